# SPDX-License-Identifier: Apache-2.0
"""What `pytest --emulator-mode` does."""

from __future__ import annotations

import pytest

from ipufit.emulator._ground import switches as _switches
from tests import modes

READ = {
    "looped": (_switches.folds, False),
    "contiguous": (_switches.uses_channels_last, False),
}


@pytest.mark.parametrize("mode", modes.VARIABLES)
def test_the_emulator_reads_what_a_mode_sets(mode, monkeypatch):
    read, expected = READ[mode]
    name, value = modes.VARIABLES[mode]
    monkeypatch.setenv(name, str(1 - int(value)))
    assert read() is not expected
    monkeypatch.setenv(name, value)
    assert read() is expected
