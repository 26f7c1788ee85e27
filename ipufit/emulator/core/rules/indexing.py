# SPDX-License-Identifier: Apache-2.0
"""Rules of indexing, gathering and scattering."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor
from torch._ops import ops
from torch.fx.node import Node

from ..graph import function_name, map_tensors, tensors_in
from ..operators import Call, row


def _as_parts(index: Any) -> list[Any]:
    is_several = isinstance(index, list) and any(
        part is None or part is Ellipsis or isinstance(part, (Tensor, Node, slice))
        for part in index
    )
    return list(index) if is_several or isinstance(index, tuple) else [index]


@row("index-negative", "__getitem__")
@row("assign-negative", "__setitem__ index_put")
def has_negative(call: Call) -> bool:
    """Return whether an index has a negative number while tracing."""
    parts = [p for p in _as_parts(call.args[1]) if isinstance(p, (Tensor, list))]
    return any(bool(torch.as_tensor(part).lt(0).any()) for part in parts)


@row("index-broadcast", "__getitem__ __setitem__ index_put")
def index_broadcast(call: Call) -> bool:
    parts = [p for p in _as_parts(call.args[1]) if isinstance(p, (Tensor, list))]
    tensors = [torch.as_tensor(part) for part in parts]
    shapes = [tensor.shape for tensor in tensors]
    if not shapes or any(map(_is_mask, tensors)):
        return False
    broadcast: Any = torch.broadcast_shapes
    return bool(broadcast(*shapes) != max(shapes, key=len))


@row("index-negative", "__getitem__", is_reported=False)
def index_negative(call: Call) -> Any:
    nodes = _as_parts(call.node.args[1]) if call.node else []
    variables = [n for n in nodes if isinstance(n, Node) and n not in call.constants]

    def read(input: Tensor, index: Any) -> Tensor:
        result = input[index]
        elements: Any = _assignment(input, index, result, is_item=False)
        undefined = math.nan if result.is_floating_point() else 0
        return result.masked_fill(elements.is_negative, undefined)

    return variables and not any(map(_is_mask, tensors_in(call.args[1]))) and read


# Assignments ------------------------------------------------------------------------


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


@dataclass(frozen=True)
class _Assignment:
    """An assignment `x[index] = value` with tensors in the index, or an `index_put`.

    Attributes:
        view: `x` after slices and single numbers of the index.
        indices: The tensor that indexes each dimension of `view`, up to the last one
            that has one; None for none.
        value: The right side.
    """

    view: Tensor
    indices: list[Any]
    value: Tensor

    @property
    def dims(self) -> list[int]:
        """Dimensions with an index."""
        return [dim for dim, index in enumerate(self.indices) if index is not None]

    @property
    def is_by_vector(self) -> bool:
        """Whether one 1-D index selects slices, which PopTorch scatters whole."""
        index = self.indices[self.dims[0]]
        is_vector = index.dim() == 1 and index.numel() != 1
        return len(self.dims) == 1 and is_vector and not _is_mask(index)

    @property
    def is_by_mask(self) -> bool:
        """Whether a mask is the only index, of which PopTorch makes a `where`."""
        return len(self.indices) == 1 and _is_mask(self.indices[0])

    @functools.cached_property
    def places(self) -> Tensor:
        """Positions of the elements in the flattened view, in torch's order.

        A negative index isn't wrapped: it is an element before.
        """
        numbers = torch.arange(self.view.numel()).view(self.view.shape)
        steps = [self.indices[dim].long() * numbers.stride(dim) for dim in self.dims]
        step: Any = sum(steps)
        zeros = [None if i is None else torch.zeros_like(step) for i in self.indices]
        first: Tensor = ops.aten.index(numbers, zeros)
        behind = self.view.dim() - len(self.dims) - self._place
        return first + step[(..., *[None] * behind)]

    @property
    def _place(self) -> int:
        """Where torch puts the dimensions of the indices."""
        is_adjacent = self.dims[-1] - self.dims[0] == len(self.dims) - 1
        return self.dims[0] if is_adjacent else 0

    @property
    def is_negative(self) -> Tensor:
        """Which elements have a negative number in their index, in torch's order."""
        parts = [self.indices[dim] < 0 for dim in self.dims]
        behind = self.view.dim() - len(self.dims) - self._place
        return functools.reduce(torch.logical_or, parts)[(..., *[None] * behind)]

    def ordered(self, x: Tensor) -> Tensor:
        """Bring elements in torch's order into the device's (`IndexOps.cpp`).

        Dimensions without an index come before those of the indices, or behind them.
        """
        rank = max(self.indices[dim].dim() for dim in self.dims)
        is_last = self.dims[0] == self.view.dim() - len(self.dims)
        places = range(self._place, self._place + rank)
        return x.movedim([*places], [*(range(-rank, 0) if is_last else range(rank))])

    def in_turn(self, value: Tensor) -> Tensor:
        """Return the values that a device assigns to `places`, one by one."""
        values = value.reshape(-1)
        if value.dim() < self.places.dim():
            return values.repeat(self.places.numel() // value.numel())
        return values

    @property
    def misses(self) -> bool:
        """Whether a device has more or fewer values than elements."""
        return self.in_turn(self.value.detach()).numel() != self.places.numel()

    def scattered(self) -> Tensor:
        """Assign one by one, as a device does except by a vector or a mask."""
        places = self.ordered(self.places).reshape(-1)
        flat = self.view.reshape(-1).scatter(0, places, self.in_turn(self.value))
        return flat.reshape(self.view.shape)

    def selected(self) -> Tensor:
        """Assign by a mask as a device does."""
        [mask] = self.indices
        ones = [1] * (self.view.dim() - mask.dim())
        mask = mask.bool().reshape(*mask.shape, *ones)
        return torch.where(mask, self.value, self.view)


def _assignment(
    x: Tensor, index: Any, values: Any, *, is_item: bool
) -> _Assignment | None:
    """Return an assignment by tensors; None of others."""
    parts = _as_parts(index)
    parts = [torch.as_tensor(p) if isinstance(p, list) else p for p in parts]
    is_by_tensors = any(isinstance(part, Tensor) for part in parts)
    if not is_by_tensors or any(isinstance(part, bool) for part in parts):
        return None
    ranks = [
        part.dim() if _is_mask(part) else int(part is not None and part is not Ellipsis)
        for part in parts
    ]
    basic: list[Any] = []
    indices: list[Any] = []
    for part, rank in zip(parts, ranks):
        if part is Ellipsis:
            basic += [slice(None)] * (x.dim() - sum(ranks))
            indices += [None] * (x.dim() - sum(ranks))
        elif isinstance(part, Tensor):
            basic += [slice(None)] * rank
            indices.append(part)
        else:
            basic.append(part)
            indices += [None] * (part is None or isinstance(part, slice))
    while indices[-1] is None:
        indices.pop()
    view, value = x[tuple(basic)], torch.as_tensor(values, dtype=x.dtype)
    while is_item and value.dim() > view.dim() and len(value) == 1:
        value = value[0]
    return _Assignment(view, indices, value)


def _assigned(call: Call) -> _Assignment | None:
    x, index, values = map(call.get, ("input", "indices", "values"))
    return _assignment(x, index, values, is_item=call.name == "__setitem__")


def _assigning(
    call: Call, put: Callable[[_Assignment], Tensor]
) -> Callable[..., Tensor]:
    """Return a function that assigns what `put` makes of the part that is indexed."""
    is_item = call.name == "__setitem__"

    def assign(input: Tensor, indices: Any, values: Any, *_: Any, **__: Any) -> Tensor:
        x = input.clone()
        assigned: Any = _assignment(x, indices, values, is_item=is_item)
        assigned.view.copy_(put(assigned))
        return x

    return assign


_WITHOUT_PLACES = (
    "An assignment to indexed elements whose values aren't one for each, nor one for "
    "all: the device doesn't broadcast them (`IndexOps.cpp`, indexPutHandler). Expand "
    "them first."
)
_ASSIGNMENTS = "__setitem__ index_put"


@row("index-put-accumulate", "index_put")
def index_put_accumulate(call: Call) -> Any:
    return call.get("accumulate") and (
        lambda input, indices, values, *_, **__: torch.index_put(input, indices, values)
    )


@row("assign-order", _ASSIGNMENTS)
def assign_order(call: Call) -> Any:
    assigned = call.once(_assigned)
    if assigned is None or any(map(_is_mask, assigned.indices)):
        return None
    if assigned.is_by_vector or assigned.value.numel() == 1:
        return None
    if assigned.misses:
        return _WITHOUT_PLACES
    numbers = torch.arange(assigned.value.numel()).view(assigned.value.shape)
    torchs = assigned.ordered(numbers.expand(assigned.places.shape)).reshape(-1)
    is_alike = torch.equal(assigned.in_turn(numbers), torchs)
    return not is_alike and _assigning(call, _Assignment.scattered)


@row("assign-mask-among", _ASSIGNMENTS)
def assign_mask_among(call: Call) -> Any:
    assigned = call.once(_assigned)
    if assigned is None or assigned.is_by_mask:
        return None
    if not any(map(_is_mask, assigned.indices)):
        return None
    if assigned.misses:
        return _WITHOUT_PLACES
    return _assigning(call, _Assignment.scattered)


@row("assign-values-to-mask", _ASSIGNMENTS)
def assign_values_to_mask(call: Call) -> Any:
    assigned = call.once(_assigned)
    if assigned is None or not assigned.is_by_mask:
        return None
    view, [mask], value = assigned.view, assigned.indices, assigned.value
    if value.numel() == 1 or value.dim() <= view.dim() - mask.dim():
        return None
    sizes = zip(reversed(value.shape), reversed(view.shape))
    if value.dim() > view.dim() or any(a not in (1, b) for a, b in sizes):
        return _WITHOUT_PLACES
    return _assigning(call, _Assignment.selected)


def _misfit(call: Call) -> str:
    """Say how values differ from the slices that a 1-D index selects."""
    assigned = call.once(_assigned)
    if assigned is None or not assigned.is_by_vector:
        return ""
    shape, sizes, [dim] = assigned.view.shape, assigned.value.shape, assigned.dims
    if len(sizes) != len(shape):
        return ""
    if sizes[dim] == 1:
        return "one"
    pairs = enumerate(zip(sizes, shape))
    return "narrow" if any(a != b for i, (a, b) in pairs if i != dim) else ""


row("assign-one-to-many", _ASSIGNMENTS, lambda call: _misfit(call) == "one")
row("assign-narrow", _ASSIGNMENTS, lambda call: _misfit(call) == "narrow")


@row("index-fill-negative", "index_fill")
def index_fill_negative(call: Call) -> Any:
    def fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
        rows = torch.arange(input.shape[0])[:, None]
        is_filled = (rows == index.reshape(-1)).any(1)
        mask = is_filled.view(-1, *[1] * (input.dim() - 1))
        return torch.where(mask, torch.as_tensor(value, dtype=input.dtype), input)

    return call.arguments["dim"] < 0 and call.first.dim() != 1 and fill


# Gathering, scattering and counting -------------------------------------------------


def _made_by(call: Call, argument: str, *functions: str) -> bool:
    """Return whether one of some functions made an argument."""
    maker = call.argument_node(argument)
    return maker is not None and function_name(maker) in functions


def _own_dims(index: Tensor) -> list[int]:
    """Return the dimensions that an expanded tensor had before."""
    strided = enumerate(zip(index.shape, index.stride()))
    return [dim for dim, (size, stride) in strided if size > 1 and stride != 0]


row("gather-number", "gather", lambda call: call.first.dim() == 0)


@row("scatter-reduce-number", "scatter_reduce index_reduce")
def scatter_reduce_number(call: Call) -> Any:
    return call.first.dim() == 0


@row("gather-expanded", "gather")
def gather_expanded(call: Call) -> Any:
    if not call.first.dim() or not _made_by(call, "index", "expand", "expand_as"):
        return None
    x, index = call.first, call.arguments["index"]
    dim = call.arguments["dim"] % x.dim()
    before = _own_dims(index)
    expanded = [d for d, size in enumerate(index.shape) if size > 1 and d not in before]
    longer = [d for d, size in enumerate(x.shape) if size > 1]
    if len(expanded) != 1 or sorted([dim, *expanded]) != longer:
        return None
    [other] = expanded
    if before not in ([], [dim]) or (before and index.shape[other] == x.shape[other]):
        return None

    def select(input: Tensor, _: Any, index: Tensor, **__: Any) -> Tensor:
        selected = input.index_select(dim, index.select(other, 0).reshape(-1))
        return selected if before else selected.squeeze(dim)

    return select


@row("scatter-partly-expanded", "scatter_add scatter_reduce")
def scatter_partly_expanded(call: Call) -> Any:
    index, node = call.arguments["index"], call.argument_node("index")
    is_expanded = _made_by(call, "index", "expand", "expand_as", "broadcast_to")
    is_used_once = is_expanded and node is not None and len(node.users) == 1
    is_full = index.shape == call.arguments["src"].shape
    return is_used_once and is_full and len(_own_dims(index)) > 1


@row("scatter-add-to-zeros", "scatter_add")
def scatter_add_to_zeros(call: Call) -> Any:
    zeros = "zeros", "zeros_like", "new_zeros"
    return _made_by(call, "input", *zeros) and _is_narrow(call)


def _is_narrow(call: Call) -> bool:
    """Return whether an index has fewer elements than a tensor across a dimension."""
    sizes = enumerate(zip(call.arguments["index"].shape, call.first.shape))
    dim = call.arguments["dim"] % call.first.dim()
    return any(a < b for other, (a, b) in sizes if other != dim)


@row("scatter-gradient", "scatter scatter_add scatter_reduce")
def scatter_gradient(call: Call) -> Any:
    return call.trains and call.arguments["index"].dim() > 1 and _is_narrow(call)


@row("scatter-extreme-ties", "scatter_reduce index_reduce", is_reported=False)
def scatter_extreme_ties(call: Call) -> Any:
    dim, is_vector = call.arguments["dim"], call.name == "index_reduce"
    function = getattr(torch, call.name)
    if not call.trains or call.get("reduce") not in ("amax", "amin"):
        return None
    if not is_vector and call.arguments["index"].shape != call.arguments["src"].shape:
        return None

    def reduce(
        input: Tensor, _: int, index: Tensor, src: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        index = index.long()
        result = function(input, dim, index, src, *args, **kwargs)
        if is_vector:
            ones = [1] * src.dim()
            ones[dim] = -1
            index = index.view(ones).expand(src.shape)
        extreme = result.detach()
        is_extreme = torch.eq(src, extreme.gather(dim, index))
        if call.get("include_self", True):
            takes_input = torch.eq(input, extreme)
        else:
            takes_input = torch.ones_like(extreme).scatter(dim, index, 0.0).bool()
        # Each that is equal, times 1.
        whole = torch.where(takes_input, input, 0.0).scatter_add(
            dim, index, torch.where(is_extreme, src, 0.0)
        )
        nothing = whole - whole.detach()  # NaN if it is infinite
        return torch.where(nothing == 0, extreme + nothing, result)

    return reduce


@row("scatter-prod-gradient", "scatter_reduce index_reduce scatter")
def scatter_prod_gradient(call: Call) -> Any:
    return call.trains and call.get("reduce") in ("prod", "multiply")


@row("scatter-mean-whole", "scatter_reduce index_reduce")
def scatter_mean_whole(call: Call) -> Any:
    is_divided = call.get("reduce") == "mean" or not call.get("include_self", True)
    return is_divided and not call.result.is_floating_point()


@row("bincount-beyond", "bincount", is_reported=False)
def bincount_beyond(call: Call) -> Any:
    length = call.get("minlength", 0)

    def bincount(input: Tensor, weights: Any = None, minlength: int = 0) -> Tensor:
        last = input.shape[0] - 1
        places = torch.where(input < length, input, last).long()
        ones = torch.ones_like(places, dtype=torch.int32)
        counts = ones if weights is None else weights
        room = torch.zeros(max(length, last + 1), dtype=counts.dtype)
        return room.scatter_add(0, places, counts)[:length]

    return bincount


row("bucketize-number", "bucketize", lambda c: not isinstance(c.args[0], Tensor))
row("random-one-bound", "random", lambda call: len(call.args) < 3)


@row("unfold-without-batch", "unfold")
def unfold_without_batch(call: Call) -> Any:
    is_columns = "padding" in call.kwargs  # as Tensor.unfold hasn't
    return is_columns and call.args[0].dim() == 3


@row("dynamic-slice-negative", "slice_tensor update_tensor")
def dynamic_slice_negative(call: Call) -> Any:
    return call.get("dim", 0) < 0


# Operators of torch_scatter and torch_spline_conv -----------------------------------


@row("torch-scatter-size", "scatter_max scatter_min scatter_mul")
def torch_scatter_size(call: Call) -> Any:
    values = *call.args, *call.kwargs.values()  # src, index, dim, out, dim_size
    return all(value is None for value in values[3:])


row("torch-scatter-mul-gradient", "scatter_mul", lambda call: call.trains)


@row("spline-degree", "spline_basis")
def spline_degree(call: Call) -> Any:
    pseudo, *_, degree = *call.args, *call.kwargs.values()
    return not 0 <= degree <= 3 or pseudo.dim() != 2


@row("spline-gradient", "spline_basis spline_weighting")
def spline_gradient(call: Call) -> Any:
    return call.trains and (
        lambda *args: call.function(*map_tensors(args, lambda x: x.detach()))
    )
