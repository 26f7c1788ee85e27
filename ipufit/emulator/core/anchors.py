# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors inside a program, and the anchored tensors.

The names are PopART's, as users of PopTorch know them. Weights have their own names,
and inputs are `input`, `input/1` and so on. A result is named by the path of its
module, its operator and a number, `fc1/Relu:0`; an operator's second result is
`fc1/Relu:0/1`.

Anchored tensors of the forward pass become additional results of the program.
Gradients, updated weights and the optimizer's tensors aren't in its graph: the device
collects them while the program runs.
"""

from __future__ import annotations

import difflib
import operator
from collections import Counter
from typing import Iterable, Mapping, NamedTuple

from torch import Tensor
from torch.fx.node import Node

from .._logging import logger
from ..enums import OutputMode
from ..errors import createPoptorchError
from ..options import Options
from .graph import function_name
from .program import Program

GRADIENT = "Gradient___"
UPDATED = "UpdatedVar___"

_POPART_NAMES = {
    **{f"avg_pool{n}d": "AveragePool" for n in (1, 2, 3)},
    **{f"conv{n}d": "Conv" for n in (1, 2, 3)},
    **{f"max_pool{n}d": "MaxPool" for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": "MaxPool" for n in (1, 2)},
    **dict.fromkeys(("divide", "true_divide", "truediv"), "Div"),
    **dict.fromkeys(("bmm", "matmul", "mm"), "MatMul"),
    **dict.fromkeys(("rsub", "subtract"), "Sub"),
    "multiply": "Mul",
}
"""PopART's names that aren't torch's in camel case, by torch's."""
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "matmul")


def operator_name(name: str) -> str:
    """Return PopART's name of a torch function or of a method such as `__radd__`.

    Where PopART computes the function in several steps, torch's name is used.

    Example:
        >>> [operator_name(n) for n in ("relu_", "log_softmax", "__radd__", "conv2d")]
        ['Relu', 'LogSoftmax', 'Add', 'Conv']
    """
    base = name.strip("_")
    if name.startswith("__") and base[:1] in "ir" and base[1:] in _ARITHMETIC:
        base = base[1:]
    camel = "".join(part[:1].upper() + part[1:] for part in base.split("_"))
    return _POPART_NAMES.get(base, camel)


def named_nodes(program: Program) -> dict[str, Node]:
    """Map PopART's names to the nodes of a program that are tensors."""
    nodes = program.graph.graph.nodes
    placeholders = [node for node in nodes if node.op == "placeholder"]
    inputs = placeholders[len(program.weight_names) :]
    named = dict(zip(program.weight_names, placeholders))
    named.update((f"input/{i}" if i else "input", n) for i, n in enumerate(inputs))
    counts: Counter[str] = Counter()
    for node in nodes:
        is_setting = function_name(node) == "__setitem__"
        has_result = node.target not in (operator.getitem, setattr) and not is_setting
        if "operator" not in node.meta or not has_result:
            continue
        scope, function = node.meta["operator"]
        if node.target is getattr:  # a property, such as `x.T`
            function = str(node.args[1])
        name = scope + operator_name(function)
        suffix = f"/{counts[name]}" if counts[name] else ""
        counts[name] += 1
        for number, tensor in enumerate(_tensors(node)):
            named[f"{name}:{number}{suffix}"] = tensor
    return named


def _tensors(node: Node) -> list[Node]:
    """Return the nodes of a result's tensors: the node itself, or one per element."""
    elements = [user for user in node.users if user.target is operator.getitem]
    return [tensor for element in elements for tensor in _tensors(element)] or [node]


def weight_tensor_names(trained: Iterable[str]) -> list[str]:
    """Return the names of trained weights' gradients, and of updated weights.

    Example:
        >>> weight_tensor_names(["fc.bias"])
        ['Gradient___fc.bias', 'UpdatedVar___fc.bias']
    """
    return [form + name for name in trained for form in (GRADIENT, UPDATED)]


