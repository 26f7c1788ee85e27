# SPDX-License-Identifier: Apache-2.0
"""`setLogLevel`: PopTorch's names and integers, on standard error."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from ipufit import emulator as poptorch
from ipufit.emulator import logger
from tests.interpreters import run_python


@pytest.fixture(autouse=True)
def _restore_logger():
    before = logger.level
    yield
    logger.setLevel(before)


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


@pytest.mark.parametrize(
    ("level", "message"),
    [(level, "Invalid log level integer") for level in (5, 7, -1)]
    + [(level, "Unknown log level") for level in ("debug", "LOUD", "")],
)
def test_other_levels_are_refused(level, message):
    with pytest.raises(ValueError, match=message):
        poptorch.setLogLevel(level)


def test_a_message_is_shown_with_its_time_logger_and_level(capsys):
    logger.warning("careful")
    shown = capsys.readouterr().err
    pattern = r"\[\d\d:\d\d:\d\d\.\d{3}\] \[poptorch::python\] \[warning\] careful\n"
    assert re.fullmatch(pattern, shown)


def test_messages_go_to_what_standard_error_is_at_the_time(monkeypatch):
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    logger.warning("one")
    monkeypatch.setattr(sys, "stderr", second)
    first.close()  # as pytest does after a test
    logger.warning("two")
    assert second.getvalue().endswith("two\n")


def test_other_handlers_see_the_messages_too(caplog):
    poptorch.setLogLevel("INFO")
    logger.info("seen")
    assert [record.getMessage() for record in caplog.records] == ["seen"]


@pytest.mark.parametrize(
    ("level", "shown"),
    [("DEBUG", ["[debug] detail", "[warning] careful"]), ("ERR", [])]
    + [(unset, ["[warning] careful"]) for unset in ("", None)],
)
def test_the_environment_sets_it_at_import(level, shown, monkeypatch):
    monkeypatch.delenv("POPTORCH_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("POPTORCH_LOG_LEVEL", level)
    code = (
        "import logging, ipufit.emulator\n"
        "logger = logging.getLogger('poptorch::python')\n"
        "logger.debug('detail')\n"
        "logger.warning('careful')"
    )
    done = run_python("-c", code)
    lines = done.stderr.splitlines()
    assert [line.partition("[poptorch::python] ")[2] for line in lines] == shown
