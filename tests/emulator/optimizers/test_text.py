# SPDX-License-Identifier: Apache-2.0
"""What the log says of an optimiser."""

from __future__ import annotations

import logging

import pytest
import torch

from ipufit.emulator import identity_loss, optim, trainingModel
from ipufit.emulator._optimizers.settings import OptimizerReader
from ipufit.emulator._optimizers.text import optimizer_log


class Mean(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

    def forward(self, x):
        return identity_loss(super().forward(x), reduction="mean")


def lines_of(optimizer):
    return list(optimizer_log(OptimizerReader(False).read(optimizer)))


def weights():
    return [torch.nn.Parameter(torch.zeros(2))]


def test_the_graphs_values_come_first_and_then_each_groups():
    groups = [{"params": weights()}, {"params": weights(), "lr": 0.5}]
    graph, first, second = lines_of(optim.Adam(groups, lr=0.25, eps=1e-6))
    assert graph.startswith("Updating graph optimizer with Adam, ")
    assert "defaultLearningRate=0.25, " in graph
    assert "defaultEps=1e-06, " in graph
    assert first.startswith("Updating group 0 optimizer with Adam, learningRate=0.25, ")
    assert second.startswith("Updating group 1 optimizer with Adam, learningRate=0.5, ")


@pytest.mark.parametrize(("momentum", "suffix"), [(None, " (const)"), (0.0, "")])
def test_constants_are_marked(momentum, suffix):
    graph, group = lines_of(optim.SGD(weights(), lr=0.1, momentum=momentum))
    assert f", defaultMomentum=0{suffix}, " in graph
    assert f", momentum=0{suffix}, " in group


def test_separate_sgd_scales_its_velocity_as_its_loss():
    graph, group = lines_of(optim.SGD(weights(), lr=0.1, loss_scaling=8.0))
    assert "defaultVelocityScaling=8, lossScaling=8" in graph
    assert "velocityScaling=8, lossScaling=8" in group


def test_combined_sgd_scales_its_velocity_by_itself():
    optimizer = optim.SGD(
        weights(),
        lr=0.1,
        loss_scaling=8.0,
        velocity_scaling=2.0,
        use_combined_accum=True,
    )
    graph, _ = lines_of(optimizer)
    assert "defaultVelocityScaling=2, lossScaling=8" in graph


def test_types_of_accumulators_are_told():
    half = torch.float16
    graph, _ = lines_of(optim.Adam(weights(), accum_type=half))
    assert "accumType=float16, firstOrderMomentumAccumType=float32" in graph
    graph, _ = lines_of(optim.SGD(weights(), lr=0.1, velocity_accum_type=half))
    assert "accumType=float32, firstOrderMomentumAccumType=float16" in graph


def test_values_a_kind_has_not_got_are_left_out():
    graph, _ = lines_of(optim.LAMB(weights()))
    assert "MaxWeightNorm=65500" in graph
    assert "omentum=" not in graph


def test_a_change_is_logged_and_its_repetition_is_not(caplog):
    module = Mean()
    optimizer = optim.SGD(module.parameters(), lr=0.5)
    training = trainingModel(module, optimizer=optimizer)
    caplog.set_level(logging.DEBUG, "poptorch::python")
    training(torch.ones(4, 2))
    assert "defaultLearningRate=0.5" in caplog.text
    caplog.clear()
    training.setOptimizer(optimizer)
    assert "Updating" not in caplog.text
    optimizer.param_groups[0]["lr"] = 0.25
    training.setOptimizer(optimizer)
    assert "Updating group 0 optimizer with SGD, learningRate=0.25," in caplog.text
