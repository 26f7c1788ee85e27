# SPDX-License-Identifier: Apache-2.0
"""Trace one micro-batch of a module into a program."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, Mapping

import torch
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node

from ipufit.emulator._ground.custom_args import (
    flattenTensorStructure,
    reconstructTensorStructure,
)
from ipufit.emulator._ground.switches import CHANNELS_LAST_VARIABLE, is_on, is_strict
from ipufit.emulator._ground.torch_extras import host_tensor
from ipufit.emulator._ops.control_flow import Body
from ipufit.emulator._options.strategies import BlockPlacement, ExecutionStrategy
from ipufit.emulator._program.args import CallArguments
from ipufit.emulator._program.channels_last import in_channels_last
from ipufit.emulator._program.checks import compute_as_device, used_ipus
from ipufit.emulator._program.losses import add_final_loss
from ipufit.emulator._program.strict import StrictTracer, refuse_unsupported_operators
from ipufit.emulator._tracing.nodes import (
    NORM_FUNCTIONS,
    changed_memory,
    constant_nodes,
    erase_dead,
)
from ipufit.emulator._tracing.operation import FACTORIES, RANDOM_FACTORIES
from ipufit.emulator._tracing.recording import (
    Recording,
    call_pre_compile_hooks,
    named_weights,
    post_compile_hooks,
    refuse_rebound,
    tracing,
    unchanged,
)
from ipufit.emulator._tracing.tracer import Tracer, guarded
from ipufit.emulator.errors import Error, createPoptorchError


@dataclass(frozen=True)
class Program:
    """The operations on one micro-batch, recorded from the user's module.

    Attributes:
        graph: Takes the weights, then the inputs. Returns the outputs that it
            computes, then the loss if there is one.
        weight_names: Names of the weights, in the order in which the graph takes them.
        weight_shapes: Shapes of the weights, in the same order.
        output_structure: The value that `forward` returned, with the traced tensors.
        constant_outputs: Values of the outputs that are equal for every micro-batch, by
            index.
        host_outputs: Values of the outputs that never were on the device, by index.
        has_loss: Whether the last result is the final loss.
        blocks: IPU, stage and phase of each block, in the order in which blocks begin.
        ipus: The IPUs of one replica that run operators.
        is_random: Whether the program draws random numbers.
        updated_weights: Floating-point weights that the program changes in place.
        volatile_weights: Integer weights that the program changes in place. They are
            constants of the program, so a change is lost after the micro-batch.
        unsynchronised_weights: Updated weights that replicas would have to broadcast:
            all but the statistics of normalisation layers.
        written_inputs: Indices of the inputs that the program changes in place.
    """

    graph: GraphModule
    weight_names: tuple[str, ...]
    weight_shapes: tuple[torch.Size, ...]
    blocks: tuple[BlockPlacement, ...]
    ipus: tuple[int, ...]
    updated_weights: frozenset[str]
    volatile_weights: frozenset[str]
    unsynchronised_weights: frozenset[str]
    written_inputs: tuple[int, ...]
    has_loss: bool
    is_random: bool = False
    output_structure: Any = None
    constant_outputs: Mapping[int, Tensor] = field(default_factory=dict)
    host_outputs: Mapping[int, Tensor] = field(default_factory=dict)

    @cached_property
    def run(self) -> Callable[..., tuple[Tensor, ...]]:
        """The graph as a function of the weights and the inputs."""
        graph = self.graph
        if is_on(CHANNELS_LAST_VARIABLE, default=True):
            graph = in_channels_last(
                graph, self.weight_shapes, is_differentiated=self.has_loss
            )
        return graph.forward

    @cached_property
    def used_weights(self) -> frozenset[str]:
        """Names of the weights that an operation reads; the device has no others.

        PopTorch neither uploads nor downloads unused weights (`LowerToPopart.cpp`).
        """
        nodes = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        named = zip(self.weight_names, nodes)
        return frozenset(name for name, node in named if node.users)

    @property
    def runs_anything(self) -> bool:
        """Whether the program does more than return constants."""
        *_, output = self.graph.graph.nodes
        return bool(output.args[0] or self.updated_weights or self.written_inputs)

    @property
    def num_inputs(self) -> int:
        """Number of tensors that the graph takes besides the weights."""
        placeholders = [n for n in self.graph.graph.nodes if n.op == "placeholder"]
        return len(placeholders) - len(self.weight_names)

    @property
    def num_results(self) -> int:
        """Number of tensors that the graph returns besides the loss."""
        *_, output = self.graph.graph.nodes
        return len(output.args[0]) - self.has_loss

    @property
    def num_ipus(self) -> int:
        """Number of IPUs of one replica, with idle ones below the highest index."""
        return max(len(self.ipus), max(self.ipus) + 1)

    @property
    def num_forward_stages(self) -> int:
        """Number of stages of the forward pass: IPU switches along the data, plus one.

        PopTorch counts them so, too (`CompilerImpl.cpp`).
        """
        ipus = [0, *(block.ipu for block in self.blocks)]
        return 1 + sum(before != after for before, after in zip(ipus, ipus[1:]))

    def outputs(self, results: list[Tensor]) -> Any:
        """Arrange results of the graph, constants and host outputs as `forward` did."""
        constants = {i: value.clone() for i, value in self.constant_outputs.items()}
        _refuse_backward([*results, *constants.values()])
        if self.output_structure is None:
            return None
        others, computed = {**self.host_outputs, **constants}, iter(results)
        count = len(results) + len(others)
        values = [others[i] if i in others else next(computed) for i in range(count)]
        return reconstructTensorStructure(self.output_structure, values)


def _refuse_backward(outputs: list[Tensor]) -> None:
    """Replace `backward` of each output by a function that raises an error.

    The function is local, so that outputs can't be pickled, as in PopTorch. Tensors
    computed from them can, such as `output.clone()`.
    """

    def refuse() -> None:
        raise createPoptorchError(
            "backward() cannot be called explicitly on outputs of a PopTorch model. If "
            "you're using a trainingModel, the backwards pass is performed "
            "automatically when invoking the model. If you're using an "
            "inferenceModel, you should use a trainingModel instead."
        )

    for tensor in outputs:
        tensor.backward = refuse  # type: ignore[method-assign, assignment]


def trace(
    module: torch.nn.Module,
    arguments: CallArguments,
    *,
    strategy: ExecutionStrategy,
    is_training: bool,
    names_modules: bool = True,
) -> Program:
    """Run `module` once on the arguments of one micro-batch, and record it.

    Args:
        arguments: Arguments with the rows of one micro-batch.
        strategy: Gives each block an IPU, a stage and a phase.
        is_training: Whether the program will be differentiated.
        names_modules: Whether names of sub-modules precede those of operators.

    Raises:
        Error: The module breaks a rule of tracing; the message names it.
    """
    rng_state = torch.random.get_rng_state()
    try:
        with unchanged(module) as rebound, torch.inference_mode(
            False
        ), torch.set_grad_enabled(is_training):
            recording = Recording(
                named_weights(module),
                arguments.tensors(),
                strategy,
                is_training=is_training,
            )
            tracer = StrictTracer(recording) if is_strict() else Tracer(recording)
            with tracing(recording), post_compile_hooks(), (
                recording.module_scopes(module)
                if names_modules
                else contextlib.nullcontext()
            ), guarded(tracer):
                call_pre_compile_hooks()
                outputs = module(*arguments.args, **arguments.kwargs)
            is_random = not torch.equal(rng_state, torch.random.get_rng_state())
    except Error:
        # A weight that was replaced explains best why it can't be used.
        refuse_rebound(rebound)
        raise
    refuse_rebound(rebound)
    flat = list(flattenTensorStructure(outputs))
    computed = {i: t for i, t in enumerate(flat) if recording.is_on_device(t)}
    nodes = dict(zip(computed, recording.finish(computed.values())))
    refuse_rebound(recording.rebound())
    host = {index: t for index, t in enumerate(flat) if index not in computed}
    for tensor in host.values():
        warnings.warn(
            f"Output expected to be on the IPU but is on {tensor.device.type}: it is "
            "returned as it was when the model was traced.",
            stacklevel=1,
        )
    graph = recording.graph
    eliminate(recording, list(nodes.values()))
    # Outputs that are returned just as `torch.ones` or the like has made them.
    makers = FACTORIES - RANDOM_FACTORIES
    constants = {i for i, n in nodes.items() if n.target in makers and not n.users}
    graph.output(tuple(node for i, node in nodes.items() if i not in constants))
    graphs = with_bodies(graph, recording.root)
    constant_inputs = recording.constant_inputs()
    for one in graphs:
        compute_as_device(one, constant_nodes(one, constant_inputs))
    if is_strict():
        refuse_unsupported_operators(graphs, constant_inputs)
    ipus = used_ipus(graphs, constant_inputs)
    if is_training:
        add_final_loss(graph, recording.results)
    return as_program(
        recording,
        graphs,
        ipus,
        has_loss=is_training,
        is_random=is_random,
        output_structure=reconstructTensorStructure(
            outputs, [tensor.detach() for tensor in flat]
        ),
        constant_outputs={
            index: host_tensor(flat[index]).detach().clone() for index in constants
        },
        host_outputs=host,
    )


def as_program(
    recording: Recording, graphs: list[Graph], ipus: tuple[int, ...], **fields: Any
) -> Program:
    """Make a program of a recording.

    Args:
        graphs: Its graph, then those of loops and branches.
        ipus: IPUs with operators on them.
        fields: Fields of `Program` that the recording doesn't know.
    """
    weights = recording.weights
    floating = {name for name, weight in weights.items() if weight.is_floating_point()}
    changes, weight_of = changed_memory(graphs), recording.weight_memory()
    updates = {weight_of[m]: names for m, names in changes.items() if m in weight_of}
    updated = frozenset(updates)
    return Program(
        graph=GraphModule(recording.root, recording.graph),
        weight_names=tuple(weights),
        weight_shapes=tuple(weight.shape for weight in weights.values()),
        blocks=tuple(recording.begun),
        ipus=ipus,
        updated_weights=updated & floating,
        volatile_weights=updated - floating,
        unsynchronised_weights=frozenset(
            name for name in updated & floating if updates[name] - NORM_FUNCTIONS
        ),
        written_inputs=tuple(
            index for index, m in enumerate(recording.input_memory()) if m in changes
        ),
        **fields,
    )


def eliminate(recording: Recording, results: list[Node]) -> None:
    """Erase operations that change no result, weight or input."""
    inputs = set(recording.input_memory())
    if not results and not inputs & changed_memory([recording.graph]).keys():
        for node in reversed(recording.graph.nodes):  # as PopTorch does
            if node.op != "placeholder":
                recording.graph.erase_node(node)
        return
    variables = {
        memory
        for memory, name in recording.weight_memory().items()
        if recording.weights[name].is_floating_point()
    }
    erase_dead(recording.graph, results, variables | inputs)


def with_bodies(graph: Graph, root: torch.nn.Module) -> list[Graph]:
    """List a graph and the graphs of its loops and branches."""
    graphs = [graph]
    for node in graph.nodes:
        part = getattr(root, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(part, Body):
            graphs += with_bodies(part.program.graph, root)
    return graphs
