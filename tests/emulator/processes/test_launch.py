# SPDX-License-Identifier: Apache-2.0
"""PopDist, and `python -m ipufit.emulator --processes` in place of PopRun."""

import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit.emulator import Error, Options, _popdist
from ipufit.emulator import __main__ as command
from ipufit.emulator import _popdist as popdist
from ipufit.emulator.__main__ import instance_variables
from tests.interpreters import run_python
from tests.pool import printed_lines

ROOT = Path(__file__).parents[3]
INSTANCES = ROOT / "tests" / "emulator" / "_instances.py"


@given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_an_instance_sees_what_poprun_would_set(data, count, local):
    index = data.draw(st.integers(0, count - 1))
    variables = instance_variables(
        {
            "RANK": str(index),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "IPUFIT_REPLICAS": str(count * local),
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        assert _popdist.isPopdistEnvSet()
        assert _popdist.getInstanceIndex() == index
        assert _popdist.getNumInstances() == count
        assert _popdist.getNumLocalReplicas() == local
        assert _popdist.getNumTotalReplicas() == count * local
        assert _popdist.getReplicaIndexOffset() == index * local
        assert _popdist.getDeviceId() == 0  # the only instance of its host
        assert _popdist.getNumIpusPerReplica() == 1
        plain = Options()
        options = _popdist.poptorch.Options()
    assert options.replication_factor == local
    assert options.Distributed.processId == index
    assert options.Distributed.numProcesses == count
    assert variables["POPDIST_LOCAL_INSTANCE_INDEX"] == "0"
    # PopRun's instances are those of mpirun, which plain options follow.
    assert plain.Distributed.processId == index
    assert plain.Distributed.numProcesses == count


def test_without_a_number_of_replicas_each_process_has_one():
    variables = instance_variables({"RANK": "1", "WORLD_SIZE": "2"})
    assert variables["POPDIST_NUM_TOTAL_REPLICAS"] == "2"
    assert variables["POPDIST_NUM_LOCAL_REPLICAS"] == "1"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "2", "POPDIST_NUM_TOTAL_REPLICAS": "2"},
    ],
    ids=["nothing", "one process", "PopRun's own"],
)
def test_nothing_is_set_for_one_process_or_under_poprun(environment):
    assert instance_variables(environment) == {}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no whole number"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "IPUFIT_REPLICAS": "3"},
            "3 replicas .* by 2 processes",
        ),
        ({"IPUFIT_REPLICAS": "0"}, "0 replicas"),
    ],
)
def test_a_strange_environment_is_refused(environment, message):
    with pytest.raises(Error, match=message):
        instance_variables(environment)


