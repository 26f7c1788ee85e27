# SPDX-License-Identifier: Apache-2.0
"""Block annotations: what a trace sees, and what a module keeps."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from ipufit.emulator._options.strategies import (
    BlockPlacement,
    PipelinedExecution,
    SerialPhasedExecution,
)
from ipufit.emulator._tracing.blocks import (
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    removeBlocks,
    tracing_blocks,
)
from ipufit.emulator.enums import AutoStage
from ipufit.emulator.errors import Error


def _trace(strategy, function, *args):
    """What a trace reports: placements, and "end"s."""
    events = []
    with tracing_blocks(strategy, events.append, lambda: events.append("end")):
        function(*args)
    return events


def _names(events):
    return [getattr(event, "block_id", event) for event in events]


def _ipus_and_stages(events):
    return [(e.ipu, e.stage) for e in events if isinstance(e, BlockPlacement)]


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
    assert Block._stages_manager is None
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


def test_a_trace_sees_every_begin_and_end():
    def forward():
        with Block("a", ipu_id=0):
            pass
        Block.start("b", ipu_id=1)
        BlockFunction("c", ipu_id=2)(lambda: None)()
        BeginBlock(lambda: None, "d", ipu_id=3)()
        BeginBlock(torch.nn.Identity(), "e", ipu_id=4)(X)

    events = _trace(PipelinedExecution(), forward)

    assert _names(events) == ["a", "end", "b", "c", "end", "d", "e"]
    assert _ipus_and_stages(events) == [(i, i) for i in range(5)]


def test_a_placement_says_block_stage_ipu_and_phase():
    strategy = SerialPhasedExecution("a", "b")
    strategy.phase(1).ipus(5)
    assert _trace(strategy, Block.start, "b") == [
        BlockPlacement(block_id="b", stage=-1, ipu=5, phase=1)
    ]


def test_leaving_an_inner_block_ends_all():
    def forward():
        with Block("a", ipu_id=0), Block("b", ipu_id=1):
            pass

    assert _names(_trace(PipelinedExecution(), forward)) == ["a", "b", "end", "end"]


def test_a_block_left_by_an_error_ends():
    events = []
    with pytest.raises(KeyError), tracing_blocks(
        PipelinedExecution(), events.append, lambda: events.append("end")
    ), Block("a", 0):
        raise KeyError("x")
    assert _names(events) == ["a", "end"]


def test_the_previous_trace_is_restored():
    outer = []
    with tracing_blocks(PipelinedExecution(), outer.append, lambda: None):
        inner = _trace(PipelinedExecution(), Block.start, "inner", 1)
        Block.start("outer", 0)
    assert (_names(outer), _names(inner)) == (["outer"], ["inner"])
    assert Block._stages_manager is None


def test_a_failed_trace_is_left_behind():
    with pytest.raises(AssertionError, match="Unknown Block 'b'"):
        _trace(PipelinedExecution("a"), Block.start, "b")
    assert Block._stages_manager is None


@pytest.mark.parametrize(
    ("strategy", "arguments", "error"),
    [
        (PipelinedExecution(), ("a",), AssertionError),
        (PipelinedExecution(), (3, 0), AssertionError),
        (PipelinedExecution("a"), (None, 0), AssertionError),
        (PipelinedExecution(), ("a", "0"), RuntimeError),
    ],
)
def test_mistakes_show_while_tracing(strategy, arguments, error):
    with pytest.raises(error):
        _trace(strategy, Block.start, *arguments)
    with pytest.raises(error):
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
    first = _trace(strategy, _two_blocks)
    second = _trace(strategy, _two_blocks)
    assert _names(first) == ["0", "end", "1", "end"]
    assert _ipus_and_stages(first) == [(0, 1), (1, 2)]
    assert _names(second) == ["2", "end", "3", "end"]
    assert _ipus_and_stages(second) == [(0, 3), (1, 4)]


def test_use_auto_id_counts_from_zero_again():
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    first = _trace(strategy, _two_blocks_counted_again)
    assert _trace(strategy, _two_blocks_counted_again) == first


def test_another_copy_of_the_strategy_counts_on_its_own():
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    untouched = copy.deepcopy(strategy)
    assert _trace(strategy, _two_blocks) == _trace(untouched, _two_blocks)


def test_hooks_remember_their_first_automatic_id():
    network = _annotated(None, None)
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    first = _trace(strategy, network, X)
    assert _names(first) == ["0", "1"]
    assert _trace(strategy, network, X) == first
    assert _names(_trace(PipelinedExecution(), network, X)) == ["0", "1"]


def test_a_layer_without_block_stays_in_front():
    network = Network()
    BeginBlock(network.second, ipu_id=1)
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    assert _ipus_and_stages(_trace(strategy, network, X)) == [(1, 1)]


def test_a_block_entered_twice_is_one_stage():
    network = torch.nn.Sequential(
        BeginBlock(torch.nn.Identity(), "a", 0),
        BeginBlock(torch.nn.Identity(), "b", 1),
        BeginBlock(torch.nn.Identity(), "a", 0),
    )
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    assert _ipus_and_stages(_trace(strategy, network, X)) == [(0, 1), (1, 2), (0, 1)]


# What a module keeps


def _saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copier",
    [
        copy.copy,
        copy.deepcopy,
        _saved,
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
)
def test_blocks_survive_copies(copier):
    network = _annotated("a", "b")
    duplicate = copier(network)
    assert _trace(PipelinedExecution("a", "b"), duplicate, X) == _trace(
        PipelinedExecution("a", "b"), network, X
    )
    with pytest.raises(Error, match="already been assigned"):
        BeginBlock(duplicate.first)


def test_parameters_keep_their_names():
    assert list(_annotated("a", "b").state_dict()) == list(Network().state_dict())


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


def test_a_function_is_wrapped():
    wrapped = BeginBlock(lambda x, *, y: x - y, "a", ipu_id=1)
    assert type(wrapped) is LegacyBeginBlockFn
    assert wrapped(5, y=3) == 2
    assert _ipus_and_stages(_trace(PipelinedExecution(), lambda: wrapped(5, y=3))) == [
        (1, 1)
    ]


def test_the_hook_shows_what_it_begins():
    layer = BeginBlock(torch.nn.Linear(1, 1), "a", ipu_id=1)
    hooks = [repr(hook) for hook in layer._forward_pre_hooks.values()]
    assert hooks == ["BeginBlock(user_id=a, ipu_id=1)"]


def test_a_hook_registered_earlier_runs_in_the_block_before():
    order = []
    layer = torch.nn.Identity()
    layer.register_forward_pre_hook(lambda module, inputs: order.append("hook"))
    BeginBlock(layer, "a", 0)
    with tracing_blocks(PipelinedExecution(), lambda p: order.append("a"), list):
        layer(X)
    assert order == ["hook", "a"]


def test_a_block_function_loses_its_name():
    @BlockFunction("a")
    def named():
        """Say nothing."""

    assert named.__name__ == "wrapper"


def test_removing_blocks_keeps_other_hooks():
    network = _annotated("a", "b")
    BeginBlock(network, "all", 0)
    calls = []
    network.second.register_forward_pre_hook(lambda *_: calls.append(1))

    assert removeBlocks(network) is None

    assert _trace(PipelinedExecution(), network, X) == []
    assert calls == [1]
    BeginBlock(network.first, "again")


@pytest.mark.parametrize("thing", [None, len, "module"])
def test_blocks_are_removed_from_modules_only(thing):
    with pytest.raises(AssertionError):
        removeBlocks(thing)


def test_removing_blocks_leaves_functions_and_scopes_alone():
    class Scoped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.function = BeginBlock(lambda x: x, "f", 1)

        def forward(self, x):
            with Block("scope", 0):
                return self.function(x)

    network = Scoped()
    removeBlocks(network)
    assert _names(_trace(PipelinedExecution(), network, X)) == ["scope", "f", "end"]
