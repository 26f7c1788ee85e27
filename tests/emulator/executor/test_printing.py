# SPDX-License-Identifier: Apache-2.0
"""Modules printed with their blocks."""

from __future__ import annotations

import copy

from torch import nn

import ipufit.emulator as poptorch

NETWORK = nn.Sequential(
    nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)), nn.ReLU()
)


def test_without_blocks_it_is_torchs_own():
    assert poptorch.module_repr(NETWORK) == repr(NETWORK)


def test_other_hooks_are_not_shown():
    network = copy.deepcopy(NETWORK)
    network[0].register_forward_pre_hook(lambda module, inputs: None)
    assert poptorch.module_repr(network) == repr(network)


def test_a_module_is_printed_twice(capsys):
    layer = poptorch.BeginBlock(nn.ReLU(), "only")
    poptorch.print(layer)
    assert capsys.readouterr().out == (
        "BeginBlock(user_id=only, ipu_id=None) ReLU()\nReLU()\n"
    )


def test_anything_else_is_printed_as_usual(capsys):
    poptorch.print("a", 1, sep="-", end="!")
    assert capsys.readouterr().out == "a-1!"


def test_a_module_with_blocks_inside_is_shown_around_them():
    network = copy.deepcopy(NETWORK)
    poptorch.BeginBlock(network, "all", ipu_id=1)
    poptorch.BeginBlock(network[1][0], "inner", ipu_id=2)
    lines = poptorch.module_repr(network).split("\n")
    assert lines[0] == "BeginBlock(user_id=all, ipu_id=1) Sequential("
    assert lines[3] == "    (0): BeginBlock(user_id=inner, ipu_id=2) ReLU()"
    assert lines[-1] == ")"


def test_an_executor_shows_the_blocks_of_its_module():
    network = copy.deepcopy(NETWORK)
    poptorch.BeginBlock(network[2], ipu_id=0)
    executor = poptorch.inferenceModel(network)
    assert repr(executor) == poptorch.module_repr(network)
    assert "(2): BeginBlock(user_id=None, ipu_id=0) ReLU()" in repr(executor)
