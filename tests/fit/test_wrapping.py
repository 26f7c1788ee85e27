# SPDX-License-Identifier: Apache-2.0
"""Weights have the classes of PopTorch only while a device has newer values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from ipufit import Callback, IPUModel, poptorch
from tests import reference

X, Y = reference.samples(16)
FIT = {"batch_size": 8, "verbose": 0}


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4)
    )


def make(module=None, optimizer="sgd"):
    return reference.compiled(module or network(), optimizer=optimizer)


def classes(module):
    return {type(w) for w in (*module.parameters(), *module.buffers())}


def assert_plain(module):
    assert classes(module) == {torch.nn.Parameter, torch.Tensor}


def fitted(**more):
    model = make()
    model.fit(X, Y, **FIT, **more)
    return model


def test_a_module_is_copied_in_mid_fit_with_the_newest_weights():
    copies = []

    class Copy(Callback):
        def on_train_batch_end(self, batch, logs):
            copies.append(copy.deepcopy(self.model.module))

    model = make()
    model.fit(X, Y, **FIT, shuffle=False, callbacks=Copy())
    twin = network()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for made, rows in zip(copies, torch.arange(16).split(8)):
        reference.train(twin, optimizer, X[rows], Y[rows], 8)
        assert_plain(made)
        reference.assert_same_weights(made[0], twin[0])
        reference.assert_same_weights(made[2], twin[2])
    assert len(copies) == 2


RUNS = {
    "fit": lambda model: model.fit(X, Y, **FIT),
    "fit and validate": lambda model: model.fit(X, Y, validation_data=(X, Y), **FIT),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
}


@pytest.mark.parametrize("second", RUNS)
@pytest.mark.parametrize(
    ("first", "last"), [("fit", "predict"), ("predict", "fit and validate")]
)
def test_runs_follow_on_a_load_whatever_their_order(tmp_path, first, second, last):
    model = make(optimizer="adam")
    RUNS[first](model)
    model.save(tmp_path / "checkpoint")
    model.load(tmp_path / "checkpoint")
    RUNS[second](model)
    assert_plain(model.module)
    RUNS[last](model)
    assert_plain(model.module)


def test_another_model_trains_the_same_module():
    module = network()
    first, second = make(module), make(module)
    for model in (first, second, first, second):
        before = reference.weights(module)
        model.fit(X, Y, validation_data=(X, Y), **FIT)
        assert not torch.equal(before["0.weight"], module[0].weight)
        assert_plain(module)
    del first, model
    second.predict(X, verbose=0)
    make(module).fit(X, Y, **FIT)
    assert_plain(module)


def test_a_model_of_a_part_trains_after_the_model_of_the_whole():
    module = network()
    make(module).fit(X, Y, **FIT)
    part = torch.nn.Sequential(module[0], module[1])
    model = IPUModel(part)
    model.compile("sgd", lambda outputs, targets: outputs.pow(2).mean())
    model.fit(X, Y, **FIT)
    assert_plain(module)


@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")  # of torch 2.0
def test_a_state_dict_of_mid_fit_is_plain_and_can_be_saved(tmp_path):
    states = []

    class Save(Callback):
        def on_train_batch_end(self, batch, logs):
            state = self.model.module.state_dict()
            torch.save(state, tmp_path / "state.pt")
            states.append(copy.deepcopy(state))

    model = make()
    model.fit(X, Y, **FIT, callbacks=Save())
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    for state in (saved, states[-1]):
        assert {type(value) for value in state.values()} == {torch.Tensor}
        for name, value in model.module.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    assert not torch.equal(states[0]["0.weight"], states[1]["0.weight"])


class Failing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.fails = True

    def forward(self, x):
        if self.fails:
            x = x * float(x.mean())
        return self.net(x)


@pytest.mark.parametrize("run", RUNS)
def test_a_module_that_failed_and_was_mended_runs(run):
    model = make(Failing())
    before = reference.weights(model.module)
    with pytest.raises(poptorch.Error):
        RUNS[run](model)
    assert_plain(model.module)
    assert model.module.training
    for name, weight in reference.weights(model.module).items():
        assert torch.equal(weight, before[name])
    model.module.fails = False
    RUNS[run](model)
    RUNS["fit and validate"](model)
    assert_plain(model.module)


@pytest.mark.parametrize("count", [8, 16])
def test_predictions_can_be_pickled(count):
    predicted = fitted().predict(X[:count], batch_size=8, verbose=0)
    assert torch.equal(pickle.loads(pickle.dumps(predicted)), predicted)
    assert "backward" not in vars(predicted)


class OfOnesOwn(torch.nn.Parameter):
    """A parameter of the user's own class."""


def test_a_class_of_ones_own_comes_back():
    module = network()
    module[0].weight = OfOnesOwn(module[0].weight.data)
    model = make(module)
    model.fit(X, Y, validation_data=(X, Y), **FIT)
    assert type(module[0].weight) is OfOnesOwn
