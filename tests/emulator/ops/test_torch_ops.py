# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.poptorch.*`: each does what PopTorch's function around it does."""

import sys

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator._args_parser import CallArguments
from ipufit.emulator.core.compile import trace
from tests.emulator._models import Function, X

pytestmark = pytest.mark.skipif(
    "poptorch" in sys.modules, reason="there are the real PopTorch's operators"
)

OPERATORS = torch.ops.poptorch
INDEX = torch.tensor([1])
PROBABILITIES = torch.randn(4, 2, 3).log_softmax(-1)
LENGTHS = torch.tensor([4, 3])
BATCHES = [0, 0, 1, 1]


def program_of(forward, *inputs, is_training=False, strategy=None):
    return trace(
        Function(lambda _, *given: forward(*given)),
        CallArguments(inputs, {}),
        strategy=strategy or poptorch.PipelinedExecution(),
        is_training=is_training,
    )


def recorded(forward, *inputs, **settings):
    """What a trace records: the code, and where each call belongs."""
    program = program_of(forward, *inputs, **settings)
    nodes = program.graph.graph.nodes
    placements = [node.meta.get("block") for node in nodes]
    return (
        program.graph.code,
        [node.meta.get("operator") for node in nodes],
        [block and (block.stage, block.ipu, block.phase) for block in placements],
        program.ipus,
    )


def print_with_format(x):
    return poptorch.ipu_print_tensor(
        x, "t", False, 10, 2, 60, 3, "scientific", ";", "[", "]"
    )


def overlap(function):
    mode = poptorch.OverlapMode.OverlapAccumulationLoop
    return lambda x: function(x, mode)


def scoped(push, pop):
    def forward(x):
        push("outer")
        x = x + 1
        push("inner")
        x = x + 2
        pop()
        pop()
        return x * 3

    return forward


def with_scopes(x):
    with poptorch.NameScope("outer"):
        x = x + 1
        with poptorch.NameScope("inner"):
            x = x + 2
    return x * 3


def with_attributes(x):
    OPERATORS.set_attribute("__outline", "layer", "embedding")
    x = x + 1
    OPERATORS.clear_attribute("__outline", "layer")
    return x


REDUCING = poptorch.MatMulSerializationMode.ReducingDim
PAIRS = {
    "nop": (poptorch.nop, OPERATORS.nop),
    "recomputation_checkpoint": (
        poptorch.recomputationCheckpoint,
        OPERATORS.recomputation_checkpoint,
    ),
    "set_available_memory": (
        lambda x: poptorch.set_available_memory(x @ x.T, 0.3),
        lambda x: OPERATORS.set_available_memory(x @ x.T, 0.3),
    ),
    "set_matmul_serialization": (
        lambda x: poptorch.serializedMatMul(x, x.T, REDUCING, 2),
        lambda x: OPERATORS.set_matmul_serialization(
            torch.matmul(x, x.T), "reducing_dim", 2, False
        ),
    ),
    "ipu_print_tensor": (
        print_with_format,
        lambda x: OPERATORS.ipu_print_tensor(x, "t", 0, 10, 2, 60, 3, 2, ";", "[", "]"),
    ),
    "set_overlap_for_input": (
        overlap(poptorch.set_overlap_for_input),
        lambda x: OPERATORS.set_overlap_for_input(x, "overlap_accumulation_loop"),
    ),
    "set_overlap_for_output": (
        overlap(poptorch.set_overlap_for_output),
        lambda x: OPERATORS.set_overlap_for_output(x, "overlap_accumulation_loop"),
    ),
    "dynamic_slice": (
        lambda x, i: poptorch.dynamic_slice(x, 0, i, 2, 1),
        lambda x, i: OPERATORS.dynamic_slice(x, 0, i, 2, 1),
    ),
    "dynamic_update": (
        lambda x, i: poptorch.dynamic_update(x, x[:2], 0, i, 2),
        lambda x, i: OPERATORS.dynamic_update(x, x[:2], 0, i, 2),
    ),
    "ctc_beam_search_decoder": (
        lambda p, n: poptorch.ctc_beam_search_decoder(p, n, 0, 5, 2),
        lambda p, n: OPERATORS.ctc_beam_search_decoder(p, n, 0, 5, 2),
    ),
    "fps": (
        lambda x: poptorch.fps(x, [0, 2, 4], 0.5, False),
        lambda x: OPERATORS.fps(x, [0, 2, 4], 0.5, False),
    ),
    "nearest": (
        lambda x, b: poptorch.nearest(x, x, b, b),
        lambda x, b: OPERATORS.nearest(x, x, b, b),
    ),
    "nearest_batch_list": (
        lambda x: poptorch.nearest(x, x, BATCHES, BATCHES),
        lambda x: OPERATORS.nearest_batch_list(x, x, BATCHES, BATCHES),
    ),
    "push_name_scope": (
        with_scopes,
        scoped(OPERATORS.push_name_scope, OPERATORS.pop_name_scope),
    ),
    "set_attribute": (lambda x: x + 1, with_attributes),
    "internal_cast": (
        lambda x: x.to(torch.float16),
        lambda x: OPERATORS.internal_cast(x, "FLOAT16"),
    ),
}
INPUTS = {
    "dynamic_slice": (X, INDEX),
    "dynamic_update": (X, INDEX),
    "ctc_beam_search_decoder": (PROBABILITIES, LENGTHS),
    "nearest": (X, torch.tensor(BATCHES)),
}
"""Of those that don't take X alone."""


