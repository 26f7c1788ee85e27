# SPDX-License-Identifier: Apache-2.0
"""What a program of the harness is, and the table that its kinds are entered into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import torch

SAMPLES, FEATURES, TARGETS = 48, 3, 2

RIGHT, REFUSED, SAID = "right", "refused", "said"
"""Torch's numbers; a typed error of ipufit or PopTorch; a warning of ipufit."""

STEADY = "steady"
BETWEEN = "changed between fits"
COMPILED_AGAIN = "changed and compiled again"
BEFORE_LOOKING = "changed before evaluate"
MID_FIT = "changed in mid-fit"

BAKED_IN = {
    BETWEEN: RIGHT,
    COMPILED_AGAIN: RIGHT,
    BEFORE_LOOKING: RIGHT,
    MID_FIT: REFUSED,
}
"""For what Python computes with when a program is traced.

Numbers are compared before the change, too.
"""

ON_DEVICE = {**BAKED_IN, MID_FIT: RIGHT}
"""For what reaches the device whenever it changes."""

BETWEEN_RUNS = {when: RIGHT for when in BAKED_IN if when != MID_FIT}


def inputs():
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))


def targets():
    return torch.randn(SAMPLES, TARGETS, generator=torch.Generator().manual_seed(2))


def mean_squares(outputs, wanted):
    return torch.nn.functional.mse_loss(outputs, wanted)


@dataclass
class Program:
    """One program, with a world of its own.

    Attributes:
        module: Is trained.
        loss: What `compile` is given.
        plain_loss: The same for plain torch; `loss` itself if it is None.
        change: What the user does to module and optimiser later on.
        metric: A function of outputs and targets.
        x: Inputs.
        y: Targets.
    """

    module: torch.nn.Module
    loss: Any = mean_squares
    plain_loss: Callable[..., torch.Tensor] | None = None
    change: Callable[[torch.nn.Module, torch.optim.Optimizer], Any] | None = None
    metric: Callable[..., torch.Tensor] | None = None
    x: Any = field(default_factory=inputs)
    y: Any = field(default_factory=targets)

    def torch_loss(self, outputs, wanted):
        return (self.plain_loss or self.loss)(outputs, wanted)


@dataclass(frozen=True)
class Kind:
    """A row of the table.

    Attributes:
        name: For the ids of tests.
        make: Makes the program, always the same.
        outcomes: What comes of it, by when something changes.
        has_replicas: Whether replicas compute what one does.
        is_known_by_autograd: Whether the trace has to note what needs a gradient, or
            to hold float64.
    """

    name: str
    make: Callable[[], Program]
    outcomes: dict[str, str]
    has_replicas: bool = True
    is_known_by_autograd: bool = False


KINDS: list[Kind] = []


def kind(name, outcomes=RIGHT, **options):
    """Enter a function that makes a program into the table."""
    if isinstance(outcomes, str):
        outcomes = {STEADY: outcomes}

    def enter(make):
        KINDS.append(Kind(name, make, outcomes, **options))
        return make

    return enter


class Linear(torch.nn.Module):
    """A linear layer, and then `act` of it; `act` is looked up on the instance."""

    def __init__(self, act=None):
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, TARGETS)
        if act is not None:
            self.act = act

    def forward(self, x):
        return self.act(self.layer(x))
