# SPDX-License-Identifier: Apache-2.0
"""The names that code reads, in the bytecode of every version of Python."""

from __future__ import annotations

import pytest

from ipufit.engine.constants import names_read


def read_of(function):
    names = names_read(function.__code__)
    return names.attributes, names.is_open


def counted(self):
    self.calls += 1


def counted_and_read(self):
    self.calls += 1
    return self.calls


def set_and_read(self):
    if self.first:
        self.first = False


def nested(self):
    return [(lambda: self.cfg.k)() for _ in range(self.n)]


def by_name(self):
    return self.k, getattr(self.cfg, "j", 1.0), hasattr(self, "aux")


def kept(self, x):
    self.hidden = x
    self.seen["x"] = x
    return self.hidden * 2


def kept_of_another(self, x, other):
    self.hidden = x
    return other.hidden


def kept_later(self, x):
    before = self.hidden
    self.hidden = x
    return before


def kept_at_times(self, x):
    if x:
        self.hidden = x
    return self.hidden


def kept_at_times_of_a_loop(self, values):
    for value in values:
        self.hidden = value
    return self.hidden


def kept_if_nothing_fails(self, x):
    try:
        self.hidden = float(x)
    except ValueError:
        x = 0.0
    return self.hidden


def kept_of_two(self, x, other):
    self.hidden = x
    self = other
    return self.hidden


def keys_are_read(self, x):
    self.seen[self.key] = x
    return self.table[x]


@pytest.mark.parametrize(
    ("function", "attributes"),
    [
        (kept, set()),
        (kept_of_another, {"hidden"}),
        (kept_later, {"hidden"}),
        (kept_at_times, {"hidden"}),
        (kept_at_times_of_a_loop, {"hidden"}),
        (kept_if_nothing_fails, {"hidden"}),
        (kept_of_two, {"hidden"}),
        (keys_are_read, {"seen", "key", "table"}),
        (counted, set()),
        (counted_and_read, {"calls"}),
        (set_and_read, {"first"}),
        (nested, {"cfg", "k", "n"}),
        (by_name, {"k", "cfg", "j", "aux"}),
    ],
)
def test_names_that_are_in_the_code(function, attributes):
    assert read_of(function) == (attributes, False)


@pytest.mark.parametrize(
    "function",
    [
        lambda self, name: getattr(self, name),
        lambda self, name: getattr(self, name, "k"),
        lambda self, i: getattr(self, f"k{i}"),
        lambda self, i: getattr(self, "k" + i),
        lambda self: vars(self)["k"],
        lambda self: self.__dict__["k"],
        lambda self: [eval("self.k") for _ in range(1)],
    ],
)
def test_names_that_are_computed(function):
    assert read_of(function)[1]


def test_globals_and_imports():
    def reading():
        import os.path

        return os.path, X, counted

    names = names_read(reading.__code__)
    assert names.variables == {"X", "counted"}
    assert names.modules == {"os.path"}


X = 1
