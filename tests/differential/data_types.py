# SPDX-License-Identifier: Apache-2.0
"""Inputs and targets of all types, and beyond what a device holds."""

from __future__ import annotations

import numpy as np
import torch

from .buffers import FLOATS, WHOLE
from .kinds import (
    REFUSED,
    SAMPLES,
    Linear,
    Program,
    inputs,
    kind,
    mean_squares,
    targets,
)

# Inputs and targets by type. ----------------------------------------------------------


def with_inputs(x, **options):
    return Program(Linear(torch.tanh), x=x, **options)


class Casting(Linear):
    def forward(self, x):
        return self.layer(x.float())


def numbers(dtype):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 2, (SAMPLES, 3), generator=generator).to(dtype)


def enter_input(dtype):
    @kind(f"inputs of {dtype}")
    def _():
        return Program(Casting(), x=numbers(dtype))


for _dtype in [*FLOATS, *WHOLE]:
    enter_input(_dtype)

kind("inputs of NumPy")(lambda: with_inputs(inputs().numpy()))
kind("inputs of NumPy's float64")(
    lambda: Program(Casting(), x=inputs().numpy().astype(np.float64))
)
kind("targets of float64")(
    lambda: Program(
        Linear(torch.tanh),
        lambda outputs, wanted: mean_squares(outputs, wanted.float()),
        y=targets().double(),
    )
)


def classes(dtype=torch.int64):
    return torch.arange(SAMPLES).remainder(2).to(dtype)


def cross_entropy(outputs, wanted):
    return torch.nn.functional.cross_entropy(outputs, wanted.long())


def enter_target(dtype):
    @kind(f"classes of {dtype}")
    def _():
        return Program(Linear(torch.tanh), cross_entropy, y=classes(dtype))


for _dtype in WHOLE:
    enter_target(_dtype)

kind("classes, the loss by name")(
    lambda: Program(Linear(torch.tanh), "cross_entropy", cross_entropy, y=classes())
)
kind("inputs beyond 32 bits", REFUSED)(
    lambda: Program(Casting(), x=numbers(torch.int64) + 1700000000123)
)
kind("inputs below 32 bits", REFUSED)(
    lambda: Program(Casting(), x=numbers(torch.int64) - 2**31 - 1)
)
kind("inputs of NumPy beyond 32 bits", REFUSED)(
    lambda: Program(Casting(), x=(numbers(torch.int64) + 2**32).numpy())
)
kind("classes beyond 32 bits", REFUSED)(
    lambda: Program(
        Linear(torch.tanh), "cross_entropy", cross_entropy, y=classes() + 2**32
    )
)
kind("inputs at the ends of 32 bits")(
    lambda: Program(
        Scaling(), x=torch.where(numbers(torch.int64) > 0, 2**31 - 1, -(2**31))
    )
)


class Scaling(Linear):
    def forward(self, x):
        return self.layer(x.float() / 2**31)


class Embedded(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 2, **options)

    def forward(self, x):
        return self.embedding(x).mean(1)


def tokens():
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 7, (SAMPLES, 3), generator=generator)


kind("embedding")(lambda: Program(Embedded(), x=tokens()))
kind("embedding of int32")(lambda: Program(Embedded(), x=tokens().int()))
kind("embedding with padding")(lambda: Program(Embedded(padding_idx=0), x=tokens()))
kind("embedding beyond 32 bits", REFUSED)(
    lambda: Program(Embedded(), x=tokens() + 2**32)
)
