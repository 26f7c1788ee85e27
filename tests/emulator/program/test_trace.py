# SPDX-License-Identifier: Apache-2.0
"""A trace makes a program, and leaves the module as it was."""

import copy

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function


class Stateful(nn.Module):
    """Calls `change(self, x)`; has a parameter and a buffer, in a child too."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.register_buffer("total", torch.ones(2))
        self.weight = nn.Parameter(torch.ones(2))
        self.child = nn.Module()
        self.child.register_buffer("total", torch.ones(2))

    def forward(self, x):
        self.change(self, x)
        return x * self.weight + self.total


def reassign(model, x):
    model.total = model.total + x


def reassign_child(model, x):
    model.child.total = x


def reassign_parameter(model, x):
    model.weight = nn.Parameter(torch.zeros(2))


def replace_data(model, x):
    model.weight.data = model.weight.data * 2


def reshape(model, x):
    model.total.unsqueeze_(0)


def remove(model, x):
    del model.child.total
    model.child.total = x * 2  # an ordinary attribute


def remove_for_good(model, x):
    del model.child.total


REBOUND = [
    (reassign, r"Buffer total is reassigned within.*self\.total\.copy_\(src\)"),
    (reassign_child, "Buffer child.total is reassigned within the model"),
    (reassign_parameter, "Parameter weight is reassigned within the model"),
    (replace_data, "Parameter weight is reassigned within the model"),
    (reshape, "Buffer total is reassigned within the model"),
    (remove, "Buffer child.total is removed from the model"),
    (remove_for_good, "Buffer child.total is removed from the model"),
]


@pytest.mark.parametrize(("change", "message"), REBOUND)
@pytest.mark.parametrize("training", [True, False])
def test_weights_cannot_be_rebound_and_stay_what_they_were(change, message, training):
    model = Stateful(change)
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = copy.deepcopy(model.state_dict())
    wrap = poptorch.trainingModel if training else poptorch.inferenceModel
    executor = wrap(model)
    with pytest.raises(poptorch.Error, match=message):
        executor(torch.ones(2))
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert "total" not in vars(model)
    assert "total" not in vars(model.child)


def test_weights_that_forward_adds_do_not_stay():
    def add(model, x):
        model.child.register_buffer("extra", x * 2)
        model.child.late = nn.Parameter(torch.ones(1))

    model = Stateful(add)
    before = list(model.state_dict())
    poptorch.inferenceModel(model)(torch.ones(2))
    assert list(model.state_dict()) == before


# What is changed ----------------------------------------------------------------


def updates(self, x):
    self.direct += 1
    self.viewed[0].fill_(5)
    self.whole += 1
    return self.norm(x) + self.read + self.direct + self.whole


def test_weights_that_a_program_changes_come_back():
    module = Function(
        updates,
        buffers={
            "direct": torch.zeros(1),
            "viewed": torch.zeros(2),
            "whole": torch.zeros(1, dtype=torch.int64),
            "read": torch.zeros(1),
        },
        norm=nn.BatchNorm1d(2),
    )
    executor = poptorch.inferenceModel(module)
    for _ in range(2):
        executor(torch.ones(3, 2))
    executor.copyWeightsToHost()
    assert module.direct.tolist() == [2.0]
    assert module.viewed.tolist() == [5.0, 0.0]
    assert module.whole.tolist() == [0]  # a constant of the program
    assert module.read.tolist() == [0.0]
    torch.testing.assert_close(module.norm.running_mean, torch.full((2,), 0.19))
