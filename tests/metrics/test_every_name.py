# SPDX-License-Identifier: Apache-2.0
"""What holds for every metric that has a name, on every kind of data that it takes."""

from __future__ import annotations

import pytest
import torch

from ipufit.errors import DataError, UnsupportedError
from ipufit.metrics import Metric, metric_names, resolve_metrics
from tests.metrics.harness import (
    Case,
    check_batches,
    check_device,
    check_half,
    check_rows_left_out,
    figure,
    labels,
    one_hot,
    scores,
)

DATA = {
    "binary": (scores(0), labels(1, num_classes=2).float()),
    "binary columns": (scores(0, 1), labels(1, num_classes=2)),
    "class indices": (scores(2, 6), labels(3, num_classes=6)),
    "one-hot": (scores(2, 6), one_hot(labels(3, num_classes=6), 6)),
    "positions": (scores(4, 3, 6), labels(5, 3, num_classes=6)),
    "numbers": (scores(6, 2), scores(7, 2)),
}


def make(name):
    (metric,) = resolve_metrics([name]).values()
    return metric


def takes(name, kind):
    try:
        figure(make(name), *DATA[kind])
    except DataError:
        return False
    return True


RANKS = {"spearman", "spearman_correlation"}  # leave rows out, and don't weight them
NAMES = metric_names()
PAIRS = [(name, kind) for name in NAMES for kind in DATA if takes(name, kind)]
CHECKS = [check_batches, check_rows_left_out, check_device, check_half]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_takes_some_kind_of_data_and_is_its_own_key(name):
    assert name in {pair[0] for pair in PAIRS}
    assert list(resolve_metrics([name])) == [name]
    assert make(name).name == name
    assert make(name).direction in ("max", "min", None)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_name(name, kind, check):
    """The figure of the whole is that of its batches, of the device, and so on."""

    def whole(outputs, targets, weights):
        kept = weights > 0
        return figure(make(name), outputs[kept], targets[kept])

    check(Case(name, lambda: make(name), *DATA[kind], whole))


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_weight_of_2_is_a_row_twice(name, kind):
    outputs, targets = DATA[kind]
    twice = torch.cat([outputs, outputs[:9]]), torch.cat([targets, targets[:9]])
    weights = torch.ones(len(outputs))
    weights[:9] = 2.0
    if name in RANKS:
        with pytest.raises(UnsupportedError, match="0 or 1"):
            figure(make(name), outputs, targets, weights)
        return
    actual = figure(make(name), outputs, targets, weights)
    expected = figure(make(name), *twice)
    assert actual == pytest.approx(expected, rel=2e-5, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_comes_to_nan_or_is_counted_as_0(name):
    metric = make(name)
    if isinstance(metric, Metric):
        outputs, targets = next(DATA[kind] for n, kind in PAIRS if n == name)
        nothing = metric.result(metric.sums(outputs, targets).double() * 0)
    else:
        nothing = metric.result()
    is_count = metric.direction is None
    assert nothing == 0.0 if is_count else nothing != nothing


@pytest.mark.parametrize("name", NAMES)
def test_a_name_may_be_written_in_capitals(name):
    assert list(resolve_metrics([name.upper()])) == [name.upper()]
