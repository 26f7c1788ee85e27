# SPDX-License-Identifier: Apache-2.0
"""The size of outputs is found without touching the module, or telling anybody."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import log
from ipufit.data import as_source
from ipufit.engine.host_calls import OutputSize, num_weights, output_size
from ipufit.engine.objective import Inferred
from tests import reference


def size_of(module, rows=4, features=3):
    source = as_source(torch.zeros(8, features))
    example = source.example(rows)
    return output_size(module, Inferred(False), source.structure, example)


class Of(torch.nn.Module):
    """Calls a function, and has a weight and buffers."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("count", torch.ones(2, 3))
        self.register_buffer("steps", torch.tensor(5))

    def forward(self, x):
        return self.function(self, x)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_it_is_the_size_of_the_outputs(rows, features, outputs):
    layer = torch.nn.Linear(features, outputs)
    expected = layer(torch.zeros(rows, features))
    found = size_of(layer, rows, features)
    assert found == OutputSize(expected.numel() * 4, has_scalars=False)


def own_mean(self, x):
    return self.layer(x), x.mean()


def logged(self, x):
    log("mean", x.mean())
    return self.layer(x)


@pytest.mark.parametrize("function", [own_mean, logged])
def test_scalars_count_once(function):
    assert size_of(Of(function)) == OutputSize(4 * 2 * 4 + 4, has_scalars=True)


def in_place(self, x):
    self.count.add_(1)
    return self.layer(x)


def a_number_in_place(self, x):
    self.steps += 1
    return self.layer(x)


def by_index(self, x):
    self.count[0] = x.mean()
    return self.layer(x)


@pytest.mark.parametrize("function", [in_place, a_number_in_place, by_index])
def test_buffers_that_move_are_seen(function):
    module = Of(function)
    assert size_of(module) == OutputSize(32, has_scalars=False, moves_buffers=True)
    assert module.count.eq(1).all()
    assert module.steps == 5


@pytest.mark.parametrize(
    "module", [torch.nn.BatchNorm1d(3), Of(lambda self, x: x * self.count.sum())]
)
def test_buffers_that_are_read_do_not_move(module):
    assert size_of(module) == OutputSize(48, has_scalars=False)


def test_nothing_is_printed(capsys):
    def printing(self, x):
        print("in forward")  # noqa: T201
        return self.layer(x)

    assert size_of(Of(printing)) is not None
    assert capsys.readouterr().out == ""


def test_an_error_of_the_module_makes_it_unknown():
    def failing(self, x):
        raise KeyError("of the user's")

    assert size_of(Of(failing)) is None


def test_weights_are_counted():
    assert num_weights(reference.network()) == sum(
        parameter.numel() for parameter in reference.network().parameters()
    )
