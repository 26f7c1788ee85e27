# SPDX-License-Identifier: Apache-2.0
"""Stages, phases, strategies, and where they put the blocks of a trace."""

import copy
import pickle

import pytest

from ipufit.emulator.enums import AutoStage, Liveness
from ipufit.emulator.options import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)

PIPELINES = [PipelinedExecution, ShardedExecution]
PHASED = [SerialPhasedExecution, ParallelPhasedExecution]


def _place(strategy, *blocks):
    """(IPU, stage) of blocks given as (name, IPU)."""
    placements = [strategy._place(name, ipu) for name, ipu in blocks]
    return [(placement.ipu, placement.stage) for placement in placements]


# Stage and Phase


def test_a_phase_is_of_stages_or_of_one_stage_of_blocks():
    first, second = Stage("a"), Stage("b")
    assert Phase(first, second).stages == (first, second)
    assert Phase(first, second).stage(1) is second
    assert [stage.blocks for stage in Phase("a", "b").stages] == [("a", "b")]
    assert Phase().stages == ()


@pytest.mark.parametrize(
    ("kinds", "arguments", "error", "message"),
    [
        ([Stage], ("a", 1), AssertionError, "block_ids"),
        ([Phase], (Stage("a"), "b"), AssertionError, "stages only or block ids only"),
        (PIPELINES, ("a", "a"), AssertionError, "a associated with more than one"),
        (PIPELINES, (Stage("a"), ["a"]), AssertionError, "a associated with more than"),
        (PIPELINES, (AutoStage.SameAsIpu, "a"), TypeError, "iterable"),
        (PIPELINES, ([Stage("a")],), AssertionError, "block_ids"),
        (PHASED, (), AssertionError, "list them"),
        (PHASED, (("a", "b"),), AssertionError, "or a list of them"),
        (PHASED, ([Phase("a"), Phase("b")],), AssertionError, "stages only or"),
        (PHASED, ([Stage("a"), "b"],), AssertionError, "stages only or"),
        (PHASED, ("a", "a"), AssertionError, "a associated with more than one stage"),
    ],
)
def test_other_stages_and_phases_are_refused(kinds, arguments, error, message):
    for kind in kinds:
        with pytest.raises(error, match=message):
            kind(*arguments)


def test_a_phase_gives_each_stage_its_ipu():
    phase = Phase(Stage("a"), Stage("b"))
    assert phase.ipus(2, 3) is None
    strategy = SerialPhasedExecution(phase)
    assert _place(strategy, ("a", None), ("b", 7)) == [(2, -1), (3, -1)]
    with pytest.raises(AssertionError, match="1 IPUs for 2 stages"):
        phase.ipus(2)


# Pipelined and sharded


@pytest.mark.parametrize("kind", PIPELINES)
def test_stages_are_numbered_by_position_whatever_their_form(kind):
    strategy = kind(["a", "b"], ("c",), "d", Stage("e"), iter(["f"]))
    blocks = [(name, None) for name in "abcdef"]
    assert _place(strategy, *blocks) == [
        (0, 0),
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
    ]


def test_the_ipu_is_that_of_the_stage_then_of_the_block_then_the_position():
    strategy = PipelinedExecution(Stage("a").ipu(0), "b", "c")
    assert _place(strategy, ("a", 9), ("b", 0), ("c", None)) == [(0, 0), (0, 1), (2, 2)]


@pytest.mark.parametrize("arguments", [(), (AutoStage.SameAsIpu,), ([],), (Stage(),)])
def test_the_stage_is_the_ipu_by_default(arguments):
    strategy = PipelinedExecution(*arguments)
    assert _place(strategy, ("a", 0), ("b", 1), ("c", 0)) == [(0, 0), (1, 1), (0, 0)]


def test_automatic_stages_count_new_blocks_from_one():
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    blocks = [("a", 0), ("b", 1), ("c", 2), ("d", 1), ("a", 0)]
    # PopTorch 3.4, tests/pipelining_test.py:334-365, has IPUs 0, 1, 2, 1.
    assert _place(strategy, *blocks) == [(0, 1), (1, 2), (2, 3), (1, 4), (0, 1)]


def test_a_block_keeps_its_first_stage_but_follows_its_ipu():
    strategy = PipelinedExecution()
    assert _place(strategy, ("a", 0), ("a", 2), ("a", None)) == [(0, 0), (2, 0), (0, 0)]


# Phased


@pytest.mark.parametrize("kind", PHASED)
def test_phases_take_several_forms(kind):
    stage = Stage("c")
    strategy = kind(Phase("a"), stage, "d", ["e", "f"], [Stage("g"), Stage("h")])
    assert [len(strategy.phase(i).stages) for i in range(5)] == [1, 1, 1, 1, 2]
    assert strategy.stage("c") is stage
    assert strategy.stage("e") is strategy.stage("f")
    assert [strategy._place(name, 0).phase for name in "acdefgh"] == [
        0,
        1,
        2,
        3,
        3,
        4,
        4,
    ]


def test_serial_phases_set_their_liveness():
    strategy = SerialPhasedExecution("a")
    assert strategy.setTensorsLiveness(Liveness.OffChipAfterEachPhase) is strategy
    assert strategy.backendOptions() == {
        "execution_mode": 2,
        "separate_backward_phase": False,
        "tensors_liveness": 3,
        "serial_phases_execution": True,
    }
    with pytest.raises(AssertionError):
        strategy.setTensorsLiveness(3)
    assert not hasattr(strategy, "sendTensorsOffChipAfterFwd")


def test_parallel_phases_send_tensors_off_chip():
    strategy = ParallelPhasedExecution("a")
    assert strategy.backendOptions() == {
        "execution_mode": 2,
        "separate_backward_phase": False,
        "tensors_liveness": 0,
        "serial_phases_execution": False,
    }
    assert strategy.sendTensorsOffChipAfterFwd() is strategy
    assert strategy.backendOptions()["tensors_liveness"] == 1
    strategy.sendTensorsOffChipAfterFwd(False)
    assert strategy.backendOptions()["tensors_liveness"] == 0
    with pytest.raises(AssertionError):
        strategy.sendTensorsOffChipAfterFwd(1)
    assert not hasattr(strategy, "setTensorsLiveness")


# Modes and copies


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
@pytest.mark.parametrize(
    "strategy",
    [
        PipelinedExecution("a", Stage("b").ipu(5)),
        ShardedExecution(AutoStage.AutoIncrement),
        SerialPhasedExecution(Phase("a"), "b"),
    ],
)
def test_copies_place_blocks_alike_and_count_on_their_own(strategy, copier):
    duplicate = copier(strategy)
    blocks = [("a", 1), ("b", 1)]
    assert _place(duplicate, *blocks) == _place(copier(strategy), *blocks)
    assert duplicate.backendOptions() == strategy.backendOptions()
