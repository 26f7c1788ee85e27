# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the core."""

from __future__ import annotations

import pytest

from ipufit import ConfigError, _env


@pytest.mark.parametrize("value", ["auto", "emulator", "poptorch"])
def test_a_backend_can_be_asked_for(monkeypatch, value):
    monkeypatch.setenv("IPUFIT_BACKEND", value)
    assert _env.backend() == value


@pytest.mark.parametrize("value", [None, ""])
def test_the_backend_is_found_by_itself_if_unset_or_empty(monkeypatch, value):
    monkeypatch.delenv("IPUFIT_BACKEND", raising=False)
    if value is not None:
        monkeypatch.setenv("IPUFIT_BACKEND", value)
    assert _env.backend() == "auto"


@pytest.mark.parametrize("value", ["Emulator", "cuda", " emulator"])
def test_an_unknown_backend_is_refused_with_the_known_ones(monkeypatch, value):
    monkeypatch.setenv("IPUFIT_BACKEND", value)
    with pytest.raises(ConfigError, match="auto, poptorch, emulator") as caught:
        _env.backend()
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("", False), ("0", False), ("1", True), ("30", True)],
)
def test_waiting_for_ipus_is_poptorchs_own_variable(monkeypatch, value, expected):
    monkeypatch.delenv("POPTORCH_WAIT_FOR_IPU", raising=False)
    if value is not None:
        monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", value)
    assert _env.waits_for_ipus() is expected