@pytest.mark.parametrize("name", PAIRS)
def test_an_operator_is_recorded_as_the_function_that_it_is_part_of(name):
    function, operator = PAIRS[name]
    inputs = INPUTS.get(name, (X,))
    assert recorded(operator, *inputs) == recorded(function, *inputs)


@pytest.mark.parametrize(
    "name",
    sorted(PAIRS.keys() - {"fps", "internal_cast", "nearest_batch_list", "nearest"}),
)
def test_outside_a_trace_they_return_the_same(name):
    function, operator = PAIRS[name]
    inputs = INPUTS.get(name, (X,))
    torch.testing.assert_close(operator(*inputs), function(*inputs))


@pytest.mark.parametrize(("number", "text"), [(0, "sum"), (1, "mean"), (2, "none")])
def test_losses_are_marked_with_a_number_for_the_reduction(number, text):
    def recorded_loss(mark, reduction):
        model = Function(lambda self, x: mark(self.weight * x[0, 0], reduction))
        model.weight = nn.Parameter(torch.ones(()))
        sgd = poptorch.optim.SGD(model.parameters(), lr=1.0)
        return poptorch.trainingModel(model, None, sgd)(X)

    expected = recorded_loss(poptorch.identity_loss, text)
    assert torch.equal(recorded_loss(OPERATORS.identity_loss, number), expected)
    assert torch.equal(
        OPERATORS.identity_loss(X, number), poptorch.identity_loss(X, text)
    )


# Blocks ------------------------------------------------------------------------


def test_blocks_begin_and_end():
    def with_blocks(x):
        with poptorch.Block("a", 0):
            x = x + 1
        with poptorch.Block("b", 1):
            return x * 2

    def with_operators(x):
        OPERATORS.begin_ipu_block(0, -1, 0)
        x = x + 1
        OPERATORS.end_ipu_block()
        OPERATORS.begin_ipu_block(1, -1, 1)
        x = x * 2
        OPERATORS.end_ipu_block()
        return x

    assert recorded(with_operators, X) == recorded(with_blocks, X)
    assert program_of(with_operators, X).num_forward_stages == 2


# Casts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("FLOAT", torch.float32),
        ("FLOAT16", torch.float16),
        ("DOUBLE", torch.float32),
        ("INT32", torch.int32),
        ("INT64", torch.int32),
        ("BOOL", torch.bool),
    ],
)
@pytest.mark.parametrize("source", [torch.float32, torch.float16])
def test_a_cast_gives_the_type_of_that_name(source, text, dtype):
    model = Function(lambda _, x: OPERATORS.internal_cast(x, text))
    result = poptorch.inferenceModel(model)(X.to(source))
    assert result.dtype == dtype
    assert torch.equal(result, X.to(source).to(dtype))


def test_a_cast_to_no_type_is_refused():
    with pytest.raises(poptorch.Error, match="No at::scalar_type for FLOAT32"):
        program_of(lambda x: OPERATORS.internal_cast(x, "FLOAT32"), X)


# Custom operations, and parts of functions ----------------------------------------


def test_a_custom_operation_is_told_the_address_of_its_attributes():
    attributes = {"alpha": 0.02}
    poptorch.custom_op([X], "Op", "test", 1, [X], attributes)
    address = f"{poptorch.ops.ATTR_PREFIX}{hex(id(attributes))}"
    (result,) = OPERATORS.custom_operation([X], "Op", "test", 1, 1, [X], address)
    assert torch.equal(result, torch.zeros_like(X))
    nothing = f"{poptorch.ops.ATTR_PREFIX}{hex(id(None))}"
    with pytest.raises(poptorch.Error, match="test::Op"):
        program_of(
            lambda x: OPERATORS.custom_operation([x], "Op", "test", 1, 1, [x], nothing),
            X,
        )


PARTS = {
    "start_for_loop": ([X],),
    "end_for_loop": ([X], [X], 3),
    "start_if_block": (X,),
    "start_else_block": ([X],),
    "end_if_block": ([X], X),
    "begin_multi_conv": (),
    "end_multi_conv": (None, None, None, None, None, None),
    "call_cpu_op": ([X], "name"),
    "end_cpu_op": ([X],),
    "optimizer_group": (0, [X]),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_functions_are_refused_in_a_trace(name):
    operator, arguments = getattr(OPERATORS, name), PARTS[name]
    assert operator(*arguments) in (None, [X])
    with pytest.raises(poptorch.Error, match=f"{name} is only a part .* Use "):
        program_of(lambda x: operator(*arguments), X)


# Where they are ------------------------------------------------------------------


def test_they_can_be_called_from_graphs_of_torch_fx():
    """optimum-graphcore puts `set_attribute` into graphs."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(OPERATORS.set_attribute, ("__outline", "layer", "a"))
    graph.output(graph.call_function(OPERATORS.nop, (x,)))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert torch.equal(poptorch.inferenceModel(module)(X), X)
