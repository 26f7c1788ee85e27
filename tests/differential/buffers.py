# SPDX-License-Identifier: Apache-2.0
"""Buffers: those that callbacks change, of all types, and written by `forward`."""

from __future__ import annotations

import torch

from .kinds import (
    BETWEEN_RUNS,
    MID_FIT,
    ON_DEVICE,
    REFUSED,
    SAID,
    Linear,
    Program,
    kind,
    mean_squares,
)

# Buffers of one number, which callbacks may change. -----------------------------------


class Annealed(Linear):
    """Multiplies by a 0-d buffer."""

    def __init__(self, dtype=torch.float32, *, is_persistent=True):
        super().__init__()
        value = torch.ones((), dtype=dtype)
        self.register_buffer("beta", value, persistent=is_persistent)

    def forward(self, x):
        return self.layer(x) * self.beta


class AnnealedLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("beta", torch.ones(()))

    def forward(self, outputs, wanted):
        return mean_squares(outputs, wanted) + self.beta * outputs.square().mean()


CHANGES = {
    "fill_": lambda beta: beta.fill_(3.0),
    "copy_": lambda beta: beta.copy_(torch.tensor(3.0)),
    "mul_": lambda beta: beta.mul_(3.0),
    "+=": lambda beta: beta.__iadd__(2.0),
    "data": lambda beta: beta.data.fill_(3.0),
}


def enter_change(name, change):
    @kind(f"0-d buffer by {name}", ON_DEVICE)
    def _():
        return Program(Annealed(), change=lambda m, _: change(m.beta))


for _name, _change in CHANGES.items():
    enter_change(_name, _change)


@kind("0-d buffer that isn't saved", ON_DEVICE)
def _():
    module = Annealed(is_persistent=False)
    return Program(module, change=lambda m, _: m.beta.fill_(3.0))


@kind("0-d buffer of a submodule", ON_DEVICE)
def _():
    module = torch.nn.Sequential(Annealed(), torch.nn.Tanh())
    return Program(module, change=lambda m, _: m[0].beta.fill_(3.0))


@kind("0-d buffer of a loss", ON_DEVICE)
def _():
    loss = AnnealedLoss()
    return Program(Linear(torch.tanh), loss, change=lambda *_: loss.beta.fill_(3.0))


@kind("0-d buffer that is compared with", ON_DEVICE)
def _():
    class Gated(Annealed):
        def forward(self, x):
            hidden = self.layer(x)
            return torch.where(self.beta > 2, hidden, torch.tanh(hidden))

    return Program(Gated(), change=lambda m, _: m.beta.fill_(3.0))


@kind("1-d buffer", BETWEEN_RUNS)
def _():
    class Masked(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([1.0, 0.5]))

        def forward(self, x):
            return self.layer(x) * self.mask

    return Program(Masked(), change=lambda m, _: m.mask.mul_(-2.0))


@kind("another tensor for a buffer", BETWEEN_RUNS)
def _():
    return Program(
        Annealed(), change=lambda m, _: setattr(m, "beta", torch.tensor(3.0))
    )


# Buffers by type. ---------------------------------------------------------------------

FLOATS = [torch.float16, torch.float32, torch.float64]
WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


class Typed(Linear):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("typed", torch.tensor([1, 0], dtype=dtype))

    def forward(self, x):
        return self.layer(x) + self.typed.float()


def enter_type(dtype, outcomes):
    @kind(f"buffer of {dtype}", outcomes, is_known_by_autograd=dtype == torch.float64)
    def _():
        return Program(
            Typed(dtype), change=lambda m, _: m.typed.copy_(torch.tensor([0, 1]))
        )


for _dtype in FLOATS:
    enter_type(_dtype, BETWEEN_RUNS)
for _dtype in WHOLE:
    enter_type(_dtype, {**BETWEEN_RUNS, MID_FIT: REFUSED})


def buffered(start, act):
    class Buffered(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", start.clone())

        def forward(self, x):
            return act(self, self.layer(x))

    return Program(Buffered())


def counting(module, hidden):
    module.count += 1
    return hidden


def using(module, hidden):
    module.count += 1
    return hidden * module.count


def writing(module, hidden):
    module.count.copy_((hidden > 0).sum())
    return hidden


@kind("float buffer that counts and is used", has_replicas=False)
def _():
    class Warming(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.count += 1
            return self.layer(x) * (self.count / 10).clamp(max=1.0)

    return Program(Warming())


@kind("moving average of the outputs", has_replicas=False)
def _():
    class Averaging(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(2))

        def forward(self, x):
            hidden = self.layer(x)
            if self.training:
                self.average.mul_(0.9).add_(hidden.detach().mean(0) * 0.1)
            return hidden - self.average

    return Program(Averaging())


@kind("whole number that counts", has_replicas=False)
def _():
    class Counting(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.tensor(5))

        def forward(self, x):
            if self.training:
                self.count += 1
            return self.layer(x)

    return Program(Counting())


kind("whole number that counts in evaluation too", SAID)(
    lambda: buffered(torch.tensor(0), counting)
)
kind("whole number that counts and is used", REFUSED)(
    lambda: buffered(torch.tensor(0), using)
)
kind("whole number that is written", SAID)(lambda: buffered(torch.tensor(0), writing))
kind("bool that is flipped", SAID)(
    lambda: buffered(torch.tensor(True), lambda m, h: (m.count.logical_not_(), h)[1])
)
