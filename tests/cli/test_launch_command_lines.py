# SPDX-License-Identifier: Apache-2.0
"""The command lines that `ipufit launch` makes, and the ones that it refuses."""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from ipufit import cli

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "how-to" / "pods.md").read_text("utf-8")
BLOCKS = [
    block.replace("\\\n", "")
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)
]
CALL = re.compile(r"ipufit launch ([^\n#]*?)(?= && |  #|\n|$)")
CALLS = [call for block in BLOCKS for call in CALL.findall(block)]
EXPANSIONS = [
    tuple(lines)
    for block in BLOCKS
    for lines in [block[2:].splitlines()]
    if block.startswith("$ ") and len(lines) == 2
]

# Anything that a shell or a parser could take for its own.
OWN = ["--", "-", "", "-m", "--processes", "--nnodes=3", "--options", "a b", "'", "$X"]
words = st.one_of(
    st.sampled_from(OWN),
    st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=8),
)
programs = st.builds(
    lambda script, arguments: [script, *arguments],
    st.sampled_from(["train.py", "dir with space/train.py"]),
    st.lists(words),
)


def golden():
    """Pairs of a command line for `ipufit launch` and the command that it becomes."""
    path = ROOT / "tests" / "golden" / "launch_commands.txt"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    return list(zip(lines[::2], lines[1::2]))


