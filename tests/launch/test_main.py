# SPDX-License-Identifier: Apache-2.0
"""The command `ipufit` names its commands, and runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ipufit
from ipufit import cli as program

ROOT = Path(__file__).parent.parent.parent


def test_its_help_names_the_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ipufit"])
    with pytest.raises(SystemExit) as exit_:
        program.main()
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "launch   run a script in several processes" in out


def test_an_unknown_command_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ipufit", "lunch"])
    with pytest.raises(SystemExit) as exit_:
        program.main()
    assert exit_.value.code == 2
    assert "'lunch' (choose from" in capsys.readouterr().err


def test_it_tells_its_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ipufit", "--version"])
    with pytest.raises(SystemExit):
        program.main()
    assert capsys.readouterr().out == f"{ipufit.__version__}\n"


def test_a_command_gets_its_arguments(monkeypatch, capsys):
    line = "ipufit launch --launcher poprun --processes 2 --dry-run train.py --version"
    monkeypatch.setattr(sys, "argv", line.split())
    program.main()
    assert capsys.readouterr().out.endswith("train.py --version\n")


def test_starting_it_waits_for_no_torch():
    code = "import sys, ipufit.__main__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
