# SPDX-License-Identifier: Apache-2.0
"""What `forward`, losses and metrics compute with: users change it from 1 to 3."""

import enum
import functools
import types

import numpy as np
import torch

from .configs import Config
from .kinds import BAKED_IN, Linear, Program, kind, mean_squares


class Mode(enum.Enum):
    ONE = 1.0
    THREE = 3.0


class Slotted:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.0


def scaled(value, factor=1.0):
    return value * factor


def put(value):
    return lambda module: setattr(module, "k", value)


def nested():
    return {"a": [{"b": types.SimpleNamespace(c=[1.0])}]}


ATTRIBUTES = {
    "number": (lambda: 1.0, lambda k: k, put(3.0)),
    "whole number": (lambda: 1, lambda k: k, put(3)),
    "bool": (lambda: False, lambda k: 3.0 if k else 1.0, put(True)),
    "None": (lambda: None, lambda k: 1.0 if k is None else k, put(3.0)),
    "text": (lambda: "one", lambda k: {"one": 1.0, "two": 3.0}[k], put("two")),
    "enum": (lambda: Mode.ONE, lambda k: k.value, put(Mode.THREE)),
    "NumPy scalar": (lambda: np.float64(1), float, put(np.float64(3))),
    "NumPy array": (
        lambda: np.ones(2),
        lambda k: float(k[1]),
        lambda m: m.k.__setitem__(1, 3.0),
    ),
    "tensor of the host": (
        lambda: torch.ones(()),
        lambda k: float(k),
        lambda m: m.k.fill_(3.0),
    ),
    "list": (lambda: [1.0], lambda k: k[0], lambda m: m.k.__setitem__(0, 3.0)),
    "list that grows": (lambda: [1.0], sum, lambda m: m.k.append(2.0)),
    "tuple": (lambda: (1.0,), lambda k: k[0], put((3.0,))),
    "dict": (lambda: {"t": 1.0}, lambda k: k["t"], lambda m: m.k.update(t=3.0)),
    "another dict": (lambda: {"t": 1.0}, lambda k: k["t"], put({"t": 3.0})),
    "set": (set, lambda k: 3.0 if "on" in k else 1.0, lambda m: m.k.add("on")),
    "nested dict": (
        lambda: {"a": {"b": [1.0]}},
        lambda k: k["a"]["b"][0],
        lambda m: m.k["a"].update(b=[3.0]),
    ),
    "deeply nested": (
        nested,
        lambda k: k["a"][0]["b"].c[0],
        lambda m: m.k["a"][0]["b"].c.__setitem__(0, 3.0),
    ),
    "namespace": (
        lambda: types.SimpleNamespace(factor=1.0),
        lambda k: k.factor,
        lambda m: setattr(m.k, "factor", 3.0),
    ),
    "dataclass": (Config, lambda k: k.factor, lambda m: setattr(m.k, "factor", 3.0)),
    "nested config": (
        lambda: Config(inner=Config()),
        lambda k: k.inner.factor,
        lambda m: setattr(m.k.inner, "factor", 3.0),
    ),
    "another nested config": (
        lambda: Config(inner=Config()),
        lambda k: k.inner.factor,
        lambda m: setattr(m.k, "inner", Config(3.0)),
    ),
    "object with slots": (
        Slotted,
        lambda k: k.factor,
        lambda m: setattr(m.k, "factor", 3.0),
    ),
    "objects in a list": (
        lambda: [Config(), Config()],
        lambda k: k[1].factor,
        lambda m: setattr(m.k[1], "factor", 3.0),
    ),
    "function": (lambda: lambda: 1.0, lambda k: k(), put(lambda: 3.0)),
    "partial": (
        lambda: functools.partial(scaled, factor=1.0),
        lambda k: k(1.0),
        lambda m: m.k.keywords.update(factor=3.0),
    ),
    "another partial": (
        lambda: functools.partial(scaled, factor=1.0),
        lambda k: k(1.0),
        put(functools.partial(scaled, factor=3.0)),
    ),
    "method of an object": (
        lambda: Config().scaled,
        lambda k: k(1.0),
        lambda m: setattr(m.k.__self__, "factor", 3.0),
    ),
    "callable object": (
        Config,
        lambda k: k(1.0),
        lambda m: setattr(m.k, "factor", 3.0),
    ),
}


class Reading(Linear):
    """Multiplies by what `read` makes of its attribute `k`."""

    def __init__(self, k, read):
        super().__init__()
        self.k = k
        self.read = read

    def forward(self, x):
        return self.layer(x) * self.read(self.k)


def enter_attribute(name, start, read, change):
    @kind(f"attribute: {name}", BAKED_IN)
    def _():
        return Program(Reading(start(), read), change=lambda m, _: change(m))


for _name, _row in ATTRIBUTES.items():
    enter_attribute(_name, *_row)


