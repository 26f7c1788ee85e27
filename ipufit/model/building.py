# SPDX-License-Identifier: Apache-2.0
"""Compiled programs, as `build` reports them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ipufit.batching import BatchPlan
from ipufit.callbacks import ProgressDisplay
from ipufit.engine.loop import Inference, Training
from ipufit.types import ShownAsText


@dataclass(frozen=True, repr=False)
class BuiltProgram(ShownAsText):
    """A program that `build` has prepared.

    Attributes:
        name: "training" or "inference".
        plan: The factors of a call.
        seconds: Time for tracing and compiling; 0 if the model had the program already.
        cache: "hit" if PopTorch has found the executable in its cache, "miss" if it has
            compiled one and stored it, "none" otherwise: there is no cache, or PopTorch
            doesn't use it (an IPU model, the emulator), or the model had the program.
        remark: The updates or passes of its calls, and why not more, if the config
            leaves them open.
    """

    name: str
    plan: BatchPlan
    seconds: float
    cache: str
    remark: str = ""

    def __str__(self) -> str:
        """Describe the program in a line."""
        ending = {"hit": ", from the cache", "miss": ", put into the cache"}
        return (
            f"{self.name} program of {self.plan.samples_per_call} samples per call: "
            f"{self.seconds:.1f}s{ending.get(self.cache, '')}"
            f"{'; ' if self.remark else ''}{self.remark}"
        )


@dataclass(frozen=True, repr=False)
class Build(ShownAsText):
    """The programs that `build` has prepared, in the order of their compilation.

    Example:
        >>> plan = BatchPlan(4)
        >>> print(Build((BuiltProgram("inference", plan, 2.5, "miss"),)))
        inference program of 4 samples per call: 2.5s, put into the cache
    """

    programs: tuple[BuiltProgram, ...]

    @property
    def seconds(self) -> float:
        """Time for all of them."""
        return sum(program.seconds for program in self.programs)

    def __str__(self) -> str:
        """Return a line for each program."""
        return "\n".join(map(str, self.programs))


def built(program: Training | Inference, display: ProgressDisplay) -> BuiltProgram:
    """Prepare a program, and compare the cache of executables before and after."""
    options = program.options.toDict()
    folder = options.get("cachePath") if options.get("enableEngineCaching") else ""
    before, seconds = _executables(folder), program.executors.seconds
    program.prepare(display)
    taken = program.executors.seconds - seconds
    new = _executables(folder) - before
    cache = "none"
    if taken and (before or new):
        cache = "miss" if new else "hit"
    name = "training" if isinstance(program, Training) else "inference"
    return BuiltProgram(name, program.plan, taken, cache, program.remark)


def _executables(folder: Any) -> set[str]:
    """Return the names of the executables in PopART's cache, a file per program.

    Their names are hashes of the programs (PopART, `Executablex::getCachePath`), so a
    program whose executable was found adds no file.
    """
    try:
        names = os.listdir(folder) if folder else []
    except OSError:  # PopART makes the folder
        names = []
    return {name for name in names if name.endswith(".popef")}