_MODES = {mode.value: mode.name.upper() for mode in OutputMode}
_MODES[OutputMode.Sum.value] = "Sum"


class Anchors(NamedTuple):
    """The anchored tensors of one program, by the user's names.

    Attributes:
        results: Names of the anchored results of the program, in their order.
        gradients: Name of the weight, for each anchored gradient.
        after_updates: PopART's name, for each anchored tensor of an update: an updated
            weight, or a tensor of the optimizer.
    """

    results: tuple[str, ...] = ()
    gradients: Mapping[str, str] = {}
    after_updates: Mapping[str, str] = {}

    @property
    def num_watched(self) -> int:
        """Number of anchors that aren't results of the program."""
        return len(self.gradients) + len(self.after_updates)


def resolve_modes(options: Options) -> None:
    """Set the output mode of anchors that have none to that of the outputs.

    PopTorch keeps and logs these modes but never sends them to the device (PopTorch,
    `LowerToPopart.cpp`): anchored tensors come back as the outputs do.

    Example:
        >>> options = Options().outputMode(OutputMode.Sum)
        >>> options.anchorTensor("out", "Relu:0")
        >>> resolve_modes(options)
        >>> options.anchored_tensors["out"]
        ['Relu:0', True, 3, 1]
    """
    for anchor in options.anchored_tensors.values():
        _, is_unspecified, _, _ = anchor
        if is_unspecified:
            is_periodic = options.output_mode == OutputMode.EveryN.value
            period = options.output_return_period if is_periodic else 1
            anchor[2:] = [int(options.output_mode), period]


def add_anchors(program: Program, options: Options, names: list[str]) -> Anchors:
    """Make the anchored tensors additional results of a program.

    Args:
        program: The traced program; its graph is changed.
        options: The executor's options, in which `Options.anchorTensor` is recorded.
        names: Names of all tensors, with those outside the graph.

    Raises:
        Error: An anchored tensor doesn't exist.
    """
    if not options.anchored_tensors:
        return Anchors()
    resolve_modes(options)  # of anchors that came late
    nodes = named_nodes(program)
    results: dict[str, Node] = {}
    gradients: dict[str, str] = {}
    after_updates: dict[str, str] = {}
    for short_name, anchor in options.anchored_tensors.items():
        long_name, _, mode, period = anchor
        if long_name in nodes:
            results[short_name] = nodes[long_name]
        elif long_name not in names:
            close = difflib.get_close_matches(long_name, names, n=5)
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise createPoptorchError(
                f"Options.anchorTensor({short_name!r}, {long_name!r}): the program has "
                f"no tensor of that name.{hint} `getTensorNames()` of the compiled "
                "model lists them all."
            )
        elif long_name.startswith(GRADIENT):
            gradients[short_name] = long_name[len(GRADIENT) :]
        else:
            after_updates[short_name] = long_name
        logger.debug("Anchored tensor: %s %s/%d", long_name, _MODES[mode], period)
        if mode != options.output_mode:
            logger.warning(
                "The output mode of anchor %r has no effect, as in PopTorch: it comes "
                "back as the outputs do (%s).",
                short_name,
                _MODES[options.output_mode],
            )
    graph = program.graph.graph
    *_, output = graph.nodes
    seen = []
    for node in results.values():
        with graph.inserting_after(node):
            seen.append(graph.call_function(snapshot, (node,)))
    before = list(output.args[0])
    at = len(before) - program.has_loss
    output.args = ((*before[:at], *seen, *before[at:]),)
    program.graph.recompile()
    return Anchors(tuple(results), gradients, after_updates)


def snapshot(tensor: Tensor) -> Tensor:
    """Copy a tensor at this point of a program, before it is changed in place.

    Example:
        >>> import torch
        >>> x = torch.ones(1)
        >>> seen = snapshot(x)
        >>> _ = x.add_(1)
        >>> seen
        tensor([1.])
    """
    return tensor.detach().clone()
