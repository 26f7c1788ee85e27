# SPDX-License-Identifier: Apache-2.0
"""Operations: calls of torch functions that a trace checks, runs and records.

This module finds which of their nodes are constant, which are dead, and what memory
they change. PopTorch computes constant expressions while it compiles, with all of
torch's functions (`EvaluateConstexprs.cpp`). Before anything else it eliminates dead
operators (PopTorch, `LowerToPopartFactories.cpp`). An operation is live if a result of
the model depends on it, or if it writes to memory that a weight, an input or a later
live operation reads (torch's `EliminateDeadCode`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import operator
import sys
import sysconfig
import traceback
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Callable, Collection, Iterable, Mapping, NamedTuple

import torch
from torch import Tensor
from torch._C import _jit_get_schemas_for_operator, _set_grad_enabled
from torch.fx import graph_module
from torch.fx.graph import Graph
from torch.fx.node import Node
from torch.overrides import handle_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import Error, createPoptorchError


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in nested arguments.

    Example:
        >>> import torch
        >>> [t.item() for t in tensors_in(([torch.tensor(1)], {"k": torch.tensor(2)}))]
        [1, 2]
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    elif isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for element in value for tensor in tensors_in(element)]


def as_list(value: Any) -> list[Any]:
    """Return the elements of a list or tuple, or a list of any other value.

    Example:
        >>> as_list((1, 2)), as_list(3)
        ([1, 2], [3])
    """
    return list(value) if isinstance(value, (list, tuple)) else [value]


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Replace the tensors in nested arguments.

    A container without changes is returned itself, such as a named result of torch.

    Example:
        >>> import torch
        >>> map_tensors({"k": [torch.tensor(1), "other"]}, lambda t: t.item())
        {'k': [1, 'other']}
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(v, function) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        elements = [map_tensors(v, function) for v in value]
        if all(new is old for new, old in zip(elements, value)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*elements)
        return type(value)(elements)
    if isinstance(value, slice):
        return slice(*map_tensors((value.start, value.stop, value.step), function))
    return value


NodesById = Mapping[int, Node]
"""The graph's node of each tensor that is on the device, by the tensor's `id`."""


@dataclass(frozen=True)
class Operation:
    """One call of a torch function in a program.

    Attributes:
        function: The function that computes the result.
        name: Name of the torch function, such as `add_` or `__getitem__`.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Example:
        >>> import torch
        >>> x = torch.zeros(2)
        >>> operation = Operation(torch.sum, "sum", (x,), {"dim": 0})
        >>> operation.arguments
        {'input': tensor([0., 0.]), 'dim': 0}
        >>> operation.run()
        tensor(0.)
    """

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors in the nested arguments."""
        return tensors_in((self.args, self.kwargs))

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments that are given, by their names in torch's signature."""
        return named_arguments(self.function, self.name, self.args, self.kwargs)

    def run(self) -> Any:
        """Compute the operation."""
        return self.function(*self.args, **self.kwargs)


_NUMPY_NAMES = {
    **{"axis": "dim", "keepdims": "keepdim", "x2": "other"},
    **dict.fromkeys(("a", "x", "x1"), "input"),
}
"""NumPy's names of arguments, which torch takes as well (`python_arg_parser.cpp`)."""


def bind_arguments(operation: Operation) -> Operation:
    """Put arguments that are given by name into their places in torch's schema.

    Those after a gap, and those that have only a name, stay by name. Functions that
    torch writes in Python bind their arguments themselves.

    Example:
        >>> x = torch.zeros(2)
        >>> call = Operation(torch.sum, "sum", (), {"axis": 0, "a": x})
        >>> bind_arguments(call).args
        (tensor([0., 0.]), 0)
    """
    if not operation.kwargs or inspect.isfunction(operation.function):
        return operation
    count = len(operation.args)
    for form in overloads(operation.name):
        kwargs = {
            name if name in form.kinds else _NUMPY_NAMES.get(name, name): value
            for name, value in operation.kwargs.items()
        }
        by_place = {*form.places[:count]}
        fits = form.required <= {*by_place, *kwargs} <= form.kinds.keys()
        if fits and by_place.isdisjoint(kwargs):
            free_places = form.places[count:]
            names = [*itertools.takewhile(kwargs.__contains__, free_places)]
            args = (*operation.args, *map(kwargs.pop, names))
            return replace(operation, args=args, kwargs=kwargs)
    return operation


