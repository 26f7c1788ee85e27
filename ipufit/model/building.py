# SPDX-License-Identifier: Apache-2.0
"""Compiled programs, as `build` reports them and `ipufit compile` describes them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterable, NoReturn

import torch

from ipufit._files import file_errors, replace_file
from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.callbacks import ProgressDisplay
from ipufit.callbacks.progress import Notes
from ipufit.data.random_state import HostRandomState
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


def built(
    one: Training | Inference, display: ProgressDisplay
) -> tuple[BuiltProgram, set[str]]:
    """Prepare a program, and compare the cache of executables before and after.

    Returns:
        The program, and the names of new files in the cache.
    """
    given = one.options.toDict()
    folder = given.get("cachePath") if given.get("enableEngineCaching") else ""
    before, seconds = _executables(folder), one.executors.seconds
    one.prepare(display)
    taken = one.executors.seconds - seconds
    new = _executables(folder) - before
    cache = "none"
    if taken and (before or new):
        cache = "miss" if new else "hit"
    name = "training" if isinstance(one, Training) else "inference"
    return BuiltProgram(name, one.plan, taken, cache, one.remark), new


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


def compile_only(
    programs: Iterable[Training | Inference],
    folder: str,
    module: torch.nn.Module,
    *,
    is_first: bool,
) -> None:
    """Compile programs, and write a file that describes each.

    Random states are put back. A program that the model had already has no file of its
    own.

    Args:
        programs: The programs of a run.
        folder: Directory of the files.
        module: The user's module.
        is_first: Whether this is process 0, which writes and prints.
    """
    display = Notes()
    for one in programs:
        before = HostRandomState()
        try:
            program, files = built(one, display)
        finally:
            before.put_back()
        if not program.seconds or not is_first:
            continue
        plan = one.plan
        about = {
            "program": program.name,
            "module": type(module).__name__,
            "micro_batch_size": plan.micro_batch_size,
            "gradient_accumulation": plan.gradient_accumulation,
            "replicas": plan.replicas,
            "device_iterations": plan.device_iterations,
            "samples_per_call": plan.samples_per_call,
            "seconds": round(program.seconds, 3),
            "cache": program.cache,
            "executables": sorted(files),
            "poptorch": str(poptorch.__version__),
        }
        number = 1 + sum(1 for _ in Path(folder).glob("*-*.json"))
        target = Path(folder) / f"{number:03d}-{program.name}.json"
        with file_errors("can't be written", target):
            replace_file(target, [json.dumps(about, indent=2).encode() + b"\n"])
        sys.stderr.write(f"ipufit: {replace(program, remark='')}\n")


def end_script() -> NoReturn:
    """End a script that needs outputs: nothing was computed.

    Raises:
        SystemExit: With status 0.
    """
    sys.stderr.write(
        "ipufit: the script ends at its first prediction, because programs are only "
        "compiled and there are no outputs.\n"
    )
    raise SystemExit(0)
