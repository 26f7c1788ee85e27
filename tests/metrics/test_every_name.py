# SPDX-License-Identifier: Apache-2.0
"""What holds for every metric that has a name, on every kind of data that it takes."""

from __future__ import annotations

import pytest
import torch

from ipufit.errors import DataError, UnsupportedError
from ipufit.metrics import Metric, metric_names, resolve_metrics
from tests.metrics.harness import (
    Case,
    check,
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


def settings(metric):
    """What tells two metrics apart, but for their names."""
    return type(metric), {
        name: str(value)
        for name, value in vars(metric).items()
        if "name" not in name and not isinstance(value, Metric)
    }


RANKS = {"spearman", "spearman_correlation"}  # leave rows out, and don't weight them
NAMES = metric_names()
NEW = [
    name
    for i, name in enumerate(NAMES)
    if settings(make(name)) not in [settings(make(other)) for other in NAMES[:i]]
]
PAIRS = [(name, kind) for name in NEW for kind in DATA if takes(name, kind)]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_of_a_metric_that_is_tested_and_its_own_key(name):
    tested = {name for name, _ in PAIRS}
    assert settings(make(name)) in [settings(make(other)) for other in tested]
    assert list(resolve_metrics([name])) == [name]
    assert list(resolve_metrics([name.upper()])) == [name.upper()]
    assert make(name).name == name
    assert make(name).direction in ("max", "min", None)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_metric(name, kind):
    """The figure of the whole is that of its batches, of the device, and so on."""

    def whole(outputs, targets, weights):
        kept = weights > 0
        return figure(make(name), outputs[kept], targets[kept])

    case = Case(name, lambda: make(name), *DATA[kind], whole)
    check(case, has_weights=False)


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


@pytest.mark.parametrize("name", NEW)
def test_nothing_comes_to_nan_or_is_counted_as_0(name):
    metric = make(name)
    if isinstance(metric, Metric):
        outputs, targets = next(DATA[kind] for n, kind in PAIRS if n == name)
        nothing = metric.result(metric.sums(outputs, targets).double() * 0)
    else:
        nothing = metric.result()
    is_count = metric.direction is None
    assert nothing == 0.0 if is_count else nothing != nothing
