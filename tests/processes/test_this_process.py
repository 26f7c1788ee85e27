# SPDX-License-Identifier: Apache-2.0
"""Which process this is, as launchers, groups and configs say; and where all meet."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from ipufit import ConfigError, ProcessError, _env
from ipufit.distributed import (
    ALONE,
    Processes,
    ProcessInfo,
    configure,
    get_process_info,
)
from tests.ports import free_port
from tests.processes.runs import Answers

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
SLURM = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
POPRUN = {
    "POPDIST_NUM_TOTAL_REPLICAS": "8",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "6",
    "POPDIST_LOCAL_INSTANCE_INDEX": "1",
}
FIRST_OF_TWO = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def _by_the_launcher_again():
    yield
    configure(None)


def process_of(variables):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return get_process_info()


# Launchers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ALONE),
        (TORCHRUN, ProcessInfo(3, 8, 1, "torchrun")),
        (MPI, ProcessInfo(1, 2, 0, "mpirun")),
        (SLURM, ProcessInfo(2, 4, 0, "srun")),
        (POPRUN, ProcessInfo(3, 4, 1, "poprun", 2)),
        # PopRun starts processes with Open MPI, and torchrun often runs in SLURM.
        ({**MPI, **POPRUN}, ProcessInfo(3, 4, 1, "poprun", 2)),
        ({**SLURM, **TORCHRUN}, ProcessInfo(3, 8, 1, "torchrun")),
        # A batch script of SLURM is no task of a step.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ALONE),
    ],
)
def test_a_launcher_says_which_process_this_is(variables, expected):
    assert process_of(variables) == expected


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [("torchrun", TORCHRUN), ("mpirun", MPI), ("PopRun", POPRUN)],
)
def test_half_of_a_launchers_variables_is_refused_with_the_others_names(
    launcher, variables
):
    optional = ("LOCAL_RANK", "LOCAL_INSTANCE_INDEX")
    needed = [name for name in variables if not name.endswith(optional)]
    for name in needed:
        with pytest.raises(ConfigError, match=f"{launcher}'s variable") as caught:
            process_of({name: variables[name]})
        assert all(other in str(caught.value) for other in needed)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({**TORCHRUN, "RANK": "eight"}, "RANK='eight' is not a whole number"),
        (
            {**TORCHRUN, "RANK": "8"},
            "RANK=8 doesn't fit WORLD_SIZE=8: .* 7 is the last",
        ),
        (
            {**TORCHRUN, "WORLD_SIZE": "0"},
            "WORLD_SIZE='0' is not a whole number of 1",
        ),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is not a whole number of 0 or more"),
        ({**POPRUN, "POPDIST_NUM_LOCAL_REPLICAS": "3"}, "3 of 8 replicas"),
    ],
)
def test_values_that_do_not_fit_are_refused(variables, text):
    with pytest.raises(ConfigError, match=text):
        process_of(variables)


@given(count=st.integers(1, 64), each=st.integers(1, 16))
def test_the_replicas_of_a_launch_are_shared_equally(count, each):
    launched = {"RANK": "0", "WORLD_SIZE": str(count)}
    info = process_of({**launched, "IPUFIT_REPLICAS": str(count * each)})
    assert (info.replicas, info.total_replicas) == (each, count * each)
    if count > 1:
        with pytest.raises(ConfigError, match=f"Use a multiple of {count}"):
            process_of({**launched, "IPUFIT_REPLICAS": str(count * each + 1)})


# Processes that load --------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "variables"),
    [
        ("fork", {}),
        ("fork", FIRST_OF_TWO),
        pytest.param("spawn", FIRST_OF_TWO, marks=pytest.mark.slow),
    ],
)
def test_processes_that_load_hear_the_number_of_a_config(monkeypatch, start, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    configure(ProcessInfo(1, 4, 1, "config"))
    loader = torch.utils.data.DataLoader(
        Answers(), None, num_workers=1, multiprocessing_context=start
    )
    assert [tuple(answer) for answer in loader] == [(1, 4)]


def test_processes_that_load_hear_the_number_of_a_group(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert get_process_info().launcher == "group"
        assert os.environ[_env.PROCESS] == "0/1:0/1"
    finally:
        distributed.destroy_process_group()
    get_process_info()
    assert _env.PROCESS not in os.environ


def test_a_number_that_is_taken_back_is_told_to_nobody():
    configure(ProcessInfo(1, 4, 1, "config"))
    configure(None)
    assert _env.PROCESS not in os.environ
    assert get_process_info() == ProcessInfo()


@pytest.fixture
def child(monkeypatch):
    """This process as one that another has started."""
    parent = multiprocessing.current_process()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)


@pytest.mark.usefixtures("child")
def test_a_process_launched_by_itself_since_has_its_launchers_number(monkeypatch):
    monkeypatch.setenv(_env.PROCESS, "1/4:0/1")
    assert get_process_info() == ProcessInfo(1, 4, 1, "config")
    assert process_of(FIRST_OF_TWO) == ProcessInfo(0, 2, 0, "torchrun")


def test_a_script_that_is_no_child_has_its_own_number(monkeypatch):
    monkeypatch.setenv(_env.PROCESS, "1/4:0/1")
    assert get_process_info() == ProcessInfo()
    assert _env.PROCESS not in os.environ  # its own children are told nothing


@pytest.mark.usefixtures("child")
@pytest.mark.parametrize("text", ["1", "4/4:0/1", "a/b"])
def test_a_number_that_ipufit_did_not_tell_is_refused(monkeypatch, text):
    monkeypatch.setenv(_env.PROCESS, text)
    with pytest.raises(ConfigError, match="was not set by ipufit"):
        get_process_info()


# Where all meet -------------------------------------------------------------------


def met(launcher, monkeypatch, variables):
    """Host and port where a process of four looks for the others."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sought = []

    def store(host, port, *rest, **settings):
        sought.append((host, port))
        raise RuntimeError("nobody is there")

    monkeypatch.setattr("torch.distributed.TCPStore", store)
    with pytest.raises(ProcessError, match="Process 1 of 4 couldn't reach"):
        Processes(ProcessInfo(1, 4, 1, launcher)).barrier()
    return sought


