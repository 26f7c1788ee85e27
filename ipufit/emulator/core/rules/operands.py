# SPDX-License-Identifier: Apache-2.0
"""Rules of the shapes, dimensions and options that operators take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node

from ..graph import SHAPE_FUNCTIONS, effects_of, function_name, storage_of
from ..operators import ANY_IN_PLACE, Call, row, rule

_IN_PLACE = """
    abs add addcdiv addcmul ceil clamp clamp_max clamp_min clip div divide exp fill
    floor floor_divide index_fill log masked_fill mul multiply neg pow reciprocal relu
    remainder round rsqrt scatter scatter_add sigmoid sqrt sub subtract tanh zero
    """.split()  # noqa: SIM905 - one per line would be a page
"""Functions of which a variant changes its first argument."""

_STRIDED = frozenset(
    """
    as_strided diagonal expand expand_as movedim permute swapaxes swapdims t transpose
    unfold
    """.split()  # noqa: SIM905 - one per line would be longer
)
"""Views that are no slice and no reshape."""

_DROPOUTS = "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"


@rule("data-gradient", "getattr", "__get__")
def data_gradient(call: Call) -> Any:
    """Find `x.data`, which is `x` itself on a device."""
    x, node = call.args[0], call.node
    accessor: Any = call.function
    name = accessor.__self__.__name__ if node is None else call.args[1]
    if name != "data" or not call.is_training:
        return None  # before a look at x, which a trace would see
    if not x.requires_grad or not (node or torch.is_grad_enabled()):
        return None
    if node is None:
        return True
    if call.users and call.users <= SHAPE_FUNCTIONS:
        return None
    # Autograd refuses to change a weight, even through a view of it.
    is_written = x.is_leaf and any(
        storage_of(x) in effects_of(other).writes for other in node.graph.nodes
    )
    return is_written or (lambda x, _: x.view_as(x))


@rule("data-assignment", "setattr")
def data_assignment(call: Call) -> Any:
    """Find `x.data = y`, which leaves `x` what it was on a device."""
    x, name, _ = call.args
    if name != "data" or not isinstance(x, Tensor):
        return None
    return lambda *_: None


@rule("cross-negative-dim", "cross", "linalg_cross")
def cross_negative_dim(call: Call) -> Any:
    default = -1 if call.name == "linalg_cross" else None
    dim = call.arguments.get("dim", default)
    return dim is not None and dim < 0


@rule("copy-broadcast", "copy")
@rule("cross-broadcast", "cross", "linalg_cross")
def is_broadcast(call: Call) -> Any:
    x, other = call.tensors()
    return x.shape != other.shape


@rule("take-along-negative-dim", "take_along_dim")
def take_along_negative_dim(call: Call) -> Any:
    dim = call.arguments.get("dim")
    return dim is not None and dim < 0


@rule("index-select-0d", "index_select")
def index_select_0d(call: Call) -> Any:
    def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
        found = torch.index_select(input, dim, index)
        # `argmax()` over everything has the shape [1] on a device.
        return found if index.dim() else found.squeeze(dim)

    return call.arguments["index"].dim() == 0 and index_select


@rule("triangle", "triu", topic="arguments")
def triangle(call: Call) -> Any:
    return (
        "torch.triu is only supported within constant expressions: multiply by the "
        "triangle of a constant, torch.triu(torch.ones(n, n))."
    )


@rule("in-place-step", ANY_IN_PLACE, topic="arguments")
def in_place_step(call: Call) -> Any:
    indices = [call.args[1]] if call.name == "__setitem__" else []
    base: Any = call.argument_node("input")
    while isinstance(base, Node) and function_name(base) == "__getitem__":
        base, index = base.args
        if any(isinstance(part, (Node, list)) for part in _parts(index)):
            break  # a copy
        indices.append(index)  # a slice of a slice
    parts = [part for index in indices for part in _parts(index)]
    return any(isinstance(p, slice) and p.step not in (None, 1) for p in parts) and (
        "In-place modification of slices with step size other than 1 is not "
        "supported. Use torch.where with a constant mask."
    )


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


@rule("in-place-view", *_IN_PLACE)
def in_place_view(call: Call) -> Any:
    # `y[0] += 1` assigns the result.
    is_lost = call.is_in_place and "__setitem__" not in call.users
    return is_lost and len(call.makers) > 1 and "input" not in call.makers


@rule("in-place-strided-view", *_IN_PLACE, "copy")
def in_place_strided_view(call: Call) -> Any:
    is_lost = call.is_in_place and "__setitem__" not in call.users
    return is_lost and not _STRIDED.isdisjoint(call.makers[:-1])


row("log-softmax-0d", "log_softmax", lambda call: call.tensors()[0].dim() == 0)


@rule("l1-loss-0d", "l1_loss")
def l1_loss_0d(call: Call) -> Any:
    return all(tensor.dim() == 0 for tensor in call.tensors())


@rule("pad-gradient", "pad")
def pad_gradient(call: Call) -> Any:
    mode = call.arguments.get("mode", "constant")
    return call.trains and mode in ("reflect", "replicate")


row("argsort-stable", "argsort", lambda call: "stable" in call.kwargs)


@rule("sort-ties", "sort", "argsort")
def sort_ties(call: Call) -> Any:
    is_whole = not call.tensors()[0].is_floating_point()
    return is_whole and not call.kwargs.get("stable")


@rule("dropout-inference", *_DROPOUTS)
def dropout_inference(call: Call) -> Any:
    given = call.arguments
    is_split = call.name == "dropout" and given.get("inplace", False)
    if call.is_training or is_split or not _drops(call):
        return None
    return lambda input, *_, **__: input.clone()


@rule("dropout-all", *_DROPOUTS)
def dropout_all(call: Call) -> Any:
    return call.arguments.get("p", 0.5) == 1 and _drops(call)


def _drops(call: Call) -> bool:
    """Return whether a dropout isn't switched off."""
    given = call.arguments
    is_training = given.get("training", given.get("train", True))
    return bool(is_training) and given.get("p", 0.5) > 0


@rule("normal-gradient", "normal")
def normal_gradient(call: Call) -> Any:
    is_of_tensors = call.is_training and not call.is_in_place
    if not is_of_tensors or not any(t.requires_grad for t in call.tensors()):
        return None

    def normal(mean: Any, std: Any = 1.0, **_: Any) -> Any:
        return mean + std * torch.randn_like(mean + std)

    return normal