_INDICES = {
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), "index"),
    **dict.fromkeys(("cross_entropy", "nll_loss"), "target"),
    "take_along_dim": "indices",
    "one_hot": "input",
}
"""Arguments of int64 in torch for which PopTorch takes int32 as well."""


def with_long_indices(operation: Operation) -> Operation:
    """Let a function take indices, or classes, of int32.

    A device's whole numbers have 32 bits, so PopTorch widens these while it infers
    types (`TypeInferenceHandler.cpp`, `RegisterMetaOps.cpp.inc`).

    Example:
        >>> x, index = torch.ones(2), torch.zeros(1, dtype=torch.int32)
        >>> gather = Operation(torch.gather, "gather", (x, 0, index), {})
        >>> with_long_indices(gather).run()
        tensor([1.])
    """
    name, function = _INDICES.get(base_name(operation.name)), operation.function
    index = operation.arguments.get(name) if name else None
    if not isinstance(index, Tensor) or index.dtype != torch.int32:
        return operation
    place = [*operation.arguments].index(str(name))

    def widened(*args: Any, **kwargs: Any) -> Any:
        if place < len(args):
            args = (*args[:place], args[place].long(), *args[place + 1 :])
        else:
            kwargs[str(name)] = kwargs[str(name)].long()
        return function(*args, **kwargs)

    widened.__name__ = operation.name
    if inspect.isfunction(function):
        vars(widened)["__wrapped__"] = function  # for its signature
    return replace(operation, function=widened)


def named_arguments(
    function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments by their names in torch's signature.

    The tensor of a method is `input`, as in torch's functions. Arguments may be the
    nodes of tensors.

    Args:
        function: The function that gets them, or the name of a method.
        name: The function's name, which stands in torch's schemas.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Example:
        >>> x = torch.zeros(2)
        >>> [*named_arguments(torch.amax, "amax", (x, 0), {"keepdim": True})]
        ['input', 'dim', 'keepdim']
    """
    forms = _signature(function) if inspect.isfunction(function) else []
    forms = forms or overloads(name)
    form = next((form for form in forms if form.takes(args, kwargs)), forms[0])
    return {**dict(zip(form.places, args)), **kwargs}


class Overload(NamedTuple):
    """Arguments of an operator: in order, without a default, the types of all."""

    places: list[str]
    required: set[str]
    kinds: dict[str, str]

    def takes(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, reads: bool = False
    ) -> bool:
        """Return whether the names and types of arguments are those of the overload.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            reads: Whether whole numbers in tensors are ints, too.
        """
        last = len(self.places) - 1
        if len(args) > last + 1 > 0 and self.kinds.get(self.places[last]) == _SIZES:
            args = (*args[:last], args[last:])  # as in `x.view(2, 3)`
        named = {**dict(zip(self.places, args)), **kwargs}
        is_known = len(args) <= last + 1 and named.keys() <= self.kinds.keys()
        return is_known and all(
            _fits(value, self.kinds[name], reads) for name, value in named.items()
        )


_SIZES = "List[int]"


def is_whole_number(tensor: Tensor) -> bool:
    """Return whether a tensor is a single whole number."""
    is_fraction = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() == 1 and not is_fraction and tensor.dtype != torch.bool


def _fits(value: Any, kind: str, reads: bool) -> bool:
    """Return whether an argument of torch's schemas takes a value."""
    if value is None or not kind:
        return True
    if isinstance(value, Tensor) and reads and "int" in kind:
        return is_whole_number(value)
    if isinstance(value, (Tensor, Node)):
        return "Tensor" in kind
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, str):
        return "str" in kind
    if isinstance(value, (list, tuple)):
        is_of_ints = _SIZES in kind and not reads
        return "List" in kind and not (is_of_ints and tensors_in(value))
    return not any(other in kind for other in ("Tensor", "bool", "str"))