def test_a_process_that_does_not_come_is_waited_for_once(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("IPUFIT_PROCESS_TIMEOUT", "1")
    began = []
    monkeypatch.setattr("torch.distributed.init_process_group", began.append)
    with pytest.raises(ProcessError, match="no sign of process 1"):
        Processes(ProcessInfo(0, 3, 0, "torchrun")).barrier()
    assert not began  # it would wait for the others anew


@pytest.mark.parametrize(
    ("launcher", "variables", "expected"),
    [
        ("mpirun", {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, ("127.0.0.1", 29500)),
        ("mpirun", {"MASTER_ADDR": "pod1"}, ("pod1", 29500)),
        ("poprun", {"MASTER_ADDR": "pod1", "MASTER_PORT": "7"}, ("pod1", 7)),
        ("config", {"MASTER_ADDR": "pod1", "MASTER_PORT": "7"}, ("pod1", 7)),
        (
            "srun",
            {"SLURM_STEP_NODELIST": "node[03-05,9],other", "SLURM_JOB_ID": "123456"},
            ("node03", 18456),
        ),
        (
            "srun",
            {"SLURM_STEP_NODELIST": "alpha,beta", "SLURM_JOB_ID": "1"},
            ("alpha", 15001),
        ),
    ],
)
def test_process_0_is_found(launcher, variables, expected, monkeypatch):
    assert met(launcher, monkeypatch, variables) == [expected]


@pytest.mark.parametrize(
    ("launcher", "variables", "missing"),
    [
        ("config", {}, "MASTER_ADDR and MASTER_PORT"),
        ("config", {"MASTER_ADDR": "pod1"}, "set MASTER_PORT"),
        # Two hosts: nothing says which is the first.
        ("poprun", {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "set MASTER_ADDR"),
        ("config", {"MASTER_ADDR": "pod1", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    ],
)
def test_what_is_missing_is_named(launcher, variables, missing, monkeypatch):
    with pytest.raises(ConfigError, match=missing):
        met(launcher, monkeypatch, variables)
