# SPDX-License-Identifier: Apache-2.0
"""State of optimisers, against the tensors that the emulator's device has."""

from __future__ import annotations

import itertools

import pytest
import torch

import ipufit
from ipufit import IPUConfig, IPUModel
from ipufit._poptorch import poptorch
from ipufit.optimizers import weight_states

HALF, FLOAT = torch.float16, torch.float32
MOMENTS = [
    {"first_order_momentum_accum_type": first, "second_order_momentum_accum_type": one}
    for first, one in itertools.product((HALF, FLOAT), repeat=2)
]
OPTIMIZERS = [
    *[("SGD", {"lr": 0.1, **more}) for more in ({}, {"momentum": 0.9})],
    ("SGD", {"lr": 0.1, "momentum": 0.0}),  # given, so that it may change
    ("SGD", {"lr": 0.1, "momentum": 0.9, "velocity_accum_type": HALF}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True}),
    ("SGD", {"lr": 0.1, "use_combined_accum": True}),
    *[(name, types) for name in ("Adam", "AdamW", "LAMB") for types in MOMENTS],
    ("AdamW", {"bias_correction": False}),
    *[("RMSprop", {"centered": one, **t}) for one in (True, False) for t in MOMENTS],
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("RMSprop", {"momentum": 0.0}),
    ("RMSprop", {"use_tf_variant": True}),
]


class Sum(torch.nn.Module):
    """Has weights named `w0`, `w1` and so on."""

    def __init__(self, weights):
        super().__init__()
        for index, weight in enumerate(weights):
            self.register_parameter(f"w{index}", weight)

    def forward(self, x):
        sums = [weight.float().sum() for weight in self.parameters()]
        return poptorch.identity_loss(torch.stack(sums).sum() * x, reduction="sum")


def on_a_device(optimizer, weights):
    """Elements and type of each state tensor that the emulator makes."""
    executor = poptorch.trainingModel(Sum(weights), None, optimizer)
    executor.compile(torch.ones(1))
    state = optimizer.state_dict()["ipu_state"]
    executor.destroy()
    return {name: (tensor.numel(), tensor.dtype) for name, tensor in state.items()}


def names_on_a_device(optimizer, weights):
    """Names of all state tensors, for optimizers of torch too."""
    executor = poptorch.trainingModel(Sum(weights), None, optimizer)
    executor.compile(torch.ones(1))
    names = executor.getTensorNames()
    executor.destroy()
    slots = ("Accl1___", "Accl2___", "Accl3___", "Step___")
    return [name for name in names if name.startswith(slots)]


def planned(optimizer, weights):
    states = weight_states(optimizer, weights)
    return {
        f"{tensor.slot}___w{index}": (tensor.num_elements, tensor.dtype)
        for index, weight in enumerate(weights)
        for tensor in states[id(weight)].tensors
    }


def some_weights(*dtypes):
    return [
        torch.nn.Parameter(torch.ones(3, index + 2, dtype=dtype))
        for index, dtype in enumerate(dtypes)
    ]


@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS)
def test_it_is_what_the_emulator_has(name, settings):
    weights = some_weights(FLOAT, HALF)
    optimizer = getattr(poptorch.optim, name)(weights, **settings)
    assert planned(optimizer, weights) == on_a_device(optimizer, weights)


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    ],
)
def test_it_is_for_optimizers_of_torch(cls, settings):
    weights = some_weights(FLOAT)
    optimizer = cls(weights, **settings)
    found = planned(optimizer, weights)
    assert sorted(found) == sorted(names_on_a_device(optimizer, weights))
    assert all(dtype == FLOAT for _, dtype in found.values())


def test_groups_have_states_of_their_own_and_the_rest_has_the_defaults():
    slow, fast, other = weights = some_weights(FLOAT, FLOAT, FLOAT)
    groups = [{"params": [slow], "momentum": 0.0}, {"params": [fast], "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert names_on_a_device(optimizer, weights) == ["Accl1___w1"]
    assert list(planned(optimizer, weights)) == ["Accl1___w1"]
    states = weight_states(optimizer, weights)
    assert states[id(other)].tensors == ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [FLOAT, FLOAT]),
        ({"accum_type": HALF}, [HALF, HALF]),
        # The velocity is the sum, of the weight's type; without one there is a sum.
        ({"use_combined_accum": True, "momentum": 0.9}, [None, None]),
        ({"use_combined_accum": True}, [FLOAT, HALF]),
    ],
)
def test_sums_of_gradients_have_a_type(settings, expected):
    weights = some_weights(FLOAT, HALF)
    optimizer = poptorch.optim.SGD(weights, lr=0.1, **settings)
    states = weight_states(optimizer, weights)
    assert [states[id(weight)].accumulator for weight in weights] == expected


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        *(("adamw", precision) for precision in ("float32", "16.16", "16.32")),
        *((name, "16.32") for name in ("lamb", "rmsprop", "sgd")),
        (ipufit.Optimizer("sgd", momentum=0.9), "16.16"),
    ],
    ids=str,
)
def test_it_is_what_a_trained_model_has(optimizer, precision):
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    model = IPUModel(module, IPUConfig(micro_batch_size=4, precision=precision))
    model.compile(optimizer, "cross_entropy")
    model.fit(torch.rand(8, 4), torch.zeros(8, dtype=torch.int64), verbose=0)
    found = model.optimizer.state_dict()["ipu_state"]
    states = weight_states(model.optimizer, model.module.parameters())
    tensors = [tensor for state in states.values() for tensor in state.tensors]
    assert sorted((one.numel(), str(one.dtype)) for one in found.values()) == sorted(
        (tensor.num_elements, str(tensor.dtype)) for tensor in tensors
    )
