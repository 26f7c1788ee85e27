# SPDX-License-Identifier: Apache-2.0
"""Callbacks, metrics, optimizers, losses and schedules print their arguments."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch

import ipufit
from ipufit import callbacks, losses, metrics, optimizers

pytestmark = pytest.mark.floor

ONES = torch.ones(3)

CALLS = [
    "BackupAndRestore(backup_dir='run', keep_last=3)",
    "CSVLogger(filename='log.csv', append=True)",
    "CallbackList(callbacks=[TerminateOnNaN(), StopAfter(minutes=3)])",
    "EarlyStopping(monitor='loss', patience=3, restore_best_weights=True)",
    "GradientMonitor(is_detailed=True)",
    "LambdaCallback(on_epoch_end=print, on_test_end=print)",
    "LearningRateScheduler(schedule=print, verbose=1)",
    "ModelCheckpoint(filepath='run', monitor='loss', keep=2)",
    "ProgressBar()",
    "ReduceLROnPlateau(factor=0.5)",
    "SwapEMAWeights(swap_on_epoch=True)",
    "Throughput(verbose=1)",
    "AUC(num_thresholds=10, curve='PR')",
    "F1Score(average='micro', ignore_class=255)",
    "Poisson(log_input=False)",
    "SparseCategoricalCrossentropy(from_logits=False, name='bits')",
    "TopKAccuracy(k=3)",
    "Loss(name='mine', function=print, ignore_index=3)",
    "Optimizer(name='adamw', learning_rate=0.1, no_decay=('bias',), betas=(0.5, 0.9))",
    "Optimizer(name='sgd', learning_rate=0.01, loss_scaling=LossScaleRamp(initial=1, "
    "factor=2, every_updates=9))",
    "PerEpoch(scheduler=print)",
    "Schedule(name='cosine', warmup_updates=3, final=0.5)",
    "Mixing(mixup=0.5)",
    "IPUConfig(micro_batch_size=2, replicas=2)",
]


def is_made_without_arguments(kind):
    if not (inspect.isclass(kind) and issubclass(kind, metrics.base.NamedMetric)):
        return False
    parameters = inspect.signature(kind).parameters.values()
    defaults = [parameter.default for parameter in parameters]
    return not inspect.isabstract(kind) and inspect.Parameter.empty not in defaults


METRICS = [
    name
    for name in metrics.__all__
    if is_made_without_arguments(getattr(metrics, name))
]


def made(call):
    names = {
        name: getattr(module, name)
        for module in (callbacks, losses, metrics, optimizers, ipufit)
        for name in module.__all__
    }
    return eval(call, names)


@pytest.mark.parametrize("call", CALLS)
def test_a_repr_is_the_call_without_defaults(call):
    text = call.replace("=print", f"={print!r}")
    assert repr(made(call)) == text
    assert repr(copy.copy(made(call))) == text


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_of_defaults_shows_none(name):
    kind = getattr(metrics, name)
    assert repr(kind()) == f"{name}()"
    assert repr(kind(name="mine")) == f"{name}(name='mine')"


class Scaled(ipufit.Metric):
    """A metric of a user, which keeps nothing of what it was made with."""

    def __init__(self, function, scale=ONES, **others):
        super().__init__("scaled")

    def sums(self, outputs, targets, weights=None):
        return outputs.sum()[None]


class Several(ipufit.Callback):
    def __init__(self, first=1, *parts, last=None):
        pass


@pytest.mark.parametrize(
    "call", ["Several()", "Several(first=2, last=3)", "Several(1, 2, 3, last=print)"]
)
def test_arguments_without_names_are_printed_without(call):
    made = eval(call)
    assert repr(made) == call.replace("=print", f"={print!r}")


def test_classes_of_users_print_their_arguments_too():
    assert repr(Scaled(print)) == f"Scaled(function={print!r})"
    metric = Scaled(lambda x: x, scale=torch.zeros(1), other=[1])
    assert repr(metric).endswith(", scale=tensor([0.]), other=[1])")
    assert repr(pickle.loads(pickle.dumps(metric))) == repr(metric)
    with pytest.raises(TypeError, match=r"EarlyStopping\(\).*'patience'"):
        callbacks.EarlyStopping(patiance=3)
    with pytest.raises(TypeError, match=r"TopKAccuracy\(\).*It takes k, name"):
        metrics.TopKAccuracy(top=3)


class Pair(ipufit.IPUConfig):
    def __init__(self, number=2, **settings):
        super().__init__(replicas=number, **settings)


class Adam(ipufit.Optimizer):
    def __init__(self, rate=0.1):
        super().__init__("adam", rate)


@dataclasses.dataclass(repr=False)
class Counter(ipufit.Callback):
    start: int = 0
    calls: int = dataclasses.field(default=0, init=False)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Pair(), "Pair(replicas=2)"),
        (Pair(4, seed=3), "Pair(replicas=4, seed=3)"),
        (Adam(), "Adam(name='adam', learning_rate=0.1)"),
        (Counter(3), "Counter(start=3)"),
    ],
)
def test_users_classes_of_dataclasses_print_their_fields(made, text):
    assert repr(made) == text
    assert repr(copy.copy(made)) == text


def test_a_model_takes_a_users_class_of_a_config():
    model = ipufit.IPUModel(torch.nn.Linear(3, 1), Pair())
    model.compile(Adam(), "mse")
    assert "Linear on Pair(replicas=2), compiled with Adam" in repr(model)
    assert len(model.fit(torch.ones(4, 3), torch.ones(4, 1), 2, verbose=0).epoch) == 1
