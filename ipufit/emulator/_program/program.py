# SPDX-License-Identifier: Apache-2.0
"""Compile: trace one micro-batch of a module and check what the trace shows."""

from __future__ import annotations

import contextlib
import logging
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node

from ipufit.emulator._ground.custom_args import (
    flattenTensorStructure,
    reconstructTensorStructure,
)
from ipufit.emulator._ground.dtypes import device_tensor, host_tensor
from ipufit.emulator._ground.switches import is_strict, uses_channels_last
from ipufit.emulator._options.stages import BlockPlacement
from ipufit.emulator._options.strategies import ExecutionStrategy
from ipufit.emulator._program.args import CallArguments
from ipufit.emulator._program.compile_hooks import (
    call_pre_compile_hooks,
    post_compile_hooks,
)
from ipufit.emulator._program.graph_limits import check_graph
from ipufit.emulator._program.losses import add_final_loss
from ipufit.emulator._program.memory_format import in_channels_last
from ipufit.emulator._program.placement import used_ipus
from ipufit.emulator._program.strict import StrictTracer, refuse_unsupported_operators
from ipufit.emulator._tracing.blocks import tracing_blocks
from ipufit.emulator._tracing.bodies import Body
from ipufit.emulator._tracing.constant_nodes import constant_nodes
from ipufit.emulator._tracing.device_numbers import compute_as_device
from ipufit.emulator._tracing.liveness import (
    NORM_FUNCTIONS,
    changed_memory,
    erase_dead,
    erase_operations,
)
from ipufit.emulator._tracing.recording import Recording
from ipufit.emulator._tracing.refusals import refuse_tied_buffers, untraceable
from ipufit.emulator._tracing.tensor_devices import FACTORIES, RANDOM_FACTORIES
from ipufit.emulator._tracing.trace_state import active_trace
from ipufit.emulator._tracing.tracer import Tracer
from ipufit.emulator._tracing.visibility import EscapeGuard, visible_indexing
from ipufit.emulator._tracing.weights import (
    bindings_of,
    named_weights,
    refuse_rebound,
    restore_bindings,
)
from ipufit.emulator.errors import Error

logger = logging.getLogger("poptorch::python")


@dataclass(frozen=True)
class Program:
    """What the device does with one micro-batch.

    Attributes:
        graph: The recorded calls; takes the weights, then the inputs, and returns
            the outputs that it computes, then the loss if there is one.
        weight_names: The weights it takes, in order.
        weight_shapes: Of these.
        output_structure: What `forward` returned, with the traced tensors in it.
        constant_outputs: Those outputs, by index, that no micro-batch changes.
        host_outputs: Those, by index, that never were on the device.
        has_loss: Whether the last result is the final loss.
        blocks: Where the blocks run, in the order in which they begin.
        ipus: The IPUs of one replica that have something to do.
        is_random: Whether it draws random numbers.
        updated_weights: Floating-point weights that it changes in place.
        volatile_weights: Integer ones, whose changes do not persist.
        unsynchronised_weights: Of the updated weights, those that replicas would
            have to broadcast: all but the statistics of normalisation layers.
        written_inputs: Inputs, by index, that it changes in place.
    """

    graph: GraphModule
    weight_names: tuple[str, ...]
    weight_shapes: tuple[torch.Size, ...]
    output_structure: Any
    constant_outputs: dict[int, Tensor]
    host_outputs: dict[int, Tensor]
    has_loss: bool
    blocks: tuple[BlockPlacement, ...]
    ipus: tuple[int, ...]
    is_random: bool
    updated_weights: frozenset[str]
    volatile_weights: frozenset[str]
    unsynchronised_weights: frozenset[str]
    written_inputs: tuple[int, ...]

    @cached_property
    def run(self) -> Callable[..., tuple[Tensor, ...]]:
        """The graph as a function of the weights and the inputs."""
        forward: Callable[..., tuple[Tensor, ...]] = self.laid_out(self.graph).forward
        return forward

    @cached_property
    def used_weights(self) -> frozenset[str]:
        """The weights that the device has; others were removed with what read them.

        PopTorch neither uploads nor downloads those (`LowerToPopart.cpp`).
        """
        nodes = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        named = zip(self.weight_names, nodes)
        return frozenset(name for name, node in named if node.users)

    def laid_out(self, graph: GraphModule) -> GraphModule:
        """A graph of the same weights in the memory format that is fastest here.

        Args:
            graph: The program's, or one that computes the same from the same weights.
        """
        if not uses_channels_last():
            return graph
        return in_channels_last(
            graph, self.weight_shapes, is_differentiated=self.has_loss
        )

    @cached_property
    def _is_flat(self) -> bool:
        """Whether `forward` returned a plain tuple of tensors."""
        structure = self.output_structure
        return type(structure) is tuple and all(type(t) is Tensor for t in structure)

    @property
    def runs_anything(self) -> bool:
        """Whether a call has any other effect than to return constants."""
        *_, output = self.graph.graph.nodes
        return bool(output.args[0] or self.updated_weights or self.written_inputs)

    @property
    def num_inputs(self) -> int:
        """Tensors that it takes besides the weights."""
        nodes = self.graph.graph.nodes
        num_arguments = sum(1 for node in nodes if node.op == "placeholder")
        return num_arguments - len(self.weight_names)

    @property
    def num_results(self) -> int:
        """Tensors that it returns besides the loss."""
        *_, output = self.graph.graph.nodes
        return len(output.args[0]) - self.has_loss

    @property
    def num_ipus(self) -> int:
        """IPUs that one replica needs: those below the highest one count too."""
        return max(len(self.ipus), max(self.ipus) + 1)

    @property
    def num_forward_stages(self) -> int:
        """IPU switches along the data, plus one (PopTorch, `CompilerImpl.cpp`)."""
        last_ipu = 0
        switches = 0
        for block in self.blocks:
            switches += block.ipu != last_ipu
            last_ipu = block.ipu
        return switches + 1

    def device_outputs(self, results: list[Tensor]) -> list[Tensor]:
        """All outputs of the device: `results`, and the constants between them."""
        if not self.constant_outputs:
            return results
        count = len(results) + len(self.constant_outputs) + len(self.host_outputs)
        computed = iter(results)
        return [
            self.constant_outputs[index].clone()
            if index in self.constant_outputs
            else next(computed)
            for index in range(count)
            if index not in self.host_outputs
        ]

    def rebuild_outputs(self, tensors: list[Tensor]) -> Any:
        """Put outputs of the device where `forward` returned tensors of the device."""
        if self.output_structure is None:
            return None
        if self._is_flat and not self.host_outputs:
            return tuple(tensors)
        outputs = iter(tensors)
        values = [
            self.host_outputs[index] if index in self.host_outputs else next(outputs)
            for index in range(len(tensors) + len(self.host_outputs))
        ]
        return reconstructTensorStructure(self.output_structure, values)


