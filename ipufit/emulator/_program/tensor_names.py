# SPDX-License-Identifier: Apache-2.0
"""What the tensors of a program are called, for those who want to see one.

The names are PopART's, as PopTorch's users meet them: a weight has its own, inputs are
`input`, `input/1` and so on, a result has the name of its operator with the path of
the module before it and its number behind, `fc1/Relu:0`; a second one `fc1/Relu:0/1`.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Iterable, Iterator

from torch.fx.graph import Graph
from torch.fx.node import Node

if TYPE_CHECKING:
    from ipufit.emulator._program.program import Program

GRADIENT = "Gradient___"
UPDATED = "UpdatedVar___"

_OPERATORS = {
    "avg_pool1d": "AveragePool",
    "avg_pool2d": "AveragePool",
    "avg_pool3d": "AveragePool",
    "bmm": "MatMul",
    "conv1d": "Conv",
    "conv2d": "Conv",
    "conv3d": "Conv",
    "divide": "Div",
    "matmul": "MatMul",
    "max_pool1d": "MaxPool",
    "max_pool2d": "MaxPool",
    "max_pool3d": "MaxPool",
    "mm": "MatMul",
    "multiply": "Mul",
    "rsub": "Sub",
    "subtract": "Sub",
    "true_divide": "Div",
    "truediv": "Div",
}
"""Names of PopART that aren't torch's in other letters."""

_ARITHMETIC = frozenset(
    ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "matmul")
)


def operator_name(name: str) -> str:
    """What PopART calls a function of torch, more or less.

    Where PopART computes it in several steps, the name is torch's.

    Args:
        name: Of the function, or of an operator's method.

    Example:
        >>> [operator_name(n) for n in ("relu_", "log_softmax", "__radd__", "conv2d")]
        ['Relu', 'LogSoftmax', 'Add', 'Conv']
    """
    is_special = name.startswith("__")
    base = name.strip("_")
    if is_special and base[:1] in ("i", "r") and base[1:] in _ARITHMETIC:
        base = base[1:]
    camel = "".join(part[:1].upper() + part[1:] for part in base.split("_"))
    return _OPERATORS.get(base, camel)


def named_nodes(program: Program) -> dict[str, Node]:
    """The nodes of a program's graph that are tensors, by name."""
    graph = program.graph.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    num_weights = len(program.weight_names)
    named = dict(zip(program.weight_names, placeholders))
    for index, node in enumerate(placeholders[num_weights:]):
        named["input" if index == 0 else f"input/{index}"] = node
    counts: dict[str, int] = {}
    for name, results in _results(graph):
        count = counts.get(name, 0)
        counts[name] = count + 1
        for number, node in enumerate(results):
            full = f"{name}:{number}"
            named[f"{full}/{count}" if count else full] = node
    return named


def weight_tensor_names(trained: Iterable[str]) -> Iterator[str]:
    """The gradients of weights that are trained, and the weights once updated.

    Example:
        >>> list(weight_tensor_names(["fc.bias"]))
        ['Gradient___fc.bias', 'UpdatedVar___fc.bias']
    """
    for name in trained:
        yield GRADIENT + name
        yield UPDATED + name


def _results(graph: Graph) -> Iterator[tuple[str, list[Node]]]:
    """Each operator of a graph with the nodes of its results."""
    for node in graph.nodes:
        recorded = node.meta.get("operator")
        if recorded is None or _is_element(node) or not _has_result(node):
            continue
        prefix, function = recorded
        if node.target is getattr:  # a property, such as `x.T`
            function = str(node.args[1])
        yield prefix + operator_name(function), _tensors(node)


def _is_element(node: Node) -> bool:
    return node.target is operator.getitem


def _has_result(node: Node) -> bool:
    return node.target not in (setattr, "__setitem__")


def _tensors(node: Node) -> list[Node]:
    """The node itself, or those of the elements of the sequence that it is."""
    elements = [user for user in node.users if _is_element(user)]
    if not elements:
        return [node]
    return [tensor for element in elements for tensor in _tensors(element)]
