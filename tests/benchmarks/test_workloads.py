# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks train: the right sizes, the same every time, learnable."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import datasets, networks, workloads

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ALL = [*workloads.DEFAULT, "W1-g8", "resnet50", "encoder12"]


@pytest.mark.parametrize("name", ALL)
def test_an_epoch_is_whole_calls(name):
    workload = workloads.find(name)
    per_call = workload.micro_batch * workload.accumulation * workload.device_iterations
    assert workload.num_train > 0
    assert workload.num_train % per_call == 0
    assert len(workload.train_data().x) == workload.num_train


@pytest.mark.parametrize("name", ALL)
def test_weights_and_data_are_the_same_every_time(name):
    workload = workloads.find(name)
    first, second = (workload.make_network().state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(workload.train_data().x, workload.train_data().x)
    train, test = workload.train_data(), workload.test_data()
    assert not torch.equal(train.x[: len(test.x)], test.x[: len(train.x)])


@pytest.mark.parametrize("name", ALL)
def test_the_network_takes_the_data(name):
    workload = workloads.find(name)
    x, y = workload.test_data().first(2)
    assert workload.make_network()(x).shape[0] == len(y)


def test_the_name_gives_the_accumulation():
    assert workloads.find("W1").accumulation == 1
    assert workloads.find("resnet18-g8").accumulation == 8
    assert workloads.find("resnet18-g8").micro_batch == workloads.RESNET.micro_batch
    for name in ("W9", "W9-g8", "W1-g0", "W1-g"):
        with pytest.raises(ValueError, match="choose from W1"):
            workloads.find(name)


def test_networks_have_the_parameters_that_their_names_promise():
    def millions(make):
        with torch.device("meta"):  # no memory is filled
            network = make()
        return sum(value.numel() for value in network.parameters()) / 1e6

    assert millions(networks.resnet50) == pytest.approx(23.5, abs=0.1)
    assert millions(networks.encoder12) == pytest.approx(9.6, abs=0.1)
    assert millions(networks.large) == pytest.approx(109, abs=1)


def test_w1_is_the_example_s_network(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    example = importlib.import_module("mnist_pipeline").Network()
    mine = networks.TutorialNetwork()
    mine.load_state_dict(example.state_dict())
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(mine(x), example(x))


def test_resnet18_has_its_parameters():
    count = sum(parameter.numel() for parameter in networks.resnet18().parameters())
    assert count == 11_173_962  # as published for CIFAR-10's variant


def test_mnist_is_read_where_it_is(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.arange(3 * 28 * 28, dtype=np.uint8)
    (raw / "train-images-idx3-ubyte").write_bytes(bytes(16) + pixels.tobytes())
    assert datasets.mnist(tmp_path, 2, train=True) is None  # no labels
    (raw / "train-labels-idx1-ubyte").write_bytes(bytes(8) + bytes([7, 1, 2]))
    found = datasets.mnist(tmp_path, 2, train=True)
    assert found.y.tolist() == [7, 1]
    expected = (float(pixels[28 * 28 + 5]) / 255 - datasets.MEAN) / datasets.STD
    assert found.x.shape == (2, 1, 28, 28)
    assert float(found.x[1].reshape(-1)[5]) == pytest.approx(expected)
    assert datasets.mnist(tmp_path, 2, train=False) is None
