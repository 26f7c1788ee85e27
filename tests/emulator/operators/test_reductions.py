# SPDX-License-Identifier: Apache-2.0
"""Sums, extremes, norms and distances as a device computes them."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from tests.emulator.operators._programs import as_module, gradients, infer, reports

X = torch.randn(2, 3, 4)
ROWS = torch.tensor([[2.0, -2.0, 2.0, 0.0], [1.0, 3.0, 3.0, -4.0]])
EQUAL = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]])
INF = math.inf

SHAPES = [
    (torch.amax, [1]),
    (torch.amin, [1]),
    (lambda x: x.amax(dim=(), keepdim=True), [1, 1]),
    (torch.argmax, [1]),
    (lambda x: x.argmin(None, keepdim=True), [1, 1]),
    (lambda x: x.sum((), keepdim=True), []),
    (lambda x: x.mean(dim=(), keepdims=True), []),
]


@pytest.mark.parametrize(("function", "shape"), SHAPES)
def test_shapes_of_reductions_over_everything(function, shape):
    device = infer(function, X)
    assert list(device.shape) == shape
    assert device.item() == function(X).item()
    assert reports(function, X)


AS_TORCH = [
    (torch.max, X),
    (lambda x: x.amax(1), X),
    (lambda x: torch.amax(x, dim=(0, 2), keepdim=True), X),
    (lambda x: x.amax(axis=1), X),
    (lambda x: x.argmax(1).int(), X),
    (lambda x: torch.argmin(x, axis=0).int(), X),
    (lambda x: x.amax(keepdim=True, dim=()), X[0]),
    (lambda x: x.sum(1, keepdim=True), X),
    (lambda x: x.bool().sum(), X),
    (lambda x: x.logsumexp((1, 2)), X),
    (lambda x: x.logsumexp(-1, keepdim=True), X),
    (lambda x: x.norm(dim=1), X),
    (lambda x: torch.linalg.norm(x, 1, -1), X),
    (lambda x: torch.linalg.vector_norm(x, INF, 0), X),
    (lambda x: torch.linalg.vector_norm(-x, 2, 0, keepdim=True), X[0, 0, 0]),
    (lambda x: torch.norm(x, 2, dim=-1), X[0, 0, 0]),
    (functional.normalize, X),
    (torch.cdist, EQUAL, EQUAL),
    (lambda x: x.count_nonzero(1), X),
]


@pytest.mark.parametrize(("function", "tensors"), [(f, x) for f, *x in AS_TORCH])
def test_what_a_device_computes_as_torch_does(function, tensors):
    expected = function(*tensors)
    expected = expected if expected.is_floating_point() else expected.int()
    torch.testing.assert_close(infer(function, *tensors), expected)
    assert not reports(function, *tensors)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.stack([x.amax(), x.amin()]),
        lambda x: x.amax().unsqueeze(0),
        lambda x: x.amax().reshape(()) * 2,
        lambda x: x.amax()[None, None],
        lambda x: x / x.amax(),
        lambda x: x.amax().expand(3),
        lambda x: torch.cat([x.amax().view(1), x.flatten()]),
    ],
)
def test_what_follows_has_the_shape_that_it_asks_for(function):
    torch.testing.assert_close(infer(function, X), function(X))


def test_the_shape_passes_on_through_arithmetic():
    assert infer(lambda x: x.amax() * 2 + x.sum(), X).shape == (1,)


def test_a_loss_of_one_element_trains():
    (gradient,) = gradients(lambda w: w.amax() * 3, weights=[ROWS])
    torch.testing.assert_close(gradient, 3.0 * (ROWS == 3))


REFUSED = [
    (lambda x: x.sum(None), "name the dims"),
    (lambda x: x.mean(dim=None, keepdim=True), "name the dims"),
    (lambda x: x[0, 0, 0].argmax(0), "input rank must be greater than 0"),
]


@pytest.mark.parametrize(("function", "fragment"), REFUSED)
def test_what_a_device_refuses(function, fragment):
    assert fragment in reports(function, X)[0]
    with pytest.raises(poptorch.Error, match=fragment):
        infer(function, X)


NUMBERS = [
    (lambda x: (x > 1).sum(dtype=torch.float32), torch.tensor(4, dtype=torch.int32)),
    (lambda x: x.norm(p=0, dim=1), torch.tensor([INF, INF])),
    (lambda x: torch.linalg.vector_norm(x[:, :1], 0, 1), torch.ones(2)),
    (lambda x: torch.cdist(x, x, p=0.0), torch.full((2, 2), INF)),
]


@pytest.mark.parametrize(("function", "expected"), NUMBERS)
def test_other_numbers_and_types(function, expected):
    torch.testing.assert_close(infer(function, ROWS), expected)
    assert reports(function, ROWS)


def test_a_sum_that_is_used_as_a_float():
    def share(x):
        return (x > 1).sum(dtype=torch.float32) / 2

    assert infer(share, ROWS) == 2
    assert "computes and returns int32" in reports(share, ROWS)[0]


def test_counts_that_are_used_as_floats():
    found = reports(lambda x: x.count_nonzero().float(), ROWS)
    assert "the conversion is dropped" in found[0]
    assert not reports(torch.count_nonzero, ROWS)


def test_infinities_in_a_logarithm_of_a_sum():
    x = torch.tensor([[-INF, -INF], [INF, 0.0], [-INF, 1.0]])
    device = infer(lambda x: x.logsumexp(1), x)
    assert device.isnan().tolist() == [True, True, False]
    assert device[2] == 1


@pytest.mark.parametrize(
    ("function", "values", "expected"),
    [
        (torch.mean, [40000.0] * 4, INF),
        (torch.mean, [2049.0, 2048.0, 4.0], 4100 / 3),  # the sum is rounded
        (torch.norm, [200.0, 200.0], INF),
        (torch.norm, [3.0, 4.0], 5.0),
        (lambda x: functional.normalize(x, dim=0)[0], [30000.0, 1.0], 0.0),
    ],
)
def test_sums_in_half_precision(function, values, expected):
    x = torch.tensor(values).half()
    torch.testing.assert_close(
        infer(function, x), torch.tensor(expected).half(), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("square", "is_reported"),
    [
        (lambda x: x.pow(2), True),
        (lambda x: x**2, True),
        (lambda x: x * x, True),
        (torch.square, True),
        (lambda x: x.float().square(), False),
        (lambda x: x * 2, False),
    ],
)
def test_a_root_mean_square_in_half_precision_is_reported(square, is_reported):
    def normalize(x):
        return x * torch.rsqrt(square(x).mean(-1, keepdim=True) + 1e-6)

    x = torch.full((2, 768), 10.0).half()
    assert [is_reported] == [
        "RMSNorm" in text for text in reports(normalize, x) or [""]
    ]
    if is_reported:
        assert infer(normalize, x).count_nonzero() == 0


GRADIENTS = [
    (lambda w: w.amax(1).sum(), [[1, 0, 1, 0], [0, 1, 1, 0]]),
    (lambda w: w.amin((0, 1), keepdim=True), [[0, 0, 0, 0], [0, 0, 0, 1]]),
    (lambda w: w[0].max(), [[1, 0, 1, 0], [0, 0, 0, 0]]),
    (lambda w: w.max(1)[0].sum(), [[1, 0, 0, 0], [0, 1, 0, 0]]),
    (lambda w: w[1].median(), [[0, 0, 0, 0], [1, 0, 0, 0]]),
    (lambda w: w.norm(p=INF, dim=1).sum(), [[1, -1, 1, 0], [0, 0, 0, -1]]),
    (lambda w: torch.linalg.vector_norm(w, -INF, 1).sum(), [[0] * 4, [1, 0, 0, 0]]),
    (lambda w: torch.linalg.vector_norm(w[0, 1], INF, 0), [[0, -1, 0, 0], [0] * 4]),
    (lambda w: w[:, :3].norm(dim=1)[0], [[3**-0.5, -(3**-0.5), 3**-0.5, 0], [0] * 4]),
]


@pytest.mark.parametrize(("function", "expected"), GRADIENTS)
def test_gradients(function, expected):
    (gradient,) = gradients(lambda w: function(w).sum(), weights=[ROWS])
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float32))


def test_the_median_trains_one_of_equals():
    (gradient,) = gradients(torch.median, weights=[torch.tensor([1.0, 2.0, 2.0])])
    assert sorted(gradient.tolist()) == [0, 0, 1]


def test_infinities_beside_an_extreme():
    x = torch.tensor([[-INF, 2.0, 2.0], [-INF, -INF, -INF]])
    (gradient,) = gradients(
        lambda w, x: (w + x).amax(1)[:1].sum(), x, weights=[torch.zeros(2, 3)]
    )
    assert gradient.tolist() == [[0, 1, 1], [0, 0, 0]]


BAD_GRADIENTS = [
    (lambda w: w.norm(dim=1).sum(), [[False] * 2, [False] * 2, [True] * 2]),
    (lambda w: functional.normalize(w)[:2].sum(), [[False] * 2] * 2 + [[True] * 2]),
    (lambda w: torch.linalg.norm(w[1:], 2, -1).sum(), [[False] * 2] * 2 + [[True] * 2]),
    (lambda w: torch.linalg.matrix_norm(w), [[False] * 2] * 3),
    (
        lambda w: functional.pairwise_distance(w[:2], w[1:], eps=0.0).sum(),
        [[True] * 2, [True] * 2, [False] * 2],
    ),
    (lambda w: torch.cdist(w, w).sum(), [[True] * 2] * 3),
]


@pytest.mark.parametrize(("function", "is_nan"), BAD_GRADIENTS)
def test_gradients_of_norms_of_zeros(function, is_nan):
    (gradient,) = gradients(function, weights=[EQUAL])
    assert gradient.isnan().tolist() == is_nan

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(EQUAL.clone())

        def forward(self):
            return function(self.weight)

    assert any("NaN" in found for found in reports(Weighted(), trains=True))
    assert not reports(as_module(function), EQUAL)
