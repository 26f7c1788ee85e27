# SPDX-License-Identifier: Apache-2.0
"""Rules: rows of the table `operators.tsv` that the emulator holds programs to.

PopTorch's handlers turn torch's operators into PopART's. Where a device then computes
other numbers than torch, the program computes them, too. Where PopTorch, PopART or
Poplar refuses an operator, the emulator does. `ipufit check` reports both.

A rule is a function of one operation of a traced program:

    @row("acosh", "acosh arccosh", is_reported=False)
    def acosh(call):
        return lambda x: torch.log(x + torch.sqrt(x * x - 1))

Operations on constants have no rules: torch computes them (PopTorch,
`EvaluateConstexprs.cpp`).
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node, map_arg

from .float16 import FUNCTION, device_function, unrounded_function
from .graph import (
    Operation,
    base_name,
    error_about,
    function_name,
    is_in_place,
    map_tensors,
    node_arguments,
    tensors_in,
)


@dataclass(frozen=True)
class Call(Operation):
    """An operation of a traced program with the tensors of the trace.

    Its name has no underscore at the end if it changes its first argument.

    Attributes:
        result: Its result in the trace, as torch computes it.
        is_training: Whether the program is differentiated.
        node: Its node.
        values: The value of each node while tracing.
        constants: Nodes that are computed while the program is compiled.
        results: Results of the functions that `once` has called.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> Call(torch.exp, "exp", (x,), {}, x.exp(), is_training=True).trains
        True
    """

    result: Any
    is_training: bool
    node: Node | None = None
    values: Mapping[Node, Any] = field(default_factory=dict)
    constants: Collection[Node] = ()
    results: dict[Callable[[Call], Any], Any] = field(default_factory=dict)

    @property
    def is_in_place(self) -> bool:
        """Whether the operation changes its first argument."""
        return self.node is not None and is_in_place(self.node)

    @property
    def users(self) -> set[str]:
        """Names of the functions that take the result; `output` is the program."""
        return set(map(function_name, self.node.users if self.node else ()))

    @property
    def first(self) -> Any:
        """The argument `input`, or the first tensor."""
        input = self.get("input")
        return input if isinstance(input, Tensor) else self.tensors[0]

    @property
    def is_half(self) -> bool:
        """Whether the first tensor is of float16."""
        return self.first.dtype is torch.float16

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument, or torch's default."""
        return self.arguments.get(name, default)

    def once(self, function: Callable[[Call], Any]) -> Any:
        """Return the result of a function of the call; several rules share it."""
        if function not in self.results:
            self.results[function] = function(self)
        return self.results[function]

    @functools.cached_property
    def makers(self) -> tuple[str, ...]:
        """Names of the functions that made the first argument, a view that is changed.

        The last view comes first, then those before it up to the function that made
        the base; `input` for a weight or an input. Without names nothing else reads the
        base.
        """
        names: list[str] = []
        is_read = False
        base: Any = next(iter(self.node.args), None) if self.node else None
        while isinstance(base, Node):
            is_read = is_read or (bool(names) and len(base.users) > 1)
            is_input = base.op == "placeholder"
            names.append("input" if is_input else function_name(base))
            value = self.values.get(base)
            is_view = not isinstance(value, Tensor) or value._is_view()
            base = base.args[0] if is_view and base.args and not is_input else None
        return tuple(names) if is_read else ()

    def argument_node(self, name: str) -> Node | None:
        """Return the node of an argument."""
        argument = node_arguments(self.node).get(name) if self.node else None
        return argument if isinstance(argument, Node) else None

    @property
    def trains(self) -> bool:
        """Whether a gradient passes through the operation."""
        tensors = tensors_in(self.result)
        if self.node is None and torch.is_grad_enabled():
            tensors += self.tensors  # of PopTorch's tensors only weights require one
        return self.is_training and any(tensor.requires_grad for tensor in tensors)

    @property
    def is_whole(self) -> bool:
        """Whether all numbers among the arguments are whole."""
        return not any(
            isinstance(value, (float, complex, np.floating))
            or any(t.is_floating_point() or t.is_complex() for t in tensors_in(value))
            for value in (*self.args, *self.kwargs.values())
        )


Condition = Callable[[Call], Any]


class OperatorRule(NamedTuple):
    """A row of the table, and the function that finds where it holds.

    Attributes:
        row: The row's `rule`.
        find: Returns the function with which a device computes the operation; a text,
            or True with the row's message, to refuse it; True if the row holds and
            torch's function stays; else None or False.
        is_reported: Whether `ipufit check` reports it. It doesn't if the row depends on
            values, which a check doesn't know.
        topic: Subject under which `ipufit check` reports it.
    """

    row: str
    find: Condition
    is_reported: bool
    topic: str


_ACCESSORS = ("__get__", "getattr", "setattr")
"""Functions of properties, for which a row has the name."""

ANY_IN_PLACE = "any function in place"
"""The name of a rule for all functions that change their first argument."""

