# SPDX-License-Identifier: Apache-2.0
"""Everybody learns what the plain loop learns, on workloads small enough for a test."""

import dataclasses

import pytest
import torch

from benchmarks import worker, workloads
from benchmarks.contestants import CONTESTANTS, PLAIN
from benchmarks.results import complaints

SMALL = {
    "W1": {"train_samples": 800, "test_samples": 120},
    "W2": {"train_samples": 640, "test_samples": 320},
    "W3": {"train_samples": 400, "test_samples": 120, "device_iterations": 1},
    "lstm": {"train_samples": 320, "test_samples": 64},
    "transformer": {"train_samples": 320, "test_samples": 64},
    "resnet18": {"train_samples": 16, "test_samples": 8},  # batch norm: two modes
}
WORKLOADS = [
    pytest.param(name, marks=[] if name == "W2" else [pytest.mark.slow])
    for name in SMALL
]
OWN = [
    *("ipufit-default", "ipufit", "ipufit-half", "ipufit-half-nearest", "tuned"),
]
PEERS = [
    name for name, entry in CONTESTANTS.items() if entry.package not in (None, "ipufit")
]


@pytest.fixture(autouse=True)
def _as_found():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain_results():
    return {}


@pytest.fixture
def small(monkeypatch):
    for name, sizes in SMALL.items():
        full = workloads.WORKLOADS[name]
        changed = dataclasses.replace(full, epochs=1, passes=1, **sizes)
        monkeypatch.setitem(workloads.WORKLOADS, name, changed)


def measure(workload, contestant):
    return worker.measure(worker.Job(workload, contestant, shuffle=False))


def measure_plain(workload, known):
    """The plain loop's, measured once."""
    if workload not in known:
        known[workload] = measure(workload, PLAIN)
    return known[workload]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.filterwarnings("ignore:.*not installed:UserWarning")
def test_those_without_peers_do_the_plain_loop_s_work(
    small, plain_results, workload, name
):
    plain, mine = measure_plain(workload, plain_results), measure(workload, name)
    if name == "tuned" and "unavailable" in mine["operations"]["train"]:
        pytest.skip(mine["operations"]["train"]["unavailable"])
    factor = CONTESTANTS[name].tolerance
    assert complaints(mine["figures"], plain["figures"], 2, 64, factor) == []
    for result in (plain, mine):
        assert set(result["operations"]) == set(worker.OPERATIONS)
        for timed in result["operations"].values():
            assert timed["measured"]["cpu"] > 0
            assert timed["first"]["wall"] > 0
        assert result["peak_bytes"] > 10_000_000


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    "workload", ["W2", pytest.param("resnet18", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore")
def test_peers_do_the_plain_loop_s_work(
    small, plain_results, monkeypatch, workload, name
):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    if not CONTESTANTS[name].is_installed:
        pytest.skip(f"{CONTESTANTS[name].package} isn't installed")
    plain, mine = measure_plain(workload, plain_results), measure(workload, name)
    assert complaints(mine["figures"], plain["figures"], 2, 64) == []
