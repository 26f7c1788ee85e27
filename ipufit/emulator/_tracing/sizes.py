# SPDX-License-Identifier: Apache-2.0
"""Tensors of one whole number in places where torch takes an int: `x.repeat(n, 1)`.

Torch turns them into ints before PopTorch sees the operation. For a tensor of the host
that is a constant like any other. For one of the device it needs the value, as
`.item()` does. The schemas of torch's operators say which places these are.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _jit_get_schemas_for_operator

from ipufit.emulator._tracing.operation import NodesById, Operation
from ipufit.emulator._tracing.refusals import value_needed

_SCHEMAS = {"interpolate": "__interpolate"}
"""Functions whose schemas have another name."""

_READ_BY_TORCH = frozenset({"narrow", "tensor_split"})
"""Functions that take tensors in such places, which torch reads itself."""

_FACTORIES = frozenset(
    {"empty", "eye", "full", "ones", "rand", "randint", "randn", "randperm", "zeros"}
)
"""Functions whose arguments are sizes, without a tensor."""

_INT = "int"
_LIST = "List[int]"
_SEVERAL = "int, int, ..."
_TENSOR = "Tensor"


def with_plain_sizes(operation: Operation, nodes: NodesById) -> Operation:
    """Put ints in the places of the host's tensors that torch takes for ints.

    Tensors that aren't in such a place stay.

    Raises:
        Error: A tensor of the device is in such a place.

    Example:
        >>> x, n = torch.zeros(4), torch.tensor(2)
        >>> reshape = Operation(Tensor.reshape, "reshape", (x, n, n), {})
        >>> with_plain_sizes(reshape, {}).args
        (tensor([0., 0., 0., 0.]), 2, 2)
        >>> with_plain_sizes(Operation(Tensor.add, "add", (x, n), {}), {}).args
        (tensor([0., 0., 0., 0.]), tensor(2))
    """
    if not any(map(_is_whole_number, operation.tensors())):
        return operation
    name, args, kwargs = operation.name, operation.args, operation.kwargs
    is_method = getattr(Tensor, name, None) is operation.function

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor) or not _is_whole_number(value):
            return value
        if id(value) in nodes:
            raise value_needed(f"a tensor as a size, dimension or index of `{name}`")
        return int(value)

    def in_place(place: int | str, value: Any) -> Any:
        forms = _forms(name, place, is_method=is_method)
        if isinstance(value, Tensor):
            is_taken = _SEVERAL in forms or (_INT in forms and value.dim() == 0)
            is_refused = bool(forms) and id(value) in nodes
            return plain(value) if is_taken or is_refused else value
        if _LIST in forms and isinstance(value, (tuple, list)):
            return type(value)(map(plain, value))
        return value

    def in_index(value: Any) -> Any:
        is_single = isinstance(value, Tensor) and value.dim() == 0
        return plain(value) if is_single and value.dtype != torch.uint8 else value

    if name in ("__getitem__", "__setitem__"):
        index = args[1]
        index = tuple(map(in_index, index)) if type(index) is tuple else in_index(index)
        return replace(operation, args=(args[0], index, *args[2:]))
    return replace(
        operation,
        args=tuple(in_place(place, value) for place, value in enumerate(args)),
        kwargs={key: in_place(key, value) for key, value in kwargs.items()},
    )


def new_of_size(operation: Operation, nodes: NodesById) -> Operation:
    """Make `new_empty` of `new` with a size.

    In a graph the size becomes a tuple, and `new` of a tuple takes values.

    Example:
        >>> x = torch.zeros(4)
        >>> new_of_size(Operation(Tensor.new, "new", (x, x.shape), {}), {}).name
        'new_empty'
    """
    if operation.name == "new" and isinstance(operation.args[-1], torch.Size):
        return replace(operation, function=Tensor.new_empty, name="new_empty")
    return operation


def _is_whole_number(tensor: Tensor) -> bool:
    is_fraction = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() == 1 and not is_fraction and tensor.dtype != torch.bool


@functools.lru_cache(maxsize=None)
def _forms(name: str, place: int | str, *, is_method: bool) -> frozenset[str]:
    """The forms in which a function takes ints in a place; empty if it takes none."""
    found: set[str] = set()
    operator = f"aten::{_SCHEMAS.get(name, name)}"
    for schema in _jit_get_schemas_for_operator(operator):
        by_name = {argument.name: _form(argument) for argument in schema.arguments}
        positional = [_form(a) for a in schema.arguments if not a.kwarg_only]
        if positional[:1] != [_TENSOR] and name not in _FACTORIES:
            continue  # a form for strings and lists of TorchScript
        if isinstance(place, str):
            found.add(by_name.get(place, ""))
        elif place and is_method and positional[1:] == [_LIST]:
            found.update((_LIST, _SEVERAL))  # as in `x.view(2, 3)`
        else:
            found.update(positional[place : place + 1])
    if _TENSOR in found and name not in _READ_BY_TORCH:
        return frozenset()
    return frozenset(found & {_INT, _LIST, _SEVERAL})


def _form(argument: Any) -> str:
    kind = str(argument.type)
    if _TENSOR in kind:
        return _TENSOR
    return kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind
