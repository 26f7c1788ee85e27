# SPDX-License-Identifier: Apache-2.0
"""Blocks: what a trace sees, what a module keeps, how it is printed."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import (
    AutoStage,
    BeginBlock,
    Block,
    BlockFunction,
    Error,
    PipelinedExecution,
    SerialPhasedExecution,
)
from tests.emulator._models import Function

ExecutionStrategy = PipelinedExecution.__base__


def _executor(strategy, function):
    options = poptorch.Options().deviceIterations(8)
    options.setExecutionStrategy(strategy)
    return poptorch.inferenceModel(Function(lambda _, x: function(x)), options)


def _compile(strategy, function, x):
    _executor(strategy, function).compile(x.repeat(8, 1))


def _traces(times, strategy, function, *args):
    """For each compilation of one executor the blocks that begin."""
    traces, place = [], ExecutionStrategy._place

    def placed(self, *block):
        traces[-1].append(place(self, *block))
        return traces[-1][-1]

    def forward(x):
        function(*args)

    executor = _executor(strategy, forward)
    with mock.patch.object(ExecutionStrategy, "_place", placed):
        for _ in range(times):
            traces.append([])
            executor.compile(X.repeat(8, 1))
            executor.destroy()
    return traces


def _trace(strategy, function, *args):
    """The blocks that begin in a trace: their names, IPUs and stages."""
    return _traces(1, strategy, function, *args)[0]


def _names(placements):
    return [placement.block_id for placement in placements]


def _ipus_and_stages(placements):
    return [(placement.ipu, placement.stage) for placement in placements]


class Network(torch.nn.Module):
    """Two layers, named or not as a test wants."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 3)
        self.second = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.second(self.first(x))


def _annotated(*names):
    network = Network()
    for ipu, (name, layer) in enumerate(zip(names, network.children())):
        BeginBlock(layer, name, ipu_id=ipu)
    return network


X = torch.ones(1, 2)


# Outside a trace


def test_annotations_do_nothing_outside_a_trace():
    with Block(3, "no IPU") as entered:
        assert entered is None
    Block.start([], {})
    Block.useAutoId()
    plain = Network()
    annotated = BeginBlock(copy.deepcopy(plain), object(), "x")
    assert torch.equal(annotated(X), plain(X))
    assert BlockFunction(3)(lambda x: x + 1)(2) == 3
    assert BeginBlock(max)(1, 2) == 2


# A trace


def test_a_trace_sees_every_begin():
    def forward():
        with Block("a", ipu_id=0):
            pass
        Block.start("b", ipu_id=1)
        BlockFunction("c", ipu_id=2)(lambda: None)()
        BeginBlock(lambda: None, "d", ipu_id=3)()
        BeginBlock(torch.nn.Identity(), "e", ipu_id=4)(X)

    events = _trace(PipelinedExecution(), forward)

    assert _names(events) == ["a", "b", "c", "d", "e"]
    assert _ipus_and_stages(events) == [(i, i) for i in range(5)]


def test_a_block_left_by_an_error_ends():
    def forward(x):
        with contextlib.suppress(KeyError), Block("a", 0):
            raise KeyError("x")
        return x + 1

    with pytest.raises(Error, match="No active Block"):
        _compile(PipelinedExecution(), forward, X)


@pytest.mark.parametrize(
    ("strategy", "arguments", "error", "message"),
    [
        (PipelinedExecution("a"), ("b", 0), AssertionError, "Unknown Block 'b'"),
        (SerialPhasedExecution("a"), ("b", 0), AssertionError, "Unknown Block 'b'"),
        (PipelinedExecution(), ("a",), AssertionError, "SameAsIpu was selected"),
        (PipelinedExecution(), (3, 0), AssertionError, "user_id"),
        (PipelinedExecution(), ("a", "0"), RuntimeError, "expected an int"),
    ],
)
def test_mistakes_show_while_tracing(strategy, arguments, error, message):
    with pytest.raises(error, match=message):
        _trace(strategy, Block.start, *arguments)
    with pytest.raises(error, match=message):
        _trace(strategy, BeginBlock(torch.nn.Identity(), *arguments), X)


# Automatic ids


def _two_blocks():
    with Block(ipu_id=0):
        pass
    with Block(ipu_id=1):
        pass


def _two_blocks_counted_again():
    Block.useAutoId()
    _two_blocks()


def test_block_ids_go_on_in_the_next_trace_of_a_strategy():
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    first, second = _traces(2, strategy, _two_blocks)
    assert _names(first) == ["0", "1"]
    assert _ipus_and_stages(first) == [(0, 1), (1, 2)]
    assert _names(second) == ["2", "3"]
    assert _ipus_and_stages(second) == [(0, 3), (1, 4)]


def test_use_auto_id_counts_from_zero_again():
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    first, second = _traces(2, strategy, _two_blocks_counted_again)
    assert first == second
    assert _names(first) == ["0", "1"]


def test_hooks_remember_their_first_automatic_id():
    network = _annotated(None, None)
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    first, second = _traces(2, strategy, network, X)
    assert _names(first) == ["0", "1"]
    assert first == second
    assert _names(_trace(PipelinedExecution(), network, X)) == ["0", "1"]


def test_functions_remember_their_first_automatic_id():
    double = BeginBlock(lambda x: x * 2, ipu_id=3)
    assert (double._user_id, double._ipu_id) == (None, 3)  # as PopTorch's tests read
    first, second = _traces(2, PipelinedExecution(AutoStage.AutoIncrement), double, X)
    assert _names(first) == _names(second) == ["0"]


# What a module keeps


def test_a_module_is_changed_in_place_once():
    layer = torch.nn.Linear(2, 2)
    assert BeginBlock(layer, "a") is layer
    with pytest.raises(Error, match="module has already been assigned to a block"):
        BeginBlock(layer, "b")


@pytest.mark.parametrize("thing", [None, 3, "layer", torch.ones(1)])
def test_only_modules_and_functions_begin_blocks(thing):
    with pytest.raises(
        Error, match=r"not an instance of torch\.nn\.Module or function"
    ):
        BeginBlock(thing)


# Modules printed with their blocks --------------------------------------------------

NETWORK = nn.Sequential(
    nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)), nn.ReLU()
)


def test_without_blocks_it_is_torchs_own():
    assert poptorch.module_repr(NETWORK) == repr(NETWORK)


def test_a_module_with_blocks_inside_is_shown_around_them():
    network = copy.deepcopy(NETWORK)
    poptorch.BeginBlock(network, "all", ipu_id=1)
    poptorch.BeginBlock(network[1][0], "inner", ipu_id=2)
    lines = poptorch.module_repr(network).split("\n")
    assert lines[0] == "BeginBlock(user_id=all, ipu_id=1) Sequential("
    assert lines[3] == "    (0): BeginBlock(user_id=inner, ipu_id=2) ReLU()"
    assert lines[-1] == ")"


def test_an_executor_shows_the_blocks_of_its_module():
    network = copy.deepcopy(NETWORK)
    poptorch.BeginBlock(network[2], ipu_id=0)
    executor = poptorch.inferenceModel(network)
    assert repr(executor) == poptorch.module_repr(network)
    assert "(2): BeginBlock(user_id=None, ipu_id=0) ReLU()" in repr(executor)
