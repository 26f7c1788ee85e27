# SPDX-License-Identifier: Apache-2.0
"""Errors of numbers against scikit-learn, or their definitions in float64."""

import numpy as np
import pytest
import torch

from ipufit.errors import DataError
from ipufit.metrics import CosineSimilarity, RootMeanSquaredError, resolve_metric
from tests.metrics import peers
from tests.metrics.harness import (
    figure,
    scores,
)

squared, root = (peers.of_columns(peers.NUMBERS[name]) for name in ("mse", "rmse"))
cosine = peers.of_columns(peers.cosine)


def test_percentages_divide_by_something_as_in_keras():
    value = figure(resolve_metric("mape"), torch.tensor([1e-6]), torch.tensor([0.0]))
    assert value == pytest.approx(1000.0)


def test_logarithms_of_what_is_below_0_are_those_of_0():
    outputs, targets = torch.tensor([-5.0, -0.5]), torch.tensor([-1.0, 0.0])
    assert figure(resolve_metric("msle"), outputs, targets) == 0.0


@pytest.mark.parametrize("size", [1e4, 1e30])
@pytest.mark.parametrize("name", ["log_cosh", "huber"])
def test_large_differences_do_not_overflow(name, size):
    value = figure(resolve_metric(name), torch.tensor([size]), torch.tensor([0.0]))
    assert value == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("scale", [1e-20, 1e20])
@pytest.mark.parametrize(
    ("name", "reference"),
    [("mse", squared), ("rmse", root), ("cosine_similarity", cosine)],
)
def test_squares_may_be_larger_or_smaller_than_float32_has(name, reference, scale):
    outputs, targets = scale * scores(0, 3), scale * scores(1, 3)
    actual = figure(resolve_metric(name), outputs, targets, None, (5,))
    expected = reference(outputs, targets, torch.ones(37))
    assert actual == pytest.approx(expected, rel=1e-5, abs=0)


@pytest.mark.parametrize("far", [0.0, 2000.0])
@pytest.mark.parametrize("name", ["msle", "log_cosh"])
def test_small_differences_keep_their_digits(name, far):
    outputs = far + 1e-4 * far * scores(0).abs() + 1e-4 * scores(0).abs()
    targets = torch.full_like(outputs, far)
    away = (outputs.double() - targets.double()).numpy()
    if name == "msle":
        expected = np.log1p(away / (1 + far)) ** 2
    else:
        expected = np.log1p(np.sinh(away) ** 2) / 2
    actual = figure(resolve_metric(name), outputs, targets)
    assert actual == pytest.approx(expected.mean(), rel=1e-5, abs=0)


def test_a_vector_of_zeros_is_similar_to_none():
    outputs = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    assert figure(CosineSimilarity(), outputs, torch.ones(2, 2)) == pytest.approx(
        0.5**0.5 / 2
    )


@pytest.mark.parametrize(
    ("metric", "outputs", "targets"),
    [
        (RootMeanSquaredError(), (4, 2), (2, 4)),
        (RootMeanSquaredError(), (4,), (3,)),
        (resolve_metric("mse"), (4, 2), (4,)),
        (CosineSimilarity(), (4,), (4,)),
        (CosineSimilarity(), (4, 1), (4, 1)),
        (CosineSimilarity(), (4, 2), (4,)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(metric, outputs, targets):
    with pytest.raises(DataError, match=r"\(4,.*\)"):
        metric.sums(torch.zeros(outputs), torch.zeros(targets))


def test_positions_are_weighted():
    outputs, weights = scores(0, 3), scores(1, 3).abs()
    metric = resolve_metric("mse")
    expected = np.average(outputs.square(), weights=weights)
    zeros = torch.zeros_like(outputs)
    assert figure(metric, outputs, zeros, weights, (7,)) == pytest.approx(expected)
