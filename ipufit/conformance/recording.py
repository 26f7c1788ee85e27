# SPDX-License-Identifier: Apache-2.0
"""Recordings: the results of all probes on one host, in a file, and their comparison.

Each probe runs in a process of its own, so that one that crashes or hangs is an answer
like others. The processes are forked from one that has imported PopTorch and hasn't
used it, as PopTorch's own tests of attaching do.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import multiprocessing
import os
import platform
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Dict, Iterator, Sequence

import torch

from ipufit import _files
from ipufit._poptorch import poptorch
from ipufit._version import __version__
from ipufit.errors import ConfigError, FileError

from . import operators, programs  # noqa: F401 - they fill PROBES
from .operators import LEFT
from .probing import PROBES, Probe, Refusal, attempt, infer

FORMAT = 1
LIMIT_SECONDS = 300
MOST_PROCESSES = 4
HALF_TOLERANCE = 0.004
KINDS = {1: "IPU Mk1", 2: "IPU Mk2", 21: "IPU Bow"}

Outcome = Dict[str, Dict[str, Any]]
"""What a probe returned: path in its result -> a tensor, a value or a refusal."""


def record(path: Path) -> int:
    """Run all probes on this host, and write the recording after each of them.

    Args:
        path: The file; there must be none yet.

    Returns:
        The exit status: 0.

    Raises:
        ConfigError: The file exists already, or PopTorch finds no IPU.
    """
    if path.exists():
        raise ConfigError(
            f"{path} exists, and recordings are never edited: name another"
        )
    about = _about()
    found: dict[str, dict[str, Any]] = {}
    for probe, outcome, seconds in _run_each(list(PROBES.values()), about["ipus"]):
        found[probe.name] = {
            "source": probe.source,
            "seconds": round(seconds, 1),
            "outcome": outcome,
        }
        ordered = {name: found[name] for name in PROBES if name in found}
        with _files.file_errors("can't be written", path):
            _files.replace_file(path, [_text(about, ordered).encode()])
        sys.stderr.write(
            f"{len(found):3}/{len(PROBES)}  {probe.name}: {seconds:.1f} s\n"
        )
    leaves = [leaf for one in found.values() for leaf in one["outcome"].values()]
    kinds = Counter(_kind(leaf) for leaf in leaves)
    answers = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    sys.stdout.write(f"{path}: {len(found)} probes on {about['device']}: {answers}\n")
    return 0


def compare(path: Path) -> int:
    """Run the probes of a recording on this process's back end, and print a line each.

    Args:
        path: The recording.

    Returns:
        The exit status: 1 if a probe differs, or isn't the one that was recorded.

    Raises:
        FileError: The file is no recording.
    """
    about, recorded = read(path)
    probes = [probe for probe in PROBES.values() if probe.name in recorded]
    same = [one for one in probes if one.source == recorded[one.name]["source"]]
    here = {probe.name: outcome for probe, outcome, _ in _run_each(same, _num_ipus())}
    sys.stdout.write(
        f"{path.name}: PopTorch {about['poptorch']} on {about['device']}, "
        f"{about['date']}\n\n"
    )
    verdicts: Counter[str] = Counter()
    for name in [*PROBES, *(name for name in recorded if name not in PROBES)]:
        verdict, words = verdict_of(name, recorded.get(name), here.get(name))
        verdicts[verdict] += 1
        lines = textwrap.wrap(f"{name}{words and ': '}{words}", 66) or [""]
        sys.stdout.write(f"{verdict:13} " + f"\n{'':14}".join(lines) + "\n")
    answers = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    sys.stdout.write(f"\n{answers}\n")
    return int(bool(verdicts["differs"] or verdicts["changed"]))


def verdict_of(
    name: str, recorded: dict[str, Any] | None, here: Outcome | None
) -> tuple[str, str]:
    """Return a verdict on a probe, and the first difference in words.

    The verdict is `"agrees"`, `"differs"`, `"known"` (it differs, as the table of
    operators says), `"changed"`, `"not run"`, `"not recorded"` or `"gone"`.
    """
    if recorded is None:
        return "not recorded", ""
    if name not in PROBES:
        return "gone", "there is no such probe any more"
    if here is None:
        return "changed", "the program isn't the one that was recorded"
    there: Outcome = recorded["outcome"]
    probe = PROBES[name]
    for path in [*there, *(path for path in here if path not in there)]:
        one, other = _at(path, there), _at(path, here)
        for leaf in (one, other):
            if "not run" in leaf:
                return "not run", leaf["not run"]
        words = _difference(one, other, probe.tolerance)
        if words:
            verdict = "known" if probe.group == LEFT else "differs"
            return verdict, f"{path}: {words}" if path else words
    return "agrees", ""


def read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what a recording says of its host, and of each probe by name."""
    with _files.file_errors("can't be read", path), _files.open_regular(path) as file:
        text = file.read()
    try:
        data = json.loads(text)
        if data["about"]["format"] == FORMAT:
            return data["about"], data["probes"]
    except (ValueError, KeyError, TypeError):
        pass
    raise FileError(f"{path} is no recording of `ipufit conformance record`")


