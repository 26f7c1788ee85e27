# SPDX-License-Identifier: Apache-2.0
"""Errors of numbers against scikit-learn, or their definitions in float64."""

from functools import partial

import numpy as np
import pytest
import torch

from ipufit.errors import DataError
from ipufit.metrics import CosineSimilarity, RootMeanSquaredError, resolve_metric
from tests.metrics import peers
from tests.metrics.harness import (
    Case,
    check,
    check_device,
    figure,
    labels,
    scores,
)

NAMES = ["mse", "rmse", "mae", "mape", "msle", "log_cosh", "huber"]
squared, root, absolute, percentage, logarithmic, log_cosh, huber = (
    peers.of_columns(peers.NUMBERS[name]) for name in NAMES
)
cosine = peers.of_columns(peers.cosine)
REFERENCES = {
    "mse": squared,
    "mean_squared_error": squared,
    "mae": absolute,
    "mean_absolute_error": absolute,
    "l1": absolute,
    "mape": percentage,
    "mean_absolute_percentage_error": percentage,
    "rmse": root,
    "root_mean_squared_error": root,
    "log_cosh": log_cosh,
    "huber": huber,
    "smooth_l1": huber,
}
SHAPES = [
    (scores(0), scores(1)),
    (scores(2, 1), scores(3)),
    (scores(4, 2, 3), 3 * scores(5, 2, 3)),
    (scores(6), labels(7)),
]
CASES = [
    *(
        Case(name, partial(resolve_metric, name), *SHAPES[number % 4], reference)
        for number, (name, reference) in enumerate(REFERENCES.items())
    ),
    *(Case("mse", partial(resolve_metric, "mse"), *given, squared) for given in SHAPES),
    *(
        Case(name, partial(resolve_metric, name), *given, logarithmic)
        for name, given in [
            ("msle", (scores(8, 2).abs(), scores(9, 2).abs())),
            ("mean_squared_logarithmic_error", (scores(8).exp(), labels(9))),
        ]
    ),
    Case("cosine_similarity", CosineSimilarity, scores(10, 5), scores(11, 5), cosine),
    Case(
        "cosine_similarity",
        CosineSimilarity,
        scores(10, 3, 5),
        scores(11, 3, 5),
        cosine,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_error_is_the_references(case):
    check(case)


def test_devices_compute_it():
    check_device(CASES)


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
