# SPDX-License-Identifier: Apache-2.0
"""The numbers of the runs of `runs.py`, recorded: one file of tensors for each run.

    python -m tests.golden.bits           # compare all runs with what is recorded
    python -m tests.golden.bits lstm gru  # some of them
    python -m tests.golden.bits --tolerance 1e-6
    python -m tests.golden.bits --write lstm

`--write` records anew, and says by how much each kind of number moved. It uses one
thread, as the test does. Numbers are the same bit for bit where torch's release and the
processor are those of the recording, and nearly the same elsewhere.
"""

import argparse
import contextlib
import hashlib
import platform
import random
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.golden.runs import HALF, IN_PROCESSES, RUNS
from tests.pool import make_pool

FOLDER = Path(__file__).parent / "bits"
LARGEST_KEPT = 64
"""Integers of larger tensors, as states of generators are, are kept as a digest."""
DIGEST = "sha256 of "
TOLERANCE, HALF_TOLERANCE = 1e-5, 1e-2
"""Where bits can't be the same: differences relative to a tensor's largest value."""


# Recording -----------------------------------------------------------------------


def numbers_of(name, pool):
    """Run, and return all numbers as tensors by name.

    Args:
        name: Name of a run.
        pool: Processes for the runs that need several (`tests/pool.py`).
    """
    if name in IN_PROCESSES:
        outcome = dict(enumerate(pool.run(outcome_of, name)))
    else:
        with one_thread():
            outcome = outcome_of(name)
    return dict(flat(outcome))


def outcome_of(name):
    """What a run returns, as NumPy arrays, which go from process to process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {key: value.numpy() for key, value in flat(RUNS[name]())}


@contextlib.contextmanager
def one_thread():
    """Compute in one thread: sums of several have another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def flat(value, name=""):
    """Yield names and tensors of all numbers that nest in a value."""
    if isinstance(value, list) and value and isinstance(value[0], (int, float)):
        value = torch.tensor(value, dtype=torch.float64)  # of a history, for example
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from flat(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, (torch.Tensor, np.ndarray, float, int)):
        tensor = torch.as_tensor(value).detach().clone().contiguous()
        if not tensor.is_floating_point() and tensor.numel() > LARGEST_KEPT:
            digest = hashlib.sha256(tensor.numpy().tobytes()).digest()
            name, tensor = DIGEST + name, torch.tensor(list(digest), dtype=torch.uint8)
        yield name, tensor
    elif value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}")


def machine():
    """What the bits of a number depend on, in words."""
    capability = re.search(r"CPU capability usage: (\S+)", torch.__config__.show())
    processor = platform.machine()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        fields = re.findall(r"^(?:vendor_id|cpu family|model)\s*: (.*)", text, re.M)
        processor = " ".join(fields[:3])
    release = torch.__version__.partition("+")[0]
    return f"torch {release}, {capability and capability[1]}, {processor}"


def path_of(name):
    return FOLDER / f"{name}.safetensors"


def write(name, numbers):
    FOLDER.mkdir(exist_ok=True)
    save_file(numbers, path_of(name), {"made by": machine()})


def recorded(name):
    """The numbers that were recorded, and the machine."""
    with safe_open(path_of(name), "pt") as file:
        numbers = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return numbers, file.metadata()["made by"]


# Comparing -----------------------------------------------------------------------


def differences(now, before, tolerance=None):
    """Say in lines where the numbers of a run differ from those recorded.

    Args:
        now: Numbers of a run by name.
        before: The same as they were recorded.
        tolerance: Differences to allow, relative to a tensor's largest value; None for
            the same bits.
    """
    lines = [f"{key} is gone" for key in before if key not in now]
    lines += [f"{key} is new" for key in now if key not in before]
    for key in [key for key in now if key in before]:
        mine, theirs = now[key], before[key]
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            lines.append(f"{key}: {described(mine)} and not {described(theirs)}")
        elif not is_same(key, mine, theirs, tolerance):
            lines.append(f"{key} differs by {distance(mine, theirs):.2g}")
    return lines


def described(tensor):
    return f"{tensor.dtype} {list(tensor.shape)}"


def is_same(key, one, other, tolerance):
    """Whether values are the same, or near enough; digests can't be compared so."""
    if tolerance is None:
        return one.numpy().tobytes() == other.numpy().tobytes()
    if not one.is_floating_point():
        return key.startswith(DIGEST) or torch.equal(one, other)
    atol = tolerance * max(largest(other), 1e-3)
    return torch.allclose(one, other, rtol=0.0, atol=atol, equal_nan=True)


def largest(tensor):
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if len(finite) else 0.0


def distance(one, other):
    """The largest difference, relative to the largest of the values."""
    return (one.double() - other.double()).abs().max().item() / (largest(other) or 1.0)


def tolerance_of(name, made_by):
    """The tolerance for a run; None where it must give the bits that are recorded."""
    if made_by == machine():
        return None
    return HALF_TOLERANCE if name in HALF else TOLERANCE


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.golden.bits")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(RUNS)}")
    parser.add_argument("--write", action="store_true", help="record anew")
    parser.add_argument("--tolerance", type=float, help="1e-6; else the same bits")
    given = parser.parse_args(arguments)
    unknown = set(given.names) - set(RUNS)
    if unknown:
        parser.error(f"there is no run {', '.join(sorted(unknown))}")
    failed = False
    for pool in make_pool([]):
        for name in given.names or RUNS:
            numbers = numbers_of(name, pool)
            failed |= differs(name, numbers, given.tolerance)
            if given.write:
                write(name, numbers)
    return int(failed and not given.write)


def differs(name, numbers, tolerance):
    """Print how the numbers of a run differ from those recorded, and return whether."""
    lines = []
    if path_of(name).exists():
        before, made_by = recorded(name)
        tolerance = tolerance or tolerance_of(name, made_by)
        lines = differences(numbers, before, tolerance)
    text = "\n    ".join([f"{name}: {len(numbers)} tensors", *lines])
    sys.stdout.write(f"{text}\n")
    return bool(lines)


if __name__ == "__main__":
    from tests.golden import bits  # where other processes find `outcome_of`

    sys.exit(bits.main())