def _text(about: dict[str, Any], found: dict[str, dict[str, Any]]) -> str:
    lines = [
        f'"{name}": {json.dumps(one, allow_nan=False)}' for name, one in found.items()
    ]
    probes = ",\n".join(lines)
    return f'{{"about": {json.dumps(about, indent=1)},\n"probes": {{\n{probes}\n}}}}\n'


# The host -----------------------------------------------------------------------------


def _about() -> dict[str, Any]:
    """Describe this host: nothing in it names the host or the user."""
    sources = "".join(probe.source for probe in PROBES.values())
    num_ipus = _num_ipus()
    return {
        "format": FORMAT,
        "date": datetime.date.today().isoformat(),
        "device": _device(num_ipus),
        "ipus": num_ipus,
        "poptorch": poptorch.__version__,
        "sdk": os.path.basename(os.environ.get("POPLAR_SDK_ENABLED", "").rstrip("/")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "ipufit": __version__,
        "probes": hashlib.sha256(sources.encode()).hexdigest()[:12],
    }


def _device(num_ipus: int) -> str:
    if poptorch.__name__ != "poptorch":
        return "emulator"
    if str(poptorch.poptorch_core.__file__).endswith(".py"):
        return "a stand-in for PopTorch's compiled core"
    if _is_model():
        return "IPU Model"
    if num_ipus == 0:
        raise ConfigError(
            "PopTorch finds no IPU: run this where IPUs are (srun --ipus=2 ...), or on "
            "the SDK's IPU Model with POPTORCH_IPU_MODEL=1."
        )
    version = int(_in_process(poptorch.ipuHardwareVersion))
    return KINDS.get(version, f"IPU of version {version}")


def _is_model() -> bool:
    names = "POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)


def _num_ipus() -> int:
    """Count the IPUs, to `MOST_PROCESSES`; the IPU Model, without replicas, is one."""
    if _is_model():
        return 1
    count = 0
    while count < MOST_PROCESSES and _in_process(
        poptorch.ipuHardwareIsAvailable, max(1, 2 * count)
    ):
        count = max(1, 2 * count)
    return count if poptorch.__name__ == "poptorch" else MOST_PROCESSES


def _in_process(function: Any, *arguments: Any) -> Any:
    """Call a function in another process: it opens the driver, which isn't forked."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


# Processes ----------------------------------------------------------------------------


def _run_each(
    probes: Sequence[Probe], num_ipus: int
) -> Iterator[tuple[Probe, Outcome, float]]:
    """Run each probe in a process, as many at once as there are IPUs and cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    slots = max(1, min(cores, MOST_PROCESSES if _is_model() else num_ipus))
    if poptorch.__name__ != "poptorch":
        infer(torch.nn.ReLU(), torch.zeros(1))  # loads once what all processes need
    context = multiprocessing.get_context("fork")
    waiting = sorted(probes, key=lambda probe: probe.num_ipus)
    running: dict[Any, tuple[Probe, Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            busy = sum(min(probe.num_ipus, slots) for probe, _, _ in running.values())
            if waiting and busy + min(waiting[0].num_ipus, slots) <= slots:
                probe = waiting.pop(0)
                if probe.num_ipus > num_ipus:
                    words = f"needs {probe.num_ipus} IPUs, and here is {num_ipus}"
                    yield probe, {"": {"not run": words}}, 0.0
                    continue
                path = Path(folder, probe.name)
                process = context.Process(target=_answer, args=(probe.name, path))
                with warnings.catch_warnings():  # NumPy has threads, which do nothing
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                running[process] = probe, path, time.monotonic()
                continue
            wait([process.sentinel for process in running], timeout=1)
            for process, (probe, path, start) in list(running.items()):
                seconds = time.monotonic() - start
                if process.exitcode is None and seconds > LIMIT_SECONDS:
                    process.kill()
                    process.join()
                    words = f"ended after {LIMIT_SECONDS} s"
                    path.write_text(json.dumps({"": {"timed out": words}}), "utf-8")
                if process.exitcode is not None:
                    del running[process]
                    yield probe, _outcome(path, process.exitcode), seconds


def _answer(name: str, path: Path) -> None:
    """Run a probe, in a process of its own, and write its outcome."""
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    outcome = dict(_leaves(attempt(PROBES[name].run)))
    path.write_text(json.dumps(outcome, allow_nan=False), encoding="utf-8")


def _outcome(path: Path, exitcode: int) -> Outcome:
    """Return what a process has written, or its last words if it has crashed."""
    if path.exists():
        outcome: Outcome = json.loads(path.read_text(encoding="utf-8"))
        return outcome
    log = Path(f"{path}.log").read_text(encoding="utf-8", errors="replace")
    last = ["", *log.strip().splitlines()][-1]
    return {"": {"crashed": f"exit code {exitcode}: {last}"[:200]}}


# Values -------------------------------------------------------------------------------


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and contents of each tensor, value or refusal of a result."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in items:
            yield from _leaves(one, f"{path}.{name}" if path else str(name))
    elif isinstance(value, torch.Tensor):
        numbers = value.detach().flatten().tolist()
        yield (
            path,
            {
                "dtype": str(value.dtype).rpartition(".")[2],
                "shape": list(value.shape),
                "data": [one if math.isfinite(one) else str(one) for one in numbers],
            },
        )
    elif isinstance(value, Refusal):
        kind = "not run" if "Failed to acquire" in value.text else "refused"
        yield path, {kind: value.text}  # IPUs that others hold refuse no program
    else:
        yield path, {"value": value}


def _at(path: str, outcome: Outcome) -> dict[str, Any]:
    """Return the leaf at a path, or the refusal of what it is a part of."""
    if path in outcome:
        return outcome[path]
    for name, leaf in outcome.items():
        is_above = not name or path.startswith(f"{name}.")
        if is_above and _kind(leaf) != "values":
            return leaf
    return {"value": "other results"}


def _kind(leaf: dict[str, Any]) -> str:
    """Return `"values"`, `"refused"` (a crash is one), `"timed out"` or `"not run"`."""
    [kind, *more] = leaf
    return "values" if more or kind == "value" else kind.replace("crashed", "refused")


def _difference(there: dict[str, Any], here: dict[str, Any], tolerance: float) -> str:
    """Describe the first difference of two leaves; `""` if they agree."""
    if _kind(there) != _kind(here):
        return f"{_in_words(there)} in the recording, {_in_words(here)} here"
    if _kind(there) != "values":
        return ""
    if "data" not in there or _in_words(there) != _in_words(here):
        is_same = there == here
        words = f"{_in_words(there)} in the recording, {_in_words(here)} here"
        return "" if is_same else words
    if there["dtype"] == "float16":
        tolerance = max(tolerance, HALF_TOLERANCE)
    for index, (one, other) in enumerate(zip(there["data"], here["data"])):
        if not _is_close(float(one), float(other), tolerance):
            position: list[int] = []
            for size in reversed(there["shape"]):
                index, at = divmod(index, size)
                position.insert(0, at)
            return f"{position}: {one} in the recording, {other} here"
    return ""


def _is_close(one: float, other: float, tolerance: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= tolerance * max(1.0, abs(one), abs(other))


def _in_words(leaf: dict[str, Any]) -> str:
    if "data" in leaf:
        return f"{leaf['dtype']} {leaf['shape']}"
    if "value" in leaf:
        return repr(leaf["value"])
    [(kind, words)] = leaf.items()
    return f"{kind} ({textwrap.shorten(words, 80, placeholder='...')})"