@functools.lru_cache(maxsize=None)
def _signature(function: Callable[..., Any]) -> list[Overload]:
    """Return the signature of a function in Python; nothing if it doesn't tell."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of a function in C that one in Python wraps: `x ** 2`
        return []
    if "args" in parameters:
        return []
    places = ["input" if name == "self" else name for name in parameters]
    return [Overload(places, set(), dict.fromkeys(places, ""))]


_OPERATORS = {
    "__getitem__": ["input", "indices"],
    "__setitem__": ["input", "indices", "values"],
    "__pow__": ["input", "exponent"],
}
"""Arguments of Python's operators; of others they are `input` and `other`."""


@functools.lru_cache(maxsize=None)
def overloads(name: str) -> list[Overload]:
    """Return the overloads of an operator, in the order in which torch tries them."""
    forms = []
    for schema in _jit_get_schemas_for_operator(f"aten::{name}"):
        named = {
            "input" if argument.name == "self" else argument.name: argument
            for argument in schema.arguments
        }
        places = [
            name
            for name, argument in named.items()
            if not argument.kwarg_only and name != "memory_format"  # of `Tensor.to`
        ]
        required = {n for n, a in named.items() if not a.has_default_value()}
        kinds = {n: str(argument.type) for n, argument in named.items()}
        forms.append(Overload(places, required, kinds))
    places = _OPERATORS.get(name, ["input", "other"])
    return forms or [Overload(places, set(), {})]


class DeviceFunction:
    """A function of the emulator that a device runs as one operation.

    A call goes to the active `TorchFunctionMode`, as a call of a torch function does.
    So a mode of the user's sees one function and calls it, and the call reaches the
    tracer.

    Attributes:
        function: The function that the tracer runs and records.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the call to the active mode."""
        return handle_torch_function(self, tensors_in((args, kwargs)), *args, **kwargs)


FACTORIES = frozenset(
    getattr(torch, name)
    for name in """
    arange empty full full_like linspace logspace normal ones rand randint randn
    randperm range tensor zeros zeros_like
    """.split()  # noqa: SIM905 - one per line would be a page
)
"""Functions that create tensors on the IPU unless given another device
(PopTorch, `_poplar_executor.py`). Others, `torch.eye` for one, use the host."""

RANDOM_FACTORIES = frozenset(
    getattr(torch, name) for name in ("normal", "rand", "randint", "randn", "randperm")
)


def creates_on_device(operation: Operation) -> bool:
    """Return whether an operation creates a tensor on the IPU, whatever its operands.

    A factory function without a device does so (PopTorch, `_poplar_executor.py`).
    `device=None` means torch's choice, the host.

    Example:
        >>> creates_on_device(Operation(torch.zeros, "zeros", (2,), {"device": None}))
        False
    """
    device = requested_device(operation)
    if device is not None:
        return bool(device != "cpu")
    if operation.function not in FACTORIES or "device" in operation.kwargs:
        return False
    return not (operation.function is torch.normal and operation.tensors)


def requested_device(operation: Operation) -> Any:
    """Return the device among the arguments, if any.

    The tracer writes the string "cpu" for the host, and `torch.device("cpu")` for an
    IPU, whose tensors are in the host's memory.
    """
    positional = operation.args[1:2] if operation.name == "to" else ()
    devices = [d for d in positional if isinstance(d, (str, torch.device))]
    return operation.kwargs.get("device") or next(iter(devices), None)


def error_about(message: str, *nodes: Node) -> Error:
    """Return an error that a survey shows with the source lines of nodes."""
    error = createPoptorchError(message)
    vars(error)["_blamed_nodes"] = nodes
    return error


def blamed_nodes(error: Error) -> tuple[Node, ...]:
    """Return the nodes that an error is about; none if unknown."""
    return vars(error).get("_blamed_nodes", ())


_CHANGES = frozenset({"__setitem__", "__iand__", "__ior__", "__ixor__"})
_RANDOM = frozenset(
    """
    _sample_dirichlet _standard_gamma alpha_dropout bernoulli bernoulli_ binomial
    dropout dropout1d dropout2d dropout3d
    exponential_ feature_alpha_dropout feature_dropout multinomial normal_ poisson
    rand_like randint_like randn_like random_ rrelu uniform_
    """.split()  # noqa: SIM905 - one per line would be a page
).union(factory.__name__ for factory in RANDOM_FACTORIES)

SHAPE_FUNCTIONS = frozenset(
    form.format(name)
    for name in ("empty", "full", "ones", "zeros")
    for form in ("{}_like", "new_{}")
)
"""Functions of the shape and type of a tensor, which are constant."""


