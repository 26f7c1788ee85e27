# SPDX-License-Identifier: Apache-2.0
"""`identity_loss` on the host; `test_losses.py` has it on the device."""

from __future__ import annotations

import pytest
import torch

from ipufit.emulator import identity_loss

X = torch.tensor([[1.0, 2.0], [3.0, 6.0]])


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 12.0), ("mean", 3.0)])
def test_it_reduces_over_all_elements(reduction, expected):
    result = identity_loss(X, reduction=reduction)
    assert result.dim() == 0
    assert result.item() == expected


def test_none_keeps_the_shape_and_copies():
    result = identity_loss(X, reduction="none")
    assert torch.equal(result, X)
    assert result is not X


def test_gradients_pass():
    x = X.clone().requires_grad_()
    identity_loss(x * x, "mean").backward()
    assert torch.equal(x.grad, X / 2)


@pytest.mark.parametrize("reduction", ["average", None, 0])
def test_other_reductions_are_refused(reduction):
    with pytest.raises(AssertionError, match="Unsupported reduction type!"):
        identity_loss(X, reduction)
