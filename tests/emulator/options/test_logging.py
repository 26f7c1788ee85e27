# SPDX-License-Identifier: Apache-2.0
"""`setLogLevel`, on standard error; and switches of the environment."""

import io
import logging
import re
import sys

import pytest
import torch
from torch import nn

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
        ("TRACE", logging.DEBUG),
        ("DEBUG", logging.DEBUG),
        ("INFO", logging.INFO),
        ("WARN", logging.WARNING),
        ("ERR", logging.ERROR),
        (1, logging.DEBUG),
        (2, logging.INFO),
        (3, logging.WARNING),
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


# Environment variables that are on or off, or numbers -------------------------------

MODEL = "POPTORCH_IPU_MODEL"
ON_OFF = [MODEL, "IPUFIT_EMULATOR_FOLD", "IPUFIT_EMULATOR_CHANNELS_LAST"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", True), ("2", True), ("-1", True), (" 1 ", True), ("0", False), ("", False)],
)
def test_any_integer_but_zero_is_on(monkeypatch, text, expected):
    monkeypatch.setenv(MODEL, text)
    assert poptorch.ipuHardwareIsAvailable() is not expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        *((name, text, "integer") for name in ON_OFF for text in ("yes", "1.0")),
        *(
            ("IPUFIT_EMULATOR_FOLD_MIB", text, "number of mebibytes")
            for text in ("much", "nan", "inf")
        ),
    ],
)
def test_what_makes_no_sense_is_named(monkeypatch, name, text, message):
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "1")  # else nothing reads its MiB
    monkeypatch.setenv(name, text)
    options = poptorch.Options().deviceIterations(2)
    with pytest.raises(poptorch.Error, match=f"{name}={text!r} is no {message}"):
        poptorch.inferenceModel(nn.ReLU(), options)(torch.ones(2))


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_strange_time_out_is_refused(monkeypatch, text):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("IPUFIT_PROCESS_TIMEOUT", text)
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: poptorch.identity_loss(x * layer.weight, "sum")
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match=f"IPUFIT_PROCESS_TIMEOUT={text!r} is no"):
        poptorch.trainingModel(layer, options)(torch.ones(1, 1))
