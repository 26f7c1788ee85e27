# SPDX-License-Identifier: Apache-2.0
"""How processes find one another, and what they say if they don't."""

import contextlib
import logging
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator._logging import logger
from ipufit.emulator._processes import (
    Processes,
    join_processes,
)
from tests.interpreters import run_python
from tests.ports import free_port


class Squares(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.layer = nn.Linear(size, 2)
        self.drop = nn.Dropout(0.5, inplace=True)  # else nothing in inference
        self.register_buffer("offset", torch.zeros(2))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        outputs = self.drop(self.layer(x)) + self.offset
        return outputs, poptorch.identity_loss((outputs**2).mean(), reduction="mean")


class Scaled(nn.Module):
    def __init__(self, groups=2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(groups, 3))

    def forward(self, x):
        outputs = x * self.scale
        return outputs, poptorch.identity_loss((outputs**2).mean(), reduction="mean")


def training_model(model, process, count, **settings):
    options = poptorch.Options()
    options.Distributed.configureProcessId(process, count)
    options.outputMode(poptorch.OutputMode.All)
    for name, value in settings.items():
        getattr(options, name)(value)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, options, optimizer)


class Heard(logging.Handler):
    """Keeps warnings."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def heard():
    handler, level = Heard(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield handler.messages
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


# The group ------------------------------------------------------------------------


def describe(process):
    try:
        join_processes(process, dist.get_world_size())
    except poptorch.Error as error:
        return error.message
    return ""


def test_another_size_or_index_than_the_groups_is_refused(pool):
    for message in pool.run(describe, 0)[1:]:
        assert "process 0 of 2" in message
        assert "process 1 of 2" in message
        assert "configureProcessId(1, 2)" in message


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "missing: MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_ADDR": "localhost"}, "missing: MASTER_PORT"),
    ],
)
def test_missing_variables_are_named(monkeypatch, given, missing):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(poptorch.Error, match=missing):
        join_processes(0, 2)
    assert not dist.is_initialized()


def test_who_comes_alone_says_so_after_the_time_out(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("IPUFIT_PROCESS_TIMEOUT", "1")
    with pytest.raises(poptorch.Error) as caught:
        join_processes(0, 2)
    assert f"localhost:{port}" in caught.value.message
    assert "IPUFIT_PROCESS_TIMEOUT" in caught.value.message
    assert not dist.is_initialized()


def end_early(index):
    rank = dist.get_rank()
    joined = Processes(rank, 2, dist.group.WORLD)
    joined.wait()
    if rank == index:
        raise KeyError("the first error")
    with pytest.raises(poptorch.Error) as caught:
        joined.gather(torch.ones(3))
    raise caught.value


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_ends_is_an_error_in_the_others(pool, index):
    with pytest.raises(KeyError, match="the first error") as caught:
        pool.run(end_early, index)
    others = str(caught.value.__cause__)
    assert f"process {1 - index} raised Error" in others
    assert f"Process {1 - index} of 2 waited" in others
    assert "Its own error is the first in the output" in others


# The same program, the same weights -------------------------------------------------


def begin(case):
    rank = dist.get_rank()
    size = 3 + rank if case == "the weights" else 3
    settings = {
        "the number of device iterations": {"deviceIterations": 1 + rank},
        "the number of replicas": {"replicationFactor": 1 + rank},
    }
    executor = training_model(Squares(size), rank, 2, **settings.get(case, {}))
    rows = 1 + rank if case in settings else 1
    try:
        executor(torch.ones(rows, size))
    except poptorch.Error as error:
        assert not executor.isAttachedToDevice()
        return error.message
    return ""


@pytest.mark.parametrize(
    "case",
    ["the weights", "the number of device iterations", "the number of replicas"],
)
def test_processes_that_train_something_else_are_refused_in_all(pool, case):
    for message in pool.run(begin, case):
        assert f"but {case} of process 1 and of process 0 differ" in message


def begin_with_other_weights():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Squares()
    model.offset.fill_(rank)
    executor = training_model(model, rank, 2)
    with heard() as messages:
        executor.compile(torch.ones(1, 3))
        for _ in range(2):  # later attachings find nothing to say
            executor.detachFromDevice()
            executor.attachToDevice()
    executor.copyWeightsToHost()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    executor.destroy()
    return state, [text for text in messages if "other weights" in text]


def test_all_begin_with_the_weights_of_process_0_and_the_others_say_so(pool):
    (first, silence), (second, warnings) = pool.run(begin_with_other_weights)
    assert silence == []
    assert len(warnings) == 1
    assert "Process 1 began with other weights" in warnings[0]
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(0)
    assert torch.equal(first["layer.weight"], Squares().layer.weight)
    assert first["offset"].tolist() == [0.0, 0.0]


# What differs between processes -----------------------------------------------------


def drop():
    rank = dist.get_rank()
    options = poptorch.Options().randomSeed(42)
    options.Distributed.configureProcessId(rank, 2)
    model = Squares()
    executor = poptorch.inferenceModel(model, options)
    zeros = [executor(torch.ones(64, 3))[0] == 0 for _ in range(2)]
    state = executor.rng_state
    again = executor(torch.ones(64, 3))[0]
    executor.rng_state = state
    return zeros, state[0], torch.equal(executor(torch.ones(64, 3))[0], again)


def test_processes_draw_other_random_numbers_and_repeat_them(pool):
    (first, seed, repeats), (second, other_seed, other_repeats) = pool.run(drop)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert (seed, other_seed) == (42, 42)
    assert repeats
    assert other_repeats
    options = poptorch.Options().randomSeed(42)
    alone = poptorch.inferenceModel(Squares(), options)
    assert torch.equal(alone(torch.ones(64, 3))[0] == 0, first[0])  # as process 0


@pytest.mark.parametrize(
    "kind", [poptorch.CommGroupType.Consecutive, poptorch.CommGroupType.NoGrouping]
)
def test_groups_of_the_replicas_of_all_processes_are_refused(kind):
    executor = training_model(Scaled(), 0, 2, replicationFactor=2)
    executor.scale.replicaGrouping(kind, 1, poptorch.VariableRetrievalMode.OnePerGroup)
    with pytest.raises(poptorch.Error, match="replicaGrouping of scale"):
        executor.compile(torch.ones(2, 3))


def train_one_group():
    rank = dist.get_rank()
    model = Scaled(groups=1)
    executor = training_model(model, rank, 2, replicationFactor=2)
    mode = poptorch.VariableRetrievalMode.OnePerGroup
    executor.scale.replicaGrouping(poptorch.CommGroupType.All, 0, mode)
    executor(torch.full((2, 3), 1.0 + rank))
    executor.destroy()
    return model.scale.detach()


def test_a_group_of_all_replicas_is_of_those_of_all_processes(pool):
    first, second = pool.run(train_one_group)
    # d/ds (s x)^2 = 2 x^2, in the mean over 3 numbers and over x = 1, 1, 2, 2
    expected = torch.full((1, 3), 1.0 - 0.1 * 2.0 / 3.0 * (1.0 + 4.0) / 2.0)
    torch.testing.assert_close(first, expected)
    assert torch.equal(first, second)


def test_inputs_of_groups_apart_are_refused():
    options = poptorch.Options().replicationFactor(4)
    options.inputReplicaGrouping(2, poptorch.CommGroupType.Orthogonal)
    options.Distributed.configureProcessId(1, 2)
    executor = poptorch.inferenceModel(Squares(), options)
    with pytest.raises(poptorch.Error, match="isn't Consecutive"):
        executor.compile(torch.ones(2, 3))


# A fork waits for gloo's threads where the interpreter needs it, and nowhere else ---

FORKS = """
import os, sys
import torch.distributed as dist
import ipufit.emulator
from ipufit.emulator import _processes

pauses = []
_processes.time.sleep = pauses.append

def fork():
    child = os.fork()
    if not child:
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8

fork()
alone = len(pauses)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fork()
joined = len(pauses)
dist.destroy_process_group()
fork()
print(alone, joined, len(pauses))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system doesn't fork")
def test_forks_of_joined_processes_wait():
    run = run_python("-c", FORKS)
    waits = int(sys.version_info < (3, 12))
    *_, counts = run.stdout.splitlines()  # after what gloo says
    assert counts.split() == ["0", str(waits), str(waits)]
