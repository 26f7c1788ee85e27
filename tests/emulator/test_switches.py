# SPDX-License-Identifier: Apache-2.0
"""Environment variables that are on or off."""

from __future__ import annotations

import pytest

import ipufit.emulator as poptorch
from ipufit.emulator._switches import is_on

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
