# SPDX-License-Identifier: Apache-2.0
"""Products, convolutions, normalisation, embeddings and losses on a device."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from ipufit.emulator.errors import Error
from tests.emulator._models import Function
from tests.emulator.operators._programs import gradients, infer, reports, trained

INF, NAN = math.inf, math.nan
X = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
WHOLE = torch.ones(2, 2, dtype=torch.int32)


def with_affine(function, *more, weight=True, bias=True, **kwargs):
    def program(x):
        ones = torch.ones(3, device=x.device)
        affine = {"weight": ones if weight else None, "bias": ones if bias else None}
        return function(x, *more, **affine, **kwargs)

    return program


@pytest.mark.parametrize(
    ("program", "tensors", "match"),
    [
        (lambda x: x.cumsum(0), [torch.tensor(1.0)], "Dimension out of range"),
        (lambda x: x.cumprod(0), [torch.tensor(1.0)], "out_of_range"),
        (nn.LSTM(4, 3, proj_size=2), [X], "whose shapes differ"),
        (with_affine(functional.layer_norm, (3,), bias=False), [X.mT], "ERROR_ON"),
        (with_affine(functional.group_norm, 3, weight=False), [X], "ERROR_ON"),
        (with_affine(functional.instance_norm, bias=False), [X], "ERROR_ON"),
        (
            with_affine(functional.batch_norm, None, None, bias=False, training=True),
            [X],
            "pass a zero bias",
        ),
        (lambda x: torch.layer_norm(x, (4,), x[0, 0], None), [X], "pass a zero bias"),
        (nn.Embedding(4, 3, max_norm=1.0), [WHOLE], "embedding_renorm_"),
        (
            nn.EmbeddingBag.from_pretrained(torch.rand(4, 3)),
            [WHOLE],
            "_embedding_bag_forward_only",
        ),
        (lambda x: x.repeat_interleave(2, 1), [X], "without output_size"),
        (lambda x: torch.repeat_interleave(x, 2, dim=1), [X], "without output_size"),
        (functional.cross_entropy, [X[0, 0], torch.tensor(1)], "beyond its end"),
        (functional.nll_loss, [X[0, 0], torch.tensor(1)], "beyond its end"),
        (
            functional.cosine_embedding_loss,
            [X[0, 0], X[0, 0], torch.tensor(1)],
            "axis 1",
        ),
        (functional.triplet_margin_loss, [X[0, 0]] * 3, "internal error"),
        (functional.gaussian_nll_loss, [X, X, X], "aten::item"),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_what_no_device_compiles_is_refused_with_its_row(program, tensors, match):
    message, *_ = reports(program, *tensors)
    assert match in message
    with pytest.raises(Error) as refusal:
        infer(program, *tensors)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("program", "tensors"),
    [
        (nn.LSTM(4, 3), [X]),
        (with_affine(functional.layer_norm, (3,)), [X.mT]),
        (with_affine(functional.group_norm, 3, weight=False, bias=False), [X]),
        (nn.EmbeddingBag(4, 3), [WHOLE]),
        (lambda x: x.repeat_interleave(2, 1, output_size=6), [X]),
        (functional.cross_entropy, [X[0], torch.tensor([1, 2, 3])]),
        (functional.cross_entropy, [X[0, 0], X[0, 0]]),
        (lambda x: x.cumsum(-1), [X]),
        (lambda x, y: x @ y, [X, X.mT]),
        (nn.Conv1d(3, 3, 1), [X]),
    ],
)
def test_others_compile(program, tensors):
    assert not reports(program, *tensors)
    infer(program, *tensors)


def embedded(offsets):
    layer = nn.EmbeddingBag(4, 3)
    return Function(lambda _, x: layer(x, torch.tensor(offsets)), layer=layer)


@pytest.mark.parametrize(
    ("program", "tensors", "match"),
    [
        (lambda x: x @ x, [WHOLE], "perhaps stops in Poplar"),
        (torch.mm, [WHOLE, WHOLE], "perhaps stops in Poplar"),
        (functional.conv1d, [WHOLE[None], WHOLE[None]], "perhaps stops in Poplar"),
        (embedded([0, 2, 2]), [torch.ones(4, dtype=torch.long)], "avoid empty bags"),
        (
            functional.nll_loss,
            [torch.zeros(70_000, 2).half(), torch.zeros(70_000, dtype=torch.long)],
            "cut at 65504",
        ),
    ],
)
def test_what_perhaps_goes_wrong_is_only_reported(program, tensors, match):
    assert match in reports(program, *tensors)[0]


@pytest.mark.parametrize(
    ("layer", "shape", "is_few"),
    [
        (nn.BatchNorm1d(3), (20, 3), True),
        (nn.BatchNorm1d(3), (20, 3, 5), False),
        (nn.BatchNorm2d(3), (6, 3, 4, 4), True),
        (nn.InstanceNorm2d(3), (20, 3, 4, 4), True),
        (nn.InstanceNorm2d(3), (2, 3, 10, 10), False),
    ],
)
def test_norms_over_few_values_are_reported_if_they_train(layer, shape, is_few):
    network, x = nn.Sequential(nn.Identity(), layer), torch.rand(shape)
    if isinstance(layer, nn.InstanceNorm2d):
        network[0] = nn.Conv2d(3, 3, 1)
    assert any("unbiased" in m for m in reports(network, x, trains=True)) is is_few
    assert not reports(network, x)


def test_statistics_of_instance_norm_stay():
    layer = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    module = nn.Sequential(nn.Conv1d(3, 3, 1), layer)
    assert "running mean" in " ".join(reports(module, X, trains=True))
    assert trained(module, X) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert layer.running_mean.eq(0).all()
    assert layer.running_var.eq(1).all()
    layer.eval()
    torch.testing.assert_close(infer(layer, X), layer(X))


@pytest.mark.parametrize(
    ("program", "tensors", "expected"),
    [
        (
            lambda i, x: torch.baddbmm(i, x, x, beta=0, alpha=2),
            [torch.tensor([[[NAN, INF], [1.0, 2.0]]]), torch.ones(1, 2, 2)],
            [[[NAN, NAN], [4.0, 4.0]]],
        ),
        (
            lambda x: x.cumsum(0),
            [torch.tensor([2**24, 1], dtype=torch.int32)],
            [2**24, 2**24],
        ),
        (lambda x: x.cumsum(0), [torch.tensor([True, True, False])], [1, 2, 2]),
        (
            lambda x: x.cumsum(0, dtype=torch.int32),
            [torch.tensor([1.75, 1.75])],
            [1, 2],
        ),
        (lambda x: x.cumsum(0), [torch.tensor([0.5, 0.25])], [0.5, 0.75]),
        (
            lambda x: x.cumprod(0, dtype=torch.int32),
            [torch.tensor([1.5, 1.5])],
            [1.5, 2.25],
        ),
    ],
)
def test_products_and_sums_are_the_devices(program, tensors, expected):
    device = infer(program, *tensors)
    torch.testing.assert_close(
        device, torch.tensor(expected, dtype=device.dtype), equal_nan=True
    )


def test_cross_entropy_of_a_sure_and_right_answer_is_not_a_number():
    def program(x, y, reduction="none"):
        return functional.binary_cross_entropy(x, y, reduction=reduction)

    x = torch.tensor([0.0, 1.0, 1.0, 0.5])
    y = torch.tensor([0.0, 1.0, 0.0, 1.0])
    expected = torch.tensor([NAN, NAN, INF, math.log(2)])
    torch.testing.assert_close(infer(program, x, y), expected, equal_nan=True)
    assert "logarithms are not clamped" in reports(program, x, y)[0]
    mean = infer(lambda x, y: program(x, y, "mean"), x[2:], y[2:])
    assert mean == INF
    weighted = infer(
        lambda x, y: functional.binary_cross_entropy(x, y, y, reduction="sum"),
        torch.tensor([0.5, 0.25]),
        torch.tensor([1.0, 0.75]),
    )
    second = 0.75 * (0.75 * math.log(0.25) + 0.25 * math.log(0.75))
    torch.testing.assert_close(weighted, torch.tensor(math.log(2) - second))


def test_gradients_of_a_cross_entropy_have_no_bound():
    def program(weight, y):
        return functional.binary_cross_entropy(weight, y, reduction="sum")

    weights, y = torch.tensor([0.5, 1e-14, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    (gradient,) = gradients(program, y, weights=[weights])
    torch.testing.assert_close(
        gradient, torch.tensor([-2.0, -1e14, NAN]), equal_nan=True
    )


@pytest.mark.parametrize(
    ("log_target", "target", "expected"),
    [
        (False, [0.0, -1.0, 0.5], [0.0, 0.0, 0.5 * math.log(0.5) + 0.5]),
        (True, [-INF, 0.0, -INF], [0.0, 2.0, 0.0]),
    ],
)
def test_divergence_counts_positive_targets_alone(log_target, target, expected):
    def program(x, y, reduction="none"):
        return functional.kl_div(x, y, reduction=reduction, log_target=log_target)

    x, y = torch.tensor([[-INF, -2.0, -1.0]]), torch.tensor([target])
    torch.testing.assert_close(infer(program, x, y), torch.tensor([expected]))
    for reduction in ("sum", "batchmean"):
        whole = infer(lambda x, y, r=reduction: program(x, y, r), x, y)
        torch.testing.assert_close(whole, torch.tensor(sum(expected)))
        last = infer(lambda x, y, r=reduction: program(x, y, r), x[0, 2], y[0, 2])
        torch.testing.assert_close(last, torch.tensor(expected[2]))


@pytest.mark.parametrize("reduction", ["sum", "batchmean"])
def test_a_divergence_is_still_the_loss(reduction):
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.zeros(1, 2))

        def forward(self, y):
            scores = self.logits.log_softmax(1)
            return functional.kl_div(scores, y, reduction=reduction)

    module = Distilled()
    sgd = poptorch.optim.SGD(module.parameters(), lr=1.0)
    model = poptorch.trainingModel(module, optimizer=sgd)
    model(torch.tensor([[1.0, 0.0]]))
    assert module.logits.tolist() == [[0.5, -0.5]]


@pytest.mark.parametrize("swap", [True, False])
def test_triplets_of_many_dimensions_are_compared_over_the_second(swap):
    def program(a, p, n):
        return functional.triplet_margin_loss(a, p, n, swap=swap, reduction="none")

    a, p, n = torch.rand(3, 2, 3, 4)
    away = [((x - y + 1e-6) ** 2).sum(1).sqrt() for x, y in ((a, p), (a, n), (p, n))]
    far = torch.minimum(away[1], away[2]) if swap else away[1]
    expected = torch.relu(away[0] - far + 1.0)
    assert expected.shape == (2, 4)
    torch.testing.assert_close(infer(program, a, p, n), expected)
    assert "dimension 1" in reports(program, a, p, n)[0]
    assert not reports(program, a[0], p[0], n[0])


def test_a_hinge_loss_ignores_targets_other_than_1_and_minus_1():
    x, target = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 0.0])
    loss = nn.HingeEmbeddingLoss(margin=2.0, reduction="none")
    assert infer(loss, x, target).tolist() == [0.5, 1.5, 0.0]


def test_a_soft_margin_loss_that_overflows_is_nan():
    loss = nn.SoftMarginLoss(reduction="none")
    device = infer(loss, torch.tensor([100.0, 0.0]), torch.tensor([-1.0, 1.0]))
    assert device[0].isnan()
    torch.testing.assert_close(device[1], torch.tensor(2.0).log())
