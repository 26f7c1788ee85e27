# SPDX-License-Identifier: Apache-2.0
"""Weights of a model: asked for, set, saved and loaded, at any time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ipufit import Callback, DataError, IPUConfig, IPUModel
from tests import reference

X, Y = reference.samples(32)


def network():
    """With buffers, and with a weight that is used twice."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = nn.Sequential(
            nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 4)
        )
    module[2].weight = module[0].weight
    return module


def compiled(module=None, lr=0.3, config=None):
    module = module or network()
    model = IPUModel(module, config or IPUConfig())
    model.compile(torch.optim.SGD(module.parameters(), lr=lr), "cross_entropy")
    return model


def fit(model, **settings):
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0, **settings}
    return model.fit(X, Y, **settings).history["loss"]


def test_what_was_got_can_be_set_again():
    model = compiled()
    start = model.get_weights()
    assert len(start) == 11
    for array, tensor in zip(start, model.module.state_dict().values()):
        np.testing.assert_array_equal(array, tensor.numpy())
    first = fit(model)
    copies = model.get_weights()
    copies[0][:] = 7.0
    assert not (model.get_weights()[0] == 7.0).any()
    model.set_weights(start)
    for mine, theirs in zip(model.get_weights(), start):
        np.testing.assert_array_equal(mine, theirs)
    assert fit(model) == first
    model.set_weights([torch.tensor(w) for w in start])  # tensors too
    assert model.evaluate(X, Y, verbose=0)["loss"] > first[0] * 0.5


# Files --------------------------------------------------------------------------------


def test_what_was_saved_can_be_loaded_into_another_model(tmp_path):
    path = tmp_path / "new" / "weights.safetensors"
    model = compiled()
    fit(model)
    model.save_weights(path)
    other = compiled()
    other.load_weights(str(path))
    for mine, theirs in zip(model.get_weights(), other.get_weights()):
        np.testing.assert_array_equal(mine, theirs)
    assert fit(other) == fit(model)
    assert other.module[2].weight is other.module[0].weight  # still tied
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_weights_of_another_module_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    compiled().save_weights(path)
    model = compiled(reference.network())
    before = model.get_weights()
    said = r"0\.weight is \[\S+ \S+\] in the module and \[\S+ \S+\] in the file.*"
    alone = r"1\.running_mean is not in the module and \[3\] in the file"
    with pytest.raises(DataError, match=f"another module: .*{said}.*{alone}"):
        model.load_weights(path)
    for mine, theirs in zip(model.get_weights(), before):
        np.testing.assert_array_equal(mine, theirs)


# In mid-fit ---------------------------------------------------------------------------


class Do(Callback):
    """Does something with the model in one hook."""

    def __init__(self, hook, action):
        self.results = []
        setattr(self, hook, lambda *_: self.results.append(action(self.model)))


HOOKS = ["on_train_batch_begin", "on_train_batch_end", "on_epoch_begin", "on_epoch_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_callback_gets_the_newest_weights(hook):
    plain, watched = reference.network(), compiled(reference.network())
    watch = Do(hook, lambda model: model.get_weights())
    fit(watched, epochs=2, callbacks=watch)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    steps = [[t.numpy().copy() for t in plain.state_dict().values()]]
    for _ in range(2):
        for rows in torch.arange(32).split(8):
            reference.train(plain, optimizer, X[rows], Y[rows], 8)
            steps.append([t.numpy().copy() for t in plain.state_dict().values()])
    expected = {
        "on_train_batch_begin": steps[:-1],
        "on_train_batch_end": steps[1:],
        "on_epoch_begin": steps[0:8:4],
        "on_epoch_end": steps[4::4],
    }[hook]
    assert len(watch.results) == len(expected)
    for mine, theirs in zip(watch.results, expected):
        for one, other in zip(mine, theirs):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("way", "hook"), [*(("set", hook) for hook in HOOKS), ("load", HOOKS[1])]
)
def test_weights_that_a_callback_sets_are_trained_on(tmp_path, hook, way):
    module = reference.network()
    model = compiled(module, lr=0.0)
    other = compiled(reference.network(seed=5))
    path = tmp_path / "other.safetensors"
    other.save_weights(path)

    def change(model):
        if way == "set":
            model.set_weights(other.get_weights())
        else:
            model.load_weights(path)

    losses = fit(model, epochs=2, validation_data=(X, Y), callbacks=Do(hook, change))
    expected = reference.evaluate(other.module, X, Y)["loss"]
    assert losses[1] == pytest.approx(expected, rel=1e-5)
    reference.assert_same_weights(module, other.module)


def clip(parameters):
    for parameter in parameters:
        parameter.data.clamp_(-0.2, 0.2)


def clipped_by_torch(epochs):
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for _ in range(epochs):
        for rows in torch.arange(32).split(8):
            reference.train(plain, optimizer, X[rows], Y[rows], 8)
            clip(plain.parameters())
    return plain


@pytest.mark.parametrize("looks", [False, True])
def test_weights_that_a_callback_changes_in_place_are_trained_on(looks):
    model, plain = compiled(), clipped_by_torch(2)
    clipping = Do("on_train_batch_end", lambda model: clip(model.module.parameters()))
    others = [Do("on_train_batch_end", lambda model: model.get_weights())] * looks
    fit(model, epochs=2, callbacks=[*others, clipping, *others])
    reference.assert_same_weights(model.module, plain)
    assert {type(w) for w in model.module.parameters()} == {nn.Parameter}
