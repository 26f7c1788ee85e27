# SPDX-License-Identifier: Apache-2.0
"""Exactly one final loss, wherever it is in `forward`."""

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import identity_loss
from tests.emulator._models import wrap

pytestmark = pytest.mark.looped

F = nn.functional


class Model(nn.Module):
    """One weight, and a loss made from it."""

    def __init__(self, make_loss):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), 2.0))
        self.make_loss = make_loss

    def forward(self, x):
        return self.make_loss(self.weight * x, x)


def train(make_loss, x=None):
    """The result of one call, and the gradient that it applied."""
    model = Model(make_loss)
    _, executor = wrap(model)
    out = executor(torch.ones(2, 3) if x is None else x)
    return out, 2.0 - model.weight.detach()


def gradient_by_hand(make_loss):
    model = Model(make_loss)
    model(torch.ones(2, 3)).backward()
    return model.weight.grad


def unused(y, x):
    F.mse_loss(y, x)
    return y


NONE, SEVERAL, NO_NUMBER = (
    "Couldn't find a loss in graph!",
    "Multiple independent losses",
    r"Loss tensor.* must be a scalar",
)


@pytest.mark.parametrize(
    ("make_loss", "message"),
    [
        (lambda y, x: y.sum(), NONE),
        # Dead code goes first (PopTorch, `LowerToPopartFactories.cpp`).
        (unused, NONE),
        # The marker is on an operator (PopTorch, `LossOps.cpp`) that they don't use.
        (lambda y, x: F.cross_entropy(y, torch.softmax(x, 1)), NONE),
        (
            lambda y, x: F.cross_entropy(y, torch.softmax(x, 1), label_smoothing=0.1),
            NONE,
        ),
        (lambda y, x: F.mse_loss(y, x) + F.l1_loss(y, x), SEVERAL),
        (lambda y, x: (F.mse_loss(y, x), F.mse_loss(y, x)), SEVERAL),
        (lambda y, x: identity_loss(y, "sum") + identity_loss(x, "sum"), SEVERAL),
        # PopART, `ir.cpp` `setFinalLoss`.
        (lambda y, x: F.mse_loss(y, x, reduction="none"), NO_NUMBER),
        (lambda y, x: F.cross_entropy(y, x.argmax(1), reduction="none"), NO_NUMBER),
        (lambda y, x: identity_loss(y * y, "none"), NO_NUMBER),
    ],
)
def test_there_is_one_final_loss_and_it_is_a_number(make_loss, message):
    with pytest.raises(poptorch.Error, match=message):
        train(make_loss)


def test_a_marked_sum_of_losses_is_one_loss():
    def make_loss(y, x):
        return identity_loss(F.mse_loss(y, x) + 2 * F.l1_loss(y, x), reduction="mean")

    _, gradient = train(make_loss)
    torch.testing.assert_close(
        gradient,
        gradient_by_hand(lambda y, x: F.mse_loss(y, x) + 2 * F.l1_loss(y, x)),
    )


def test_what_follows_a_built_in_loss_does_not_train():
    loss, gradient = train(lambda y, x: F.mse_loss(y, x) * 5)
    assert loss.item() == 5
    torch.testing.assert_close(gradient, gradient_by_hand(F.mse_loss))
    _, marked = train(lambda y, x: identity_loss(F.mse_loss(y, x) * 5, "none"))
    torch.testing.assert_close(marked, 5 * gradient)


def test_a_dropped_marker_leaves_the_loss_inside_with_its_own_reduction():
    def dropped(y, x):
        loss = F.mse_loss(y, x, reduction="sum")
        identity_loss(loss / 6, "mean")
        return loss

    _, gradient = train(dropped)
    torch.testing.assert_close(gradient, 6 * gradient_by_hand(F.mse_loss))


# Losses inside functions that torch composes -----------------------------------


def test_the_mark_of_batchmean_is_on_the_sum():
    """The division comes after it: updates are batch times larger."""
    loss, gradient = train(lambda y, x: F.kl_div(y, x, reduction="batchmean"))
    by_hand = gradient_by_hand(lambda y, x: F.kl_div(y, x, reduction="batchmean"))
    torch.testing.assert_close(gradient, 2 * by_hand)
    expected = F.kl_div(
        torch.full((2, 3), 2.0), torch.ones(2, 3), reduction="batchmean"
    )
    torch.testing.assert_close(loss, expected)


