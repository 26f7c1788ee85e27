# SPDX-License-Identifier: Apache-2.0
"""Attributes that `forward` computes with: the user changes them from 1 to 3."""

from __future__ import annotations

import enum
import functools
import types

import numpy as np
import torch

from .configs import Config
from .kinds import BAKED_IN, Linear, Program, kind


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
