# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks train: the right sizes, the same every time, learnable."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import networks, workloads

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ALL = [*workloads.DEFAULT, "W1-g8", "resnet50", "encoder12"]


@pytest.mark.parametrize("name", ALL)
def test_an_epoch_is_whole_calls(name):
    workload = workloads.find(name)
    per_call = workload.micro_batch * workload.accumulation * workload.device_iterations
    assert workload.num_train > 0
    assert workload.num_train % per_call == 0
    assert len(workload.train_data().x) == workload.num_train


@pytest.mark.parametrize("name", ["W1", "lstm", "resnet18"])
def test_weights_and_data_are_the_same_every_time(name):
    workload = workloads.find(name)
    first, second = (workload.make_network().state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(workload.train_data().x, workload.train_data().x)
    train, test = workload.train_data(), workload.test_data()
    assert not torch.equal(train.x[: len(test.x)], test.x[: len(train.x)])


def test_w1_is_the_example_s_network(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    example = importlib.import_module("mnist_pipeline").Network()
    mine = networks.TutorialNetwork()
    mine.load_state_dict(example.state_dict())
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(mine(x), example(x))
