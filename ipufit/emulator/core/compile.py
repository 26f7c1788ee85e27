# SPDX-License-Identifier: Apache-2.0
"""Compile a module: record one micro-batch, then run the stages in their order.

`STAGES` are the stages of a traced graph; `compile_model` of `_poplar_executor.py`
checks the program against the options after them. As in PopTorch dead operations go
first (`LowerToPopartFactories.cpp`), and constants are computed while the program is
compiled (`EvaluateConstexprs.cpp`). So operators are refused, or computed as a device
does, only where they are live and depend on a variable. `ipufit check` runs the same
stages with a `Report` that notes what is refused, and goes on.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node

from .._args_parser import CallArguments
from .._utils import flattenTensorStructure, reconstructTensorStructure
from ..errors import Error
from ..ops import Body, identity_loss
from ..options import ExecutionStrategy
from . import rules  # noqa: F401 - adds the rules of operators
from .float16 import host_tensor
from .graph import (
    FACTORIES,
    NORM_FUNCTIONS,
    NOWHERE,
    RANDOM_FACTORIES,
    add_place,
    changed_memory,
    constant_nodes,
    erase_dead,
    error_about,
    function_name,
    node_arguments,
    place_of,
    storage_of,
    tensors_in,
)
from .losses import add_final_loss
from .operators import findings, replace_function, settle_shapes
from .pipelines import used_ipus
from .program import KNOWN, Program
from .recording import (
    POST_COMPILE_HOOKS,
    PRE_COMPILE_HOOKS,
    REFUSAL,
    Recording,
    call_hooks,
    named_weights,
    refuse_rebound,
    tracing,
    unchanged,
)
from .strict import NEWER, unsupported_nodes
from .tracer import Report, Tracer, guarded


class Compilation:
    """A program on its way through the stages.

    Args:
        strategy: Gives each block an IPU, a stage and a phase.
        report: Hears what is refused.
        is_training: Whether the program will be differentiated.

    Attributes:
        recording: The operations that a trace has recorded.
        outputs: The value that `forward` returned.
        is_whole: Whether `forward` has come to its end.
        is_random: Whether the program draws random numbers.
        results: The nodes of the outputs that the graph computes, by index.
        constant_outputs: Indices of those that are equal for every micro-batch.
        graphs: The graph, then those of loops and branches.
        constants: Nodes that are computed while the program is compiled.
        resized: Messages about nodes whose result has another shape on a device.
        ipus: The IPUs of one replica that run operators.
        shapes: Results of another shape, as `add_final_loss` returns them.
        has_loss: Whether the last result is the final loss.
    """

    def __init__(
        self, strategy: ExecutionStrategy, report: Report, *, is_training: bool
    ) -> None:
        self.strategy, self.report = strategy, report
        self.is_training, self.is_whole, self.is_random = is_training, True, False
        self.outputs: Any = ()
        self.flat: list[Tensor] = []
        self.results: dict[int, Node] = {}
        self.constant_outputs: set[int] = set()
        self.graphs: list[Graph] = []
        self.constants: set[Node] = set()
        self.resized: dict[Node, str] = {}
        self.ipus: tuple[int, ...] = (0,)
        self.shapes: dict[Node, Any] = {}
        self.has_loss = False

    def trace(
        self,
        module: torch.nn.Module,
        arguments: CallArguments,
        *,
        names_modules: bool = True,
        calls_hooks: bool = True,
    ) -> None:
        """Run `module` once on the arguments of one micro-batch, and record it.

        Args:
            module: The module.
            arguments: Arguments with the rows of one micro-batch.
            names_modules: Whether names of sub-modules precede those of operators.
            calls_hooks: Whether to call the hooks of `registerPreCompileHook` and
                `registerPostCompileHook`.
        """
        problems: list[str] = []
        rng_state = torch.random.get_rng_state()
        records = self.is_training or torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(records):
            weights, inputs = named_weights(module), arguments.tensors()
            recording = Recording(weights, inputs, self.strategy, self.is_training)
            self.recording, self.graph = recording, recording.graph
            self.report.recording = recording
            try:
                with unchanged(module, problems), contextlib.ExitStack() as stack:
                    stack.enter_context(tracing(recording))
                    if calls_hooks:
                        stack.callback(call_hooks, POST_COMPILE_HOOKS)
                    if names_modules:
                        stack.enter_context(recording.module_scopes(module))
                    stack.enter_context(guarded(Tracer(recording, self.report)))
                    if calls_hooks:
                        call_hooks(PRE_COMPILE_HOOKS)
                    self.outputs = module(*arguments.args, **arguments.kwargs)
                    stack.close()
                    now = torch.random.get_rng_state()
                    self.is_random = not torch.equal(rng_state, now)
            except Exception as error:
                self.is_whole = False
                if not self.report.goes_on_after(error, module, problems):
                    raise
            else:
                self.report.refuse_rebound(module, problems)
        self.flat = list(flattenTensorStructure(self.outputs))

    @property
    def host_outputs(self) -> dict[int, Tensor]:
        """Values of the outputs that never were on the device, by index."""
        is_on_device = self.recording.is_on_device
        return {i: t for i, t in enumerate(self.flat) if not is_on_device(t)}

    def run(self) -> None:
        """Run the stages."""
        for stage in STAGES:
            if self.is_whole or not stage.needs_end:
                self.report.attempt(stage.topic, stage.function, self)

    def program(self) -> Program:
        """Return the compiled program."""
        detached = [tensor.detach() for tensor in self.flat]
        constants = {i: host_tensor(detached[i]).clone() for i in self.constant_outputs}
        return Program(
            *(self.recording, self.graphs, self.ipus, self.has_loss, self.is_random),
            reconstructTensorStructure(self.outputs, detached),
            constants,
            self.host_outputs,
        )


class CompileStage(NamedTuple):
    """A stage of a compilation.

    Attributes:
        topic: Subject of what it refuses.
        function: Runs it.
        needs_end: Whether it needs a `forward` that has come to its end.
    """

    topic: str
    function: Callable[[Compilation], None]
    needs_end: bool = True


def find_results(compilation: Compilation) -> None:
    """Find the nodes of the outputs."""
    flat, recording = compilation.flat, compilation.recording
    computed = {i: t for i, t in enumerate(flat) if recording.is_on_device(t)}
    nodes = recording.finish(computed.values())
    compilation.results = dict(zip(computed, nodes))


def refuse_exchanged_weights(compilation: Compilation) -> None:
    """Refuse weights whose memory was replaced, as by `weight.data = ...`."""
    exchanges = [node for node in compilation.graph.nodes if node.target is setattr]
    place = place_of(exchanges[-1]) if exchanges else NOWHERE
    for problem in compilation.recording.rebound():
        compilation.report.attempt("buffer", refuse_rebound, problem, place=place)


def eliminate_dead(compilation: Compilation) -> None:
    """Erase operations that change no result, weight or input."""
    recording, graph = compilation.recording, compilation.graph
    inputs = set(recording.input_memory())
    if not compilation.results and not inputs & changed_memory([graph]).keys():
        for node in reversed(graph.nodes):  # as PopTorch does
            if node.op != "placeholder":
                graph.erase_node(node)
        return
    variables = {
        memory
        for memory, name in recording.weight_memory().items()
        if recording.weights[name].is_floating_point()
    }
    erase_dead(graph, compilation.results.values(), variables | inputs)


def find_constants(compilation: Compilation) -> None:
    """Find constant outputs and nodes, and the graphs of loops and branches."""
    # Outputs that are returned just as `torch.ones` or the like has made them.
    results, recording = compilation.results, compilation.recording
    compilation.constant_outputs = {
        i for i, node in results.items() if node.target in _MAKERS and not node.users
    }
    computed = results.keys() - compilation.constant_outputs
    compilation.graph.output(tuple(results[index] for index in sorted(computed)))
    compilation.graphs = _with_bodies(compilation.graph, recording.root)
    for graph in compilation.graphs:
        compilation.constants |= constant_nodes(graph, recording.constant_inputs())


_MAKERS = FACTORIES - RANDOM_FACTORIES


def _with_bodies(graph: Graph, root: torch.nn.Module) -> list[Graph]:
    """List a graph and the graphs of its loops and branches."""
    graphs = [graph]
    for node in graph.nodes:
        part = getattr(root, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(part, Body):
            graphs += _with_bodies(part.graph, root)
    return graphs


def apply_rules(compilation: Compilation) -> None:
    """Refuse operators that a device doesn't run; compute others as it does.

    Where a device certainly computes other numbers than torch, the program computes the
    device's. Where it probably computes wrong numbers, or a later compiler refuses the
    program, the emulator refuses it.
    """
    values, report = compilation.recording.results, compilation.report
    for node in _variables(compilation):
        for finding in findings(
            node, values, compilation.constants, is_training=compilation.is_training
        ):
            if finding.is_refused:
                message = finding.message(function_name(node))
                report.refuse(finding.rule.topic, error_about(message, node))
                continue
            report.remark(finding, node)
            if callable(finding.found):
                replace_function(node, finding.found)
                if finding.verdict == "shape":
                    message = finding.message(function_name(node))
                    compilation.resized[node] = message


def refuse_marked(compilation: Compilation) -> None:
    """Refuse operators of a backward pass and hints that are found while tracing."""
    for graph in compilation.graphs:
        for node in graph.nodes:
            if REFUSAL in node.meta and not node.meta.get("refused"):
                topic, message = node.meta[REFUSAL]
                compilation.report.refuse(topic, error_about(message, node))


def _variables(compilation: Compilation) -> Iterator[Node]:
    """Yield the operations that depend on an input, a weight or random numbers."""
    for graph in compilation.graphs:
        for node in graph.nodes:
            is_called = node.op in ("call_function", "call_method")
            is_constant = node in compilation.constants
            if is_called and not is_constant and not node.meta.get("refused"):
                yield node


def settle_device_shapes(compilation: Compilation) -> None:
    """Find which later results have another shape on a device than in the trace."""
    for graph in compilation.graphs:
        settle_shapes(graph, compilation.recording.results, compilation.resized)


def refuse_unsupported_operators(compilation: Compilation) -> None:
    """Refuse operators that PopTorch doesn't compile, or warn of them."""
    nodes = dict.fromkeys(_variables(compilation))
    # Python fails at these, whatever becomes of their results.
    newer = (node for node in compilation.recording.results if NEWER in node.meta)
    nodes.update(dict.fromkeys(newer))
    unsupported = list(unsupported_nodes(nodes))
    if unsupported:
        compilation.report.refuse_unsupported(unsupported)


