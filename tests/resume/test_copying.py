# SPDX-License-Identifier: Apache-2.0
"""A copy of a model goes on as the model would, and leaves it alone."""

from __future__ import annotations

import copy
import pickle
import threading
from multiprocessing import resource_sharer

import pytest
import torch
from torch.optim import lr_scheduler

from ipufit import (
    Callback,
    IPUConfig,
    IPUModel,
    Mixing,
    NotCompiledError,
    Optimizer,
    UnsupportedError,
    poptorch,
)
from tests.fit.counting import Moves
from tests.reference import assert_same_weights, compiled, network, samples, weights

X, Y = samples(32)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


both = pytest.mark.parametrize("copied", [copy.deepcopy, pickled])


def normed():
    body = network()
    return torch.nn.Sequential(body[0], torch.nn.BatchNorm1d(5), *body[1:])


def squared(outputs, targets):
    return (outputs - targets.unsqueeze(1)).square()


def halved(optimizer):
    return lr_scheduler.StepLR(optimizer, 4, 0.5)


def stepped(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=100)
    return {"optimizer": optimizer, "lr_schedule": scheduler}


def poptorchs(module):
    return {"optimizer": poptorch.optim.AdamW(module.parameters(), lr=0.01)}


def averaged(module):
    return {"optimizer": Optimizer("adam", 0.05, ema_momentum=0.9)}


def scheduled(module):
    return {
        "optimizer": Optimizer("adam", 0.05),
        "lr_schedule": halved,
        "loss": torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        "metrics": ["accuracy", squared],
    }


def plain(module):
    return {"optimizer": Optimizer("sgd", 0.1, momentum=0.5), "lr_schedule": "cosine"}


def mixing(module):
    return {"optimizer": "sgd", "augment": Mixing(0.4), "label_smoothing": 0.1}


CASES = {
    "a plain one": (network, {}, plain),
    "batch norm and an optimizer of torch": (normed, {}, stepped),
    "an optimizer of PopTorch": (network, {"gradient_accumulation": 2}, poptorchs),
    "averages": (network, {"replicas": 2}, averaged),
    "functions": (normed, {"device_iterations": 2}, scheduled),
    "half with a layer in float32": (
        network,
        {"precision": "float16", "float32_modules": ["2"]},
        stepped,
    ),
    "mixed samples": (network, {}, mixing),
    "stages": (network, {"pipeline": ("0", "2"), "gradient_accumulation": 4}, plain),
}
ignore_shared_rates = pytest.mark.filterwarnings(
    "ignore::ipufit.errors.SharedRateWarning"
)


def made(case):
    module, config, arguments = CASES[case]
    given = module()
    model = IPUModel(given, IPUConfig(seed=5, **config))
    told = {"loss": "cross_entropy", "metrics": ["accuracy"], **arguments(given)}
    model.compile(**told)
    return model


def fitted(model, callbacks=()):
    history = model.fit(X, Y, 8, verbose=0, callbacks=callbacks)
    return history.history


def seen(model):
    return model.evaluate(X, Y, 8, verbose=0), model.predict(X, 8, verbose=0).tolist()


# Pickles are made of what a deep copy is made of.
EACH = [
    *((case, pickled) for case in CASES),
    ("functions", copy.deepcopy),
]


@pytest.mark.parametrize(("case", "copied"), EACH)
@ignore_shared_rates
def test_a_copy_goes_on_as_the_model_does(case, copied, monkeypatch):
    model, untouched = made(case), made(case)
    never_fitted = copied(model)
    first = fitted(model)
    assert fitted(never_fitted) == first == fitted(untouched)
    seen(model)
    moves = Moves().watch(monkeypatch)
    try:
        other = copied(model)
        assert moves.taken()["compiled"] == 0
        assert_same_weights(other.module, model.module, rtol=0, atol=0)
        then = seen(model), fitted(model), seen(model)
        # Its programs are the same still.
        assert moves.taken()["compiled"] == 0
    finally:
        moves.stop()
    assert (seen(untouched), fitted(untouched), seen(untouched)) == then
    assert [one.dtype for one in other.module.parameters()] == [
        one.dtype for one in model.module.parameters()
    ]
    if case.startswith(
        "half"
    ):  # rounded stochastically, by random numbers that begin anew
        assert seen(other) == then[0]
        assert fitted(other)["loss"] == pytest.approx(then[1]["loss"], rel=1e-3)
    else:
        assert (seen(other), fitted(other), seen(other)) == then
    assert other.num_updates == model.num_updates > 0
    assert other.config == model.config
    assert copied(model).history is None


