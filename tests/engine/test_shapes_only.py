# SPDX-License-Identifier: Apache-2.0
"""What is computed in the place of torch's functions is what they compute."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from ipufit import IPUConfig, IPUModel, UnsupportedError
from ipufit.model.costs import KnownShapes, like, shapes_only

SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def require_same(function, *tensors):
    """Values are the same on tensors that have some, and shapes on those without."""
    expected = function(*tensors)
    with KnownShapes():
        found = function(*tensors)
    assert torch.equal(found, expected)
    assert found.requires_grad == expected.requires_grad
    with shapes_only():
        fake = function(*map(like, tensors))
    assert (fake.shape, fake.dtype) == (expected.shape, expected.dtype)


@given(shape=SHAPES, repeats=st.integers(1, 3), data=st.data())
def test_repeated_rows(shape, repeats, data):
    x = torch.rand(shape).requires_grad_()
    places = st.integers(-len(shape), len(shape) - 1)
    dim = data.draw(st.one_of(st.none(), places))
    require_same(lambda x: torch.repeat_interleave(x, repeats, dim), x)
    require_same(lambda x: x.repeat_interleave(repeats=repeats, dim=dim), x)


@given(shape=SHAPES, classes=st.integers(1, 5), data=st.data())
def test_one_hot_rows(shape, classes, data):
    x = torch.randint(0, classes, shape)
    require_same(lambda x: functional.one_hot(x, classes), x)
    require_same(lambda x: functional.one_hot(x, num_classes=classes), x)


@given(count=st.integers(1, 6), bins=st.integers(4, 6))
def test_counts(count, bins):
    x = torch.randint(0, 4, (count,))
    require_same(lambda x: torch.bincount(x, minlength=bins), x)
    require_same(lambda x, w: x.bincount(w, bins), x, torch.rand(count).double())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.repeat_interleave(x, x),
        lambda x: functional.one_hot(x),
        lambda x: torch.bincount(x),
    ],
)
def test_shapes_that_depend_on_values_are_refused(function):
    with pytest.raises(UnsupportedError), shapes_only():
        function(like(torch.tensor([1, 2])))


def test_arguments_that_torch_refuses_are_refused_in_its_words():
    with pytest.raises(IndexError, match="Dimension out of range"), shapes_only():
        torch.repeat_interleave(like(torch.zeros(2)), 2, 1)


class Grouped(nn.Module):
    """Attention heads of which several share keys, and classes as an input."""

    def __init__(self):
        super().__init__()
        self.keys = nn.Linear(5, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        keys = self.keys(functional.one_hot(x, 5).float())
        return self.head(keys.repeat_interleave(2, dim=-1)).mean(1)


def test_a_model_with_such_functions_is_planned_cut_and_trained():
    x, y = torch.randint(0, 5, (24, 6)), torch.randint(0, 3, (24,))
    model = IPUModel(Grouped(), IPUConfig(pipeline="auto", ipus=2))
    model.compile("adamw", "cross_entropy")
    plan = model.plan(x, y, batch_size=12)
    assert [stage.flops for stage in plan.stages] == [
        2 * 4 * 6 * 5 * 4,
        2 * 4 * 6 * 8 * 3,
    ]
    model.fit(x, y, batch_size=12, verbose=0)
    assert model.config.pipeline == ["keys", "head"]