def find_ipus(compilation: Compilation) -> None:
    """List the IPUs that operators run on."""
    nodes = (node for graph in compilation.graphs for node in graph.nodes)
    compilation.ipus = used_ipus(nodes, compilation.constants)


def find_loss(compilation: Compilation) -> None:
    """Make the loss of a training program its last result."""
    if compilation.is_training:
        values = compilation.recording.results
        compilation.shapes = add_final_loss(compilation.graph, values)
        compilation.has_loss = True


def refuse_frozen_norms(compilation: Compilation) -> None:
    """Refuse normalisation by running statistics where a gradient passes through.

    Raises:
        Error: There is such a layer.
    """
    if not compilation.has_loss:
        return
    *_, output = compilation.graph.nodes
    waiting, seen = [output.args[0][-1]], {output}
    while waiting:
        node = waiting.pop()
        tensors = tensors_in(compilation.recording.results.get(node))
        if node in seen or (tensors and not any(t.requires_grad for t in tensors)):
            continue
        seen.add(node)
        waiting.extend(node.all_input_nodes)
        if function_name(node) not in NORM_FUNCTIONS:
            continue
        given = node_arguments(node)
        is_instance = function_name(node) == "instance_norm"
        if not given.get("training", given.get("use_input_stats", is_instance)):
            raise error_about(
                f"`{function_name(node)}`: a layer of batch norm in eval mode has no "
                "gradient on a device, and the loss needs one of it (BatchNorm Op is "
                "in inference mode, but its gradient Op is being created: PopART, "
                "`batchnorm.cpp`). Freeze it together with all that is before it, or "
                "compute (x - mean) * rsqrt(var + eps) * weight + bias.",
                node,
            )


