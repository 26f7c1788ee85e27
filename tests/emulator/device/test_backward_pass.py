# SPDX-License-Identifier: Apache-2.0
"""The engine called directly against `torch.autograd.backward`."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit.emulator._device import backward_pass as _backward_pass
from ipufit.emulator._device.backward_pass import run_backward
from tests.strategies import examples

LOSSES = {
    "sum": lambda a, b: (a * b).sum(),
    "one": lambda a, b: a.sin().sum(),
    "same": lambda a, b: a.sum() + a.sum() + b.sum(),
    "expanded": lambda a, b: (a[:1] + b).sum() * 2,
    "strided": lambda a, b: (a.view(2, 2).t() @ b.view(2, 2)).prod(),
    "several": lambda a, b: a * b,
}


def gradients(function, name, scale, times):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 4, generator=generator).unbind()
    leaves = [leaf.clone().requires_grad_() for leaf in (a, b)]
    for _ in range(times):
        loss = LOSSES[name](*leaves)
        function(loss, torch.full_like(loss, scale))
    return [leaf.grad for leaf in leaves]


@settings(max_examples=examples(30))
@given(st.sampled_from(sorted(LOSSES)), st.sampled_from([1.0, 0.5]), st.integers(1, 3))
def test_gradients_are_autograds(name, scale, times):
    actual = gradients(run_backward, name, scale, times)
    expected = gradients(torch.autograd.backward, name, scale, times)
    for left, right in zip(actual, expected):
        assert (left is None) == (right is None)
        if left is not None:
            assert torch.equal(left, right)
            assert left.stride() == right.stride()


def test_hooks_of_weights_see_their_gradients():
    weight, seen = torch.ones(2, requires_grad=True), []
    weight.register_hook(seen.append)
    run_backward((3.0 * weight).sum(), torch.tensor(1.0))
    assert [gradient.tolist() for gradient in seen] == [[3.0, 3.0]]


def test_this_torch_has_such_an_engine():
    assert _backward_pass._engine() is not None


@pytest.mark.parametrize("engine", [None, object(), mock.Mock(side_effect=TypeError)])
def test_an_engine_that_takes_other_arguments_is_not_called(engine):
    if isinstance(engine, mock.Mock):
        engine = mock.Mock(run_backward=engine)
    _backward_pass._engine.cache_clear()
    try:
        with mock.patch.object(torch.autograd.Variable, "_execution_engine", engine):
            assert _backward_pass._engine() is None
    finally:
        _backward_pass._engine.cache_clear()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_without_it_autograd_does_it(name):
    with mock.patch.object(_backward_pass, "_engine", return_value=None):
        actual = gradients(run_backward, name, 0.5, 2)
    expected = gradients(torch.autograd.backward, name, 0.5, 2)
    assert [None if g is None else g.tolist() for g in actual] == [
        None if g is None else g.tolist() for g in expected
    ]
