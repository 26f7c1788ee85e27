# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/how-to/pods.md are what `ipufit launch` takes and makes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from ipufit import launch

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "pods.md"
BLOCKS = [
    block.replace("\\\n", "")
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
]
CALL = re.compile(r"ipufit (launch [^\n#]*?)(?= && |  #|\n|$)")
COMMANDS = [command for block in BLOCKS for command in CALL.findall(block)]
EXPANSIONS = [
    tuple(lines)
    for block in BLOCKS
    for lines in [block[2:].splitlines()]
    if block.startswith("$ ") and len(lines) == 2
]


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that returns what `--dry-run` prints, on 8 cores without IPUs."""
    monkeypatch.setattr(launch, "_num_cores", lambda: 8)
    monkeypatch.setattr(sys, "executable", "python")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def run(arguments):
        launch.main(["--dry-run", *shlex.split(arguments)[1:]])
        return capsys.readouterr().out.strip()

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_taken(command, run):
    assert " train.py" in run(command)


@pytest.mark.parametrize(("call", "command"), EXPANSIONS)
def test_a_command_becomes_what_the_page_says(call, command, run):
    assert run(call.replace("ipufit launch", "launch", 1)) == command


def test_there_are_commands_on_the_page():
    assert len(COMMANDS) >= 10
    assert len(EXPANSIONS) >= 5


def test_the_command_for_several_hosts_reaches_poprun_as_it_is_meant(run):
    [command] = [command for command in COMMANDS if "MASTER_ADDR=host1" in command]
    words = shlex.split(run(command))
    assert "--host=host1,host2,host3,host4" in words
    assert "--vipu-partition=p64" in words
    [local] = [word for word in words if word.startswith("--mpi-local-args=")]
    assert local.endswith("-x MASTER_ADDR=host1 -x MASTER_PORT=29500")
    assert words[-3:] == ["python", "-u", "train.py"]


def test_the_page_names_every_option_of_the_command(capsys):
    with pytest.raises(SystemExit):
        launch.main(["--help"])
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.M))
    text = PAGE.read_text(encoding="utf-8")
    assert len(options) >= 7
    assert [option for option in options if option not in text] == []
