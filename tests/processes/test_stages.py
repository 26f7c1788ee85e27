# SPDX-License-Identifier: Apache-2.0
"""`pipeline="auto"` in several processes: all cut alike, as one process does."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ipufit.model import costs
from tests.processes.runs import CLASSES, FEATURES, Network, fitted
from tests.processes.test_scale import require_equal_everywhere, require_same

pytestmark = pytest.mark.floor

WIDTHS = [FEATURES, 20, 12, 28, 16]


class Deep(Network):
    """Layers of several widths: most places to cut are worse than the best one."""

    def __init__(self, is_frozen=False):
        super().__init__(is_frozen)
        pairs = zip(WIDTHS, WIDTHS[1:])
        self.first = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in pairs)
        self.last = torch.nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, x):
        for layer in self.first:
            x = torch.relu(layer(x))
        return self.last(x)


NAMES = ["first.0", "first.3"]


def small_fitted(capacity, **arguments):
    """A run on IPUs that have so many bytes each."""
    with mock.patch.object(costs, "CAPACITY", capacity):
        return fitted(network=Deep, pipeline="auto", **arguments)


@pytest.mark.slow
def test_processes_cut_alike_and_train_as_one(pool):
    automatic = {"network": Deep, "pipeline": "auto", "ipus": 2}
    runs = pool.run(fitted, replicas=2, **automatic)
    require_equal_everywhere(runs)
    alone = fitted(**automatic)
    assert [run["config"].pipeline for run in (*runs, alone)] == [NAMES] * 3
    require_same(runs[0], alone)


@pytest.mark.parametrize(
    ("capacity", "names"),
    [(15_000, NAMES), pytest.param(30_000, None, marks=pytest.mark.slow)],
)
def test_processes_take_as_many_ipus_as_one(pool, capacity, names):
    runs = pool.run(small_fitted, capacity, ipus="auto")
    require_equal_everywhere(runs)
    alone = small_fitted(capacity, ipus="auto")
    assert [run["config"].pipeline for run in (*runs, alone)] == [names] * 3
    require_same(runs[0], alone)
