# SPDX-License-Identifier: Apache-2.0
"""What every test gets: fixed seeds, and things left as they were found."""

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time

# Tests run in one process per core; more threads would only wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest
import torch

from ipufit.emulator.core.pod import held_ipus
from tests import modes
from tests import pool as pools

# A shell lets programs that it starts in the background ignore Ctrl-C, and so would the
# tests and the programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SEED = 20230601
GRACE_SECONDS = 30.0
LASTING = ("tqdm._monitor", "torch._inductor.compile_worker.subproc_pool")
"""Modules whose threads go on to the end of Python: the monitor of tqdm, by which
PopTorch shows compilations, and the compilers that some torches start at an import."""


class TorchRandom:
    """torch's global generator in the words of `random`, for hypothesis."""

    # torch.manual_seed would ask every kind of device, and note its caller for each.
    seed = staticmethod(torch.default_generator.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# Each example begins with the same random numbers, so that it fails alone as it failed
# among others. Hypothesis keeps no reference of its own.
_torch_random = TorchRandom()
hypothesis.register_random(_torch_random)

# No deadline: the first call of a test pays for torch's own start.
hypothesis.settings.register_profile(
    "everyday", deadline=None, derandomize=True, print_blob=True, max_examples=10
)
hypothesis.settings.register_profile(
    "long", deadline=None, derandomize=False, print_blob=True, max_examples=50
)
hypothesis.settings.load_profile("everyday")


def pytest_addoption(parser):
    parser.addoption(
        "--emulator-mode",
        action="append",
        default=[],
        choices=list(modes.VARIABLES),
        help="how the emulator runs programs (tests/modes.py); may be repeated",
    )


def pytest_configure(config):
    try:
        modes.enter(config.getoption("emulator_mode"))
    except ValueError as error:
        raise pytest.UsageError(f"--emulator-mode: {error}") from error


def pytest_ignore_collect(collection_path, config):
    """Import no file without the marker that an expression begins with."""
    marker = config.getoption("markexpr").partition(" and ")[0]
    if marker in ("floor", "looped") and collection_path.suffix == ".py":
        return f"mark.{marker}" not in collection_path.read_text("utf-8") or None
    return None


def pytest_collection_finish():
    """Spare later collections of garbage what modules have made: it stays."""
    # Hypothesis registers NumPy's generator at its first test, and then looks for what
    # holds it, which it doesn't find among frozen objects.
    hypothesis.given(hypothesis.strategies.none())(lambda _: None)()
    gc.collect()
    gc.freeze()
    # What test files import is imported once by the fork server, not in each process.
    multiprocessing.set_forkserver_preload(
        [
            "ipufit.emulator._dataloader",
            "pytest",
            "hypothesis.strategies",
            "tests.conformance.recording",
            "tests.reference",
        ]
    )


def pytest_collection_modifyitems(items):
    for item in items:
        if "pool" in item.fixturenames:
            item.add_marker("process")


def pytest_runtest_setup(item):
    active = set(item.config.getoption("emulator_mode"))
    for marker in item.iter_markers("not_in_mode"):
        if active.intersection(marker.args or active):
            pytest.skip(f"not in this mode: {marker.kwargs['reason']}")


@pytest.fixture(autouse=True)
def _left_as_found():
    """Seed all generators; restore what a test may change; fail on what it leaves.

    A thread or child process that outlives the test is a failure.
    """
    random.seed(SEED)
    np.random.seed(SEED)
    torch.default_generator.manual_seed(SEED)
    environment = dict(os.environ)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # for pytest, not for what it runs
        os.environ.pop(name, None)
    excepthook = sys.excepthook  # torch.distributed's names ranks in tracebacks
    running = {*threading.enumerate(), *multiprocessing.active_children()}
    yield
    sys.excepthook = excepthook
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    deadline = time.monotonic() + GRACE_SECONDS
    stragglers = _running_besides(running)
    while stragglers and time.monotonic() < deadline:
        time.sleep(0.01)
        stragglers = _running_besides(running)
    if stragglers:
        pytest.fail(f"left running: {sorted(map(repr, stragglers))}")


_files = [""]  # those of the tests so far


@pytest.fixture(autouse=True, scope="module")
def _all_ipus_free(request):
    """Fail if models of the file before hold IPUs for good: tests here may need all."""
    if held_ipus:
        gc.collect()
    kept = set(held_ipus)
    held_ipus.clear()
    _files.append(request.node.name)
    assert not kept, f"something keeps a model of {_files[-2]} that is still attached"


def _running_besides(known):
    running = {*threading.enumerate(), *multiprocessing.active_children()} - known
    return {one for one in running if _origin(one) not in LASTING}


def _origin(one):
    """The module of a thread's or process's function, or else of its class."""
    function = getattr(one, "_target", None)
    return getattr(function, "__module__", type(one).__module__)


@pytest.fixture
def unsynced(monkeypatch):
    """Files aren't flushed: tests/files has what pulls the plug."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def quick(monkeypatch):
    """Displays take all that they show for quick, however slow the machine is."""
    monkeypatch.setattr("ipufit.callbacks.progress._QUICK_SECONDS", 1e6)


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    """The current folder is an empty one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def moves(monkeypatch):
    """Counts what goes between host and device: `Moves` of tests/fit/counting.py."""
    from tests.fit.counting import Moves

    watching = Moves().watch(monkeypatch)
    yield watching
    watching.stop()


@pytest.fixture(scope="session")
def pool(request):
    """Processes that run functions together: see `tests/pool.py`."""
    yield from pools.make_pool(request.config.getoption("emulator_mode"))
