# SPDX-License-Identifier: Apache-2.0
"""`device_iterations` left open: a fit is the same as with one update per call."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from ipufit import (
    BackupAndRestore,
    Callback,
    ConfigError,
    EarlyStopping,
    GradientMonitor,
    IPUConfig,
    IPUModel,
    LambdaCallback,
    Mixing,
    ModelCheckpoint,
    Optimizer,
    PerEpoch,
    Schedule,
    TerminateOnNaN,
    Throughput,
)
from ipufit.metrics import StreamedMetric
from tests import reference
from tests.strategies import examples

CLASSES = reference.NUM_CLASSES


class Mean(StreamedMetric):
    """A mean that depends on how rows are grouped, in its last bits."""

    direction = None

    def reset(self):
        self.total = torch.zeros(())

    def update(self, outputs, targets, weights=None):
        self.total = self.total + outputs.exp().sum()

    def result(self):
        return float(self.total)


class States(Callback):
    """Whole checkpoints at the ends of epochs."""

    def __init__(self):
        self.seen = []

    def on_epoch_end(self, epoch, logs):
        self.run.after_hooks(lambda: self.take(logs))

    def take(self, logs):
        checkpoint = self.model.checkpoint()
        kept = {
            name: checkpoint.state[name] for name in ("figures", "updates", "optimizer")
        }
        tensors = {
            f"{group}/{name}": tensor.clone()
            for group, of_group in checkpoint.tensors.items()
            for name, tensor in of_group.items()
        }
        self.seen.append((kept, tensors, logs))


class HalvedRate(Callback):
    """Changes the learning rate between epochs."""

    def on_epoch_end(self, epoch, logs):
        self.model.optimizer.param_groups[0]["lr"] /= 2


OPTIMIZERS = {
    "momentum": lambda: Optimizer("sgd", 0.1, momentum=0.9),
    "adamw": lambda: Optimizer("adamw", 0.01),
    "average": lambda: Optimizer("adam", 0.01, ema_momentum=0.9),
    "lamb": lambda: Optimizer("lamb", 0.01),
}
SCHEDULES = {
    "none": lambda: None,
    "per update": lambda: Schedule("linear"),
    "per epoch": lambda: PerEpoch(
        lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
    ),
}
CALLBACKS = {
    "none": list,
    "of epochs": lambda: [HalvedRate(), EarlyStopping("loss", patience=1)],
    "of calls": lambda: [TerminateOnNaN()],
    "throughput": lambda: [Throughput(verbose=0)],
}
FORMS = {
    "arrays": lambda x, y, size: ((x, y), {"batch_size": size}),
    "dataset": lambda x, y, size: ((reference.Recorded(x, y),), {"batch_size": size}),
    "loader": lambda x, y, size: ((DataLoader(TensorDataset(x, y), size),), {}),
    "generator": lambda x, y, size: ((batches(x, y, size),), {"batch_size": size}),
}


def batches(x, y, size):
    """An iterable without a length."""
    return reference.Restartable(lambda: zip(x.split(size), y.split(size)))


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(reference.NUM_FEATURES, 6),
        torch.nn.BatchNorm1d(6),
        torch.nn.Dropout(0.25),
        torch.nn.ReLU(),
        torch.nn.Linear(6, CLASSES),
    )


def trained(make, iterations, config):
    """Everything that a user sees of a fit."""
    torch.manual_seed(7)
    optimizer, compiled, data, fitted = make()
    model = IPUModel(network(), IPUConfig(device_iterations=iterations, **config))
    model.compile(optimizer, "cross_entropy", **compiled)
    states = States()
    callbacks = [*fitted.pop("callbacks"), states]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(*data, callbacks=callbacks, verbose=0, **fitted)
    figures = {
        name: values
        for name, values in history.history.items()
        if name not in ("latency_ms", "samples_per_second")
    }
    outputs = model.predict(torch.ones(5, reference.NUM_FEATURES), verbose=0)
    told = [str(one.message) for one in caught]
    return (
        model,
        (figures, history.dropped_samples, told, model.num_updates),
        (
            states.seen,
            reference.weights(model.module),
            outputs,
        ),
    )


def assert_equal(one, other):
    """The same bits, in nested values with tensors."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        timed = {"latency_ms", "samples_per_second"}
        assert one.keys() == other.keys()
        for name in one.keys() - timed:
            assert_equal(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            assert_equal(left, right)
    else:
        assert one == other


def updates_of(model):
    """Updates per call of the model's newest training program."""
    return model._executors._trainer.executor.options.device_iterations


@settings(max_examples=examples(28), deadline=None)
@given(st.data())
def test_nothing_set_is_one_update_per_call_bit_by_bit(data):
    draw = lambda choices: data.draw(st.sampled_from(list(choices)))  # noqa: E731
    factors = {
        "micro_batch_size": data.draw(st.integers(2, 3)),
        "gradient_accumulation": data.draw(st.integers(1, 2)),
        "replicas": data.draw(st.integers(1, 2)),
    }
    size = 1
    for factor in factors.values():
        size *= factor
    count = data.draw(st.integers(1, 8)) * size + data.draw(st.integers(0, size - 1))
    x, y = reference.samples(count)
    optimizer, schedule, callbacks = map(draw, (OPTIMIZERS, SCHEDULES, CALLBACKS))
    form = draw(FORMS)
    metrics = draw((["accuracy"], ["accuracy", "mean"]))
    mixing = draw((None, Mixing(mixup=0.4)))
    drop_last = draw((True, "pad"))
    steps = draw((None, 2, 3))
    validation = draw((None, 2))
    weights = draw((None, {0: 2.0, 1: 0.5}))
    if schedule == "per update" and form == "generator" and steps is None:
        schedule = "none"  # nobody knows how long it is

    def make():
        given_, sized = FORMS[form](x, y, size)
        fitted = {
            **sized,
            "epochs": 2,
            "drop_last": drop_last,
            "steps_per_epoch": steps,
            "class_weight": weights,
            "callbacks": CALLBACKS[callbacks](),
        }
        if validation is not None:
            fitted["validation_data"] = reference.samples(4, seed=1)
            fitted["validation_updates"] = validation
        compiled = {
            "metrics": [Mean("mean") if m == "mean" else m for m in metrics],
            "lr_schedule": SCHEDULES[schedule](),
            "augment": mixing,
        }
        return OPTIMIZERS[optimizer](), compiled, given_, fitted

    config = {**factors, "seed": draw((None, 3))}
    open_, told, kept = trained(make, None, config)
    _, told_of_one, kept_of_one = trained(make, 1, config)
    assert_equal(told, told_of_one)
    assert_equal(kept, kept_of_one)
    is_one = schedule == "per update" or callbacks == "of calls" or "mean" in metrics
    if is_one or optimizer == "average" or form == "generator":
        assert updates_of(open_) == 1


# What the number is --------------------------------------------------------------


X, Y = reference.samples(48)


def open_model(**config):
    return reference.compiled(config=IPUConfig(**config), metrics=["accuracy"])


def of_calls(**hooks):
    return LambdaCallback(**{name: lambda *_: None for name in hooks.pop("names")})


class CountsCalls(ModelCheckpoint):
    """A subclass that hears calls itself."""

    def on_train_batch_end(self, batch, logs):
        super().on_train_batch_end(batch, logs)


class OldName(Callback):
    def on_batch_end(self, batch, logs):
        pass


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (list, 12),
        (lambda: [EarlyStopping("loss")], 12),
        (lambda: [Throughput(verbose=0)], 12),
        (lambda: [TerminateOnNaN()], 1),
        (lambda: [OldName()], 1),
        (lambda: [of_calls(names=["on_epoch_end"])], 12),
        (lambda: [of_calls(names=["on_train_batch_begin"])], 1),
        (lambda: [GradientMonitor(["0.weight"])], 1),
        (lambda: [ModelCheckpoint("run")], 12),
        (lambda: [ModelCheckpoint("run", save_freq=8)], 4),
        (lambda: [], 12),
        (lambda: [CountsCalls("run")], 1),
        (lambda: [BackupAndRestore("backup")], 12),
        (lambda: [BackupAndRestore("backup", save_freq=9)], 3),
        (lambda: [ModelCheckpoint("a", save_freq=4), ModelCheckpoint("b")], 4),
    ],
)
def test_calls_end_where_callbacks_need_it(tmp_path, monkeypatch, make, expected):
    monkeypatch.chdir(tmp_path)
    model = open_model()
    model.fit(X, Y, 4, verbose=0, callbacks=make())
    assert updates_of(model) == expected


