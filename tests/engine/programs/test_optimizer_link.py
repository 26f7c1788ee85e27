# SPDX-License-Identifier: Apache-2.0
"""An optimiser's state, as programs with other weights take it over."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from ipufit import IPUConfig, IPUModel
from tests import reference

X, Y = reference.samples(24)
OPTIMIZERS = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), 0.05),
    "adam": lambda module: torch.optim.Adam(module.parameters(), 0.05),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), 0.05, 0.9),
    "plain sgd": lambda module: torch.optim.SGD(module.parameters(), 0.05),
    "rmsprop": lambda module: torch.optim.RMSprop(module.parameters(), 0.05),
    "groups": lambda module: torch.optim.AdamW(
        [
            {"params": module[0].parameters(), "lr": 0.02, "weight_decay": 0.3},
            {"params": module[2].parameters(), "lr": 0.05},
        ],
        lr=0.01,
    ),
}


def freeze(layer, is_frozen):
    for parameter in layer.parameters():
        parameter.requires_grad_(not is_frozen)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_layer_that_was_frozen_is_trained_as_in_torch(optimizer, caplog):
    """Its state begins with zeros, and that of the others goes on."""
    torch.manual_seed(0)
    module = reference.network()
    twin = copy.deepcopy(module)
    model = IPUModel(module, IPUConfig(micro_batch_size=4))
    model.compile(OPTIMIZERS[optimizer](module), "cross_entropy")
    plain = OPTIMIZERS[optimizer](twin)
    with caplog.at_level(logging.WARNING):
        for is_frozen in (True, False):
            freeze(module[0], is_frozen)
            freeze(twin[0], is_frozen)
            model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            for _ in range(2):
                reference.train(twin, plain, X, Y, 8)
            reference.assert_same_weights(module, twin, rtol=1e-4, atol=1e-5)
    assert [record.getMessage() for record in caplog.records] == []
    model.detach()


def test_freezing_and_unfreezing_says_nothing(caplog):
    module = reference.network()
    model = IPUModel(module)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # the second time with programs that are kept
            model.compile("lamb", "cross_entropy")
            for frozen in ((0,), (), (2,), (0,), ()):
                for index in (0, 2):
                    freeze(module[index], index in frozen)
                model.fit(X, Y, batch_size=8, verbose=0)
    assert [record.getMessage() for record in caplog.records] == []
    model.detach()


def test_weights_of_one_element_are_no_counters():
    """Their states have shapes, as those of large ones; counts of steps have none."""
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 3))
    freeze(module[1], True)
    model = IPUModel(module)
    model.compile(OPTIMIZERS["adam"](module), "mse")
    data = torch.randn(8, 1), torch.randn(8, 3)
    model.fit(*data, batch_size=4, verbose=0)
    freeze(module[1], False)
    model.fit(*data, batch_size=4, verbose=0)
    state = model.optimizer.state_dict()["ipu_state"]
    shapes = {name: tuple(state[name].shape) for name in state}
    assert shapes["Accl1___module.1.weight"] == (3, 1)
    assert shapes["Step___module.1.weight"] == shapes["Step___module.0.weight"]
    model.detach()
