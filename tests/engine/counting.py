# SPDX-License-Identifier: Apache-2.0
"""Counts what moves between host and devices, on any PopTorch."""

from __future__ import annotations

import inspect
import sys
from collections import Counter

from ipufit import poptorch

COUNTED = ("copyWeightsToDevice", "copyWeightsToHost", "attachToDevice")


def classes_with(method):
    """The class of executors, and that of the part that has the method, if one has.

    Parts of one executor call each other's methods, as PopTorch calls its own.
    """
    given = vars(poptorch.PoplarExecutor)[method]
    of_part = inspect.unwrap(given)
    if of_part is given:
        return [poptorch.PoplarExecutor]
    name, _, _ = of_part.__qualname__.partition(".")
    return [poptorch.PoplarExecutor, getattr(sys.modules[of_part.__module__], name)]


class Moves(Counter):
    """What the executors do, by the names that `docs/concepts/calls.md` uses.

    `compiled`: traces; `up` and `down`: transfers of all weights.
    """

    def watch(self, monkeypatch):
        for name in COUNTED:
            self._spy(monkeypatch, name)
        handle = poptorch.registerPreCompileHook(lambda: self._count("compiled"))
        monkeypatch.setattr(self, "_handle", handle, raising=False)
        return self

    def stop(self):
        self._handle.remove()

    def _count(self, name):
        self[name] += 1

    def _spy(self, monkeypatch, name):
        for owner in classes_with(name):
            self._spy_on(monkeypatch, owner, name)

    def _spy_on(self, monkeypatch, owner, name):
        original = getattr(owner, name)

        def spy(executor, *arguments):
            before = self["up"]
            result = original(executor, *arguments)
            if name == "copyWeightsToHost":
                self["down"] += 1
            elif name == "copyWeightsToDevice" or self["up"] == before:
                self["up"] += 1
            return result

        monkeypatch.setattr(owner, name, spy)

    def taken(self):
        """The counts since the last time."""
        now = {name: self[name] for name in ("compiled", "up", "down")}
        self.clear()
        return now