RULES: dict[str, list[OperatorRule]] = {}
"""The rules of each function of torch, by the name under which it is recorded."""


def row(
    name: str,
    functions: str | Iterable[str],
    find: Condition | None = None,
    *,
    is_reported: bool = True,
    topic: str = "numbers",
) -> Callable[[Condition], Condition]:
    """Add the rule of a row, or decorate the function that finds it.

    Args:
        name: The row's `rule` in the table.
        functions: Names of torch's functions, as they are recorded: a text with all of
            them, or a tuple. Those that change their first argument are included:
            `clamp_` with `clamp`.
        find: As in `OperatorRule`; without it, the decorator is returned.
        is_reported: As in `OperatorRule`.
        topic: As in `OperatorRule`.
    """

    def add(find: Condition) -> Condition:
        rule = OperatorRule(name, find, is_reported, topic)
        for function in functions.split() if isinstance(functions, str) else functions:
            RULES.setdefault(function, []).append(rule)
        return find

    if find is not None:
        add(find)
    return add


class Finding(NamedTuple):
    """A rule that holds for a node.

    Attributes:
        rule: The rule.
        found: The value that the rule's `find` returned.
    """

    rule: OperatorRule
    found: Any

    @property
    def verdict(self) -> str:
        """The verdict of the row, on what a device does."""
        return table()[self.rule.row]["verdict"]

    @property
    def is_refused(self) -> bool:
        """Whether a compilation refuses the program; else the finding is reported."""
        row = table()[self.rule.row]
        is_certain = self.verdict == "refused" and row["emulator"] == "has"
        is_text = isinstance(self.found, str) or row["message"]
        return not callable(self.found) and bool(is_text or is_certain)

    def message(self, name: str) -> str:
        """Say what a device does, when, and what to do instead."""
        row = table()[self.rule.row]
        if row["message"]:
            return row["message"].format(name=name, found=self.found)
        if isinstance(self.found, str):
            return self.found
        name = row["names"] if name in _ACCESSORS else name
        when = f" ({row['when']})" if row["when"] else ""
        source = re.sub(r"[\w./-]+/", "", row["citation"].split(";")[0])
        instead = f" Instead: {row['instead']}." if row["instead"] else ""
        return f"`{name}`{when}: a device {row['device']} [{source}].{instead}"


def findings(
    node: Node,
    values: Mapping[Node, Any],
    constants: Collection[Node] = (),
    *,
    is_training: bool,
) -> Iterator[Finding]:
    """Yield the rules that hold for a node.

    Args:
        node: A node that isn't constant.
        values: The value of each node while tracing.
        constants: Nodes that are computed while the program is compiled.
        is_training: Whether the program is differentiated.
    """
    name = function_name(node)
    rules = RULES.get(base_name(name), [])
    if is_in_place(node):
        rules = rules + RULES[ANY_IN_PLACE]
    if not rules or node not in values:
        return
    args, kwargs = map_arg((node.args, node.kwargs), values.get)
    function: Any = node.target
    call = Call(
        function,
        base_name(name),
        tuple(args),
        dict(kwargs),
        values[node],
        is_training,
        node,
        values,
        constants,
    )
    for rule in rules:
        found = rule.find(call)
        if found:
            yield Finding(rule, found)


def grave_messages(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    *,
    is_training: bool,
) -> list[str]:
    """Say what a device does gravely otherwise in one call of a torch function.

    It needs no recorded program: a call on a device may be told by its tensors alone.

    Args:
        function: The torch function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        result: Its result.
        is_training: Whether the program is differentiated.

    Example:
        >>> x = torch.ones(2)
        >>> dropout = torch.nn.functional.dropout
        >>> [text] = grave_messages(dropout, (x,), {}, x, is_training=False)
        >>> print(text[:60])
        `dropout` (training=True (a module in train mode) in an infe
    """
    name = getattr(function, "__name__", "")
    rules = [r for r in RULES.get(base_name(name), ()) if table()[r.row]["warns"]]
    if not rules:
        return []
    call = Call(function, base_name(name), args, kwargs, result, is_training)
    found = (Finding(rule, rule.find(call)) for rule in rules)
    return [finding.message(name) for finding in found if finding.found]


def replace_function(node: Node, function: Callable[..., Any]) -> None:
    """Make a node compute its result with another function."""
    node.meta[FUNCTION] = _like(node, function)


_RESHAPES = frozenset(
    """
    flatten ravel reshape reshape_as squeeze unflatten unsqueeze view view_as
    """.split()  # noqa: SIM905 - one per line would be longer
)
"""Functions that PopTorch makes a reshape to the shape of the trace."""

_MAY_RESHAPE = frozenset({"__getitem__", "contiguous", "identity_loss"})
"""Functions that it makes one at times: `x[None]`, for example."""

_OF_THE_TRACE = frozenset({"fill", "index_fill", "masked_fill", "stack"})
"""Functions whose operands it reshapes to the trace, or broadcasts from one element."""

