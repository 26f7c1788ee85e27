# SPDX-License-Identifier: Apache-2.0
"""The names that code reads, in the bytecode of every version of Python."""

from __future__ import annotations

import pytest

from ipufit.engine.code_names import names_read


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


@pytest.mark.parametrize(
    ("function", "attributes"),
    [
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
