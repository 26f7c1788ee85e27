# SPDX-License-Identifier: Apache-2.0
"""Names, modules and functions that mean a loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from ipufit import ConfigError, UnknownNameError
from ipufit.losses import resolve_loss

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, -3.0], [1.0, 1.0, 1.0]])
CLASSES = torch.tensor([0, 1, 2])
NUMBERS = torch.tensor([[0.5], [-1.0], [3.0]])
TRUTHS = torch.tensor([1, 0, 1])

EXPECTED = {
    "cross_entropy": (LOGITS, CLASSES, lambda: F.cross_entropy(LOGITS, CLASSES)),
    "sparse_categorical_crossentropy": (
        LOGITS,
        CLASSES,
        lambda: F.cross_entropy(LOGITS, CLASSES),
    ),
    "nll": (LOGITS, CLASSES, lambda: F.nll_loss(LOGITS, CLASSES)),
    "nll_loss": (LOGITS, CLASSES, lambda: F.nll_loss(LOGITS, CLASSES)),
    **{
        name: (NUMBERS, TRUTHS, lambda: F.mse_loss(NUMBERS[:, 0], TRUTHS.float()))
        for name in ("mse", "mean_squared_error")
    },
    **{
        name: (NUMBERS, TRUTHS, lambda: F.l1_loss(NUMBERS[:, 0], TRUTHS.float()))
        for name in ("mae", "mean_absolute_error")
    },
    "smooth_l1": (
        NUMBERS,
        TRUTHS,
        lambda: F.smooth_l1_loss(NUMBERS[:, 0], TRUTHS.float()),
    ),
    **{
        name: (
            NUMBERS,
            TRUTHS,
            lambda: F.binary_cross_entropy_with_logits(NUMBERS[:, 0], TRUTHS.float()),
        )
        for name in ("binary_cross_entropy", "binary_crossentropy")
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_name_is_torchs_loss(name):
    outputs, targets, expected = EXPECTED[name]
    assert torch.equal(resolve_loss(name).value(outputs, targets), expected())


def test_every_name_is_tested():
    with pytest.raises(UnknownNameError) as caught:
        resolve_loss("")
    known = str(caught.value).split("Known: ")[1].rstrip(".").split(", ")
    assert sorted(EXPECTED) == known


@pytest.mark.parametrize(
    ("name", "meant"), [("crossentropy", "cross_entropy"), ("MSE", "mse")]
)
def test_an_unknown_name_gets_a_suggestion(name, meant):
    with pytest.raises(UnknownNameError, match=f"loss '{name}'.*'{meant}'"):
        resolve_loss(name)


@pytest.mark.parametrize("loss", [3, None, ["mse"]])
def test_what_is_no_loss_is_refused(loss):
    with pytest.raises(ConfigError, match="neither a name"):
        resolve_loss(loss)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_module_reduces_as_it_was_told(reduction):
    module = torch.nn.CrossEntropyLoss(reduction=reduction)
    loss = resolve_loss(module)
    value = loss.value(LOGITS, CLASSES)
    reported = loss.total(value, rows=3) / 3
    assert loss.is_sum == (reduction == "sum")
    assert value.dim() == 0
    torch.testing.assert_close(reported, F.cross_entropy(LOGITS, CLASSES))


def test_a_sum_may_come_as_one_value_per_sample_too():
    class Squares:
        reduction = "sum"

        def __call__(self, outputs, targets):
            return (outputs - targets).square()

    loss = resolve_loss(Squares())
    value = loss.value(NUMBERS, torch.zeros(3, 1))
    assert value == NUMBERS.square().sum()
    assert loss.total(value, rows=3) == value


def test_a_function_may_give_one_value_per_sample():
    def half_square(outputs, targets):
        return (outputs - targets).square().mean(dim=1) / 2

    loss = resolve_loss(half_square)
    assert loss.name == "half_square"
    assert loss.value(NUMBERS, torch.zeros(3, 1)) == pytest.approx(
        float(NUMBERS.square().mean() / 2)
    )
