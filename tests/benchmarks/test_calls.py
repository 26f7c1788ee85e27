# SPDX-License-Identifier: Apache-2.0
"""Trips between host and devices, counted on any PopTorch."""

from __future__ import annotations

import torch

from benchmarks.calls import SETTINGS, count

UPDATES, BATCH, TESTED = 10, 10, 320  # micro-batches of one image


def test_each_setting_makes_as_many_calls_as_the_page_says():
    train = torch.randn(UPDATES * BATCH, 1, 28, 28)
    test = torch.randn(TESTED, 1, 28, 28)
    counted = {
        name: count(setting, train, test, micro_batch=1)
        for name, setting in SETTINGS.items()
    }
    one, ten, free = (
        {operation: figures["calls"] for operation, figures in counted[name].items()}
        for name in ("one update per call", "10 updates per call", "nothing set")
    )
    assert (one["train"], ten["train"]) == (UPDATES, UPDATES // 10)
    # Batches of 8; a pipeline of four has four of them in a call.
    assert one["evaluate"] == one["predict"] == TESTED // 8 // 4
    for operation, calls in free.items():
        assert 1 <= calls <= one[operation] / 10
    for each in counted.values():
        assert each["evaluate"]["optimizer"] == each["predict"]["optimizer"] == 0
        assert each["train"]["optimizer"] <= 1
        assert each["train"]["weights"] <= 2
