# SPDX-License-Identifier: Apache-2.0
"""What `forward` returns: objects of all kinds with tensors in them, and odd things."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import attr
except ImportError:  # comes with other packages, if at all
    attr = None

from tests.fit.model_outputs import ModelOutput

from .kinds import REFUSED, RIGHT, Linear, Program, kind, mean_squares


@dataclasses.dataclass
class Record:
    hidden: Any
    doubled: Any = None
    name: str = "record"


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Any
    number: int = 3


if attr is not None:

    @attr.s
    class AttrsRecord:
        hidden = attr.ib()
        doubled = attr.ib(default=None)


class Pair(NamedTuple):
    hidden: Any
    doubled: Any


Fields = collections.namedtuple("Fields", ["hidden"])


class Bag(dict):
    pass


class Named(collections.OrderedDict):
    """As transformers' ModelOutput: a dict whose keys are attributes too."""

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        setattr(self, name, value)


class Own:
    def __init__(self, hidden):
        self.hidden = hidden


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Sequence(list):
    pass


def enter(name, wrap, unwrap, outcome=RIGHT):
    """A module that returns `wrap` of its result; the loss looks into it."""

    def loss(outputs, wanted):
        return mean_squares(unwrap(outputs), wanted)

    kind(f"returns {name}", outcome)(lambda: Program(Linear(wrap), loss))


def hidden(value):
    return value.hidden


enter("dataclass", lambda h: Record(h, 2 * h), lambda r: r.hidden + r.doubled)
enter("dataclass with None", lambda h: Record(h), hidden)
enter("frozen dataclass", lambda h: Frozen(h), hidden)
if attr is not None:
    enter("class of attrs", lambda h: AttrsRecord(h, 2 * h), lambda r: r.doubled)
enter("NamedTuple", lambda h: Pair(h, h * 3), lambda r: r.hidden + r.doubled)
enter("namedtuple of one", lambda h: Fields(h), lambda r: getattr(r, "hidden", r))
enter("SimpleNamespace", lambda h: types.SimpleNamespace(hidden=h, k=1), hidden)
enter(
    "OrderedDict",
    lambda h: collections.OrderedDict(b=h, a=h * 2),
    lambda r: r["a"] + r["b"],
)
enter("dict subclass", lambda h: Bag(b=h, a=h * 2), lambda r: r["a"] + r["b"])
enter(
    "dict with attributes",
    lambda h: Named(hidden=h, doubled=h * 2),
    lambda r: r.hidden + r["doubled"],
)
enter("model output of one", ModelOutput, lambda r: getattr(r, "logits", r))
enter(
    "default dict",
    lambda h: collections.defaultdict(list, a=h, b=-h),
    lambda r: r["a"] - r["b"],
)
enter("list subclass", lambda h: Sequence([h, h * 2]), lambda r: r[0] + r[1])
enter(
    "dict of dataclasses",
    lambda h: {"a": Record(h, h), "b": Record(h * 2)},
    lambda r: r["a"].hidden + r["b"].hidden,
)
enter(
    "dataclass of dict and tuple",
    lambda h: Record({"a": h}, (h, [h * 2])),
    lambda r: r.hidden["a"] + r.doubled[1][0],
)
enter(
    "list of NamedTuples",
    lambda h: [Pair(h, h), Pair(h, 2 * h)],
    lambda r: r[0].hidden + r[1].doubled,
)
enter(
    "namespace in tuple in dataclass",
    lambda h: Record((types.SimpleNamespace(hidden=h), "name")),
    lambda r: r.hidden[0].hidden,
)
enter(
    "OrderedDict in namespace",
    lambda h: types.SimpleNamespace(hidden=collections.OrderedDict(z=h, a=-h)),
    lambda r: r.hidden["z"] * 2 + r.hidden["a"],
)
enter("object of one's own", Own, hidden, REFUSED)
enter("slotted object", Slotted, hidden, REFUSED)
enter("object in dict", lambda h: {"a": Own(h), "b": h}, lambda r: r["b"], REFUSED)
enter(
    "object in dataclass", lambda h: Record(Own(h)), lambda r: r.hidden.hidden, REFUSED
)
enter("dict view", lambda h: {"a": h}.values(), lambda r: next(iter(r)), REFUSED)
enter("deque", lambda h: collections.deque([h]), lambda r: r[0], REFUSED)
enter(
    "distribution",
    lambda h: torch.distributions.Normal(h, torch.ones_like(h)),
    lambda r: r.mean,
    REFUSED,
)
enter(
    "distribution in dict",
    lambda h: {"d": torch.distributions.Bernoulli(logits=h), "h": h},
    lambda r: r["h"],
    REFUSED,
)

enter("tuple with None", lambda h: (h, None), lambda r: r[0])
enter("tuple with text and number", lambda h: (h, "text", 3, 2.5), lambda r: r[0])
enter("nested tuples", lambda h: (h, ((h * 2,), [h])), lambda r: r[0] + r[1][0][0])
enter("the same tensor twice", lambda h: (h, h), lambda r: r[0] + r[1])
enter("views", lambda h: (h[:, :1], h[:, 1:]), lambda r: torch.cat(r, 1))
enter("a view of the whole", lambda h: h.view(-1, 2), lambda r: r)
enter("a transposed tensor", lambda h: (h.unsqueeze(1).mT,), lambda r: _whole(r))
enter("an expanded tensor", lambda h: h[:, None].expand(-1, 4, -1), lambda r: r.mean(1))
enter("dict with int keys", lambda h: {1: h, 0: h * 2}, lambda r: r[1] + r[0])
enter("dict of one", lambda h: {"only": h}, lambda r: _whole(r))
enter("list of one", lambda h: [h], lambda r: _whole(r))
enter("bools beside", lambda h: (h, h > 0), lambda r: r[0])
enter("classes beside", lambda h: (h, h.argmax(1)), lambda r: r[0])
enter("float16 beside", lambda h: (h, (h > 0).half()), lambda r: r[0])
enter("empty containers", lambda h: (h, (), [], {}), lambda r: r[0])


def _whole(outputs):
    """An only output, which losses get without its container."""
    while not isinstance(outputs, Tensor):
        outputs = next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
    return outputs.reshape(len(outputs), -1)


@kind("returns its input too")
def _():
    class Both(Linear):
        def forward(self, x):
            return self.layer(x), x

    return Program(Both(), lambda r, y: mean_squares(r[0] + r[1][:, :2], y))


@kind("returns what it got")
def _():
    class Late(Linear):
        def forward(self, x):
            inner = Record(self.layer(x))
            inner.doubled = inner.hidden * 2
            return inner

    return Program(Late(), lambda r, y: mean_squares(r.doubled, y))