def shown(arguments):
    """The line that `ipufit launch --dry-run` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.launch(["--dry-run", *arguments])
    return out.getvalue()[:-1]


def command(launcher, processes, program, *options):
    """Variables that are set, and the words of the command."""
    line = ["--launcher", launcher, "--processes", str(processes), *options, *program]
    found = shlex.split(shown(line))
    variables = [word for word in found if re.match(r"[A-Z_]+=", word)]
    return variables, found[len(variables) :]


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(sys, "executable", "python")
    for name in (
        *("OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_JOBID"),
        "IPUOF_VIPU_API_PARTITION_ID",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("line", "expected"), [*golden(), *EXPANSIONS])
def test_a_command_line_is_the_golden_one_and_that_of_the_page(line, expected):
    _, _, *arguments = shlex.split(line)
    assert shown(arguments) == expected


@pytest.mark.parametrize("call", CALLS)
def test_a_command_of_the_page_is_taken(call):
    assert " train.py" in shown(shlex.split(call))


def test_the_command_for_several_hosts_reaches_poprun_as_it_is_meant():
    [call] = [call for call in CALLS if "MASTER_ADDR=host1" in call]
    found = shlex.split(shown(shlex.split(call)))
    assert "--host=host1,host2,host3,host4" in found
    assert "--vipu-partition=p64" in found
    [local] = [word for word in found if word.startswith("--mpi-local-args=")]
    assert local.endswith("-x MASTER_ADDR=host1 -x MASTER_PORT=29500")
    assert found[-3:] == [sys.executable, "-u", "train.py"]


def test_the_page_names_every_option_of_the_command(capsys):
    with pytest.raises(SystemExit):
        cli.launch(["--help"])
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.M))
    assert len(options) >= 6
    assert [option for option in options if option not in PAGE] == []


@given(programs, st.integers(1, 8), st.booleans())
def test_torchrun_passes_a_program_and_its_arguments_on(program, processes, is_module):
    options = ["-m"] if is_module else []
    _, found = command("torchrun", processes, program, *options)
    assert found[:3] == [sys.executable, "-m", "ipufit._torchrun"]
    read = get_args_parser().parse_args(found[3:])  # torchrun's own reading
    assert [read.training_script, *read.training_script_args] == program
    assert read.module is is_module
    assert read.nproc_per_node == str(processes)


@given(programs, st.integers(1, 8))
def test_poprun_gets_a_program_and_its_arguments_at_the_end(program, processes):
    _, found = command("poprun", processes, program)
    assert found[-len(program) - 2 :] == [sys.executable, "-u", *program]


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ({}, "", []),
        ({"SLURM_JOB_ID": "7"}, "", ["--vipu-partition=slurm_7"]),
        ({"SLURM_JOBID": "8"}, "", ["--vipu-partition=slurm_8"]),
        (
            {"SLURM_JOB_ID": "7", "IPUOF_VIPU_API_PARTITION_ID": "p"},
            "",
            ["--vipu-partition=p"],
        ),
        ({"SLURM_JOB_ID": "7"}, "--vipu-partition=q", ["--vipu-partition=q"]),
        ({"SLURM_JOB_ID": "7"}, "--vipu-allocation a", ["--vipu-allocation"]),
    ],
)
def test_poprun_gets_the_partition_of_the_job(
    variables, options, expected, monkeypatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, found = command("poprun", 1, ["train.py"], "--options", options)
    assert [word for word in found if word.startswith("--vipu")] == expected


@given(st.lists(st.text("abc=,: '\"$", min_size=1).map("--x".__add__)))
def test_options_of_the_launcher_are_passed_as_they_are(options):
    text = " ".join(map(shlex.quote, options))
    for launcher in ("poprun", "torchrun"):
        _, found = command(launcher, 2, ["train.py"], "--options", text)
        start = found.index(options[0]) if options else 0
        assert found[start:][: len(options)] == options


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--processes 4", "No script"),
        (
            "--processes 4 --replicas 10 x",
            "10 can't be shared .* 4 processes: use 8 or",
        ),
        ("--processes 0 x", "'0' is not a number from 1 to 1024, the IPUs of"),
        ("--processes 99999999 x", "'99999999' is not a number from 1 to 1024"),
        (f"--replicas {'9' * 5000} x", "is not a number from 1 to 1024"),
        ("--replicas 4 x", "required: --processes"),
        (
            "--processes 3 --options '--nnodes=2' x",
            "--processes 3 .* 2 hosts: use 2 or 4",
        ),
        ("--processes 4 --options '--nnodes 2' x", "place to meet: add --rdzv-backend"),
        ("--processes 4 --options '--nnodes 1:2' x", "--nnodes 1:2: .*one number"),
        ('--processes 4 --options "--host=\'a" x', "No closing quotation"),
        ("--processes 4 nowhere.py", "no script 'nowhere.py'"),
        ("--processes 4 --launcher mpirun x", "invalid choice: 'mpirun'"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, words, capsys, monkeypatch):
    monkeypatch.setenv("IPUFIT_BACKEND", "emulator")
    with pytest.raises(SystemExit) as exit_:
        cli.launch(shlex.split(arguments))
    assert exit_.value.code == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("has_poptorch", "has_poprun", "backend", "expected"),
    [
        (False, True, "auto", "torchrun"),
        (True, False, "auto", "torchrun"),
        (True, True, "auto", "poprun"),
        (True, True, "poptorch", "poprun"),
        (True, True, "emulator", "torchrun"),
    ],
)
def test_poprun_is_chosen_where_poptorch_runs(
    has_poptorch, has_poprun, backend, expected, tmp_path, monkeypatch, capsys
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
    monkeypatch.setattr("os.execvpe", lambda *_: None)
    cli.launch(["--processes", "2", __file__])
    told = capsys.readouterr().err
    assert ("ipufit._torchrun" in told) == (expected == "torchrun")
    assert ("poprun --num-instances=2" in told) == (expected == "poprun")
    assert ("enable.sh" in told) == (has_poptorch and not has_poprun)


def test_a_launcher_that_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit) as stop:
        cli.launch(["--processes", "2", "--launcher", "poprun", __file__])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "poprun isn't on PATH: the enable.sh of the Poplar SDK" in told


def test_what_the_environment_tells_torchrun_counts_as_an_option(monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "host1:29500")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    variables, found = command("torchrun", 8, ["train.py"])
    assert "--nproc-per-node=4" in found
    assert not any("--rdzv" in word for word in found)
    assert variables == []


@pytest.mark.parametrize(("cores", "threads"), [(16, "4"), (7, "1")])
def test_the_processes_of_a_host_share_its_cores(cores, threads, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    variables, _ = command("torchrun", 4, ["train.py"])
    assert variables == [f"OMP_NUM_THREADS={threads}"]
