# SPDX-License-Identifier: Apache-2.0
"""Recipes of training that are an argument: groups, schedules, validations, scaling."""

from __future__ import annotations

import torch
from torch import nn

from ipufit import IPUConfig, IPUModel, Optimizer


def network():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def data(rows=32):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 4, generator=generator)
    return x, (x.sum(1) > 0).long()


def model_of(optimizer="sgd", config=None, **settings):
    model = IPUModel(network(), config or IPUConfig(seed=7))
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"], **settings)
    return model


# Parameter groups ---------------------------------------------------------------------


def test_fit_says_once_how_many_parameters_each_group_has(capsys):
    model = model_of(Optimizer("adamw", weight_decay=0.1, no_decay="bias_and_norm"))
    model.fit(*data(), batch_size=8, verbose=2)
    expected = (
        "Optimizer groups: weight_decay 0.1: 2 parameters (36 values); "
        "weight_decay 0: 4 parameters (20 values)\n"
    )
    shown = capsys.readouterr().out
    assert shown.startswith(expected)
    model.fit(*data(), batch_size=8, verbose=2)
    assert "groups" not in capsys.readouterr().out


def test_one_group_is_not_counted(capsys):
    model_of("adamw").fit(*data(), batch_size=8, verbose=2)
    assert "groups" not in capsys.readouterr().out