def trace(
    module: torch.nn.Module,
    arguments: CallArguments,
    *,
    strategy: ExecutionStrategy,
    is_training: bool,
    names_modules: bool = True,
) -> Program:
    """Run `module` once on the arguments of one micro-batch and record it.

    Args:
        module: What is recorded.
        arguments: Those of one micro-batch.
        strategy: Places its blocks.
        is_training: Whether the program will be differentiated.
        names_modules: Whether sub-modules put their names before operators'.

    Returns:
        What was recorded.

    Raises:
        Error: The module breaks a rule of tracing; the message names it.
    """
    _refuse_scripted(module)
    refuse_tied_buffers(module)
    weights = named_weights(module)
    bindings = bindings_of(module)
    rng_state = torch.random.get_rng_state()
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(
            is_training
        ), visible_indexing(), _unvalidated_distributions():
            recording = Recording(weights, arguments.tensors())
            tracer = StrictTracer(recording) if is_strict() else Tracer(recording)
            with active_trace(recording, is_training=is_training), tracing_blocks(
                strategy, recording.begin_block, recording.end_block
            ), post_compile_hooks(), (
                recording.scopes.of_modules(module)
                if names_modules
                else contextlib.nullcontext()
            ), EscapeGuard(recording), tracer:
                call_pre_compile_hooks()
                outputs = module(*arguments.args, **arguments.kwargs)
        is_random = not torch.equal(rng_state, torch.random.get_rng_state())
    except Error:
        # A weight that was replaced explains best why it can't be used.
        refuse_rebound(restore_bindings(module, bindings))
        raise
    finally:
        torch.random.set_rng_state(rng_state)
        rebound = restore_bindings(module, bindings)
    refuse_rebound(rebound)
    flat = list(flattenTensorStructure(outputs))
    computed = {i: t for i, t in enumerate(flat) if recording.is_on_device(t)}
    nodes = dict(zip(computed, recording.finish(computed.values())))
    refuse_rebound(
        [f"{_kind(weights[n])} {n} is reassigned" for n in recording.weights.rebound()]
    )
    _warn_of_host_outputs(flat, computed)
    graph = recording.graph
    weight_of = recording.weights.memory()
    _eliminate(recording, list(nodes.values()), weights)
    constants = {i for i, node in nodes.items() if _is_constant(node)}
    graph.output(tuple(node for i, node in nodes.items() if i not in constants))
    graphs = _with_bodies(graph, recording.root)
    compiled_in = _compiled_in(recording, weights)
    _check_operators(graphs, compiled_in)
    ipus = used_ipus(graphs, compiled_in)
    if is_training:
        add_final_loss(graph, recording.results)
    floating = {name for name, weight in weights.items() if weight.is_floating_point()}
    changes = changed_memory(graphs)
    updates = {weight_of[m]: names for m, names in changes.items() if m in weight_of}
    updated = frozenset(updates)
    return Program(
        graph=GraphModule(recording.root, graph),
        weight_names=tuple(weights),
        weight_shapes=tuple(weight.shape for weight in weights.values()),
        output_structure=reconstructTensorStructure(
            outputs, [tensor.detach() for tensor in flat]
        ),
        constant_outputs={
            index: host_tensor(flat[index]).detach().clone() for index in constants
        },
        host_outputs={
            index: tensor for index, tensor in enumerate(flat) if index not in computed
        },
        has_loss=is_training,
        blocks=tuple(recording.begun),
        ipus=ipus,
        is_random=is_random,
        updated_weights=updated & floating,
        volatile_weights=updated - floating,
        unsynchronised_weights=frozenset(
            name for name in updated & floating if updates[name] - NORM_FUNCTIONS
        ),
        written_inputs=tuple(
            index for index, m in enumerate(recording.input_memory()) if m in changes
        ),
    )


