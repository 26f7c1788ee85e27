# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks train and count: sizes, data, calls, stages."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import networks, workloads
from benchmarks.calls import SETTINGS, count
from benchmarks.splits import SUBJECTS, costs_of, layers, split_by_hand
from ipufit.planning.split import best_split

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


SMALL = [one for one in SUBJECTS if one.name != "ResNet-50"]
CASES = [
    pytest.param(one, marks=[] if not number else [pytest.mark.slow])
    for number, one in enumerate(SMALL)
]


@pytest.mark.parametrize("subject", CASES, ids=lambda one: one.name)
def test_automatic_stages_are_no_less_even(subject):
    costs = costs_of(subject)
    by_hand = split_by_hand(costs, subject.by_hand)
    automatic = best_split(costs, len(by_hand.names))
    assert automatic.imbalance <= by_hand.imbalance
    assert sum(automatic.flops) == sum(by_hand.flops)


def test_the_tutorials_network_has_its_published_operations():
    subject = SMALL[0]
    by_hand = split_by_hand(costs_of(subject), subject.by_hand)
    assert by_hand.flops == (288_000, 640_000, 163_840, 5_120)


def test_layers_of_the_vision_transformer_are_cut_as_by_hand():
    subject = next(one for one in SMALL if one.name.startswith("ViT"))
    assert list(best_split(costs_of(subject), 4).names) == layers(3, 3, 3, 3)