# Whole command lines -----------------------------------------------------------------


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*arguments, folder):
    command = ("-m", "ipufit.emulator", *arguments)
    return run_python(*command, cwd=folder, env=ENVIRONMENT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "2", "--replicas", "3"], "3 replicas"),
        (["--replicas", "2"], "--replicas 2 needs --processes"),
        (["--processes", "0"], "'0' is not 1 or more"),
    ],
)
def test_a_strange_command_line_is_refused(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["emulator", *arguments, "script.py"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("RANK", "a process of torchrun's already"),
        ("POPDIST_NUM_TOTAL_REPLICAS", "as if PopRun had started"),
    ],
)
def test_processes_of_launchers_start_no_others(monkeypatch, capsys, variable, message):
    monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(sys, "argv", ["emulator", "--processes", "2", "script.py"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_of_popdist_trains_on_all_instances(tmp_path):
    arguments = ("--processes", 2, "--replicas", 4, INSTANCES, "--epochs", 2)
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    # Only the first process is heard, and a function ran on it alone.
    lines = printed_lines(done.stdout)
    losses = [float(line.split()[-1]) for line in lines[1:]]
    assert lines[0] == "instance 0 of 2, replicas 2 of 4"
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert "processes: 2; replicas: 4" in done.stderr
    one, two = (torch.load(str(tmp_path / f"instance-{i}.pt")) for i in range(2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "saved-by.txt").read_text() == "0"


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_an_instance_that_fails_ends_all_with_its_own_error_first(tmp_path, index):
    done = run("--processes", 2, INSTANCES, "--fail", index, folder=tmp_path)
    assert done.returncode != 0
    first = re.search(r"^(\[rank\d\]: )?(\w+Error): (.*)$", done.stderr, re.MULTILINE)
    assert first.groups()[1:] == ("KeyError", "'this instance fails'")


@pytest.mark.slow
def test_torchrun_itself_starts_instances(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("--rdzv-id", tmp_path.name, "--nproc-per-node", "2"),
            *("-m", "ipufit.emulator", str(INSTANCES)),
        ],
        capture_output=True,
        text=True,
        cwd=str(tmp_path),
        env={**ENVIRONMENT, "IPUFIT_REPLICAS": "4"},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "instance 0 of 2, replicas 2 of 4" in done.stdout
    assert "instance 1 of 2, replicas 2 of 4" in done.stdout


# PopDist: one instance without PopRun, and what PopRun's variables say --------------

VARIABLES = [
    "POPDIST_NUM_TOTAL_REPLICAS",
    "POPDIST_NUM_LOCAL_REPLICAS",
    "POPDIST_REPLICA_INDEX_OFFSET",
    "POPDIST_NUM_IPUS_PER_REPLICA",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE",
]


def set_poprun(patch, *, total, local, first=0, ipus=1, is_uniform=True):
    """The environment of one instance."""
    values = [total, local, first, ipus, int(is_uniform)]
    for name, value in zip(VARIABLES, values):
        patch.setenv(name, str(value))


@pytest.fixture(autouse=True)
def _no_poprun(monkeypatch):
    for name in [*VARIABLES, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"]:
        monkeypatch.delenv(name, raising=False)


def test_without_poprun_there_is_one_instance():
    popdist.init()
    assert not popdist.isPopdistEnvSet()
    assert popdist.getInstanceIndex() == 0
    assert popdist.getNumInstances() == 1
    assert popdist.getNumTotalReplicas() == 1
    assert popdist.getNumLocalReplicas() == 1
    assert popdist.getNumIpusPerReplica() == 1
    assert popdist.getDeviceId() == popdist.popdist_core.getDeviceId(4) == 0


@pytest.mark.parametrize("setting", [{"total": 3}, {"total": 4, "is_uniform": False}])
def test_unequal_instances_are_refused(monkeypatch, setting):
    set_poprun(monkeypatch, local=2, **setting)
    with pytest.raises(RuntimeError, match="same number of replicas"):
        popdist.getNumInstances()
    with pytest.raises(RuntimeError, match="same number of replicas"):
        popdist.poptorch.Options()


def run_on(instances, path):
    index = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        set_poprun(patch, total=2, local=1, first=index)
        popdist.init()
        result = popdist.execute_on_instances(instances, leave_a_file, path)
    return result, path.exists()


def leave_a_file(path):
    time.sleep(0.2)  # the others would come first
    path.write_text("here")
    return torch.distributed.get_rank()


@pytest.mark.parametrize(("instances", "results"), [([1], [(None, True), (1, True)])])
def test_a_function_runs_on_some_instances_while_others_wait(
    pool, tmp_path, instances, results
):
    assert pool.run(run_on, instances, tmp_path / "file") == results


def test_a_function_runs_without_poprun():
    assert popdist.execute_on_instances({0}, divmod, 7, 3) == (2, 1)
    assert popdist.execute_on_instances({1, 2}, pytest.fail, "not here") is None


@pytest.mark.parametrize(
    "duplicate", [lambda o: o.clone(), lambda o: pickle.loads(pickle.dumps(o))]
)
def test_copies_refuse_too(monkeypatch, duplicate):
    set_poprun(monkeypatch, total=4, local=2, first=2)
    options = duplicate(popdist.poptorch.Options())
    assert options.Distributed.processId == 1
    with pytest.raises(RuntimeError, match="Cannot call"):
        options.Distributed.disable()
    with pytest.raises(RuntimeError, match="Cannot call"):
        options.replicationFactor(1)
