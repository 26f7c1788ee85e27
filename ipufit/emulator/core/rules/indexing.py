# SPDX-License-Identifier: Apache-2.0
"""Rules of indexing, gathering and scattering."""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import Node

from ..graph import function_name
from ..operators import Call, row, rule

_SCATTERS = "scatter", "scatter_add", "scatter_reduce"


def _as_parts(index: Any) -> list[Any]:
    is_several = isinstance(index, list) and any(
        part is None or part is Ellipsis or isinstance(part, (Tensor, Node, slice))
        for part in index
    )
    return list(index) if is_several or isinstance(index, tuple) else [index]


def _is_index(part: Any) -> bool:
    return isinstance(part, (Tensor, list))


def _has_negative_constant(call: Call) -> bool:
    if call.node is None:
        return False
    nodes = _as_parts(call.node.args[1])
    return any(
        (isinstance(part, list) or node in call.constants)
        and bool(torch.as_tensor(part).lt(0).any())
        for node, part in zip(nodes, _as_parts(call.args[1]))
        if _is_index(part)
    )


@rule("index-negative", "__getitem__")
def index_negative(call: Call) -> Any:
    return _has_negative_constant(call) and (
        "A list or constant tensor of indices with a negative number: the device "
        "doesn't wrap it. It reads the element before, or none at all "
        "(`IndexOps.cpp`, processIndex). Write numbers from 0 on; a single number "
        "(x[-1]) and slices may be negative."
    )


# Assignments ------------------------------------------------------------------------


def _as_tensors(index: Any, is_item: bool) -> list[Any]:
    """Return the parts of an index of `x[index] = v`, or of `index_put`."""
    parts = _as_parts(index) if is_item else list(index)
    return [torch.as_tensor(p) if isinstance(p, list) else p for p in parts]


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _indexed(x: Tensor, parts: list[Any]) -> tuple[Tensor, list[Any]]:
    """Apply what isn't a tensor in an index.

    Returns:
        The view that the tensors index, and the index of each of its dimensions up to
        the last one that has one; None of one that has none.
    """
    sizes = [
        part.dim() if _is_mask(part) else int(part is not None and part is not Ellipsis)
        for part in parts
    ]
    basic: list[Any] = []
    taken: list[Any] = []
    for part, size in zip(parts, sizes):
        if part is Ellipsis:
            part, size = slice(None), x.dim() - sum(sizes)
            basic += [part] * size
            taken += [None] * size
        elif isinstance(part, Tensor):
            basic += [slice(None)] * size
            taken.append(part)
        else:
            basic.append(part)
            taken += [None] * (part is None or isinstance(part, slice))
    while taken and taken[-1] is None:
        taken.pop()
    return x[tuple(basic)], taken


class _Assignment(NamedTuple):
    """An assignment `x[index] = value` with tensors in the index, or an `index_put`.

    Attributes:
        view: `x` after slices and single numbers of the index.
        taken: The tensor that indexes each dimension of `view`; None for none.
        value: The right side, without leading dimensions of 1.
    """

    view: Tensor
    taken: list[Any]
    value: Tensor

    @property
    def dims(self) -> list[int]:
        """Dimensions with an index."""
        return [dim for dim, index in enumerate(self.taken) if index is not None]

    @property
    def is_by_vector(self) -> bool:
        """Whether one 1-D index selects slices, which PopTorch scatters whole."""
        index = self.taken[self.dims[0]]
        is_vector = index.dim() == 1 and index.numel() != 1
        return len(self.dims) == 1 and is_vector and not _is_mask(index)

    @property
    def is_by_mask(self) -> bool:
        """Whether a mask is the only index, of which PopTorch makes a `where`."""
        return len(self.taken) == 1 and _is_mask(self.taken[0])


def _assignment(call: Call) -> _Assignment | None:
    """Return an assignment by tensors; None of others."""
    is_item = call.name == "__setitem__"
    given = call.arguments
    parts = _as_tensors(given["indices"], is_item)
    if not any(isinstance(part, Tensor) for part in parts):
        return None
    if any(isinstance(part, bool) for part in parts):
        return None
    view, taken = _indexed(given["input"], parts)
    value = torch.as_tensor(given["values"])
    while is_item and value.dim() > view.dim() and len(value) == 1:
        value = value[0]
    return _Assignment(view, taken, value)


def _assigning(
    call: Call, put: Callable[[_Assignment], Tensor]
) -> Callable[..., Tensor]:
    """Return a function that assigns what `put` makes of the part that is indexed."""
    is_item = call.name == "__setitem__"

    def assign(input: Tensor, indices: Any, values: Any, *_: Any, **__: Any) -> Tensor:
        x = input.clone()
        view, taken = _indexed(x, _as_tensors(indices, is_item))
        value = torch.as_tensor(values, dtype=x.dtype)
        view.copy_(put(_Assignment(view, taken, value)))
        return x

    return assign


