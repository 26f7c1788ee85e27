# SPDX-License-Identifier: Apache-2.0
"""Rules of the shapes, dimensions and options that operators take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node

from ..graph import SHAPE_FUNCTIONS, effects_of, function_name, storage_of
from ..operators import ANY_IN_PLACE, Call, row

_IN_PLACE = """
    abs add addcdiv addcmul ceil clamp clamp_max clamp_min clip div divide exp fill
    floor floor_divide index_fill log masked_fill mul multiply neg pow reciprocal relu
    remainder round rsqrt scatter scatter_add sigmoid sqrt sub subtract tanh zero
"""
"""Functions of which a variant changes its first argument."""

_STRIDED = frozenset(
    """
    as_strided diagonal expand expand_as movedim permute swapaxes swapdims t transpose
    unfold
    """.split()  # noqa: SIM905 - one per line would be longer
)
"""Views that are no slice and no reshape."""

_DROPOUTS = "dropout dropout1d dropout2d dropout3d feature_dropout"


@row("data-gradient", "getattr __get__")
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


@row("data-assignment", "setattr")
def data_assignment(call: Call) -> Any:
    """Find `x.data = y`, which leaves `x` what it was on a device."""
    x, name, _ = call.args
    if name != "data" or not isinstance(x, Tensor):
        return None
    return lambda *_: None


@row("cross-negative-dim", "cross linalg_cross")
def cross_negative_dim(call: Call) -> Any:
    dim = call.get("dim", -1 if call.name == "linalg_cross" else None)
    return dim is not None and dim < 0


@row("copy-broadcast", "copy")
@row("cross-broadcast", "cross linalg_cross")
def is_broadcast(call: Call) -> Any:
    x, other = call.tensors
    return x.shape != other.shape


row(
    "take-along-negative-dim", "take_along_dim", lambda call: (call.get("dim") or 0) < 0
)


@row("index-select-0d", "index_select")
def index_select_0d(call: Call) -> Any:
    def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
        selected = torch.index_select(input, dim, index)
        # `argmax()` over everything has the shape [1] on a device.
        return selected if index.dim() else selected.squeeze(dim)

    return call.arguments["index"].dim() == 0 and index_select


row("triangle", "triu", lambda call: True, topic="arguments")


@row("in-place-step", (ANY_IN_PLACE,), topic="arguments")
def in_place_step(call: Call) -> Any:
    indices = [call.args[1]] if call.name == "__setitem__" else []
    base: Any = call.argument_node("input")
    while isinstance(base, Node) and function_name(base) == "__getitem__":
        base, index = base.args
        if any(isinstance(part, (Node, list)) for part in _parts(index)):
            break  # a copy
        indices.append(index)  # a slice of a slice
    parts = [part for index in indices for part in _parts(index)]
    return any(isinstance(p, slice) and p.step not in (None, 1) for p in parts)


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


@row("in-place-view", _IN_PLACE)
def in_place_view(call: Call) -> Any:
    # `y[0] += 1` assigns the result.
    is_lost = call.is_in_place and "__setitem__" not in call.users
    return is_lost and len(call.makers) > 1 and "input" not in call.makers


@row("in-place-strided-view", f"{_IN_PLACE} copy")
def in_place_strided_view(call: Call) -> Any:
    is_lost = call.is_in_place and "__setitem__" not in call.users
    return is_lost and not _STRIDED.isdisjoint(call.makers[:-1])


row("log-softmax-0d", "log_softmax", lambda call: call.first.dim() == 0)
row("l1-loss-0d", "l1_loss", lambda call: not any(t.dim() for t in call.tensors))


@row("pad-gradient", "pad")
def pad_gradient(call: Call) -> Any:
    return call.trains and call.get("mode") in ("reflect", "replicate")


row("tensor-split-tensor", "tensor_split", lambda call: len(call.tensors) > 1)
row("pad-circular", "pad", lambda call: call.get("mode") == "circular")
row("argsort-stable", "argsort", lambda call: "stable" in call.kwargs)


@row("sort-ties", "sort argsort")
def sort_ties(call: Call) -> Any:
    return not call.first.is_floating_point() and not call.kwargs.get("stable")


@row("dropout-inference", _DROPOUTS)
def dropout_inference(call: Call) -> Any:
    is_split = call.name == "dropout" and call.get("inplace", False)
    is_identity = not call.is_training and not is_split and _drops(call)
    return is_identity and (lambda input, *_, **__: input.clone())


row("dropout-all", _DROPOUTS, lambda call: call.get("p", 0.5) == 1 and _drops(call))


def _drops(call: Call) -> bool:
    """Return whether a dropout isn't switched off."""
    is_training = call.get("training", call.get("train", True))
    return bool(is_training) and call.get("p", 0.5) > 0


@row("normal-gradient", "normal")
def normal_gradient(call: Call) -> Any:
    def normal(mean: Any, std: Any = 1.0, **_: Any) -> Any:
        return mean + std * torch.randn_like(mean + std)

    is_of_tensors = call.is_training and not call.is_in_place
    return is_of_tensors and any(t.requires_grad for t in call.tensors) and normal
