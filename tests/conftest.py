# SPDX-License-Identifier: Apache-2.0
"""What every test gets: fixed seeds, and things left as they were found."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time

import hypothesis
import numpy as np
import pytest
import torch

SEED = 20230601
GRACE_SECONDS = 5.0

# No deadline: the first call of a test pays for torch's own start.
hypothesis.settings.register_profile(
    "ipufit", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.load_profile("ipufit")


@pytest.fixture(autouse=True)
def _seed():
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _restore_environment():
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _no_stragglers():
    """Fail on a thread or a child process that outlives the test."""
    before = {*threading.enumerate(), *multiprocessing.active_children()}
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    stragglers = _running_besides(before)
    while stragglers and time.monotonic() < deadline:
        time.sleep(0.01)
        stragglers = _running_besides(before)
    if stragglers:
        pytest.fail(f"left running: {sorted(map(repr, stragglers))}")


def _running_besides(known):
    return {*threading.enumerate(), *multiprocessing.active_children()} - known