def test_label_smoothing_with_sum_trains_the_part_without():
    """Only `nll_loss` inside is marked."""

    def smoothed(y, x):
        labels = x.argmax(1)
        return F.cross_entropy(y, labels, reduction="sum", label_smoothing=0.3)

    def plain(y, x):
        return F.cross_entropy(y, x.argmax(1), reduction="sum")

    loss, gradient = train(smoothed)
    torch.testing.assert_close(gradient, gradient_by_hand(plain))
    torch.testing.assert_close(
        loss, smoothed(torch.full((2, 3), 2.0), torch.ones(2, 3))
    )
    assert not torch.allclose(gradient, gradient_by_hand(smoothed))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_marked_loss_with_label_smoothing_trains_as_it_should(reduction):
    def smoothed(y, x):
        loss = F.cross_entropy(y, x.argmax(1), reduction=reduction, label_smoothing=0.3)
        return identity_loss(loss / 2, "sum")

    _, gradient = train(smoothed)
    torch.testing.assert_close(gradient, gradient_by_hand(smoothed))


# Losses that are a step on the way ---------------------------------------------


def test_a_removed_marker_has_one_dimension():
    """PopTorch, `RemoveSurplusIdentityLosses.cpp`: flattened, and reduced along 1."""

    def make_loss(y, x):
        loss = F.mse_loss(y, x)
        marked = identity_loss(y, "sum")
        kept = identity_loss(y, "none")
        l1 = F.l1_loss(y, x)
        final = identity_loss(loss + marked + kept.sum() + l1, "mean")
        return final, loss, marked, kept, l1, loss * 2, loss.reshape(())

    results, _ = train(make_loss)
    shapes = [tuple(result.shape) for result in results]
    assert shapes == [(), (1,), (1,), (2, 3), (), (1,), ()]
    by_hand = make_loss(torch.full((2, 3), 2.0), torch.ones(2, 3))
    for result, expected in zip(results, by_hand):
        torch.testing.assert_close(result.reshape(expected.shape), expected)


@pytest.mark.parametrize(
    "collect",
    [
        lambda loss, y: torch.stack([loss, y.sum()]).sum(),
        lambda loss, y: torch.stack([y.sum(), loss * 2]).sum(),
        lambda loss, y: torch.stack([loss, torch.zeros((), device="ipu")]).sum(),
    ],
)
def test_numbers_and_removed_markers_do_not_stack(collect):
    def make_loss(y, x):
        return identity_loss(collect(F.mse_loss(y, x), y), "mean")

    with pytest.raises(poptorch.Error, match=r"shape \[1\], not \[\].*reshape\(\(\)\)"):
        train(make_loss)


def test_what_removed_markers_are_added_to_in_place_takes_their_shape():
    """Calls in place become others first (PopTorch, `InplaceOps.cpp`)."""

    def make_loss(y, x):
        total = torch.zeros((), device="ipu")
        total += F.mse_loss(y, x)
        return identity_loss(total * 2, "mean"), total

    (loss, total), gradient = train(make_loss)
    assert (loss.item(), total.tolist()) == (2, [1])
    torch.testing.assert_close(gradient, 2 * gradient_by_hand(F.mse_loss))


@pytest.mark.parametrize(
    "collect",
    [
        lambda losses: torch.stack(losses).sum(),
        lambda losses: _written(losses),
        lambda losses: torch.zeros(()).add_(losses[0]).add_(losses[1]),
    ],
)
def test_losses_are_followed_into_what_is_made_of_them(collect):
    def make_loss(y, x):
        losses = [F.mse_loss(y, x), F.smooth_l1_loss(y, x)]
        return identity_loss(collect(losses), "mean")

    _, gradient = train(make_loss)
    expected = gradient_by_hand(lambda y, x: F.mse_loss(y, x) + F.smooth_l1_loss(y, x))
    torch.testing.assert_close(gradient, expected)


def _written(losses):
    total = torch.zeros(2)
    total[0] = losses[0]
    total[1] = losses[1]
    return total.sum()


def test_inference_needs_no_loss_and_reduces_with_the_marks():
    executor = poptorch.inferenceModel(
        Model(lambda y, x: (identity_loss(y, "sum"), identity_loss(y, "mean")))
    )
    total, mean = executor(torch.ones(2, 3))
    assert (total.item(), mean.item()) == (12, 2)
