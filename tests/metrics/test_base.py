# SPDX-License-Identifier: Apache-2.0
"""Means, weights, and functions as metrics."""

import pytest
import torch

from ipufit.errors import ConfigError, DataError
from ipufit.metrics import (
    FunctionMetric,
    Metric,
    StreamedMetric,
    mean_sums,
)
from tests.metrics.harness import COUNT, Case, check, check_device, figure, scores

NAN = float("nan")


def gap(outputs, targets):
    return outputs - targets


def mean_gap(outputs, targets, weights):
    each = (outputs - targets).reshape(COUNT, -1).mean(1)
    return float((each * weights).sum() / weights.sum())


@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_a_function_is_averaged_over_samples_and_elements(shape):
    case = Case(
        "gap",
        lambda: FunctionMetric("gap", gap),
        scores(0, *shape),
        scores(1, *shape),
        mean_gap,
    )
    check(case)
    check_device([case])


def test_a_mean_of_the_batch_counts_for_its_rows():
    metric = FunctionMetric("gap", lambda x, y: (x - y).mean())
    outputs, targets = scores(0), scores(1)
    actual = figure(metric, outputs, targets, sizes=(30, 7))
    expected = mean_gap(outputs, targets, torch.ones(COUNT))
    assert actual == pytest.approx(expected, rel=1e-5)


def test_a_mean_of_the_batch_cannot_be_weighted():
    metric = FunctionMetric("gap", lambda x, y: (x - y).mean())
    with pytest.raises(DataError, match="one value for the whole batch"):
        metric.sums(scores(0), scores(1), torch.ones(COUNT))


@pytest.mark.parametrize("value", [0.5, None])
def test_a_function_gives_a_tensor(value):
    with pytest.raises(DataError, match="isn't a tensor"):
        FunctionMetric("f", lambda x, y: value).sums(scores(0), scores(1))


def test_bools_are_shares():
    metric = FunctionMetric("less", lambda x, y: x < y, "max")
    expected = (scores(0) < scores(1)).float().mean()
    assert figure(metric, scores(0), scores(1)) == pytest.approx(float(expected))
    assert metric.direction == "max"


def test_nan_that_counts_stays():
    total, count = mean_sums(torch.tensor([NAN, 1.0]), torch.ones(2)).tolist()
    assert total != total
    assert count == 2


def test_a_metric_is_a_quotient_unless_it_says_otherwise():
    class Ours(Metric):
        def sums(self, outputs, targets, weights=None):
            return torch.stack([outputs.sum(), torch.full_like(outputs.sum(), 2.0)])

    assert figure(Ours("ours"), torch.ones(6), torch.ones(6), sizes=(2,)) == 1.0
    result = Ours("ours").result(torch.zeros(2, dtype=torch.float64))
    assert result != result
    assert Ours("ours").direction is None


@pytest.mark.parametrize("base", [Metric, StreamedMetric])
@pytest.mark.parametrize("word", ["update_state", "reset_state", "reset_states"])
def test_a_metric_in_keras_s_words_is_refused_where_it_is_written(base, word):
    with pytest.raises(ConfigError, match=f"Mine has {word}, which is Keras's.*sums"):
        type("Mine", (base,), {word: lambda self: None})
