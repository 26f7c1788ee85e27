# SPDX-License-Identifier: Apache-2.0
"""Combinations of calls that compute on the host and don't compile for a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from tests.emulator._models import Function

X = torch.linspace(-1, 2, 24).reshape(4, 6)
TABLE = torch.arange(10.0).reshape(5, 2)


def run(function, *inputs, **attributes):
    module = Function(lambda m, *given: function(m, *given), **attributes)
    return poptorch.inferenceModel(module)(*(inputs or (X,)))


@pytest.mark.parametrize(
    "function", [lambda m, x: torch.triu(x), lambda m, x: x.clone().triu_()]
)
def test_the_triangle_of_what_changes_is_refused(function):
    with pytest.raises(poptorch.Error, match="only supported within constant express"):
        run(function)


def test_the_triangle_of_a_constant_is_fine():
    mask = torch.ones(4, 6).triu()
    assert torch.equal(run(lambda m, x: x * torch.ones(4, 6).triu_()), X * mask)
    assert torch.equal(run(lambda m, x: x * torch.triu(torch.ones(4, 6))), X * mask)


def test_a_loops_body_has_no_constants_but_its_own():
    def body(x):
        return x.triu()

    with pytest.raises(poptorch.Error, match="only supported within constant express"):
        run(lambda m, x: poptorch.for_loop(2, body, [x])[0])


@pytest.mark.parametrize("by_name", [True, False])
def test_the_offsets_of_an_embedding_bag_must_be_constant(by_name):
    indices, offsets = torch.tensor([0, 3, 4, 1]), torch.tensor([0, 2])
    bag = nn.EmbeddingBag.from_pretrained(TABLE)

    def given(m, i, o):
        if by_name:
            return m.bag(i, o)
        return functional.embedding_bag(i, m.bag.weight, o)

    with pytest.raises(poptorch.Error, match="offsets tensor must be a constant"):
        run(given, indices, offsets, bag=bag)
    result = run(lambda m, i: given(m, i, torch.tensor([0, 2])), indices, bag=bag)
    assert torch.equal(result, functional.embedding_bag(indices, TABLE, offsets))


def by_assignment(x, step):
    x[::step] = 0.0
    return x


def by_addition(x, step):
    x[:, 1::step] += 1
    return x


def by_method(x, step):
    x[1:][::step].mul_(2)
    return x


@pytest.mark.parametrize("change", [by_assignment, by_addition, by_method])
def test_only_adjacent_elements_can_be_changed_in_place(change):
    with pytest.raises(poptorch.Error, match="step size other than 1 is not supported"):
        run(lambda m, x: change(x * 1, 2))
    assert torch.equal(run(lambda m, x: change(x * 1, 1)), change(X * 1, 1))
    assert torch.equal(run(lambda m, x: x[::2] * 2), X[::2] * 2)


def test_a_constant_can_be_changed_anyhow():
    expected = X + by_assignment(torch.ones(4, 6), 2)
    assert torch.equal(
        run(lambda m, x: x + by_assignment(torch.ones(4, 6), 2)), expected
    )