def base_name(name: str) -> str:
    """Remove the underscore of a function that changes its argument.

    Example:
        >>> base_name("add_"), base_name("__iadd__")
        ('add', '__iadd__')
    """
    return name if name.endswith("__") else name.rstrip("_")


def function_name(node: Node) -> str:
    """Return the name of the function that a node calls.

    Example:
        >>> import torch
        >>> graph = Graph()
        >>> function_name(graph.call_function(torch.relu, (graph.placeholder("x"),)))
        'relu'
    """
    return getattr(node.target, "__name__", str(node.target))


def node_arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a node's function by name."""
    return named_arguments(node.target, function_name(node), node.args, node.kwargs)


def constant_nodes(graph: Graph, constant_inputs: Collection[str]) -> set[Node]:
    """Return the nodes whose value is the same in every run.

    Args:
        graph: A traced program.
        constant_inputs: Names of inputs that are compiled in.

    Example:
        >>> import torch
        >>> graph = Graph()
        >>> ones = graph.call_function(torch.ones, (2,))
        >>> total = graph.call_function(torch.add, (graph.placeholder("x"), ones))
        >>> constant_nodes(graph, ()) == {ones}
        True
    """
    constants: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            is_constant = node.target in constant_inputs
        else:
            name = function_name(node)
            is_constant = name in SHAPE_FUNCTIONS or (
                name not in _RANDOM and constants.issuperset(node.all_input_nodes)
            )
        if is_constant:
            constants.add(node)
    return constants


def is_in_place(node: Node) -> bool:
    """Return whether a node changes its first argument in place.

    Example:
        >>> graph = Graph()
        >>> is_in_place(graph.call_method("add_", (graph.placeholder("x"), 1)))
        True
    """
    name = function_name(node)
    return name in _CHANGES or (name.endswith("_") and not name.endswith("__"))


NORM_FUNCTIONS = frozenset({"batch_norm", "instance_norm"})
"""Functions that keep running statistics."""

_HAS_SIDE_EFFECTS = ("call_on_host", _set_grad_enabled.__name__)
_SUBGRAPHS = {"run_loop": "for_loop", "run_branch": "cond"}
_IDENTITIES = frozenset(
    """
    dropout dropout1d dropout2d dropout3d feature_dropout nop recomputationCheckpoint
    """.split()  # noqa: SIM905 - one per line would be longer
)
"""Functions that are operators of PopTorch even if they return their argument."""

_ANNOTATIONS = frozenset({"overlapped_input", "overlapped_output"})
"""Functions that become attributes of the program (PopTorch, `OverlappedIO.cpp`)."""


@dataclass(frozen=True)
class Effects:
    """Memory that one operation read and changed; each storage has a number.

    Attributes:
        reads: Memory of its arguments.
        writes: Memory changed in place.
        statistics: Memory of running statistics that a normalisation layer changed.
            PopTorch's operator doesn't declare this change, so it isn't among the
            writes.
        results: Memory of its results.
        is_operator: Whether PopTorch makes an operator of it: not if it only returned
            its argument.
    """

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    statistics: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    is_operator: bool = False


_NONE = Effects()


def observed(
    name: str, touched: list[Tensor], compute: Callable[[], Any]
) -> tuple[Any, Effects]:
    """Run an operation, and return its result and its effects.

    Args:
        name: Name of the operation's function.
        touched: Tensors among its arguments.
        compute: Runs it.

    Example:
        >>> x = torch.ones(1)
        >>> _, effects = observed("add_", [x], lambda: x.add_(1))
        >>> effects.writes == effects.reads == effects.results, effects.is_operator
        (True, True)
    """
    versions = [tensor._version for tensor in touched]
    memory = [storage_of(tensor) for tensor in touched]
    # Normalisation updates its statistics without telling the version counter.
    normalised = touched if name in NORM_FUNCTIONS else []
    values = [tensor.detach().clone() for tensor in normalised]
    result = compute()
    results = tensors_in(result)
    writes = frozenset(
        storage
        for tensor, version, before in zip(touched, versions, memory)
        if tensor._version != version or storage_of(tensor) != before
        for storage in (before, storage_of(tensor))  # `x.data = y` exchanges it
    )
    is_new = any(all(r is not t for t in touched) for r in results)
    is_operator = is_new or bool(writes) or name in _IDENTITIES
    return result, Effects(
        reads=frozenset(memory),
        writes=writes,
        statistics=frozenset(
            storage_of(tensor)
            for tensor, before in zip(normalised, values)
            if not torch.equal(tensor, before)
        ),
        results=frozenset(map(storage_of, results)),
        is_operator=is_operator and name not in _ANNOTATIONS,
    )


