# SPDX-License-Identifier: Apache-2.0
"""Compiling refuses stages, IPUs, output modes, buffers and processes."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import (
    AutoStage,
    Block,
    OutputMode,
    Phase,
    PipelinedExecution,
    ShardedExecution,
    Stage,
)
from ipufit.emulator.core.survey import survey
from tests.emulator import _models
from tests.emulator._models import Function


class Blocks(nn.Module):
    """Enters a block on each of `ipus`, each with a weight of its own.

    `prefix` is work outside all blocks.
    """

    def __init__(self, ipus, *, prefix=False):
        super().__init__()
        ones = [nn.Parameter(torch.ones(1)) for _ in range(1 + len(ipus))]
        self.weights = nn.ParameterList(ones)
        self.ipus = ipus
        self.prefix = prefix

    def forward(self, x):
        first, *weights = self.weights
        x = x * first if self.prefix or not self.ipus else x
        for number, (ipu, weight) in enumerate(zip(self.ipus, weights)):
            Block.start(f"block{number}", ipu_id=ipu)
            x = x * weight
        return poptorch.identity_loss(x, reduction="mean")


def make_options(*, G=1, D=1, R=1, strategy=None):  # noqa: N803
    options = _models.make_options(D, G, R)
    return options.setExecutionStrategy(strategy) if strategy else options


def compiling(wrap):
    def compile_model(model, options, rows=1):
        executor = wrap(model, options)
        try:
            executor.compile(torch.ones(rows))
        finally:
            executor.destroy()

    return compile_model


compile_training = compiling(poptorch.trainingModel)
compile_inference = compiling(poptorch.inferenceModel)


def function(forward):
    return Function(lambda _, x: forward(x))


# Pipeline stages --------------------------------------------------------------


def test_device_iterations_do_not_help_training():
    with pytest.raises(poptorch.Error, match="gradientAccumulation"):
        compile_training(Blocks([0, 1]), make_options(D=3), 3)


def test_a_pipeline_computes_what_one_ipu_does():
    losses, weights = set(), set()
    for ipus in ([0, 0, 0], [0, 1, 2]):
        model = Blocks(ipus)
        executor = poptorch.trainingModel(model, make_options(G=6, D=2))
        losses.add(executor(torch.arange(12.0) / 100).item())
        weights.add(tuple(weight.item() for weight in model.weights))
        executor.destroy()
    assert len(losses) == len(weights) == 1
    assert 1.0 not in weights.pop()[1:]


class Shared(nn.Module):
    """Uses a weight, or a view of it, or a buffer, on two IPUs."""

    def __init__(self, read=None, *, is_copied=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.ones(1))
        self.register_buffer("index", torch.zeros(1, dtype=torch.long))
        self.read = read
        self.is_copied = is_copied

    def forward(self, x):
        with Block("first", ipu_id=0):
            used = self.read(self)
            x = x * used
        with Block("second", ipu_id=1):
            x = x + (used if self.is_copied else self.read(self))
            return poptorch.identity_loss(x, reduction="mean")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("scale", lambda m: m.scale),
        ("scale", lambda m: m.scale.view(1, 1)[0]),
        ("scale", lambda m: m.scale.contiguous()),
        ("shift", lambda m: m.shift),
    ],
)
def test_ipus_of_a_pipeline_share_no_weight(name, read):
    match = f"Can not copy variable tensor {name}"
    with pytest.raises(poptorch.Error, match=match):
        compile_training(Shared(read), make_options(G=3), 3)
    with pytest.raises(poptorch.Error, match=match):
        compile_inference(Shared(read), make_options(D=3), 3)


@pytest.mark.parametrize(
    ("module", "strategy"),
    [
        (Shared(lambda m: m.scale * 1, is_copied=True), None),
        (Shared(lambda m: m.index), None),
        (Shared(lambda m: m.scale), ShardedExecution()),
    ],
)
def test_values_of_one_ipu_are_copied_to_another(module, strategy):
    compile_inference(module, make_options(D=3, strategy=strategy), 3)


# Gradients --------------------------------------------------------------------


def test_automatic_loss_scaling_needs_gradients_in_half_precision():
    options = make_options()
    options.Training.setAutomaticLossScaling(True)
    with pytest.raises(poptorch.Error, match="type fp16 were found"):
        compile_training(Blocks([]), options)
    compile_training(Blocks([]).half(), options)
    with pytest.raises(poptorch.Error, match="setAutomaticLossScaling is for training"):
        compile_inference(Blocks([]), options)


class Normalised(nn.Module):
    def __init__(self, norm, *, is_frozen=False, is_detached=False):
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 2, 1), nn.Conv1d(2, 1, 1)
        self.norm = norm.eval()
        self.is_detached = is_detached
        if is_frozen:
            self.first.requires_grad_(False)
            self.norm.requires_grad_(False)

    def forward(self, x):
        hidden = self.norm(self.first(x.reshape(-1, 1, 1).expand(-1, 1, 2)))
        result = self.last(hidden.detach() if self.is_detached else hidden)
        return poptorch.identity_loss(result, reduction="mean"), hidden


@pytest.mark.parametrize(
    "make", [nn.BatchNorm1d, partial(nn.InstanceNorm1d, track_running_stats=True)]
)
def test_no_gradient_passes_through_running_statistics(make):
    module = Normalised(make(2))
    with pytest.raises(poptorch.Error, match="its gradient Op is being created"):
        compile_training(module, None, 4)
    plain = Normalised(make(2))  # no executor has given it classes of its own
    found = survey(plain, [torch.ones(4)], poptorch.Options(), is_training=True)
    assert any("its gradient Op" in one.message for one in found.remarks)
    compile_inference(plain, None, 4)
    compile_training(Normalised(make(2), is_detached=True), None, 4)
    compile_training(Normalised(make(2), is_frozen=True), None, 4)


def test_stages_must_increase_along_the_data():
    options = make_options(D=3, strategy=PipelinedExecution(AutoStage.SameAsIpu))
    with pytest.raises(poptorch.Error, match="stages must increase"):
        compile_inference(Blocks([0, 1, 0]), options, 3)


def test_stages_of_parallel_branches_may_come_in_any_order():
    def branches(x):
        with Block("late", ipu_id=1):
            late = x * 2
        with Block("early", ipu_id=0):
            early = x * 3
        with Block("end", ipu_id=1):
            return late + early

    options = make_options(D=4, strategy=PipelinedExecution("early", ["late", "end"]))
    compile_inference(function(branches), options, 4)


# Blocks -----------------------------------------------------------------------


def in_a_block(x):
    with Block("a", ipu_id=0):
        return x + 1


def nested(x):
    with Block("a", ipu_id=0):
        return in_a_block(x) * 2


def between(make):
    def forward(x):
        x = in_a_block(x)
        ones = torch.ones(1, device="ipu")
        with Block("b", ipu_id=0):
            return x + make(ones)

    return forward


AFTER_A_BLOCK = {
    "an operator": lambda x: in_a_block(x) * 2,
    "an outer block": nested,
    "a view": lambda x: in_a_block(x).view(-1),
    "dropout of eval mode": lambda x: nn.functional.dropout(
        in_a_block(x), training=False
    ),
    "a returned input": lambda x: (in_a_block(x), x),
    "a constant of a later block": between(lambda ones: ones),
    "nop": lambda x: poptorch.nop(in_a_block(x)),
}


@pytest.mark.parametrize("forward", AFTER_A_BLOCK.values(), ids=AFTER_A_BLOCK)
def test_no_block_is_active_after_one_was_left(forward):
    """PopTorch, `Compiler.cpp` `clearActiveIpu`, `CompilerImpl.cpp`
    `setExecutionStrategyAttributes`, for each operator that is lowered; for a returned
    input `JitDispatch.cpp` `addOutput`."""
    with pytest.raises(poptorch.Error, match="No active Block"):
        compile_inference(function(forward), make_options())


def nothing_after(x):
    x = in_a_block(x)
    return x.float().contiguous(), nn.functional.dropout(x + 1, training=False).shape[0]


def dead_after(x):
    x = in_a_block(x)
    torch.sin(x)
    return x


def before_the_first(x):
    x = x + 1
    with Block("a", ipu_id=0):
        return x * 2


def started_after(x):
    x = in_a_block(x)
    Block.start("a", ipu_id=0)
    return x.view(-1)


@pytest.mark.parametrize(
    "forward",
    [
        before_the_first,
        lambda x: (in_a_block(x), torch.zeros(2, device="ipu")),
        dead_after,
        between(lambda ones: ones + 1),
        nothing_after,
        started_after,
    ],
)
def test_what_is_no_operator_needs_no_block(forward):
    """Constants that only the host returns (PopTorch, `CanonicaliseConstants.cpp`) or
    that are computed while compiling aren't lowered, and neither is what is dead."""
    compile_inference(function(forward), make_options())