def _eliminate(
    recording: Recording, results: list[Node], weights: dict[str, Tensor]
) -> None:
    """Erase the dead calls of a trace; all if it gives nothing back."""
    inputs = set(recording.input_memory())
    if not results and not inputs & changed_memory([recording.graph]).keys():
        erase_operations(recording.graph)
        return
    variables = {
        memory
        for memory, name in recording.weights.memory().items()
        if weights[name].is_floating_point()
    }
    erase_dead(recording.graph, results, variables | inputs)


@contextlib.contextmanager
def _unvalidated_distributions() -> Iterator[None]:
    """Let `torch.distributions` take arguments whose values nobody knows yet."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def micro_batch(arguments: CallArguments, factor: int, explain: str) -> CallArguments:
    """The rows of the first micro-batch, in types that an IPU holds.

    Args:
        arguments: Those of the whole call.
        factor: Micro-batches per call.
        explain: How `factor` came about, for the message.

    Raises:
        AssertionError: A leading dimension is not a multiple of `factor`.
    """

    def first_rows(tensor: Tensor) -> Tensor:
        size = tensor.shape[0] if tensor.dim() else 1
        if size % factor:
            raise AssertionError(
                f"Invalid batch dimension: In the input of shape "
                f"{tuple(tensor.shape)}, the batch dimension ({size}) must be a "
                f"multiple of {explain} = "
                f"{factor} because it is divided into that many micro-batches."
            )
        if tensor.requires_grad:
            logger.warning(
                "Input tensor has requires_grad=True set. This tensor will be detached "
                "because backward pass via inputs is not supported."
            )
        rows = tensor.narrow(0, 0, size // factor) if tensor.dim() else tensor
        return device_tensor(rows.detach(), copy=True)

    tensors = [first_rows(tensor) for tensor in arguments.tensors()]
    args, kwargs = reconstructTensorStructure(
        (arguments.args, arguments.kwargs), iter(tensors)
    )
    return CallArguments(args, kwargs)


def _with_bodies(graph: Graph, root: torch.nn.Module) -> list[Graph]:
    """A graph, and those of the loops and branches that it runs."""
    graphs = [graph]
    for node in graph.nodes:
        part = getattr(root, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(part, Body):
            graphs += _with_bodies(part.graph, root)
    return graphs


def _compiled_in(recording: Recording, weights: dict[str, Tensor]) -> set[str]:
    """The graph's inputs that PopTorch makes constants of."""
    return {
        recording.weights.inputs[name]
        for name, weight in weights.items()
        if not weight.is_floating_point()
    }


def _check_operators(graphs: list[Graph], compiled_in: set[str]) -> None:
    """Refuse combinations of calls, and in strict mode calls, that don't compile."""
    for graph in graphs:
        constants = constant_nodes(graph, compiled_in)
        check_graph(graph, constants)
        compute_as_device(graph, constants)
    if is_strict():
        refuse_unsupported_operators(graphs, compiled_in)


def _is_constant(node: Node) -> bool:
    """Whether an output is a tensor as it was created, which nothing else uses."""
    return node.target in FACTORIES - RANDOM_FACTORIES and not node.users


def _warn_of_host_outputs(flat: list[Tensor], computed: dict[int, Tensor]) -> None:
    for index, tensor in enumerate(flat):
        if index not in computed:
            warnings.warn(
                "Output expected to be on the IPU but is on "
                f"{tensor.device.type}: it is returned as it was when the model was "
                "traced.",
                stacklevel=2,
            )


def _kind(weight: Tensor) -> str:
    return "Parameter" if isinstance(weight, torch.nn.Parameter) else "Buffer"


def _refuse_scripted(module: torch.nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):  # type: ignore[attr-defined,unused-ignore]
            raise untraceable(f"a torch.jit.ScriptModule: {type(part).__name__}")
