# SPDX-License-Identifier: Apache-2.0
"""The program of one micro-batch: what runs, and exceptions that stop it."""

from __future__ import annotations

import copy
import math
from dataclasses import InitVar, dataclass, replace
from functools import cached_property
from typing import Any, Callable, Mapping

import torch
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node, map_aggregate

from .._switches import CHANNELS_LAST_VARIABLE, is_on
from .._utils import reconstructTensorStructure
from ..errors import Error, createPoptorchError
from ..ops import Body
from .channels_last import in_channels_last
from .float16 import FUNCTION, ROUNDING, device_function
from .graph import (
    NORM_FUNCTIONS,
    GraphModule,
    changed_memory,
    effects_of,
    function_name,
    is_in_place,
    storage_of,
    tensors_in,
)
from .recording import Recording

KNOWN = "known"
"""Metadata of a node: its constant result, or None if it only copies its argument."""

_READ_MEMORY = ("as_strided", "resize_")
"""What the functions begin with that view other memory than that of a tensor."""


@dataclass(eq=False)
class Program:
    """The operations on one micro-batch, recorded from the user's module.

    Args:
        recording: The operations that a trace has recorded.
        graphs: Its graph, then those of loops and branches.
        ipus: The IPUs of one replica that run operators.
        has_loss: Whether the last result is the final loss.
        is_random: Whether the program draws random numbers.
        output_structure: The value that `forward` returned, with the traced tensors.
        constant_outputs: Values of the outputs that are equal for every micro-batch, by
            index.
        host_outputs: Values of the outputs that never were on the device, by index.
        stops_at_exceptions: Whether the program stops at floating-point exceptions.

    Attributes:
        graph: Takes the weights, then the inputs. Returns the outputs that it
            computes, then the loss if there is one.
        weight_names: Names of the weights, in the order in which the graph takes them.
        weight_shapes: Shapes of the weights, in the same order.
        variables: Names of the floating-point weights. Others are constants.
        has_half: Whether there is any tensor of float16.
        blocks: IPU, stage and phase of each block, in the order in which blocks begin.
        updated_weights: Floating-point weights that the program changes in place.
        volatile_weights: Integer weights that the program changes in place. They are
            constants of the program, so a change is lost after the micro-batch.
        unsynchronised_weights: Updated weights that replicas would have to broadcast:
            all but the statistics of normalisation layers.
        num_inputs: Number of tensors that the graph takes besides the weights.
        written_inputs: Indices of the inputs that the program changes in place.
        memory: Storages of the weights, then of the inputs.
        is_convolutional: Whether there are convolutions, all of them of batches of
            images, which torch has in channels_last.
        reads_memory: Whether the program reads memory by strides of its own.
    """

    recording: InitVar[Recording]
    graphs: InitVar[list[Graph]]
    ipus: tuple[int, ...]
    has_loss: bool
    is_random: bool
    output_structure: Any
    constant_outputs: dict[int, Tensor]
    host_outputs: dict[int, Tensor]
    stops_at_exceptions: bool = False

    def __post_init__(self, recording: Recording, graphs: list[Graph]) -> None:
        self.graph = GraphModule(recording.root, recording.graph)
        self.blocks = tuple(recording.begun)
        weights = recording.weights
        self.weight_names = tuple(weights)
        self.weight_shapes = tuple(weight.shape for weight in weights.values())
        self.variables = frozenset(
            name for name, weight in weights.items() if weight.is_floating_point()
        )
        made = (recording.results.get(node) for node in recording.graph.nodes)
        self.has_half = any(
            tensor.dtype == torch.float16
            for value in (*weights.values(), *made)
            for tensor in tensors_in(value)
        )
        names = {function_name(node) for graph in graphs for node in graph.nodes}
        self.reads_memory = any(name.startswith(_READ_MEMORY) for name in names)
        images = [
            recording.results[node].dim()
            for node in recording.graph.nodes
            if function_name(node) in ("conv2d", "conv_transpose2d")
        ]
        self.is_convolutional = bool(images) and 3 not in images
        changes, weight_of = changed_memory(graphs), recording.weight_memory()
        inputs = recording.input_memory()
        self.num_inputs = len(inputs)
        self.written_inputs = tuple(i for i, m in enumerate(inputs) if m in changes)
        self.memory = [*map(storage_of, recording.copies.values()), *inputs]
        by = {weight_of[m]: names for m, names in changes.items() if m in weight_of}
        updated = by.keys() & self.variables
        self.updated_weights = frozenset(updated)
        self.volatile_weights = frozenset(by.keys() - updated)
        self.unsynchronised_weights = frozenset(
            name for name in updated if by[name] - NORM_FUNCTIONS
        )

    @cached_property
    def run(self) -> Callable[..., tuple[Tensor, ...]]:
        """The graph as a function of the weights and the inputs."""
        return lower(self).forward

    @cached_property
    def used_weights(self) -> frozenset[str]:
        """Names of the weights that an operation reads.

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
        others, computed = {**self.host_outputs, **constants}, iter(results)
        count = len(results) + len(others)
        values = [others[i] if i in others else next(computed) for i in range(count)]
        return reconstructTensorStructure(self.output_structure, values)


def lower(program: Program) -> GraphModule:
    """Make the graph of a program run as a device does; the program stays as it is."""
    root, graph = program.graph, copy.deepcopy(program.graph.graph)
    attributes = store_known_results(graph)
    if program.has_loss:
        keep_values_for_backward(graph, program.memory)
    is_wanted = is_on(CHANNELS_LAST_VARIABLE, default=True)
    if is_wanted and program.is_convolutional and not program.stops_at_exceptions:
        graph = in_channels_last(
            graph, program.weight_shapes, is_differentiated=program.has_loss
        )
    for name in {str(node.target) for node in graph.nodes if node.op == "get_attr"}:
        value = attributes.setdefault(name, getattr(root, name, None))
        if isinstance(value, Body):
            body = copy.deepcopy(value.graph)
            compute_on_device(body)
            attributes[name] = replace(value, graph=body)
    compute_on_device(graph, stops_at_exceptions=program.stops_at_exceptions)
    return GraphModule(attributes, graph)


def compute_on_device(graph: Graph, *, stops_at_exceptions: bool = False) -> None:
    """Give each operation the function of a device: of a rule, in its precision."""
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            is_uninitialised = function_name(node).startswith(("empty", "new_empty"))
            is_checked = stops_at_exceptions and not is_uninitialised
            if is_checked or FUNCTION in node.meta or node.meta.get(ROUNDING):
                function = device_function(node)
                name = function_name(node)
                node.target = checked(function, name) if is_checked else function
                node.op = "call_function"


def store_known_results(graph: Graph) -> dict[str, Any]:
    """Store constants, and spare the copy that marks a loss; return the constants."""
    constants: dict[str, Any] = {}
    for node in [node for node in graph.nodes if KNOWN in node.meta]:
        value = node.meta[KNOWN]
        if value is None:
            node.replace_all_uses_with(node.args[0])
        elif node.users:
            constants[node.name] = value
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(node.name))
        graph.erase_node(node)
    return constants


def keep_values_for_backward(graph: Graph, memory: list[int]) -> None:
    """Copy the values of weights and inputs that are used before they are written.

    On a device a variable is written after all its consumers, those of the backward
    pass too (PopART, `Graph::setVarUpdateConstraints`).

    Args:
        graph: A training program; it is changed.
        memory: Storages of the weights, then of the inputs.
    """
    nodes = list(graph.nodes)
    places = [node for node in nodes if node.op == "placeholder"]
    storages = {node: frozenset([m]) for node, m in zip(places, memory)}
    last = {m: i for i, n in enumerate(nodes) for m in effects_of(n).writes}
    copies: dict[Node, Node] = {}
    for index, node in enumerate(nodes):
        effects = effects_of(node)
        if node.op.startswith("call"):
            storages[node] = effects.results.intersection(memory)
        changed = (*node.args, None)[0] if is_in_place(node) else None
        for source in node.all_input_nodes:
            used = storages.get(source, frozenset())
            if changed is None:
                used = used - effects.results - effects.writes
            is_written_later = any(last.get(storage, -1) > index for storage in used)
            if source is changed:  # the backward pass of `tanh_` needs its result
                if is_written_later and len(node.all_input_nodes) == 1:
                    with graph.inserting_before(node):
                        result = graph.call_method("clone", (source,))
                    node.replace_all_uses_with(source)
                    node.replace_input_with(source, result)
                    with graph.inserting_after(node):
                        graph.call_method("copy_", (source, result))
            elif is_written_later:
                if source not in copies:
                    with graph.inserting_before(node):
                        copies[source] = graph.call_method("clone", (source,))
                node.replace_input_with(source, copies[source])
        copies = {n: c for n, c in copies.items() if not storages[n] & effects.writes}


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


# Floating-point exceptions -------------------------------------------------------
# With `Options.Precision.enableFloatingPointExceptions(True)` a device stops at a
# division by zero, an invalid operation, a comparison with NaN, or an overflow. The
# emulator checks each operation of the forward pass for results that are not finite
# although its arguments are. It checks the backward pass by gradients of weights.

_COMPARISONS = frozenset(
    form
    for name in ("eq", "ge", "gt", "le", "lt", "ne")
    for form in (name, f"__{name}__")
)
_EXPONENTIALS = frozenset({"celu", "elu", "selu"})
"""Activations whose exp(x) a device computes for positive x, too."""


def refuse_bad_gradients(gradients: Mapping[str, Tensor | None]) -> None:
    """Raise if a gradient is not finite.

    Raises:
        Error: A gradient is NaN or infinite; the message names its weight.

    Example:
        >>> import torch
        >>> refuse_bad_gradients({"weight": torch.ones(2), "bias": None})
    """
    for name, gradient in gradients.items():
        if gradient is not None and not gradient.isfinite().all():
            raise _exception(f"the gradient of {name} is not finite")


def checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that raises an error for a floating-point exception.

    Example:
        >>> import torch
        >>> checked(torch.reciprocal, "reciprocal")(torch.zeros(1))
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: 'poptorch_py_error': Floating point exception...
    """

    def check(*args: Any, **kwargs: Any) -> Any:
        had_nan, had_infinity = _has_nan_and_infinity((args, kwargs))
        result = function(*args, **kwargs)
        has_nan, has_infinity = _has_nan_and_infinity(result)
        if has_nan and not had_nan:
            raise _exception(f"`{name}` gave NaN (an invalid operation)")
        if has_infinity and not (had_infinity or had_nan):
            raise _exception(
                f"`{name}` gave infinity (an overflow or a division by zero)"
            )
        if name in _COMPARISONS and had_nan:
            raise _exception(f"`{name}` compared a NaN")
        if name.rstrip("_") in _EXPONENTIALS:
            largest = math.log(torch.finfo(args[0].dtype).max)
            if bool((args[0] > largest).any()):
                raise _exception(f"exp(x) in `{name}` overflows")
        return result

    check.__name__ = check.__qualname__ = name
    return check


def _has_nan_and_infinity(value: Any) -> tuple[bool, bool]:
    """Return whether nested values contain NaN, and whether infinities."""
    tensors = [t for t in tensors_in(value) if t.is_floating_point()]
    numbers: list[Any] = []
    map_aggregate(value, lambda v: numbers.append(v) if isinstance(v, float) else v)
    tensors += [torch.tensor(number, dtype=torch.float64) for number in numbers]
    return (
        any(bool(tensor.isnan().any()) for tensor in tensors),
        any(bool(tensor.isinf().any()) for tensor in tensors),
    )


def _exception(what: str) -> Error:
    return createPoptorchError(
        f"Floating point exception: {what}. "
        "Options.Precision.enableFloatingPointExceptions(True) asks to stop here."
    )
