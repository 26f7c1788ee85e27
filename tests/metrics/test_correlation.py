# SPDX-License-Identifier: Apache-2.0
"""Shares of variance and correlations against scikit-learn, NumPy and SciPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit.errors import UnsupportedError
from ipufit.metrics import (
    ExplainedVariance,
    PearsonCorrelation,
    R2Score,
    SpearmanCorrelation,
)
from tests.metrics import peers
from tests.metrics.harness import figure, scores
from tests.metrics.peers import sk
from tests.strategies import examples, slow_but_each_fourth

REFERENCES = {
    R2Score: peers.of_columns(peers.NUMBERS["r2"]),
    ExplainedVariance: peers.of_columns(peers.NUMBERS["explained_variance"]),
    PearsonCorrelation: peers.of_columns(peers.NUMBERS["pearson"]),
}
NOISE = 0.3 * scores(9)


def added_up(metric, outputs, targets, size):
    """As a device adds: in float32, one micro-batch after the other."""
    sums = None
    for x, y in zip(outputs.split(size), targets.split(size)):
        batch = metric.sums(x, y)
        sums = batch if sums is None else sums + batch
    return metric.result(sums.double())


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize(
    ("mean", "spread"),
    slow_but_each_fourth([(2020, 5), (1e4, 1), (-3e5, 100), (0, 1), (1.7e9, 1e4)]),
)
def test_numbers_far_from_0_lose_nothing_when_a_device_adds_up(kind, mean, spread):
    noise = torch.Generator().manual_seed(0)
    targets = mean + spread * torch.randn(1600, generator=noise)
    outputs = targets + 0.5 * spread * torch.randn(1600, generator=noise)
    expected = REFERENCES[kind](outputs, targets, torch.ones(1600))
    assert added_up(kind(), outputs, targets, 16) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", REFERENCES)
@settings(max_examples=examples(32))
@given(
    st.sampled_from([1e-20, 1e-9, 3e-5, 1.0, 1.7e9, 1e20]),
    st.sampled_from([0.0, 1.0, -30.0]),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_any_scale_gives_the_references_value(kind, scale, mean, size, seed):
    noise = torch.Generator().manual_seed(seed)
    targets = scale * (mean + torch.randn(120, 2, generator=noise))
    outputs = targets + 0.5 * scale * torch.randn(120, 2, generator=noise)
    expected = REFERENCES[kind](outputs, targets, torch.ones(120))
    assert added_up(kind(), outputs, targets, size) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", [R2Score, ExplainedVariance])
def test_weights_below_0_count_as_in_scikit_learn(kind):
    targets, weights = 5 + scores(3), torch.ones(37)
    weights[::5] = -0.3
    outputs = targets + NOISE
    expected = REFERENCES[kind](outputs, targets, weights)
    assert figure(kind(), outputs, targets, weights, (4,)) == pytest.approx(expected)


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_outputs_of_constant_targets_count_alike_in_an_r2_by_variance(error):
    targets = torch.ones(4, 2)
    outputs = targets + error * torch.eye(4, 2)
    weighted = sk.r2_score(targets, outputs, multioutput="variance_weighted")
    metric = R2Score("variance_weighted_average")
    assert figure(metric, outputs, targets) == weighted


def test_a_single_sample_has_no_r2():
    sample = torch.tensor([2.0])
    assert np.isnan(figure(R2Score(), sample, sample))
    assert figure(R2Score(), torch.zeros(2), torch.zeros(2)) == 1.0


@pytest.mark.parametrize("constant", [0.0, 2020.0, 1e6 / 3, 1e-20, 1.7e9])
@pytest.mark.parametrize("kind", [R2Score, ExplainedVariance])
def test_constant_targets_are_met_or_not_as_in_scikit_learn(kind, constant):
    targets = torch.full((10,), constant)
    assert figure(kind(), targets, targets, None, (3,)) == 1.0
    missed = targets + max(constant, 1.0) * scores(0)[:10]
    assert figure(kind(), missed, targets, None, (3,)) == 0.0


@pytest.mark.parametrize("kind", [PearsonCorrelation, SpearmanCorrelation])
def test_what_does_not_vary_has_no_correlation(kind):
    constant, varied = torch.full((9,), 0.1), scores(0)[:9]
    assert np.isnan(figure(kind(), constant, varied, None, (4,)))
    assert np.isnan(figure(kind(), varied, constant, None, (4,)))
    assert np.isnan(figure(kind(), varied.masked_fill(varied < 0, np.nan), varied))


def test_ranks_have_no_weights_but_0_and_1():
    with pytest.raises(UnsupportedError, match="must be 0 or 1"):
        SpearmanCorrelation().update(torch.ones(2), torch.ones(2), torch.tensor([1, 2]))