@kind("attribute with a private name", BAKED_IN)
def _():
    class Private(Linear):
        _k = None

        def forward(self, x):
            return self.layer(x) * self._k

    module = Private()
    module._k = 1.0
    return Program(module, change=lambda m, _: setattr(m, "_k", 3.0))


@kind("attribute of the class", BAKED_IN)
def _():
    class Classy(Linear):
        k = 1.0

        def forward(self, x):
            return self.layer(x) * self.k

    return Program(Classy(), change=lambda m, _: setattr(type(m), "k", 3.0))


@kind("property", BAKED_IN)
def _():
    class Derived(Linear):
        _half = 0.5

        @property
        def k(self):
            return 2 * self._half

        def forward(self, x):
            return self.layer(x) * self.k

    return Program(Derived(), change=lambda m, _: setattr(m, "_half", 1.5))


@kind("attribute of a submodule", BAKED_IN)
def _():
    module = torch.nn.Sequential(Linear(lambda h: h), torch.nn.LeakyReLU(0.1))
    return Program(module, change=lambda m, _: setattr(m[1], "negative_slope", 0.9))


# What functions reach and what is called --------------------------------------------

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


# Losses and metrics -----------------------------------------------------------------


# Losses. ------------------------------------------------------------------------------


def with_loss(loss, change):
    return Program(Linear(torch.tanh), loss, change=change)


@kind("loss with a closure", BAKED_IN)
def _():
    factor = 1.0

    def loss(outputs, wanted):
        return mean_squares(outputs, wanted) * factor

    def change(_, __):
        nonlocal factor
        factor = 3.0

    return with_loss(loss, change)


@kind("loss with a default", BAKED_IN)
def _():
    def loss(outputs, wanted, factor=1.0):
        return mean_squares(outputs, wanted) * factor

    return with_loss(loss, lambda *_: setattr(loss, "__defaults__", (3.0,)))


def global_loss(outputs, wanted):
    return mean_squares(outputs, wanted) * FACTOR


@kind("loss with a global", BAKED_IN)
def _():
    set_factor(1.0)
    return with_loss(global_loss, lambda *_: set_factor(3.0))


def scaled_loss(outputs, wanted, factor):
    return mean_squares(outputs, wanted) * factor


@kind("loss that is a partial", BAKED_IN)
def _():
    loss = functools.partial(scaled_loss, factor=1.0)
    return with_loss(loss, lambda *_: loss.keywords.update(factor=3.0))


@kind("loss that is a partial of a config", BAKED_IN)
def _():
    config = Config()
    loss = functools.partial(Config.loss, config)
    return with_loss(loss, lambda *_: setattr(config, "factor", 3.0))


@kind("loss that is a method", BAKED_IN)
def _():
    config = Config()
    return with_loss(config.loss, lambda *_: setattr(config, "factor", 3.0))


class LossObject:
    def __init__(self):
        self.weights = {"factor": 1.0}

    def __call__(self, outputs, wanted):
        return mean_squares(outputs, wanted) * self.weights["factor"]


@kind("loss that is an object", BAKED_IN)
def _():
    loss = LossObject()
    return with_loss(loss, lambda *_: loss.weights.update(factor=3.0))


class LossModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0
        self.config = Config()

    def forward(self, outputs, wanted):
        return mean_squares(outputs, wanted) * self.factor * self.config.factor


@kind("loss module's attribute", BAKED_IN)
def _():
    loss = LossModule()
    return with_loss(loss, lambda *_: setattr(loss, "factor", 3.0))


@kind("loss module's config", BAKED_IN)
def _():
    loss = LossModule()
    return with_loss(loss, lambda *_: setattr(loss.config, "factor", 3.0))


@kind("torch's loss with an attribute", BAKED_IN)
def _():
    loss = torch.nn.SmoothL1Loss(beta=1.0)
    return with_loss(loss, lambda *_: setattr(loss, "beta", 0.25))


# Metrics. -----------------------------------------------------------------------------


def with_metric(metric, change):
    return Program(Linear(torch.tanh), metric=metric, change=change)


@kind("metric with a closure", BAKED_IN)
def _():
    held = {"limit": 0.5}

    def near(outputs, wanted):
        return (outputs - wanted).abs().lt(held["limit"]).float()

    return with_metric(near, lambda *_: held.update(limit=2.0))


@kind("metric with a default", BAKED_IN)
def _():
    def near(outputs, wanted, limit=0.5):
        return (outputs - wanted).abs().lt(limit).float()

    return with_metric(near, lambda *_: setattr(near, "__defaults__", (2.0,)))


@kind("metric that is an object", BAKED_IN)
def _():
    class Near:
        __name__ = "near"
        limit = 0.5

        def __call__(self, outputs, wanted):
            return (outputs - wanted).abs().lt(self.limit).float()

    near = Near()
    return with_metric(near, lambda *_: setattr(near, "limit", 2.0))
