# SPDX-License-Identifier: Apache-2.0
"""The command lines that `ipufit launch` makes, and the ones that it refuses."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from ipufit import launch
from ipufit.errors import ConfigError
from ipufit.launch import Command, LaunchRequest

GOLDEN = Path(__file__).parent.parent / "golden" / "launch_commands.txt"

# Anything that a shell or a parser could take for its own.
words = st.one_of(
    st.sampled_from(
        [
            "--",
            "-",
            "",
            "-m",
            "--processes",
            "--nnodes=3",
            "--options",
            "a b",
            "'",
            "$X",
        ]
    ),
    st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=8),
)
programs = st.tuples(
    st.sampled_from(["train.py", "dir with space/train.py"]), st.lists(words)
).map(lambda parts: (parts[0], *parts[1]))


def golden():
    """Pairs of a command line for `ipufit launch` and the command that it becomes."""
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    return list(zip(lines[::2], lines[1::2]))


@pytest.fixture
def shown(monkeypatch, capsys):
    """A function that returns what `ipufit launch --dry-run` prints, on 8 cores."""
    monkeypatch.setattr(launch, "_num_cores", lambda: 8)
    monkeypatch.setattr(sys, "executable", "python")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def show(line):
        _, _, *arguments = shlex.split(line)
        launch.main(["--dry-run", *arguments])
        return capsys.readouterr().out.strip()

    return show


@pytest.mark.parametrize(("line", "expected"), golden())
def test_a_command_line_is_the_golden_one(line, expected, shown):
    assert shown(line) == expected


def test_there_are_golden_lines_for_both_launchers():
    starts = {expected.split()[0] for _, expected in golden()}
    assert "poprun" in starts
    assert len(golden()) >= 10


def parsed(command):
    """torchrun's own reading of its command line."""
    assert command.arguments[:3] == (sys.executable, "-m", "torch.distributed.run")
    return get_args_parser().parse_args(command.arguments[3:])


@given(programs, st.integers(1, 8), st.booleans())
def test_torchrun_passes_a_program_and_its_arguments_on(program, processes, is_module):
    request = LaunchRequest(program, processes, is_module=is_module)
    given = parsed(launch.torchrun_command(request, {}))
    assert (given.training_script, *given.training_script_args) == program
    assert given.module is is_module
    assert given.nproc_per_node == str(processes)


@given(programs, st.integers(1, 8))
def test_poprun_gets_a_program_and_its_arguments_at_the_end(program, processes):
    arguments = launch.poprun_command(LaunchRequest(program, processes)).arguments
    assert arguments[-len(program) :] == program
    assert arguments[-len(program) - 2 : -len(program)] == (sys.executable, "-u")


@given(st.lists(st.text("abc=,: '\"$", min_size=1).map("--x".__add__)))
def test_options_of_the_launcher_are_passed_as_they_are(options):
    request = LaunchRequest(("train.py",), 2, options=tuple(options))
    for command in launch.poprun_command(request), launch.torchrun_command(request, {}):
        start = command.arguments.index(options[0]) if options else 0
        assert list(command.arguments[start:][: len(options)]) == options


@given(programs, st.dictionaries(st.sampled_from(["A", "B"]), words))
def test_a_shell_reads_the_printed_line_as_the_command(arguments, variables):
    line = str(Command(arguments, variables))
    settings = [f"{name}={text}" for name, text in variables.items()]
    assert shlex.split(line) == [*settings, *arguments]


@given(programs)
def test_everything_after_the_script_is_the_scripts(program):
    own, rest = launch._split(["--processes", "4", "--dry-run", *program])
    assert own == ["--processes=4", "--dry-run"]
    assert tuple(rest) == program


def test_each_option_with_a_value_is_known_to_have_one():
    actions = launch._parser()._option_string_actions
    valued = {name for name, action in actions.items() if action.nargs is None}
    assert valued == set(launch._VALUED)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--processes 4", "No script"),
        (
            "--processes 4 --replicas 10 x",
            "10 can't be shared .* 4 processes: use 8 or",
        ),
        ("--processes 4 --replicas 3 x", "3 can't be shared equally .*: use 4"),
        ("--processes 0 x", "'0' is not 1 or more"),
        ("--replicas 4 x", "required: --processes"),
        (
            "--processes 3 --options '--nnodes=2' x",
            "--processes 3 .* 2 hosts: use 2 or 4",
        ),
        ("--processes 4 --options '--nnodes 1:4' x", "one number of hosts"),
        ("--processes 4 --options '--nnodes 2' x", "place to meet: add --rdzv-backend"),
        ("--processes 4 --options '--nproc_per_node 2' x", "--processes sets it"),
        ('--processes 4 --options "--host=\'a" x', "No closing quotation"),
        ("--processes 4 nowhere.py", "no script 'nowhere.py'"),
        ("--processes 4 --launcher mpirun x", "invalid choice: 'mpirun'"),
        ("--processes 4 --process 3 x", "unrecognized arguments: --process"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(launch, "chosen_launcher", lambda: ("torchrun", ""))
    with pytest.raises(SystemExit) as exit_:
        launch.main(shlex.split(arguments))
    assert exit_.value.code == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    "option", ["--num-instances=2", "--num-replicas=2", "--ipus-per-replica=2"]
)
def test_poprun_gets_no_option_twice(option):
    request = LaunchRequest(("train.py",), 2, options=(option,))
    with pytest.raises(ConfigError, match="sets it"):
        launch.poprun_command(request)


@pytest.mark.parametrize(
    ("has_poptorch", "has_poprun", "backend", "expected"),
    [
        (False, False, "auto", "torchrun"),
        (False, True, "auto", "torchrun"),
        (True, False, "auto", "torchrun"),
        (True, True, "auto", "poprun"),
        (True, True, "poptorch", "poprun"),
        (True, True, "emulator", "torchrun"),
    ],
)
def test_poprun_is_chosen_where_poptorch_runs(
    has_poptorch, has_poprun, backend, expected, tmp_path, monkeypatch
):
    poprun = tmp_path / "poprun"
    if has_poprun:
        poprun.touch(mode=0o755)
    if has_poptorch:
        # It would fail if it were imported.
        (tmp_path / "poptorch.py").write_text("raise SystemError", encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("IPUFIT_BACKEND", backend)
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher, remark = launch.chosen_launcher()
    assert launcher == expected
    assert ("enable.sh" in remark) == (has_poptorch and not has_poprun)


def test_what_the_environment_tells_torchrun_counts_as_an_option():
    request = LaunchRequest(("train.py",), 8)
    environment = {
        "PET_NNODES": "2",
        "PET_RDZV_ENDPOINT": "host1:29500",
        "OMP_NUM_THREADS": "3",
    }
    command = launch.torchrun_command(request, environment, cores=16)
    assert "--nproc-per-node=4" in command.arguments
    assert not any("--rdzv" in argument for argument in command.arguments)
    assert command.variables == {}


@pytest.mark.parametrize(("cores", "threads"), [(16, "4"), (7, "1"), (2, "1")])
def test_the_processes_of_a_host_share_its_cores(cores, threads):
    request = LaunchRequest(("train.py",), 4)
    command = launch.torchrun_command(request, {}, cores)
    assert command.variables == {"OMP_NUM_THREADS": threads}
