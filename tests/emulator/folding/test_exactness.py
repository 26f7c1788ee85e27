# SPDX-License-Identifier: Apache-2.0
"""Which operations give the same bits for one micro-batch as for several."""

from __future__ import annotations

import pytest
import torch

from ipufit.emulator._folding.exactness import exact_nodes
from ipufit.emulator._folding.example_run import run_example

X = torch.ones(4, 8)


def is_exact(function):
    """Whether the last operation of a function is."""
    program = torch.fx.symbolic_trace(function)
    *_, last, _output = program.graph.nodes
    return last in exact_nodes(run_example(program, [X], is_grad_enabled=False))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.gt(0.0),
        lambda x: x.argmax(dim=1),
        lambda x: x.gt(0.0).sum(),
        lambda x: x.gt(0.0).to(torch.float32).sum(),
        lambda x: torch.stack([x.gt(0.0), x.lt(0.0)]).to(torch.float32).sum(dim=1),
        lambda x: x.gt(0.0).to(torch.float32).sum().clamp(min=1.0).sum(),
        lambda x: torch.cat([x.gt(0.0)[0].float(), x.lt(0.0)[0].float()]).sum(),
        lambda x: x.div(3.0),
        lambda x: x.to(torch.int64).sum(),
        lambda x: x.transpose(0, 1),
    ],
)
def test_moves_comparisons_and_counts_are_exact(function):
    assert is_exact(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(),
        lambda x: x.gt(0.0).to(torch.float32).mul(0.1).sum(),
        lambda x: x.gt(0.0).to(torch.float32).clamp(min=0.5).sum(),
        lambda x: x.gt(0.0).to(torch.float32).clamp(max=2.0**24).sum(),
        lambda x: torch.where(x.gt(0.0), x, 0.1).sum(),
        lambda x: x.exp(),
        lambda x: x.add(x, alpha=3.0),
        lambda x: x.mean(),
        lambda x: x.add_(1.0),
        lambda x: torch.rand_like(x),
        lambda x: torch.nn.functional.linear(x, x),
    ],
)
def test_what_rounds_or_writes_or_draws_is_not(function):
    assert not is_exact(function)
