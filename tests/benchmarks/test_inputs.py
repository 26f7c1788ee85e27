# SPDX-License-Identifier: Apache-2.0
"""Datasets that are read sample by sample, and what reading them takes."""

from __future__ import annotations

import pytest
import torch

from benchmarks import reading
from benchmarks.reading import Reading

SMALL = {"samples": 400, "epochs": 1, "source": "drawings"}


@pytest.fixture(autouse=True)
def _as_found():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("way", ["plain", "ipufit-default", "ipufit"])
def test_every_way_can_be_measured(way):
    found = reading.measure(Reading(way, 0, **SMALL))
    assert found["cpu"] > 0
    assert found["wall"] > 0
    assert found["source"] == "drawings like MNIST's"
