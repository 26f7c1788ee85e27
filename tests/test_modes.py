# SPDX-License-Identifier: Apache-2.0
"""What `pytest --emulator-mode` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipufit.emulator._ground import switches as _switches
from tests import modes

ROOT = Path(__file__).parent.parent

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


SCRIPT = """
import pytest
from ipufit.emulator._ground import switches as _switches

def test_here():
    assert _switches.folds() is False
    assert not _switches.uses_channels_last()

@pytest.mark.not_in_mode("another", reason="no")
def test_not_in_another():
    pass

@pytest.mark.not_in_mode("another", "looped", reason="not two")
def test_not_in_two():
    raise AssertionError

@pytest.mark.not_in_mode(reason="not in any")
def test_not_in_any():
    raise AssertionError
"""


@pytest.mark.thorough
def test_a_run_in_two_modes(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(SCRIPT)
    options = ["-q", "-rs", "-p", "tests.conftest", "--emulator-mode", "looped"]
    options += ["--emulator-mode", "contiguous"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        cwd=str(tmp_path),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed, 2 skipped" in done.stdout
    assert "not in this mode: not two" in done.stdout
