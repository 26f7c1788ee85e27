# SPDX-License-Identifier: Apache-2.0
"""`setLogLevel`: PopTorch's names and integers, on standard error."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from ipufit import emulator as poptorch
from ipufit.emulator._logging import logger


@pytest.fixture(autouse=True)
def _restore_logger():
    before = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]
    logger.propagate = before[2]


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("TRACE_ALL", logging.DEBUG),
        ("TRACE", logging.DEBUG),
        ("DEBUG_IR", logging.DEBUG),
        ("DEBUG", logging.DEBUG),
        ("INFO", logging.INFO),
        ("WARN", logging.WARNING),
        ("ERR", logging.ERROR),
        (0, logging.DEBUG),
        (1, logging.DEBUG),
        (2, logging.INFO),
        (3, logging.WARNING),
        (4, logging.ERROR),
    ],
)
def test_a_level_shows_itself_and_what_is_graver(level, shown):
    poptorch.setLogLevel(level)
    assert logger.isEnabledFor(shown)
    assert not logger.isEnabledFor(shown - 1)


@pytest.mark.parametrize("level", ["OFF", 6])
def test_off_shows_nothing(level):
    poptorch.setLogLevel(level)
    assert not logger.isEnabledFor(logging.CRITICAL)


@pytest.mark.parametrize("level", [5, 7, -1])
def test_other_integers_are_refused(level):
    with pytest.raises(ValueError, match="Invalid log level integer"):
        poptorch.setLogLevel(level)


@pytest.mark.parametrize("level", ["debug", "LOUD", ""])
def test_other_names_are_refused(level):
    with pytest.raises(ValueError, match="Unknown log level"):
        poptorch.setLogLevel(level)


def test_setting_it_twice_logs_once(capsys):
    poptorch.setLogLevel("INFO")
    poptorch.setLogLevel("INFO")
    assert len(logger.handlers) == 1


@pytest.mark.parametrize(("level", "lines"), [("DEBUG", 1), ("ERR", 0)])
def test_the_environment_sets_it_at_import(level, lines, monkeypatch):
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", level)
    code = (
        "import logging, ipufit.emulator\n"
        "logging.getLogger('poptorch::python').warning('careful')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines() == ["[poptorch::python] [WARNING] careful"] * lines