class _Order(NamedTuple):
    """The order of indexed elements, on a device and in torch (`IndexOps.cpp`).

    Attributes:
        shape: Shape of the elements on a device: dimensions without an index before
            those of the indices or behind them.
        places: Position of each element in the flattened tensor, of that shape.
        torch_shape: Shape of the elements in torch.
        moved: For each dimension of `shape` its place in `torch_shape`.
    """

    shape: list[int]
    places: Tensor
    torch_shape: list[int]
    moved: list[int]


def _order(view: Tensor, taken: list[Any]) -> _Order:
    taken = [*taken, *[None] * (view.dim() - len(taken))]
    dims = [dim for dim, index in enumerate(taken) if index is not None]
    free = [dim for dim, index in enumerate(taken) if index is None]
    shared = list(_broadcast_shape(*(taken[dim].shape for dim in dims)))
    indices = [taken[dim].long().expand(shared) for dim in dims]
    rest = [view.shape[dim] for dim in free]
    is_last = dims[0] == len(free)  # no dimension without an index behind one
    shape = [*rest, *shared] if is_last else [*shared, *rest]
    places = torch.zeros((), dtype=torch.int64)
    for dim, size in enumerate(view.shape):
        if dim in free:
            at = free.index(dim) + (0 if is_last else len(shared))
            ones = [1] * (len(shape) - at - 1)
            index = torch.arange(size).view(-1, *ones)
        else:
            index = indices[dims.index(dim)]
            index = index if is_last else index[(..., *[None] * len(rest))]
        places = places * size + index
    is_adjacent = dims[-1] - dims[0] == len(dims) - 1
    before = dims[0] if is_adjacent else 0
    torch_shape = [*rest[:before], *shared, *rest[before:]]
    own = list(range(before, before + len(shared)))
    others = [dim for dim in range(len(torch_shape)) if dim not in own]
    moved = [*others, *own] if is_last else [*own, *others]
    return _Order(shape, places.expand(shape), torch_shape, moved)


def _broadcast_shape(*shapes: torch.Size) -> torch.Size:
    found: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call,unused-ignore]
    return found


