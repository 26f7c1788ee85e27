# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings of a trace name the line and the module."""

import inspect
import traceback

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import said


class Encoder(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


class Network(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.encoder = Encoder(function)

    def forward(self, x):
        return self.encoder(x)


FAULTS = {
    "value": lambda x: x * x.sum().item(),
    "argument": lambda x: torch.bincount(x[:, 0].int()),
    "rule": lambda x: x + (x > 0).sum() / 3,
    "a later check": lambda x: x.triu(),
}


def place(function):
    line = inspect.getsourcelines(function)[1]
    return f"(test_places.py:{line}, in encoder)"


def infer(function):
    return poptorch.inferenceModel(Network(function))(torch.ones(2, 3))


@pytest.mark.parametrize("kind", FAULTS)
def test_an_error_names_the_line_and_the_module(kind):
    with pytest.raises(poptorch.Error) as caught:
        infer(FAULTS[kind])
    assert caught.value.message.endswith(place(FAULTS[kind]))
    assert str(caught.value).count("test_places.py") == 1


def test_a_traceback_ends_at_the_user_s_line():
    with pytest.raises(poptorch.Error) as caught:
        infer(FAULTS["value"])
    *_, last = traceback.extract_tb(caught.value.__traceback__)
    assert last.filename == __file__
    assert last.line == '"value": lambda x: x * x.sum().item(),'


def test_a_warning_of_what_does_not_compile_names_the_line(caplog):
    def forward(x):
        return torch.nan_to_num(x)

    infer(forward)
    [warning] = [one for one in said(caplog) if "doesn't compile" in one]
    where = f"test_places.py:{inspect.getsourcelines(forward)[1] + 1}, in encoder"
    assert f"torch.nan_to_num, {where}, try torch.where(torch.isnan" in warning