def storage_of(tensor: Tensor) -> int:
    """Return a number for the storage of a tensor, unique while it exists."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def effects_of(node: Node) -> Effects:
    """Return the effects of a node's operation."""
    return node.meta.get("effects", _NONE)


def erase_dead(
    graph: Graph, results: Iterable[Node], outside: Collection[int] = frozenset()
) -> None:
    """Erase the operations that don't affect a program's results or its memory.

    Args:
        graph: The program, without an output node.
        results: Nodes that it returns.
        outside: Memory of the weights and inputs; an operation that writes to it stays.

    Raises:
        Error: Nothing uses what a loop or a branch returns.

    Example:
        >>> graph = Graph()
        >>> x = graph.placeholder("x")
        >>> used, unused = (graph.call_function(torch.relu, (x,)) for _ in range(2))
        >>> erase_dead(graph, [used])
        >>> [node.name for node in graph.nodes]
        ['x', 'relu']
    """
    live: set[Node] = set()
    wanted = set(results)
    memory = {storage for node in wanted for storage in effects_of(node).results}

    def keep(node: Node) -> None:
        live.add(node)
        wanted.update(node.all_input_nodes)
        memory.update(effects_of(node).reads)

    for node in graph.nodes:
        is_outside = effects_of(node).writes.intersection(outside)
        if is_outside or function_name(node) in _HAS_SIDE_EFFECTS:
            keep(node)
    for node in reversed(graph.nodes):
        if node in wanted or effects_of(node).writes & memory:
            keep(node)
    for node in graph.nodes:  # an operator has all its results or none
        if node.target is operator.getitem and node.args[0] in live:
            live.add(node)
    for node in reversed(graph.nodes):
        if node not in live and node.op != "placeholder":
            name = _SUBGRAPHS.get(function_name(node))
            if name is not None:  # its start has a side effect in PopTorch
                raise error_about(
                    f"Nothing uses what poptorch.{name} returns: its end is "
                    "eliminated, as dead code is, and its start is left without one. "
                    "Return something that depends on it, or leave it out.",
                    node,
                )
            graph.erase_node(node)


def changed_memory(graphs: Iterable[Graph]) -> dict[int, set[str]]:
    """Map memory that is changed in place to the names of the changing functions.

    Example:
        >>> changed_memory([Graph()])
        {}
    """
    changes: dict[int, set[str]] = {}
    for graph in graphs:
        for node in graph.nodes:
            effects = effects_of(node)
            for storage in effects.writes | effects.statistics:
                changes.setdefault(storage, set()).add(function_name(node))
    return changes


# Places --------------------------------------------------------------------------

TORCH = f"{Path(torch.__file__).parent}/"
PACKAGE = f"{Path(__file__).parents[2]}/"
_STANDARD = tuple(f"{sysconfig.get_paths()[n]}/" for n in ("stdlib", "platstdlib"))
_USERS, _INSTALLED, _SKIPPED = range(3)


class Place(NamedTuple):
    """A source line of a program, and the module that it runs in.

    Attributes:
        file: Path of the source file; "" if no line of the user's is known.
        line: Number of the line.
        module: Path of the module that ran there; "" for the whole.

    Example:
        >>> str(Place("models/net.py", 12, "encoder"))
        'net.py:12, in encoder'
    """

    file: str = ""
    line: int = 0
    module: str = ""

    def __str__(self) -> str:
        line = f"{Path(self.file).name}:{self.line}" if self.file else ""
        inside = f"in {self.module}" if self.module else ""
        return ", ".join(filter(None, (line, inside)))


NOWHERE = Place()


def place_of(node: Node) -> Place:
    """Return the place of a node's operation."""
    return node.meta.get("place", NOWHERE)


