# SPDX-License-Identifier: Apache-2.0
"""One harness for all metrics: a figure against a reference, in every way it is used.

@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_references(case):
    check(case)
"""

from __future__ import annotations

import itertools
import os
from typing import Any, Callable, NamedTuple

import pytest
import torch

import ipufit.emulator as poptorch
from ipufit.emulator._switches import STRICT_VARIABLE
from ipufit.metrics import Metric
from tests.emulator._models import Function

COUNT = 37


class Case(NamedTuple):
    """A metric with data and what it should come to.

    Attributes:
        label: For the test's name.
        make: A fresh metric.
        outputs: Of `COUNT` rows.
        targets: Theirs.
        reference: `reference(outputs, targets, weights)` of tensors, weights float32
            `[rows]`, all ones if there are none. Gives a number.
        tolerance: Relative.
    """

    label: str
    make: Callable[[], Any]
    outputs: torch.Tensor
    targets: torch.Tensor
    reference: Callable[..., float]
    tolerance: float = 2e-5

    def __str__(self):
        shapes = f"{tuple(self.outputs.shape)}, {tuple(self.targets.shape)}"
        return f"{self.label} {shapes} {self.targets.dtype}".replace("torch.", "")


class Through(torch.nn.Module):
    """Outputs a function of the inputs and of a parameter that is 0."""

    def __init__(self, function=torch.clone):
        super().__init__()
        self.by, self.function = torch.nn.Parameter(torch.zeros(())), function

    def forward(self, x):
        return self.function(x + self.by)


# Data -------------------------------------------------------------------------------


def generator(seed):
    return torch.Generator().manual_seed(seed)


def scores(seed, *shape):
    """Normally distributed numbers."""
    return torch.randn(COUNT, *shape, generator=generator(seed))


def probabilities(seed, *shape):
    """Between 0 and 1; along the last axis they add up to 1 if it has several."""
    given = scores(seed, *shape)
    several = len(shape) > 0 and shape[-1] > 1
    return given.softmax(-1) if several else given.sigmoid()


def labels(seed, *shape, num_classes=4):
    return torch.randint(0, num_classes, (COUNT, *shape), generator=generator(seed))


def one_hot(indices, num_classes=4):
    return torch.nn.functional.one_hot(indices, num_classes).float()


def sample_weights(seed=99):
    """Of rows: some 0, the others anything."""
    weights = torch.rand(COUNT, generator=generator(seed)) * 3
    weights[::5] = 0.0
    return weights


def spread(weights, values):
    """A weight for each of the values, flat; what scikit-learn takes."""
    shaped = weights.reshape(weights.shape + (1,) * (values.dim() - weights.dim()))
    return shaped.expand(values.shape).reshape(-1).numpy()


# What is computed -------------------------------------------------------------------


def figure(metric, outputs, targets, weights=None, sizes=(COUNT,)):
    """What a metric comes to over batches of these sizes, over and over."""
    sums, start, number = None, 0, 0
    while start < len(outputs):
        rows = slice(start, start + sizes[number % len(sizes)])
        start, number = rows.stop, number + 1
        given = (
            outputs[rows],
            targets[rows],
            None if weights is None else weights[rows],
        )
        if isinstance(metric, Metric):
            added = metric.sums(*given)
            assert added.dim() == 1
            assert added.dtype == torch.float32
            sums = added.double() + (0 if sums is None else sums)
        else:
            metric.update(*given)
    return metric.result(sums) if isinstance(metric, Metric) else metric.result()


def is_about(actual, case, weights=None):
    """Compare with the reference."""
    if weights is None:
        weights = torch.ones(COUNT)
    expected = case.reference(case.outputs, case.targets, weights)
    assert isinstance(actual, float)
    assert actual == pytest.approx(
        float(expected), rel=case.tolerance, abs=1e-6, nan_ok=True
    )


# Checks -----------------------------------------------------------------------------


def check_whole(case):
    is_about(figure(case.make(), case.outputs, case.targets), case)


def check_batches(case):
    """Sums of batches, however they are cut, are those of the whole."""
    is_about(figure(case.make(), case.outputs, case.targets, None, (3, 20, 1)), case)


def check_weights(case):
    weights = sample_weights()
    actual = figure(case.make(), case.outputs, case.targets, weights, (8, 3))
    is_about(actual, case, weights)


def check_rows_left_out(case):
    """Rows of weight 0 don't count, whatever is in them."""
    weights = (sample_weights() > 0).float()
    outputs, targets = case.outputs.clone(), case.targets.clone()
    outputs[weights == 0] = float("nan")
    outputs[::10] = float("-inf")
    if targets.is_floating_point():
        targets[weights == 0] = float("nan")
    actual = figure(case.make(), outputs, targets, weights, (8, 3))
    is_about(actual, case, weights)
    kept = weights > 0
    assert actual == pytest.approx(
        figure(case.make(), case.outputs[kept], case.targets[kept]), rel=1e-5, abs=1e-6
    )


def check_device(cases):
    """In one program of nothing but what PopTorch compiles: as on the host."""
    made = [(case, case.make()) for case in cases]
    made = [(case, metric) for case, metric in made if isinstance(metric, Metric)]

    def sums(*given):
        pairs = zip(made, given[:-1:2], given[1::2])
        return tuple(metric.sums(x, y, given[-1]) for (_, metric), x, y in pairs)

    os.environ[STRICT_VARIABLE] = "1"
    executor = poptorch.inferenceModel(Function(lambda _, *given: sums(*given)))
    pairs = [(case.outputs, case.targets) for case, _ in made]
    flipped = [(outputs.flip(0), targets) for outputs, targets in pairs]
    weights = sample_weights()
    try:
        for given in (
            [*itertools.chain(*pairs), weights],
            [*itertools.chain(*flipped), weights.flip(0)],
        ):
            for actual, expected in zip(executor(*given), sums(*given)):
                assert actual.shape == expected.shape
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    finally:
        executor.destroy()


def check_half(case):
    """Half precision outputs are added up in single precision."""
    metric = case.make()
    if isinstance(metric, Metric):
        half = case.outputs.half()
        actual = metric.sums(half, case.targets)
        expected = metric.sums(half.float(), case.targets)
        torch.testing.assert_close(actual, expected)


def check(case, *, has_weights=True):
    """Make all checks: of weights unless there are none but 0 and 1."""
    check_whole(case)
    check_batches(case)
    if has_weights:
        check_weights(case)
    check_rows_left_out(case)
    check_half(case)
