# SPDX-License-Identifier: Apache-2.0
"""What functions reach and what is called: closures, globals, hooks."""

from __future__ import annotations

import torch

from .configs import Config
from .kinds import BAKED_IN, Linear, Program, kind

FACTOR = 1.0
SETTINGS = {"nested": {"factor": 1.0}}


# What functions reach. ----------------------------------------------------------------


@kind("closure", BAKED_IN)
def _():
    factor = 1.0

    def act(hidden):
        return hidden * factor

    def change(_, __):
        nonlocal factor
        factor = 3.0

    return Program(Linear(act), change=change)


@kind("dict in a closure", BAKED_IN)
def _():
    held = {"factor": 1.0}
    return Program(
        Linear(lambda h: h * held["factor"]),
        change=lambda *_: held.update(factor=3.0),
    )


@kind("object in a closure", BAKED_IN)
def _():
    config = Config(inner=Config())
    return Program(
        Linear(lambda h: h * config.inner.factor),
        change=lambda *_: setattr(config.inner, "factor", 3.0),
    )


@kind("function in a closure", BAKED_IN)
def _():
    held = [lambda h: h]
    return Program(
        Linear(lambda h: held[0](h)),
        change=lambda *_: held.__setitem__(0, lambda h: h * 3.0),
    )


def set_factor(value):
    global FACTOR
    FACTOR = value


def factor_of_global():
    return FACTOR


class Global(Linear):
    def forward(self, x):
        return self.layer(x) * FACTOR


class GlobalDict(Linear):
    def forward(self, x):
        return self.layer(x) * SETTINGS["nested"]["factor"]


class GlobalFunction(Linear):
    def forward(self, x):
        return self.layer(x) * factor_of_global()


@kind("global", BAKED_IN)
def _():
    set_factor(1.0)
    return Program(Global(), change=lambda *_: set_factor(3.0))


@kind("global of a function that forward calls", BAKED_IN)
def _():
    set_factor(1.0)
    return Program(GlobalFunction(), change=lambda *_: set_factor(3.0))


@kind("dict in a global", BAKED_IN)
def _():
    SETTINGS["nested"]["factor"] = 1.0
    return Program(
        GlobalDict(), change=lambda *_: SETTINGS["nested"].update(factor=3.0)
    )


@kind("default of an argument", BAKED_IN)
def _():
    def act(hidden, held={"factor": 1.0}):  # noqa: B006 - that is the point
        return hidden * held["factor"]

    return Program(
        Linear(act), change=lambda *_: act.__defaults__[0].update(factor=3.0)
    )


@kind("default of a keyword", BAKED_IN)
def _():
    def act(hidden, *, factor=1.0):
        return hidden * factor

    return Program(Linear(act), change=lambda *_: act.__kwdefaults__.update(factor=3.0))


# What is called. ----------------------------------------------------------------------


@kind("function replaced", BAKED_IN)
def _():
    module = Linear(torch.relu)
    return Program(module, change=lambda m, _: setattr(m, "act", torch.tanh))


@kind("forward replaced", BAKED_IN)
def _():
    def change(module, _):
        forward = module.forward
        module.forward = lambda x: forward(x) * 3.0

    return Program(torch.nn.Linear(3, 2), change=change)


@kind("forward of the class replaced", BAKED_IN)
def _():
    class Patched(Linear):
        def forward(self, x):
            return self.layer(x)

    def change(module, _):
        type(module).forward = lambda self, x: self.layer(x) * 3.0

    return Program(Patched(), change=change)


@kind("submodule replaced", BAKED_IN)
def _():
    module = Linear(torch.nn.ReLU())
    return Program(module, change=lambda m, _: setattr(m, "act", torch.nn.Tanh()))


@kind("submodule of a sequence replaced", BAKED_IN)
def _():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    return Program(module, change=lambda m, _: m.__setitem__(1, torch.nn.Tanh()))


@kind("submodule added to a sequence", BAKED_IN)
def _():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    return Program(module, change=lambda m, _: m.append(torch.nn.Tanh()))


@kind("forward hook added", BAKED_IN)
def _():
    def change(module, _):
        module.layer.register_forward_hook(lambda _, __, output: output * 3.0)

    return Program(Linear(torch.tanh), change=change)


@kind("forward hook on the whole added", BAKED_IN)
def _():
    def change(module, _):
        module.register_forward_hook(lambda _, __, output: output * 3.0)

    return Program(torch.nn.Linear(3, 2), change=change)


@kind("forward hook removed", BAKED_IN)
def _():
    module = Linear(torch.tanh)
    handle = module.layer.register_forward_hook(lambda _, __, output: output * 3.0)
    return Program(module, change=lambda *_: handle.remove())


@kind("forward pre-hook added", BAKED_IN)
def _():
    def change(module, _):
        module.layer.register_forward_pre_hook(lambda _, given: (given[0] * 3.0,))

    return Program(Linear(torch.tanh), change=change)


@kind("value in a forward hook", BAKED_IN)
def _():
    module, held = Linear(torch.tanh), {"factor": 1.0}
    module.layer.register_forward_hook(lambda _, __, output: output * held["factor"])
    return Program(module, change=lambda *_: held.update(factor=3.0))


@kind("forward hook that is an object", BAKED_IN)
def _():
    class Hook:
        factor = 1.0

        def __call__(self, _, __, output):
            return output * self.factor

    module, hook = Linear(torch.tanh), Hook()
    module.layer.register_forward_hook(hook)
    return Program(module, change=lambda *_: setattr(hook, "factor", 3.0))
