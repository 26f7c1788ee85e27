# SPDX-License-Identifier: Apache-2.0
"""Weights that are shared, frozen or changed, and tied buffers."""

from __future__ import annotations

import copy

import torch

from .buffers import Annealed
from .kinds import (
    BETWEEN,
    COMPILED_AGAIN,
    MID_FIT,
    ON_DEVICE,
    REFUSED,
    RIGHT,
    Program,
    kind,
)

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
