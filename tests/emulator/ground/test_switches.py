# SPDX-License-Identifier: Apache-2.0
"""Environment variables that are on or off."""

from __future__ import annotations

import pytest

import ipufit.emulator as poptorch
from ipufit.emulator._ground.switches import (
    fold_bytes,
    folds,
    is_on,
    process_timeout,
)

NAME = "POPTORCH_WAIT_FOR_IPU"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", True), ("2", True), ("-1", True), (" 1 ", True), ("0", False), ("", False)],
)
def test_any_integer_but_zero_is_on(monkeypatch, text, expected):
    monkeypatch.setenv(NAME, text)
    assert is_on(NAME) is expected


def test_what_is_not_set_is_off(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    assert is_on(NAME) is False


@pytest.mark.parametrize(
    ("text", "expected"), [(None, True), ("", True), ("1", True), ("0", False)]
)
def test_what_is_on_by_default_is_turned_off(monkeypatch, text, expected):
    monkeypatch.delenv(NAME, raising=False)
    if text is not None:
        monkeypatch.setenv(NAME, text)
    assert is_on(NAME, default=True) is expected


@pytest.mark.parametrize("text", ["yes", "1.0", "True"])
def test_what_is_no_integer_is_named(monkeypatch, text):
    monkeypatch.setenv(NAME, text)
    with pytest.raises(poptorch.Error, match=f"{NAME}={text!r} is no integer"):
        is_on(NAME)


@pytest.mark.parametrize(("text", "expected"), [("", True), ("0", False), ("1", True)])
def test_folding_is_on_unless_it_is_turned_off(monkeypatch, text, expected):
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", text)
    assert folds() is expected


def test_memory_is_given_in_mebibytes(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD_MIB", "1.5")
    assert fold_bytes(is_training=True) == 3 * 2**19


@pytest.mark.parametrize("text", ["much", "nan", "inf"])
def test_other_memory_is_refused(monkeypatch, text):
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD_MIB", text)
    with pytest.raises(poptorch.Error, match="number of mebibytes"):
        fold_bytes(is_training=True)


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 600.0), ("1.5", 1.5), (" 30 ", 30.0)]
)
def test_the_time_out_of_processes_is_a_number_of_seconds(monkeypatch, text, seconds):
    monkeypatch.setenv("IPUFIT_PROCESS_TIMEOUT", text)
    assert process_timeout() == seconds


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_strange_time_out_is_refused(monkeypatch, text):
    monkeypatch.setenv("IPUFIT_PROCESS_TIMEOUT", text)
    with pytest.raises(poptorch.Error, match="IPUFIT_PROCESS_TIMEOUT"):
        process_timeout()
