# SPDX-License-Identifier: Apache-2.0
"""The page's table of what metrics take is true."""

import inspect
import math
import pathlib
import re

import pytest
import torch

from ipufit import metrics
from ipufit.metrics import Metric, StreamedMetric, resolve_metric
from tests.metrics.harness import COUNT, figure, labels, scores

PAGE = pathlib.Path(__file__).parents[2] / "docs/reference/metrics.md"


def rows():
    table = PAGE.read_text().split("| axis of classes |")[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for name in names.replace("`", "").split(", "):
            yield (name, *cells)


ROWS = list(rows())


def of_bits(name, outputs, targets, weights=None):
    metric = resolve_metric(name)
    metric.has_binary_loss = True
    return figure(metric, outputs, targets, weights)


def about(value):
    return pytest.approx(value, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_table_is_true(row):
    name, axis, outputs, several, one_class, ignored, weights = row
    is_binary = several != "no"
    shape = (3,) if is_binary else (3, 7)  # 7 positions, classes on axis 1
    x = scores(0, *shape)
    if is_binary:
        y = labels(1, 3, num_classes=2)
        columns = [of_bits(name, x[:, i], y[:, i]) for i in range(3)]
        together = of_bits(name, x.reshape(-1), y.reshape(-1))
        mean = sum(columns) / 3
        is_mean = several.startswith("mean")
        assert of_bits(name, x, y) == about(mean if is_mean else together)
        x, y = x[:, 0], y[:, 0]
        figures = [of_bits(name, x, torch.full((COUNT,), one)) for one in (0, 1)]
        if one_class == "0 or 1":
            assert figures == [0.0, 1.0]
        else:
            assert [math.isnan(f) for f in figures] == 2 * [one_class == "NaN"]
    else:
        y = labels(1, 7, num_classes=3)
        moved = figure(resolve_metric(name), x.movedim(1, -1), y)
        assert figure(resolve_metric(name), x, y) == about(moved)
    assert axis in ("none", "last, or 1", "last, or 1; two classes")
    if outputs == "logits or probabilities":
        squashed = resolve_metric(name)
        squashed.has_probabilities = True
        probabilities = x.sigmoid() if is_binary else x.softmax(1)
        assert figure(squashed, probabilities, y) == about(of_bits(name, x, y))
    if ignored.startswith("-100"):
        marked = y.clone()
        marked[:5] = -100
        assert of_bits(name, x, marked) == about(of_bits(name, x[5:], y[5:]))
    assert weights == "rows, positions"
    kept = torch.arange(COUNT).ge(5).float()
    expected = about(of_bits(name, x[5:], y[5:]))
    assert of_bits(name, x, y, kept) == expected
    spread = kept.reshape((-1,) + (1,) * (y.dim() - 1)).expand(y.shape)
    assert of_bits(name, x, y, spread) == expected


def test_the_table_of_objects_has_the_arguments_of_each():
    table = PAGE.read_text().split("| object of `ipufit.metrics` |")[1]
    listed = {}
    for line in table.split("\n\n")[0].splitlines()[2:]:
        names, arguments = (
            re.findall(r"`(\w+)", cell) for cell in line.split("|")[1:3]
        )
        listed.update(dict.fromkeys(names, arguments))
    kinds = {name: getattr(metrics, name) for name in metrics.__all__}
    expected = {
        name: [p for p in inspect.signature(kind).parameters if p != "name"]
        for name, kind in kinds.items()
        if inspect.isclass(kind) and issubclass(kind, (Metric, StreamedMetric))
        if not inspect.isabstract(kind)
    }
    assert listed == expected


def test_the_table_has_rows():
    assert len(ROWS) > 20
    assert any(isinstance(resolve_metric(row[0]), StreamedMetric) for row in ROWS)
