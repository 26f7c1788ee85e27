# SPDX-License-Identifier: Apache-2.0
"""Functions that hide operators: a device computes them by their parts."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from tests.emulator.operators._programs import infer, reports

LARGE, ZEROS = torch.full((2, 4), 200.0).half(), torch.zeros(2, 4).half()
INFINITE = torch.full((2,), float("inf"))


def attend(q, **options):
    return functional.scaled_dot_product_attention(q, q, q, **options)


MASK = torch.ones(4, 4, dtype=torch.bool).tril()


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_drops_nothing_in_an_inference_model(is_causal):
    q = torch.randn(2, 2, 4, 8)
    result = infer(lambda q: attend(q, dropout_p=0.5, is_causal=is_causal), q)
    torch.testing.assert_close(result, attend(q, is_causal=is_causal))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_attention_with_a_mask_drops_nothing_in_an_inference_model(kind):
    q, mask = torch.randn(2, 2, 4, 8), MASK
    if kind == "float":
        mask = torch.zeros(4, 4).masked_fill(~MASK, float("-inf"))
    model = lambda q, mask: attend(q, attn_mask=mask, dropout_p=0.5)  # noqa: E731
    torch.testing.assert_close(infer(model, q, mask), attend(q, attn_mask=mask))


@pytest.mark.parametrize("needs_weights", [True, False])
def test_multi_head_attention_drops_nothing_in_an_inference_model(needs_weights):
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.5), torch.randn(4, 2, 8)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x, x, x, need_weights=needs_weights)[0]

    result = infer(Attention().train(), x)
    torch.testing.assert_close(result, layer.eval()(x, x, x)[0])


def test_a_layer_of_a_transformer_drops_nothing_in_an_inference_model():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5), torch.randn(4, 2, 8)
    result = infer(layer.train(), x)
    torch.testing.assert_close(result, layer.eval()(x))


def test_a_check_reports_dropout_inside_attention():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5), torch.randn(4, 2, 8)
    assert any("no Monte Carlo dropout" in text for text in reports(layer.train(), x))
    assert reports(layer.eval(), x) == []


def test_attention_that_drops_everything_is_refused():
    q = torch.randn(2, 2, 4, 8)
    with pytest.raises(poptorch.Error, match="ratio value 1 is not valid"):
        infer(lambda q: attend(q, dropout_p=1.0), q)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (functional.pairwise_distance, INFINITE),
        (functional.cosine_similarity, torch.zeros(2)),
    ],
)
def test_squares_overflow_in_float16(function, expected):
    other = ZEROS if expected.isinf().any() else torch.ones_like(LARGE)
    assert torch.equal(infer(function, LARGE, other).float(), expected)
    assert function(LARGE.float(), other.float()).isfinite().all()


@pytest.mark.parametrize(
    "function", [functional.pairwise_distance, functional.cosine_similarity]
)
def test_distances_in_float16_are_those_of_torch(function):
    x, y = torch.randn(2, 3, 4).half().unbind()
    expected = function(x.float(), y.float())
    torch.testing.assert_close(
        infer(function, x, y).float(), expected, rtol=0.01, atol=0.01
    )


def test_a_triplet_loss_in_float16_measures_distances_in_float32():
    def loss(x, y):
        return functional.triplet_margin_loss(x, y, y + 1, reduction="none")

    expected = loss(LARGE.float(), ZEROS.float())
    torch.testing.assert_close(infer(loss, LARGE, ZEROS).float(), expected)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_in_float16_are_those_of_torch(reduction):
    x, y = torch.randn(2, 3, 4).half().unbind()

    def triplet(x, y):
        return functional.triplet_margin_loss(x, y, -y, swap=True, reduction=reduction)

    def soft(x, y):
        return functional.soft_margin_loss(x, y.sign(), reduction=reduction)

    for loss in (triplet, soft):
        close = {"rtol": 0.01, "atol": 0.01}
        expected = loss(x.float(), y.float())
        torch.testing.assert_close(infer(loss, x, y).float(), expected, **close)


def test_the_exponential_of_a_soft_margin_loss_overflows_in_float16():
    x, y = torch.tensor([1.0, 12.0]).half(), -torch.ones(2).half()
    result = infer(
        lambda x, y: functional.soft_margin_loss(x, y, reduction="none"), x, y
    )
    assert result.isnan().tolist() == [False, True]


class Trained(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss, self.layer = loss, nn.Linear(4, 4)

    def forward(self, x, y):
        out = self.layer(x)
        return out, self.loss(out, y)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: functional.triplet_margin_loss(out, y, -y),
        lambda out, y: functional.soft_margin_loss(out, y.sign()),
    ],
)
def test_a_loss_in_float16_trains(loss):
    module = Trained(loss).half()
    before = module.layer.weight.detach().clone()
    model = poptorch.trainingModel(module)
    model(*torch.randn(2, 3, 4).half().unbind())
    model.copyWeightsToHost()
    assert not torch.equal(module.layer.weight, before)
    model.destroy()
