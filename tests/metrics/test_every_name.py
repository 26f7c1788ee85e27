# SPDX-License-Identifier: Apache-2.0
"""What holds for every metric that has a name, on every kind of data that it takes."""

import pytest
import torch

from ipufit import IPUConfig, IPUModel
from ipufit.errors import DataError, UnsupportedError
from ipufit.metrics import Metric, metric_names, resolve_metrics
from tests.metrics.harness import (
    COUNT,
    Case,
    check,
    check_device,
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
        if "name" not in name and name != "_arguments"
        if not isinstance(value, Metric)
    }


RANKS = {"spearman", "spearman_correlation"}  # leave rows out, and don't weight them
NAMES = metric_names()
SETTINGS = [settings(make(name)) for name in NAMES]
NEW = [name for i, name in enumerate(NAMES) if SETTINGS[i] not in SETTINGS[:i]]
PAIRS = [(name, kind) for name in NEW for kind in DATA if takes(name, kind)]


def test_every_name_is_of_a_metric_that_is_tested_and_its_own_key():
    assert {name for name, _ in PAIRS} == set(NEW)
    assert len({name.replace("_", "") for name in NAMES}) == len(NAMES) > 60
    for name, known in zip(NAMES, SETTINGS):
        for word in (name, name.upper(), name.replace("_", "").title()):
            assert list(resolve_metrics([word])) == [word] == [make(word).name]
            assert settings(make(word)) == known
        assert make(name) is not make(name)


def case_of(name, kind):
    def whole(outputs, targets, weights):
        kept = weights > 0
        return figure(make(name), outputs[kept], targets[kept])

    return Case(name, lambda: make(name), *DATA[kind], whole)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_sums_of_batches_are_those_of_the_whole(name, kind):
    check(case_of(name, kind), has_weights=False)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        if kind in ("binary columns", "one-hot", "numbers")
        else pytest.param(kind, marks=pytest.mark.slow)
        for kind in DATA
    ],
)
def test_every_metric_on_a_device(kind):
    check_device([case_of(name, one) for name, one in PAIRS if one == kind])


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
    outputs, targets = next(DATA[kind] for n, kind in PAIRS if n == name)
    if isinstance(metric, Metric):
        sums = metric.sums(outputs, targets, torch.zeros(COUNT)).double()
        nothing = metric.result(sums)
    else:
        metric.update(outputs, targets)
        metric.reset()
        nothing = metric.result()
    is_count = metric.direction is None
    assert nothing == 0.0 if is_count else nothing != nothing


@pytest.mark.parametrize("name", [name for name, kind in PAIRS if kind == "positions"])
def test_positions_have_weights_or_are_left_out(name):
    outputs, targets = DATA["positions"]
    expected = pytest.approx(figure(make(name), outputs[:, 1], targets[:, 1]), rel=2e-5)
    weights = torch.zeros(COUNT, 3)
    weights[:, 1] = 1.0
    for given in (weights, weights.unsqueeze(-1)):
        assert figure(make(name), outputs, targets, given, (8, 3)) == expected
    left_out = targets.clone()
    left_out[:, ::2] = -100  # torch's losses leave it out too
    assert figure(make(name), outputs, left_out, None, (8, 3)) == expected


class Scaled(torch.nn.Module):
    """Multiplies its input by a weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("kind", DATA)
def test_a_device_computes_every_metric_as_torch_does(kind):
    model = IPUModel(Scaled(), IPUConfig(micro_batch_size=4))
    names = [name for name, one in PAIRS if one == kind]
    model.compile("sgd", lambda outputs, _: outputs.mean(), metrics=names)
    report = model.check(*(tensor[:8] for tensor in DATA[kind]), 4)
    assert [one for one in report.findings if one.topic == "numbers"] == []
    assert not report.is_refused
