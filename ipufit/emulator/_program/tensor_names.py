# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors inside a program, by which users can anchor them.

The names are PopART's, as PopTorch's users meet them: a weight has its own, inputs are
`input`, `input/1` and so on, a result has the name of its operator with the path of
the module before it and its number behind, `fc1/Relu:0`; a second one `fc1/Relu:0/1`.
"""

from __future__ import annotations

import operator
from typing import Iterable, Iterator

from torch.fx.graph import Graph
from torch.fx.node import Node

from ipufit.emulator._program.program import Program

GRADIENT = "Gradient___"
UPDATED = "UpdatedVar___"

_OPERATORS = {
    "AveragePool": ("avg_pool1d", "avg_pool2d", "avg_pool3d"),
    "Conv": ("conv1d", "conv2d", "conv3d"),
    "Div": ("divide", "true_divide", "truediv"),
    "MatMul": ("bmm", "matmul", "mm"),
    "MaxPool": ("max_pool1d", "max_pool2d", "max_pool3d"),
    "Mul": ("multiply",),
    "Sub": ("rsub", "subtract"),
}
"""PopART's names that aren't torch's in camel case, with torch's."""
_POPART_NAMES = {name: popart for popart, names in _OPERATORS.items() for name in names}

_ARITHMETIC = frozenset(
    ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "matmul")
)


def operator_name(name: str) -> str:
    """PopART's name for a function of torch or a method such as `__radd__`.

    Where PopART computes the function in several steps, it is torch's name.

    Example:
        >>> [operator_name(n) for n in ("relu_", "log_softmax", "__radd__", "conv2d")]
        ['Relu', 'LogSoftmax', 'Add', 'Conv']
    """
    is_special = name.startswith("__")
    base = name.strip("_")
    if is_special and base[:1] in ("i", "r") and base[1:] in _ARITHMETIC:
        base = base[1:]
    camel = "".join(part[:1].upper() + part[1:] for part in base.split("_"))
    return _POPART_NAMES.get(base, camel)


def named_nodes(program: Program) -> dict[str, Node]:
    """Map names to the nodes of a program's graph that are tensors."""
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
    """Name the gradients of trained weights, and the weights after an update.

    Example:
        >>> list(weight_tensor_names(["fc.bias"]))
        ['Gradient___fc.bias', 'UpdatedVar___fc.bias']
    """
    for name in trained:
        yield GRADIENT + name
        yield UPDATED + name


def _results(graph: Graph) -> Iterator[tuple[str, list[Node]]]:
    """Yield the name of each operator of a graph, and the nodes of its results."""
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
    """Nodes of the tensors in a result: the node itself, or its elements' nodes."""
    elements = [user for user in node.users if _is_element(user)]
    if not elements:
        return [node]
    return [tensor for element in elements for tensor in _tensors(element)]