_NOT_RUN = frozenset({"call_on_host", "run_branch", "run_loop"})


def settle_shapes(
    graph: Graph, values: Mapping[Node, Any], resized: Mapping[Node, str]
) -> None:
    """Find which results have another shape on a device than in the trace.

    PopART infers the shapes anew. A reshape takes the shape of the trace.

    Args:
        graph: A program to which the rules are applied.
        values: The value of each node while tracing.
        resized: Messages about nodes whose result has another shape on a device.

    Raises:
        Error: An operation doesn't take the device's shapes.
    """
    sized: dict[Node, Any] = {}
    why = {node: node for node in resized}

    def copy(node: Node) -> Any:
        value = sized.get(node, values.get(node))
        return map_tensors(value, lambda tensor: tensor.detach().clone())

    for node in graph.nodes if resized else ():
        origin = next((why[n] for n in (node, *node.all_input_nodes) if n in why), None)
        is_called = node.op in ("call_function", "call_method")
        if origin is None or not is_called or function_name(node) in _NOT_RUN:
            continue
        name = function_name(node)
        operands = [operand for operand in node.all_input_nodes if operand in sized]
        if base_name(name) in _OF_THE_TRACE and all(
            sized[operand].numel() == values[operand].numel() for operand in operands
        ):
            for operand in operands:
                shape = tuple(values[operand].shape)
                with graph.inserting_before(node):
                    plain = graph.call_function(torch.reshape, (operand, shape))
                node.replace_input_with(operand, plain)
            continue
        args, kwargs = map_arg((node.args, node.kwargs), copy)
        run = device_function(node)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=()):
                result = run(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            message = f"{resized[origin]} Here: {error}"
            raise error_about(message, node, origin) from None
        traced = values.get(node)
        if isinstance(result, Tensor) and isinstance(traced, Tensor):
            if result.shape == traced.shape:
                continue
            count = result.numel()
            if count != traced.numel():
                if name in _RESHAPES:
                    wrong = f"{name} to {list(traced.shape)} of {count} elements"
                    raise error_about(f"{resized[origin]} Here: {wrong}", node, origin)
            elif name in _RESHAPES or name in _MAY_RESHAPE:
                function = unrounded_function(node)
                replace_function(node, _reshaped(function, traced.shape))
                continue
        sized[node], why[node] = result, origin


def _reshaped(
    function: Callable[..., Tensor], shape: torch.Size
) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: function(*args, **kwargs).reshape(shape)


@functools.lru_cache(maxsize=None)
def table() -> dict[str, dict[str, str]]:
    """Return the rows of the table that have a rule, by its name.

    Example:
        >>> table()["gelu-exact"]["verdict"]
        'number'
    """
    return {row["rule"]: row for row in _rows() if row["rule"]}


@functools.lru_cache(maxsize=None)
def handled_operators() -> frozenset[str]:
    """Return the names of the operators that PopTorch lowers, without overloads.

    Those of other libraries have the library's name. They are the `registerHandler` of
    graphcore/poptorch at c2a8b177 (`poptorch/source/popart_canonicalization`), which
    cover the list of its user guide ("IPU supported operations").
    """
    names = (
        name
        for row in _rows()
        if row["emulator"] != "strict" and not row["operator"].startswith("(none)")
        for name in row["operator"].split(", ")
    )
    return frozenset(base_name(name.replace("aten::", "")) for name in names)


_NEWER = "torch after 2.0.1"
"""Source of rows about what a pod's torch doesn't have."""


@functools.lru_cache(maxsize=None)
def newer_names() -> frozenset[str]:
    """Return functions, and arguments as `f(argument)`, that a pod's torch hasn't."""
    rows = (row for row in _rows() if row["source"] == _NEWER)
    return frozenset(name for row in rows for name in row["names"].split(", "))


@functools.lru_cache(maxsize=None)
def replacements() -> dict[str, str]:
    """Return what PopTorch compiles in place of functions that it doesn't."""
    rows = (row for row in _rows() if row["source"] in ("(no handler)", _NEWER))
    return {
        name.partition("(")[0]: row["instead"]
        for row in rows
        for name in row["names"].split(", ")
        if row["instead"]
    }


@functools.lru_cache(maxsize=None)
def _rows() -> list[dict[str, str]]:
    text = Path(__file__).with_name("operators.tsv").read_text("utf-8")
    names, *rows = (line.split("\t") for line in text.rstrip("\n").split("\n"))
    return [dict(itertools.zip_longest(names, row, fillvalue="")) for row in rows]


def _like(node: Node, function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a replacement the name of a node's function, and its effect in place."""
    is_changing = is_in_place(node) or bool(node.kwargs.get("inplace"))

    def computed(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if is_changing:
            x, *others = args
            return x.copy_(function(x.clone(), *others, **kwargs))
        result = function(*args, **kwargs)
        return result if out is None else out.copy_(result)

    computed.__name__ = computed.__qualname__ = function_name(node)
    return computed
