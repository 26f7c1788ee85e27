# SPDX-License-Identifier: Apache-2.0
"""Copies of programs with other operations."""

from __future__ import annotations

import torch

from ipufit.emulator._ground.rewriting import rewritten


def with_sines(program):
    def change(node):
        node.target = torch.sin

    return rewritten(program, lambda node: node.target is torch.cos, change)


def test_only_what_is_found_is_changed_and_only_in_the_copy():
    program = torch.fx.symbolic_trace(lambda x, y: (torch.cos(x) + torch.exp(y), x))
    x, y = torch.tensor(1.0), torch.tensor(2.0)
    copy = with_sines(program)
    assert copy(x, y) == (torch.sin(x) + torch.exp(y), x)
    assert program(x, y) == (torch.cos(x) + torch.exp(y), x)


def test_a_program_without_such_operations_is_given_back():
    program = torch.fx.symbolic_trace(lambda x: torch.exp(x))
    assert with_sines(program) is program
