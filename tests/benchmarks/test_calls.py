# SPDX-License-Identifier: Apache-2.0
"""Trips between host and devices, counted on any PopTorch."""

from __future__ import annotations

import pytest
import torch

from benchmarks import calls
from benchmarks.calls import COUNTED, SETTINGS, count, counting
from ipufit import poptorch

UPDATES = 20
BATCH = 10  # micro-batches of one image
TRAIN, TEST = torch.randn(UPDATES * BATCH, 1, 28, 28), torch.randn(512, 1, 28, 28)


@pytest.fixture(scope="module")
def counted():
    return {
        name: count(setting, TRAIN, TEST, micro_batch=1)
        for name, setting in SETTINGS.items()
    }


def test_each_update_is_a_call_if_it_is_asked_for(counted):
    assert counted["one update per call"]["train"]["calls"] == UPDATES


def test_ten_updates_in_a_call_make_a_tenth_of_the_calls(counted):
    assert counted["10 updates per call"]["train"]["calls"] == UPDATES // 10


@pytest.mark.parametrize("name", ["train", "evaluate", "predict"])
def test_with_nothing_set_a_tenth_of_the_calls_is_enough(counted, name):
    calls = counted["nothing set"][name]["calls"]
    assert 1 <= calls <= counted["one update per call"][name]["calls"] / 10


def test_evaluate_and_predict_take_calls_of_whole_pipelines(counted):
    for name in ("evaluate", "predict"):
        # 512 images in batches of 8; a pipeline of four has four of them in a call.
        assert counted["one update per call"][name]["calls"] == 512 // 8 // 4


def test_nothing_but_calls_goes_to_the_devices_in_a_later_epoch(counted):
    for each in counted.values():
        assert each["evaluate"]["optimizer"] == each["predict"]["optimizer"] == 0
        assert each["train"]["optimizer"] <= 1
        assert each["train"]["weights"] <= 2


def test_executors_are_left_as_they_were():
    before = {name: getattr(poptorch.PoplarExecutor, name) for name in COUNTED}
    with counting() as counts:
        assert poptorch.PoplarExecutor.__call__ != before["__call__"]
    assert counts == {}
    after = {name: getattr(poptorch.PoplarExecutor, name) for name in COUNTED}
    assert after == before


def test_the_command_counts_and_reports(monkeypatch, capsys):
    monkeypatch.setattr(
        calls, "SETTINGS", {"10 updates per call": SETTINGS["10 updates per call"]}
    )
    switches = ["--images", "400", "--test-images", "64", "--micro-batch", "2"]
    assert calls.main(switches) == 0
    cells = [
        cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")
    ]
    assert cells[1:3] == ["10 updates per call", "2"]
