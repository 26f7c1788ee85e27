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


def test_blocks_are_shown_where_they_begin():
    network = copy.deepcopy(NETWORK)
    poptorch.BeginBlock(network[0], "first", ipu_id=0)
    lines = poptorch.module_repr(network).split("\n")
    assert lines[1:5] == [
        "  (0): Linear(",
        "    BeginBlock(user_id=first, ipu_id=0)",
        "    in_features=2, out_features=3, bias=True",
        "  )",
    ]


def test_other_hooks_are_not_shown():
    network = copy.deepcopy(NETWORK)
    network[0].register_forward_pre_hook(lambda module, inputs: None)
    assert poptorch.module_repr(network) == repr(network)


def test_a_module_is_printed_twice(capsys):
    layer = poptorch.BeginBlock(nn.ReLU(), "only")
    poptorch.print(layer)
    assert capsys.readouterr().out == (
        "ReLU(\n  BeginBlock(user_id=only, ipu_id=None)\n)\nReLU()\n"
    )


def test_anything_else_is_printed_as_usual(capsys):
    poptorch.print("a", 1, sep="-", end="!")
    assert capsys.readouterr().out == "a-1!"