def _in_turn(value: Tensor, shape: list[int]) -> Tensor:
    """Return the values that a device assigns to elements of a shape, in turn."""
    if value.dim() < len(shape):
        return value.reshape(-1).repeat(math.prod(shape) // value.numel())
    return value.reshape(-1)


def _scattered(assigned: _Assignment) -> Tensor:
    """Assign elements one by one, as a device does except by a vector or a mask."""
    view = assigned.view
    order = _order(view, assigned.taken)
    values = _in_turn(assigned.value, order.shape)
    places = order.places.reshape(-1)
    return view.reshape(-1).scatter(0, places, values).reshape(view.shape)


def _misses(assigned: _Assignment, order: _Order) -> bool:
    """Return whether a device has more or fewer values than elements."""
    values = _in_turn(assigned.value.detach(), order.shape)
    return values.numel() != math.prod(order.shape)


_WITHOUT_PLACES = (
    "An assignment to indexed elements whose values aren't one for each, nor one for "
    "all: the device doesn't broadcast them (`IndexOps.cpp`, indexPutHandler). Expand "
    "them first."
)


@rule("index-put-accumulate", "index_put")
def index_put_accumulate(call: Call) -> Any:
    return call.arguments.get("accumulate") and (
        lambda input, indices, values, *_, **__: torch.index_put(input, indices, values)
    )


@rule("assign-negative", "__setitem__")
def assign_negative(call: Call) -> Any:
    return _has_negative_constant(call) and (
        "An assignment to a list or constant tensor of indices with a negative number: "
        "the device doesn't wrap it. It ignores such a value, or assigns it to the "
        "element before (`IndexOps.cpp`). Write numbers from 0 on; a single number "
        "(x[-1] = v) and slices may be negative."
    )


@rule("assign-order", "__setitem__", "index_put")
def assign_order(call: Call) -> Any:
    assigned = _assignment(call)
    if assigned is None or any(map(_is_mask, assigned.taken)) or assigned.is_by_vector:
        return None
    order = _order(assigned.view, assigned.taken)
    if assigned.value.numel() == 1:
        return None
    if _misses(assigned, order):
        return _WITHOUT_PLACES
    numbers = torch.arange(assigned.value.numel()).view(assigned.value.shape)
    torchs = numbers.expand(order.torch_shape).permute(order.moved).reshape(-1)
    is_alike = torch.equal(_in_turn(numbers, order.shape), torchs)
    return not is_alike and _assigning(call, _scattered)


@rule("assign-mask-among", "__setitem__", "index_put")
def assign_mask_among(call: Call) -> Any:
    assigned = _assignment(call)
    if assigned is None or assigned.is_by_mask:
        return None
    if not any(map(_is_mask, assigned.taken)):
        return None
    if _misses(assigned, _order(assigned.view, assigned.taken)):
        return _WITHOUT_PLACES
    return _assigning(call, _scattered)


@rule("assign-values-to-mask", "__setitem__", "index_put")
def assign_values_to_mask(call: Call) -> Any:
    assigned = _assignment(call)
    if assigned is None or not assigned.is_by_mask:
        return None
    view, (mask,), value = assigned
    if value.numel() == 1 or value.dim() <= view.dim() - mask.dim():
        return None
    try:
        is_alike = _broadcast_shape(view.shape, value.shape) == view.shape
    except RuntimeError:
        is_alike = False
    return _assigning(call, _selected) if is_alike else _WITHOUT_PLACES


def _selected(assigned: _Assignment) -> Tensor:
    view, (mask,), value = assigned
    ones = [1] * (view.dim() - mask.dim())
    return torch.where(mask.bool().reshape(*mask.shape, *ones), value, view)


@rule("assign-one-to-many", "__setitem__", "index_put")
def assign_one_to_many(call: Call) -> Any:
    assigned = _assignment(call)
    if assigned is None or not assigned.is_by_vector:
        return None
    (dim,) = assigned.dims
    is_full = assigned.value.dim() == assigned.view.dim()
    return is_full and assigned.value.shape[dim] == 1


@rule("assign-narrow", "__setitem__", "index_put")
def assign_narrow(call: Call) -> Any:
    assigned = _assignment(call)
    if assigned is None or not assigned.is_by_vector:
        return None
    view, value = assigned.view, assigned.value
    (dim,) = assigned.dims
    if value.dim() != view.dim() or value.shape[dim] == 1:
        return None
    return any(
        a != b for i, (a, b) in enumerate(zip(value.shape, view.shape)) if i != dim
    )


@rule("index-fill-negative", "index_fill")
def index_fill_negative(call: Call) -> Any:
    given = call.arguments
    if given["dim"] >= 0 or given["input"].dim() == 1:
        return None

    def fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
        rows = torch.arange(input.shape[0])[:, None]
        is_filled = (rows == index.reshape(-1)).any(1)
        mask = is_filled.view(-1, *[1] * (input.dim() - 1))
        return torch.where(mask, torch.as_tensor(value, dtype=input.dtype), input)

    return fill


# Gathering, scattering and counting -------------------------------------------------


def _is_expanded(node: Node | None) -> bool:
    """Return whether a node is an expansion that nothing else takes."""
    if node is None or len(node.users) != 1:
        return False
    return function_name(node) in ("expand", "expand_as", "broadcast_to")


def _own_dims(index: Tensor) -> list[int]:
    """Return the dimensions that an expanded tensor had before."""
    strided = enumerate(zip(index.shape, index.stride()))
    return [dim for dim, (size, stride) in strided if size > 1 and stride != 0]


@rule("gather-number", "gather")
@rule("scatter-reduce-number", "scatter_reduce", "index_reduce")
def reads_a_number(call: Call) -> Any:
    return call.tensors()[0].dim() == 0


@rule("gather-expanded", "gather")
def gather_expanded(call: Call) -> Any:
    given = call.arguments
    x, dim, index = given["input"], given["dim"] % given["input"].dim(), given["index"]
    maker = call.argument_node("index")
    if maker is None or function_name(maker) not in ("expand", "expand_as"):
        return None
    own = _own_dims(index)
    expanded = [d for d, size in enumerate(index.shape) if size > 1 and d not in own]
    longer = [d for d, size in enumerate(x.shape) if size > 1]
    if (
        sorted([dim, *expanded]) != longer
        or len(expanded) != 1
        or own not in ([], [dim])
    ):
        return None
    if own and index.shape[expanded[0]] == x.shape[expanded[0]]:
        return None
    other = expanded[0]

    def select(input: Tensor, _: Any, index: Tensor, **__: Any) -> Tensor:
        places = index.select(other, 0).reshape(-1)
        found = input.index_select(dim, places)
        return found if own else found.squeeze(dim)

    return select


@rule("scatter-partly-expanded", "scatter_add", "scatter_reduce")
def scatter_partly_expanded(call: Call) -> Any:
    given = call.arguments
    index = given["index"]
    is_used = (
        _is_expanded(call.argument_node("index")) and index.shape == given["src"].shape
    )
    return is_used and len(_own_dims(index)) > 1


@rule("scatter-add-to-zeros", "scatter_add")
def scatter_add_to_zeros(call: Call) -> Any:
    given = call.arguments
    maker = call.argument_node("input")
    if maker is None or function_name(maker) not in (
        "zeros",
        "zeros_like",
        "new_zeros",
    ):
        return None
    return _is_narrower(given["index"], given["input"], given["dim"])


def _is_narrower(index: Tensor, x: Tensor, dim: int) -> bool:
    """Return whether an index has fewer elements than a tensor across a dimension."""
    sizes = zip(index.shape, x.shape)
    return any(a < b for d, (a, b) in enumerate(sizes) if d != dim % x.dim())


@rule("scatter-gradient", *_SCATTERS)
def scatter_gradient(call: Call) -> Any:
    given = call.arguments
    if not call.trains or given["index"].dim() < 2:
        return None
    return _is_narrower(given["index"], given["input"], given["dim"])


_GROUPED = "scatter_reduce", "index_reduce", "scatter"


def _reduction(call: Call) -> tuple[str, bool]:
    given = call.arguments
    return given.get("reduce") or "", given.get("include_self", True)


@rule("scatter-extreme-ties", "scatter_reduce", "index_reduce", is_reported=False)
def scatter_extreme_ties(call: Call) -> Any:
    given = call.arguments
    kind, includes_self = _reduction(call)
    if not call.trains or kind not in ("amax", "amin"):
        return None
    dim, is_vector = given["dim"], call.name == "index_reduce"
    function = getattr(torch, call.name)
    if not is_vector and given["index"].shape != given["src"].shape:
        return None

    def reduce(
        input: Tensor, _: int, index: Tensor, src: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        found = function(input, dim, index, src, *args, **kwargs)
        if is_vector:
            ones = [1] * src.dim()
            ones[dim] = -1
            index = index.view(ones).expand(src.shape)
        extreme = found.detach()
        is_extreme = torch.eq(src, extreme.gather(dim, index))
        untouched = torch.ones_like(extreme).scatter(dim, index, 0.0)
        own = torch.eq(input, extreme) if includes_self else untouched.bool()
        # Each that is equal, times 1.
        whole = torch.where(own, input, 0.0).scatter_add(
            dim, index, torch.where(is_extreme, src, 0.0)
        )
        nothing = whole - whole.detach()  # NaN if it is infinite
        return torch.where(nothing == 0, extreme + nothing, found)

    return reduce


@rule("scatter-prod-gradient", *_GROUPED)
def scatter_prod_gradient(call: Call) -> Any:
    return call.trains and _reduction(call)[0] in ("prod", "multiply")


@rule("scatter-mean-whole", "scatter_reduce", "index_reduce", is_certain=False)
def scatter_mean_whole(call: Call) -> Any:
    kind, includes_self = _reduction(call)
    is_whole = not call.result.is_floating_point()
    return is_whole and (kind == "mean" or not includes_self)


@rule("bincount-beyond", "bincount", is_reported=False)
def bincount_beyond(call: Call) -> Any:
    length = call.arguments.get("minlength", 0)

    def bincount(input: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
        last = input.shape[0] - 1
        places = torch.where(input < length, input, last).long()
        ones = torch.ones_like(places, dtype=torch.int32)
        counts = ones if weights is None else weights
        room = torch.zeros(max(length, last + 1), dtype=counts.dtype)
        return room.scatter_add(0, places, counts)[:length]

    return bincount


@rule("bucketize-number", "bucketize", is_certain=False)
def bucketize_number(call: Call) -> Any:
    return not isinstance(call.args[0], Tensor)


row("random-one-bound", "random", lambda call: len(call.args) < 3)


@rule("unfold-without-batch", "unfold")
def unfold_without_batch(call: Call) -> Any:
    is_columns = "padding" in call.kwargs  # as Tensor.unfold hasn't
    return is_columns and call.args[0].dim() == 3


@rule("dynamic-slice-negative", "slice_tensor", "update_tensor", is_certain=False)
def dynamic_slice_negative(call: Call) -> Any:
    return call.arguments.get("dim", 0) < 0


# Operators of torch_scatter and torch_spline_conv -----------------------------------


@rule("torch-scatter-size", "scatter_max", "scatter_min", "scatter_mul")
def torch_scatter_size(call: Call) -> Any:
    given = *call.args, *call.kwargs.values()  # src, index, dim, out, dim_size
    return all(value is None for value in given[3:])


row("torch-scatter-mul-gradient", "scatter_mul", lambda call: call.trains)


@rule("spline-degree", "spline_basis")
def spline_degree(call: Call) -> Any:
    pseudo, *_, degree = *call.args, *call.kwargs.values()
    return not 0 <= degree <= 3 or pseudo.dim() != 2


@rule("spline-gradient", "spline_basis", "spline_weighting")
def spline_gradient(call: Call) -> Any:
    if not call.trains:
        return None
    return lambda *args: call.function(
        *(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
    )