@pytest.mark.parametrize(
    ("strategy", "is_allowed"),
    [
        (PipelinedExecution(Stage("a").ipu(1), Stage("b").ipu(0)), False),
        (PipelinedExecution(Stage("a"), Stage("b")), True),
        (PipelinedExecution(AutoStage.AutoIncrement), True),
        (ShardedExecution(Stage("a").ipu(1), Stage("b").ipu(0)), True),
    ],
)
def test_what_runs_before_the_first_block_is_on_ipu_0(strategy, is_allowed):
    """In stage 0, which can't be on two IPUs (PopTorch, `CompilerImpl.hpp`; PopART,
    `ir.cpp` `verifyPipelineSettings`)."""

    def forward(x):
        x = x + 1
        with Block("a", ipu_id=0):
            x = x * 2
        with Block("b", ipu_id=1):
            return x * 3

    options = make_options(D=4, strategy=strategy)
    refusal = pytest.raises(poptorch.Error, match="same pipeline stage")
    with contextlib.nullcontext() if is_allowed else refusal:
        compile_inference(function(forward), options, 4)


@pytest.mark.parametrize(("ipu", "is_allowed"), [(1, True), (0, False)])
def test_parallel_phases_alternate_between_even_and_odd_ipus(ipu, is_allowed):
    strategy = poptorch.ParallelPhasedExecution(
        Phase(Stage("block0").ipu(0)), Phase(Stage("block1").ipu(ipu))
    )
    refusal = pytest.raises(poptorch.Error, match="even phases must run on even IPUs")
    with contextlib.nullcontext() if is_allowed else refusal:
        compile_inference(Blocks([None, None]), make_options(strategy=strategy))