def mark_known_results(compilation: Compilation) -> None:
    """Mark results that never change, and copies that only mark a loss, for `lower`."""
    recording, graph = compilation.recording, compilation.graph
    values = recording.results
    changing = {*changed_memory(compilation.graphs), *recording.weight_memory()}
    for node in graph.nodes:
        made = node.all_input_nodes[0] if node.target is identity_loss else node
        both = values.get(made), values.get(node)
        if all(isinstance(t, Tensor) and storage_of(t) not in changing for t in both):
            shape = compilation.shapes.get(made, both[0])
            is_copy = made is not node and shape.dim() == 0
            if is_copy or (node.target in _MAKERS and not node.all_input_nodes):
                node.meta[KNOWN] = None if is_copy else values[node].detach().clone()


STAGES = (
    CompileStage("own backward", find_results),
    CompileStage("buffer", refuse_exchanged_weights),
    CompileStage("control flow", eliminate_dead),
    CompileStage("arguments", find_constants, needs_end=False),
    CompileStage("gradients", refuse_marked, needs_end=False),
    CompileStage("arguments", apply_rules, needs_end=False),
    CompileStage("numbers", settle_device_shapes),
    CompileStage("operator", refuse_unsupported_operators, needs_end=False),
    CompileStage("blocks", find_ipus),
    CompileStage("loss", find_loss),
    CompileStage("arguments", refuse_frozen_norms),
    CompileStage("arguments", mark_known_results),
)
"""All that happens to a recorded program until it is compiled, in this order."""


def trace(
    module: torch.nn.Module,
    arguments: CallArguments,
    *,
    strategy: ExecutionStrategy,
    is_training: bool,
    names_modules: bool = True,
) -> Program:
    """Run `module` once on the arguments of one micro-batch, and compile it.

    Args:
        arguments: Arguments with the rows of one micro-batch.
        strategy: Gives each block an IPU, a stage and a phase.
        is_training: Whether the program will be differentiated.
        names_modules: Whether names of sub-modules precede those of operators.

    Raises:
        Error: The module breaks a rule of tracing, or PopTorch refuses the program; the
            message names it.
    """
    compilation = Compilation(strategy, Report(), is_training=is_training)
    compilation.trace(module, arguments, names_modules=names_modules)
    for tensor in compilation.host_outputs.values():
        warnings.warn(
            f"Output expected to be on the IPU but is on {tensor.device.type}: it is "
            "returned as it was when the model was traced.",
            stacklevel=1,
        )
    try:
        compilation.run()
    except Error as error:
        add_place(error, trace.__code__, "")
        raise
    return compilation.program()
