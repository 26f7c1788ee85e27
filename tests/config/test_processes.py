# SPDX-License-Identifier: Apache-2.0
"""Processes and replicas: the config's fields, the launcher, the user's options."""

from __future__ import annotations

import pytest

from ipufit import ConfigError, IPUConfig, poptorch

POPRUN = {
    "POPDIST_NUM_TOTAL_REPLICAS": "8",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "6",
    "POPDIST_NUM_IPUS_PER_REPLICA": "1",
}


@pytest.fixture
def launched(monkeypatch):
    """Set the variables of a launcher."""

    def launch(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


def options_of(config, batch_size=32):
    plan = config.training_plan(batch_size)
    return config.build_training_options(plan), config.build_inference_options(
        config.inference_plan(batch_size)
    )


def test_a_tool_of_ones_own_names_the_process():
    config = IPUConfig(process_id=1, num_processes=4)
    assert config.training_plan(32).micro_batch_size == 8
    for options in options_of(config):
        assert options.Distributed.processId == 1
        assert options.Distributed.numProcesses == 4


def test_the_launchers_processes_divide_the_batch(launched):
    launched({"RANK": "2", "WORLD_SIZE": "4", "IPUFIT_REPLICAS": "8"})
    config = IPUConfig()
    plan = config.training_plan(32)
    assert (plan.processes, plan.replicas, plan.micro_batch_size) == (4, 2, 4)
    for options in options_of(config):
        assert options.replication_factor == 2
        assert options.Distributed.processId == 2


@pytest.mark.skipif(poptorch.__name__ == "poptorch", reason="PopDist isn't there")
def test_popruns_options_are_popdists(launched):
    launched(POPRUN)
    for options in options_of(IPUConfig()):
        assert options.replication_factor == 2
        assert options.Distributed.processId == 3
        assert options.Distributed.numProcesses == 4
        with pytest.raises(RuntimeError, match="Cannot call `replicationFactor`"):
            options.clone().replicationFactor(1)


def test_replicas_may_repeat_the_launchers_but_not_contradict(launched):
    launched(POPRUN)
    assert IPUConfig(replicas=2).num_replicas == 2
    with pytest.raises(ConfigError, match=r"replicas=4, and the launcher .* 2 repl"):
        IPUConfig(replicas=4)


def test_own_options_get_the_process(launched):
    launched({"RANK": "1", "WORLD_SIZE": "2"})
    own = poptorch.Options().replicationFactor(4)
    config = IPUConfig(training_options=own, inference_options=own)
    for options in options_of(config):
        assert options.Distributed.processId == 1
    assert own.Distributed.numProcesses == 1  # cloned


def test_own_options_of_other_processes_are_refused(launched):
    launched({"RANK": "1", "WORLD_SIZE": "2"})
    own = poptorch.Options()
    own.Distributed.configureProcessId(0, 4)
    with pytest.raises(ConfigError, match=r"process 0 of 4, and torchrun .* 1 of 2"):
        IPUConfig(training_options=own).training_plan(32)


def test_own_options_may_name_the_process():
    own = poptorch.Options()
    own.Distributed.configureProcessId(1, 2)
    assert IPUConfig(training_options=own).process.count == 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"process_id": 0}, "give both"),
        ({"num_processes": 2}, "give both"),
        ({"process_id": 2, "num_processes": 2}, "count from 0 to 1"),
        ({"process_id": -1, "num_processes": 2}, "count from 0 to 1"),
        ({"process_id": 0.5, "num_processes": 2}, "process_id=0.5"),
        ({"process_id": 0, "num_processes": 0}, "num_processes=0"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, text):
    with pytest.raises(ConfigError, match=text):
        IPUConfig(**fields)


def test_half_of_a_launchers_variables_is_refused_at_once(launched):
    launched({"WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK is missing"):
        IPUConfig()
