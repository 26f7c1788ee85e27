# SPDX-License-Identifier: Apache-2.0
"""Counts what moves between host and devices, on any PopTorch."""

from __future__ import annotations

from collections import Counter

from ipufit import poptorch

COUNTED = ("copyWeightsToDevice", "copyWeightsToHost", "attachToDevice")


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
        original = getattr(poptorch.PoplarExecutor, name)

        def spy(executor, *arguments):
            before = self["up"]
            result = original(executor, *arguments)
            if name == "copyWeightsToHost":
                self["down"] += 1
            elif name == "copyWeightsToDevice" or self["up"] == before:
                self["up"] += 1
            return result

        monkeypatch.setattr(poptorch.PoplarExecutor, name, spy)

    def taken(self):
        """The counts since the last time."""
        now = {name: self[name] for name in ("compiled", "up", "down")}
        self.clear()
        return now
