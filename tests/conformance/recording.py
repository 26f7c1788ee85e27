# SPDX-License-Identifier: Apache-2.0
"""Recordings: what each probe returned on one host, in a file, and their comparison.

Each probe runs in a process of its own, so that one that crashes or hangs is an answer
like others. It is forked from one that has imported PopTorch and hasn't used it, as
PopTorch's own tests of attaching do.
"""

from __future__ import annotations

import datetime
import json
import math
import multiprocessing
import os
import platform
import tempfile
import textwrap
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

import torch

from ipufit import __version__, poptorch
from ipufit._files import open_regular, replace_file
from tests.conformance import operators, programs  # noqa: F401 - they fill PROBES
from tests.conformance.operators import LEFT
from tests.conformance.probing import PROBES, Probe, Refusal, attempt

# Used here, so that the emulator imports its compiler once, not in each process.
poptorch.inferenceModel  # noqa: B018

FORMAT = 1
LIMIT_SECONDS = 300
MOST_IPUS = 4
HALF_TOLERANCE = 0.004
KINDS = {1: "IPU Mk1", 2: "IPU Mk2", 21: "IPU Bow"}

Outcome = Dict[str, Dict[str, Any]]
"""What a probe returned: path in its result -> a tensor, a value or a refusal."""


class Recording:
    """What a host is, and what each probe returned there.

    Attributes:
        path: The file.
        about: The host: PopTorch, device, date and versions.
        probes: Name of a probe -> hash of its source, and its outcome.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.probes: dict[str, dict[str, Any]] = {}

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a recording.

        Raises:
            ValueError: The file is no recording.
        """
        try:
            with open_regular(path) as file:
                data = json.loads(file.read())
            recording = cls(path, data["about"])
            recording.probes = data["probes"]
            is_ours = recording.about["format"] == FORMAT
            for name in ("poptorch", "device", "date"):
                is_ours &= isinstance(recording.about[name], str)
            for found in recording.probes.values():
                is_ours &= isinstance(found["source"], str)
                is_ours &= all(map(_is_leaf, found["outcome"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_ours = False
        if not is_ours:
            raise ValueError(f"{str(path)!r} is no recording of tests/conformance.")
        return recording

    def write(self) -> None:
        """Write the file anew: what was there stays if this fails."""
        lines = [
            f"{json.dumps(name)}: {json.dumps(found, allow_nan=False)}"
            for name, found in self.probes.items()
        ]
        probes = ",\n".join(lines)
        about = json.dumps(self.about, indent=1)
        text = f'{{"about": {about},\n"probes": {{\n{probes}\n}}}}\n'
        replace_file(self.path, [text.encode()])

    def verdict(self, name: str, here: Outcome) -> tuple[str, str]:
        """Return a verdict on a probe, and the first difference in words.

        The verdict is `"agrees"`, `"differs"`, `"known"` (it differs, as the table of
        operators says), `"changed"`, `"not run"` or `"not recorded"`.
        """
        probe, found = PROBES[name], self.probes.get(name)
        if found is None:
            return "not recorded", "the probe is newer than the recording"
        if found["source"] != probe.source:
            return "changed", "the program isn't the one that was recorded"
        there: Outcome = found["outcome"]
        for path in [*there, *(path for path in here if path not in there)]:
            one, other = _at(path, there), _at(path, here)
            for leaf in (one, other):
                if "not run" in leaf:
                    return "not run", _in_words(leaf)
            words = difference(one, other, probe.tolerance)
            if words:
                verdict = "known" if probe.group == LEFT else "differs"
                return verdict, f"{path}: {words}" if path else words
        return "agrees", ""


def _is_leaf(leaf: Any) -> bool:
    """Whether a value of a file is a leaf of an outcome."""
    if not isinstance(leaf, dict) or "data" not in leaf:
        return isinstance(leaf, dict) and len(leaf) == 1
    numbers = [float(number) for number in leaf["data"]]
    is_whole = math.prod(leaf["shape"]) == len(numbers)
    return is_whole and leaf["dtype"].isidentifier()


# The host -----------------------------------------------------------------------------


def about_this_host() -> dict[str, Any]:
    """Describe this host: nothing in it names the host or the user.

    Raises:
        RuntimeError: PopTorch is here and finds no IPU.
    """
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
    }


def _device(num_ipus: int) -> str:
    if poptorch.__name__ != "poptorch":
        return "emulator"
    if str(poptorch.poptorch_core.__file__).endswith(".py"):
        return "a stand-in for PopTorch's compiled core"
    if _is_model():
        return "IPU Model"
    if num_ipus == 0:
        raise RuntimeError(
            "PopTorch finds no IPU: run this where IPUs are (srun --ipus=2 ...), or on "
            "the SDK's IPU Model with POPTORCH_IPU_MODEL=1."
        )
    version = int(_in_process(poptorch.ipuHardwareVersion))
    return KINDS.get(version, f"IPU of version {version}")


def _is_model() -> bool:
    names = "POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"
    return any(os.environ.get(name, "0") not in ("", "0") for name in names)


def _num_ipus() -> int:
    """Count the IPUs, to `MOST_IPUS`; the IPU Model, without replicas, is one."""
    if _is_model():
        return 1
    count = 0
    while count < MOST_IPUS and _in_process(
        poptorch.ipuHardwareIsAvailable, max(1, 2 * count)
    ):
        count = max(1, 2 * count)
    return count if poptorch.__name__ == "poptorch" else MOST_IPUS


def _in_process(function: Any, *arguments: Any) -> Any:
    """Call a function in another process: it opens the driver, which isn't forked."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


# Processes ----------------------------------------------------------------------------


def ask(probe: Probe, num_ipus: int) -> Outcome:
    """Run a probe in a process of its own, and return its outcome.

    Args:
        probe: The probe.
        num_ipus: Number of IPUs of this host.
    """
    if probe.num_ipus > num_ipus:
        words = f"needs {probe.num_ipus} IPUs, and here is {num_ipus}"
        return {"": {"not run": words}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "outcome.json")
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_answer, args=(probe.run, path))
        process.start()
        process.join(LIMIT_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            return {"": {"timed out": f"ended after {LIMIT_SECONDS} s"}}
        if path.exists():
            outcome: Outcome = json.loads(path.read_text(encoding="utf-8"))
            return outcome
        log = Path(f"{path}.log").read_text(encoding="utf-8", errors="replace")
        last = ["", *log.strip().splitlines()][-1]
        words = f"exit code {process.exitcode}: {last}"[:200]
        return {"": {"crashed": words}}


def _answer(run: Callable[[], Any], path: Path) -> None:
    """Run a probe, in a process of its own, and write its outcome."""
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["IPUFIT_EMULATOR_STRICT"] = "1"  # refuse what a device refuses
    torch.set_num_threads(1)
    outcome = dict(_leaves(attempt(run)))
    path.write_text(json.dumps(outcome, allow_nan=False), encoding="utf-8")


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
        if is_above and kind_of(leaf) != "values":
            return leaf
    return {"value": "other results"}


def kind_of(leaf: dict[str, Any]) -> str:
    """Return `"values"`, `"refused"` (a crash is one), `"timed out"` or `"not run"`."""
    [kind, *more] = leaf
    return "values" if more or kind == "value" else kind.replace("crashed", "refused")


def difference(there: dict[str, Any], here: dict[str, Any], tolerance: float) -> str:
    """Describe the first difference of two leaves; `""` if they agree."""
    if kind_of(there) != kind_of(here):
        return f"{_in_words(there)} in the recording, {_in_words(here)} here"
    if kind_of(there) != "values":
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
    printable = "".join(filter(str.isprintable, f"{kind} ({words}"))
    return f"{textwrap.shorten(printable, 90, placeholder='...')})"