@pytest.mark.parametrize(
    ("ipus", "prefix", "expected"),
    [([0, 1], False, 2), ([3], False, 4), ([0, 2], False, 3), ([1], True, 2)],
)
def test_ipus_below_the_highest_count(ipus, prefix, expected):
    executor = poptorch.inferenceModel(
        Blocks(ipus, prefix=prefix), make_options(strategy=ShardedExecution())
    )
    executor.compile(torch.ones(1))
    assert executor._executable.program.num_ipus == expected


# IPUs -------------------------------------------------------------------------


def test_more_than_64_ipus_are_too_many():
    compile_inference(nn.Identity(), make_options(R=64), 64)
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(65\)"):
        compile_inference(nn.Identity(), make_options(R=65), 65)
    sharded = make_options(R=33, strategy=ShardedExecution())
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(66\)"):
        compile_inference(Blocks([0, 1]), sharded, 33)


# Output modes -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "is_allowed"), [(1, 1), (2, 1), (4, 1), (3, 0), (8, 0)]
)
def test_every_n_divides_the_device_iterations(period, is_allowed):
    options = make_options(D=4, G=2).outputMode(OutputMode.EveryN, period)
    refusal = pytest.raises(poptorch.Error, match=rf"EveryN \({period}\) must divide")
    with contextlib.nullcontext() if is_allowed else refusal:
        compile_training(Blocks([]), options, 8)


def test_every_n_is_not_for_pipelines():
    options = make_options(D=2).outputMode(OutputMode.EveryN, 2)
    with pytest.raises(poptorch.Error, match="pipelined over several IPUs"):
        compile_inference(Blocks([0, 1]), options, 2)
    sharded = make_options(D=2, strategy=ShardedExecution())
    compile_inference(Blocks([0, 1]), sharded.outputMode(OutputMode.EveryN, 2), 2)


# Buffers ----------------------------------------------------------------------


class Counter(nn.Module):
    def __init__(self, update):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(1))
        self.update = update

    def forward(self, x):
        self.update(self)
        return poptorch.identity_loss(x * self.weight + self.count, reduction="sum")


def through_a_view(model):
    model.count[0] += 1


def frozen_weight(model):
    with torch.no_grad():
        model.weight.mul_(0.5)


UPDATES = [lambda model: model.count.add_(1), through_a_view, frozen_weight]


@pytest.mark.parametrize("update", UPDATES)
def test_replicas_do_not_broadcast_what_they_change(update):
    with pytest.raises(poptorch.Error, match="does not support broadcasting buffers"):
        compile_training(Counter(update), make_options(R=2), 2)
    compile_training(Counter(update), make_options(R=1), 1)
    compile_training(Counter(update), make_options(R=2).broadcastBuffers(False), 2)


# Processes --------------------------------------------------------------------
