# SPDX-License-Identifier: Apache-2.0
"""PopDist: one instance without PopRun, and what PopRun's variables say."""

from __future__ import annotations

import pickle
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ipufit.emulator as poptorch
from ipufit.emulator import _popdist as popdist

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


@given(data=st.data(), instances=st.integers(1, 16), local=st.integers(1, 16))
def test_instances_follow_from_the_replicas(data, instances, local):
    index = data.draw(st.integers(0, instances - 1))
    with pytest.MonkeyPatch.context() as patch:
        first = index * local
        set_poprun(patch, total=instances * local, local=local, first=first, ipus=4)
        assert popdist.isPopdistEnvSet()
        assert popdist.getNumIpusPerReplica() == 4
        assert popdist.getNumInstances() == instances
        assert popdist.getInstanceIndex() == index
        options = popdist.poptorch.Options()
    assert options.replication_factor == local
    assert options.Distributed.numProcesses == instances
    assert options.Distributed.processId == index


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


@pytest.mark.parametrize(
    ("instances", "results"),
    [({0}, [(0, True), (None, True)]), ([1], [(None, True), (1, True)])],
)
def test_a_function_runs_on_some_instances_while_others_wait(
    pool, tmp_path, instances, results
):
    assert pool.run(run_on, instances, tmp_path / "file") == results


def test_a_function_runs_without_poprun():
    assert popdist.execute_on_instances({0}, divmod, 7, 3) == (2, 1)
    assert popdist.execute_on_instances({1, 2}, pytest.fail, "not here") is None


@pytest.mark.parametrize("given", [{}, {"ipus_per_replica": 2}])
def test_options_are_poptorchs(given):
    options = popdist.poptorch.Options(**given)
    assert isinstance(options, poptorch.Options)
    assert isinstance(options.Distributed, poptorch.options._DistributedOptions)
    assert options.deviceIterations(4).device_iterations == 4
    assert options.Distributed.processId == 0
    assert options.Distributed.numProcesses == 1


def test_conversion_leaves_them_frozen_or_not():
    options = popdist.poptorch.Options().outputMode(poptorch.OutputMode.All)
    poptorch.poptorch_core._validateOptions(options.toDict())
    options.checkIsFrozen()
    options._freeze()
    options.toDict()
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.checkIsFrozen()


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