def no_sample_left_out(samples):
    return torch.utils.data.default_collate(samples)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (lambda: DataLoader(TensorDataset(X, Y), 4), 1),
        (lambda: DataLoader(TensorDataset(X.repeat(5, 1), Y.repeat(5)), 4), 3),
        (
            lambda: DataLoader(
                TensorDataset(X.repeat(5, 1), Y.repeat(5)),
                4,
                collate_fn=no_sample_left_out,
            ),
            1,
        ),
        (lambda: batches(X, Y, 4), 1),
        (lambda: reference.Recorded(X.repeat(5, 1), Y.repeat(5)), 3),
    ],
)
def test_only_a_number_of_samples_that_is_certain_counts(data, expected):
    model = open_model()
    model.fit(data(), batch_size=4, verbose=0)
    assert updates_of(model) == expected


# Resuming ---------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [None, 1, 6])
def test_a_resumed_run_keeps_its_number(tmp_path, iterations):
    checkpoint = ModelCheckpoint(tmp_path / "run", save_freq=18)
    first = open_model(device_iterations=iterations)
    first.fit(X, Y, 4, epochs=2, verbose=0, callbacks=[checkpoint])
    begun = updates_of(first)
    assert begun == (iterations or 6)
    model = open_model()
    # A callback that hears calls can't make them smaller in the middle of a run.
    hears = of_calls(names=["on_train_batch_end"])
    hears.is_saved = False
    again = ModelCheckpoint(tmp_path / "run", save_freq=18)
    history = model.fit(
        X,
        Y,
        4,
        epochs=2,
        verbose=0,
        callbacks=[again, hears],
        resume=tmp_path / "run",
    )
    assert updates_of(model) == begun
    assert history.history == first.history.history
    for name, tensor in reference.weights(first.module).items():
        assert torch.equal(tensor, model.module.state_dict()[name])
    other = open_model(device_iterations=3)
    with pytest.raises(ConfigError, match=f"device_iterations was {begun} and is 3"):
        other.fit(
            *(X, Y, 4),
            epochs=2,
            verbose=0,
            callbacks=[again],
            resume=tmp_path / "run",
        )