def find_place(
    frames: Iterable[tuple[FrameType, int]], stop: CodeType, module: str
) -> Place:
    """Return the user's innermost line, or else that of an installed package.

    Args:
        frames: Frames and their lines, the innermost first.
        stop: The function that traces; its callers aren't part of the program.
        module: Path of the module that runs.
    """
    inside = itertools.takewhile(lambda step: step[0].f_code is not stop, frames)
    lines = ((frame.f_code.co_filename, line) for frame, line in inside)
    path, line = min(lines, key=lambda where: _kind(where[0]), default=("", 0))
    is_known = path and _kind(path) != _SKIPPED
    return Place(path, line, module) if is_known else Place(module=module)


def add_place(error: Error, stop: CodeType, module: str) -> None:
    """Add the place of the nodes that an error is about, or else of its traceback.

    The traceback then ends at the user's line.

    Args:
        error: An error of a trace.
        stop: The function that traces.
        module: Path of the module that runs.
    """
    places = [place_of(node) for node in blamed_nodes(error)]
    if not places:
        places = [place_of_error(error, stop, module)]
        _cut_after_user(error)
    shown = "; ".join(dict.fromkeys(str(place) for place in places if place.file))
    if shown:
        error.message = f"{error.message} ({shown})"
        error.args = (error.message,)


def _cut_after_user(error: BaseException) -> None:
    """Leave out the end of an error's traceback that is torch's or this package's."""
    last: TracebackType | None = None
    step = error.__traceback__
    while step is not None:
        if _kind(step.tb_frame.f_code.co_filename) != _SKIPPED:
            last = step
        step = step.tb_next
    if last is not None:
        last.tb_next = None


def place_of_error(error: BaseException, stop: CodeType, module: str) -> Place:
    """Return the place where an error was raised, or where its cause was."""
    found = Place(module=module)
    cause: BaseException | None = error
    while cause is not None:
        frames = list(traceback.walk_tb(cause.__traceback__))
        place = find_place(reversed(frames), stop, module)
        found = place if place.file else found
        cause = cause.__cause__
    return found


@functools.lru_cache(maxsize=None)
def _kind(path: str) -> int:
    """Rank a source file: the user's, an installed package's, torch's or Python's."""
    if path.startswith((TORCH, PACKAGE, "<frozen")):
        return _SKIPPED
    if "/site-packages/" in path or "/dist-packages/" in path:
        return _INSTALLED
    return _SKIPPED if path.startswith(_STANDARD) else _USERS


# Without torch's compiler ---------------------------------------------------------
# From torch 2.1 on, some functions of torch import its compiler first, to exclude
# themselves from compiled code. The import takes over a second, longer than tracing
# most programs.


def without_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without torch's wrapper that imports the compiler.

    Args:
        function: A function, such as a method of a class. Without such a wrapper it is
            returned as it is.

    Example:
        >>> import torch
        >>> add = without_compiler(torch.optim.Optimizer.add_param_group)
        >>> add.__module__
        'torch.optim.optimizer'
        >>> without_compiler(len) is len
        True
    """
    namespace = getattr(function, "__globals__", {})
    if namespace.get("__name__") != "torch._compile":
        return function
    return getattr(function, "__wrapped__", function)


def is_importing_compiler() -> bool:
    """Return whether torch's compiler is being imported.

    Modules of the compiler compute with tensors when they are imported. These
    operations aren't part of the user's program.

    Example:
        >>> is_importing_compiler()
        False
    """
    spec = getattr(sys.modules.get("torch._dynamo"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` that doesn't import torch's compiler when it first runs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call,unused-ignore]
        if "__torch_dispatch__" in vars(cls):
            plain = without_compiler(cls.__torch_dispatch__)
            cls.__torch_dispatch__ = plain  # type: ignore[method-assign]


class GraphModule(graph_module.GraphModule):
    """Torch's module of a graph, whose source is freed with it.

    torch keeps the source of every graph for tracebacks, as long as the process runs.
    """

    def recompile(self) -> Any:
        code = super().recompile()
        name = type(self).forward.__code__.co_filename
        weakref.finalize(self, _forget_source, name).atexit = False
        return code


def _forget_source(name: str) -> None:
    linecache.cache.pop(name, None)
    graph_module._loader.eval_cache.pop(name, None)
