# SPDX-License-Identifier: Apache-2.0
"""Buffers, weights, inputs and targets: of all types, changed, written, shared."""

import copy

import numpy as np
import torch

from .kinds import (
    BETWEEN,
    BETWEEN_RUNS,
    COMPILED_AGAIN,
    MID_FIT,
    ON_DEVICE,
    REFUSED,
    RIGHT,
    SAID,
    SAMPLES,
    Linear,
    Program,
    inputs,
    kind,
    mean_squares,
    targets,
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


def carrying(write):
    class Carrying(Linear):
        def __init__(self):
            super().__init__()
            self.back = torch.nn.Linear(2, 2)
            self.register_buffer("state", torch.zeros(2))

        def forward(self, x):
            hidden = torch.tanh(self.layer(x) + self.back(self.state.clone()))
            if self.training:
                write(self.state, hidden.mean(0).detach())
            return hidden

    return Program(Carrying())


STATES = {
    "copy_": lambda state, new: state.copy_(new),
    "a slice": lambda state, new: state.__setitem__(slice(None), new),
    "lerp_": lambda state, new: state.lerp_(new, 0.3),
}


def enter_state(name, write):
    kind(f"state that is written by {name}", has_replicas=False)(
        lambda: carrying(write)
    )


for _name, _write in STATES.items():
    enter_state(_name, _write)


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


# Inputs and targets -----------------------------------------------------------------

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


# Weights ----------------------------------------------------------------------------

# Weights: shared, frozen, changed. ----------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(3, 2, bias=False)
        self.decoder = torch.nn.Linear(2, 3, bias=False)
        self.decoder.weight = torch.nn.Parameter(self.encoder.weight.T.clone())
        self.again = torch.nn.Linear(3, 2)
        self.again.weight = self.encoder.weight

    def forward(self, x):
        return self.again(self.decoder(torch.tanh(self.encoder(x))))


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = self.first
        self.last = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.second(torch.tanh(self.first(x))))


kind("tied weights")(lambda: Program(Tied()))
kind("a module under two names")(lambda: Program(Twice()))


@kind("a module several times in a sequence")
def _():
    shared = torch.nn.Linear(3, 3)
    return Program(
        torch.nn.Sequential(
            shared, torch.nn.Tanh(), shared, torch.nn.Tanh(), torch.nn.Linear(3, 2)
        )
    )


@kind("a shared buffer", REFUSED)
def _():
    first, second = Annealed(), Annealed()
    second.layer = torch.nn.Linear(2, 2)
    second.beta = first.beta
    return Program(torch.nn.Sequential(first, second))


def deep():
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    )


@kind("a frozen layer")
def _():
    module = deep()
    module[0].requires_grad_(False)
    return Program(module)


@kind("a frozen bias", {BETWEEN: RIGHT, COMPILED_AGAIN: RIGHT})
def _():
    module = deep()
    module[2].bias.requires_grad_(False)
    return Program(module, change=lambda m, _: m[2].bias.requires_grad_(True))


@kind("a layer frozen later", {BETWEEN: RIGHT, COMPILED_AGAIN: RIGHT, MID_FIT: REFUSED})
def _():
    return Program(deep(), change=lambda m, _: m[0].requires_grad_(False))


@kind("all weights frozen", REFUSED)
def _():
    return Program(deep().requires_grad_(False))


@kind("weights changed by hand", ON_DEVICE)
def _():
    def change(module, _):
        with torch.no_grad():
            module[0].weight.mul_(0.5)

    return Program(deep(), change=change)


@kind("weights changed by their data", ON_DEVICE)
def _():
    return Program(deep(), change=lambda m, _: m[0].weight.data.mul_(0.5))


@kind("weights that are loaded", ON_DEVICE)
def _():
    def change(module, _):
        state = {name: value * 0.5 for name, value in module.state_dict().items()}
        module.load_state_dict(state)

    return Program(deep(), change=change)


@kind("weights that are clipped", ON_DEVICE)
def _():
    def change(module, _):
        for weight in module.parameters():
            weight.data.clamp_(-0.1, 0.1)

    return Program(deep(), change=change)


@kind("statistics that are reset", ON_DEVICE)
def _():
    def change(module, _):
        module[0].reset_running_stats()
        module[1].weight.zero_()

    norm = torch.nn.BatchNorm1d(3, affine=False)
    return Program(torch.nn.Sequential(norm, torch.nn.Linear(3, 2)), change=change)


@kind("a teacher that follows", ON_DEVICE)
def _():
    class Taught(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)
            self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

        def forward(self, x):
            return self.layer(x) + 0.5 * self.teacher(x).detach()

    def change(module, _):
        pairs = zip(module.teacher.parameters(), module.layer.parameters())
        for followed, weight in pairs:
            followed.lerp_(weight, 0.5)

    return Program(Taught(), change=change)


def enter_rate(name, optimizer_s):
    @kind(f"learning rate {name}", {BETWEEN: RIGHT, MID_FIT: RIGHT})
    def _():
        return Program(deep(), change=optimizer_s)


def _divide_rates(_, optimizer):
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / 10


enter_rate("of the groups", _divide_rates)