@both
def test_a_copy_in_mid_fit_has_the_newest_weights_and_disturbs_nothing(copied):
    class Copier(Callback):
        def __init__(self):
            self.copies = []

        def on_train_batch_end(self, batch, logs):
            self.copies.append(copied(self.model))

    model, untouched = made("a plain one"), made("a plain one")
    copier, states = Copier(), []

    class Watcher(Callback):
        def on_train_batch_end(self, batch, logs):
            states.append(self.model.copied_weights())

    assert fitted(model, copier) == fitted(untouched, Watcher())
    assert_same_weights(model.module, untouched.module, rtol=0, atol=0)
    assert len(copier.copies) == len(states) == 4
    for number, (other, expected) in enumerate(zip(copier.copies, states)):
        assert other.num_updates == number + 1
        for name, value in weights(other.module).items():
            assert torch.equal(value, expected[name])
    other = copier.copies[2]
    before = weights(model.module)
    fitted(other)
    seen(other)
    assert all(torch.equal(before[n], w) for n, w in weights(model.module).items())


@both
def test_while_averages_are_in_place_a_copy_has_both(copied):
    model = made("averages")
    fitted(model)
    model.set_weights([w * 1.5 for w in model.get_weights()])
    trained = weights(model.module)
    model.swap_weights(is_average=True)
    averages = weights(model.module)
    other = copied(model)
    assert model.weight_average.is_swapped
    assert_same_weights(other.module, model.module, rtol=0, atol=0)
    for one in (model, other):
        one.swap_weights(is_average=False)
        assert all(torch.equal(trained[n], w) for n, w in weights(one.module).items())
    assert not torch.equal(averages["0.weight"], trained["0.weight"])


class Named(IPUModel):
    """Has a constructor of its own."""

    def __init__(self, name):
        super().__init__(network())
        self.name = name
        self.notes = ["first"]


@both
def test_a_subclass_keeps_its_class_and_its_attributes(copied):
    model = Named("mine")
    model.extra = {"module": model.module}
    other = copied(model)
    other.notes.append("second")
    assert type(other) is Named
    assert (other.name, model.notes, other.notes) == (
        "mine",
        ["first"],
        ["first", "second"],
    )
    assert other.extra["module"] is other.module is not model.module


@both
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_what_has_no_settings_or_shapes_is_copied_too(copied):
    options = poptorch.Options().deviceIterations(2).replicationFactor(2)
    config = IPUConfig(replicas=2, inference_options=options)
    other = copied(IPUModel(network(), config))
    assert other.config.replicas == 2
    assert other.config.inference_options.device_iterations == 2
    with pytest.raises(NotCompiledError):
        other.fit(X, Y)
    if copied is copy.deepcopy:
        model = compiled(torch.nn.LazyLinear(4))
        other = copied(model)
        other.fit(X, Y, verbose=0)
        assert other.module.weight.shape == (4, 3)
        assert isinstance(model.module, torch.nn.LazyLinear)


@both
def test_what_is_shared_stays_shared(copied):
    model = made("a plain one")
    module, one, two = copied([model.module, model, model])
    assert one is two
    assert one.module is module is not model.module


def test_copy_copy_is_another_model_of_the_same_module():
    model = made("a plain one")
    fitted(model)
    other = copy.copy(model)
    assert other.module is model.module
    assert other.num_updates == 0
    assert seen(other) == seen(model)
    fitted(other)
    assert seen(other) == seen(model)  # they are the same weights
    fitted(model)
    assert seen(other) == seen(model)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("loss", {"loss": lambda outputs, targets: (outputs.sum(1) - targets).abs()}),
        ("metrics", {"metrics": ["accuracy", lambda outputs, targets: outputs.sum(1)]}),
        ("lr_schedule", {"lr_schedule": lambda one: lr_scheduler.StepLR(one, 1)}),
    ],
)
def test_what_cant_be_pickled_is_said_and_can_be_copied(name, arguments):
    noted = IPUModel(network())
    noted.note = threading.Lock()
    with pytest.raises(UnsupportedError, match="because of note: "):
        pickle.dumps(noted)
    model = IPUModel(network(), IPUConfig(seed=5))
    model.compile(**{"optimizer": "sgd", "loss": "cross_entropy", **arguments})
    fitted(model)
    with pytest.raises(UnsupportedError, match=rf"because of compile\({name}=\.\.\.\)"):
        pickle.dumps(model)
    other = copy.deepcopy(model)
    assert seen(other) == seen(model)
    assert fitted(other) == fitted(model)


def fitted_elsewhere(model):
    model.fit(X, Y, 8, verbose=0)
    return [weight.tolist() for weight in model.module.parameters()]


def test_a_pool_of_processes_trains_copies():
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    model = compiled(module, seed=1, optimizer=optimizer)
    model.fit(X, Y, 8, verbose=0)
    before = [weight.tolist() for weight in model.module.parameters()]
    with torch.multiprocessing.get_context("forkserver").Pool(1) as pool:
        trained = pool.map(fitted_elsewhere, [model])
    resource_sharer.stop()
    assert [weight.tolist() for weight in model.module.parameters()] == before
    assert trained == [fitted_elsewhere(model)] != [before]
