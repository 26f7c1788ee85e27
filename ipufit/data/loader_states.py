# SPDX-License-Identifier: Apache-2.0
"""States of the user's own loader, such as a `StatefulDataLoader` of torchdata.

A run that is resumed has the loader go on from its state, and draws no batch twice.
"""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ipufit.errors import DataError

_TAG = "$"


class LoaderState(NamedTuple):
    """The state of a loader, and what was drawn of it and isn't trained on yet.

    Attributes:
        state: The result of its `state_dict()`.
        rows: The last rows that were drawn; empty between two passes.
        num_left: Number of these that the next call begins with.
        num_drawn: Number of rows that the pass has drawn.
        has_ended: Whether the loader has given its last batch, so that it begins a new
            pass when it is asked again.
    """

    state: Any
    rows: list[Tensor]
    num_left: int = 0
    num_drawn: int = 0
    has_ended: bool = False

    @property
    def is_between(self) -> bool:
        """Whether a pass has ended, and the next hasn't begun."""
        return self.has_ended and not self.rows


def is_stateful(loader: Any) -> bool:
    """Whether a loader gives its state and takes one, as torchdata's protocol has it.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> is_stateful(DataLoader([1, 2]))
        False
    """
    return all(
        callable(getattr(loader, name, None))
        for name in ("state_dict", "load_state_dict")
    )


def load_state(loader: Any, kept: LoaderState, name: str) -> None:
    """Have a loader go on from a state, in the next pass over it.

    Args:
        loader: A loader that keeps a state.
        kept: The state.
        name: Name of the data in error messages.

    Raises:
        DataError: The loader can't take the state.
    """
    try:
        loader.load_state_dict(kept.state)
        if kept.has_ended:
            # The pass that begins now goes on from one that has ended, and may draw
            # random numbers. The one after it begins as in a run that goes on.
            iter(loader)
    except Exception as error:  # a user's object may raise anything
        raise DataError(
            f"`{name}` can't go on from the state that the checkpoint has of it: "
            f"{error!r}. Pass a loader with the same dataset and settings."
        ) from error


def packed(kept: LoaderState) -> dict[str, Tensor]:
    """A state as tensors, which a checkpoint can hold.

    Raises:
        DataError: The loader's state has values that no checkpoint can hold.

    Example:
        >>> kept = LoaderState({"seen": (1, None)}, [torch.zeros(2, 3)], num_left=2)
        >>> unpacked(packed(kept)).state
        {'seen': (1, None)}
    """
    tensors: dict[str, Tensor] = {}
    words = {
        "state": _encoded(kept.state, tensors, "state_dict()"),
        "num_rows": len(kept.rows),
        "num_left": kept.num_left,
        "num_drawn": kept.num_drawn,
        "has_ended": kept.has_ended,
    }
    text = json.dumps(words).encode()
    return {
        "json": torch.frombuffer(bytearray(text), dtype=torch.uint8),
        **{f"state/{name}": one for name, one in tensors.items()},
        **{f"rows/{i}": leaf.clone() for i, leaf in enumerate(kept.rows)},
    }


def unpacked(tensors: dict[str, Tensor]) -> LoaderState | None:
    """The state that `packed` made tensors of; None if there are none.

    Raises:
        DataError: `packed` hasn't made them.
    """
    if not tensors:
        return None
    try:
        words = json.loads(tensors["json"].numpy().tobytes())
        rows = [tensors[f"rows/{i}"] for i in range(words["num_rows"])]
        state = _decoded(words["state"], tensors)
        counts = [words[name] for name in ("num_left", "num_drawn")]
        has_ended = bool(words["has_ended"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"it has no state of a loader: {error!r}") from error
    is_whole = all(type(one) is int and one >= 0 for one in counts)
    if not is_whole or any(len(leaf) < counts[0] for leaf in rows):
        raise DataError("it has no state of a loader: its counts are none")
    return LoaderState(state, rows, counts[0], counts[1], has_ended)


def _encoded(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """A value as JSON knows it; what JSON doesn't know is tagged.

    Args:
        value: Part of a state.
        tensors: Gets the tensors and arrays.
        where: The part, for messages.

    Raises:
        DataError: The value is of another type.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [_encoded(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if type(value) is list else {_TAG: "tuple", "items": items}
    if isinstance(value, dict):
        pairs = [
            [_encoded(key, tensors, where), _encoded(v, tensors, f"{where}[{key!r}]")]
            for key, v in value.items()
        ]
        return {_TAG: "dict", "items": pairs}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "items": base64.b64encode(value).decode()}
    if isinstance(value, (Tensor, np.ndarray, np.number, np.bool_)):
        name = str(len(tensors))
        tensors[name] = torch.as_tensor(value).detach().cpu().clone()
        kinds = {Tensor: "tensor", np.ndarray: "array"}
        kind = next((k for t, k in kinds.items() if isinstance(value, t)), "scalar")
        return {_TAG: kind, "items": name}
    raise DataError(
        f"`x` keeps a state, so that a run can be resumed, and {where} in it is a "
        f"{type(value).__name__}, which no checkpoint can hold. Use numbers, text, "
        "bytes, tensors and arrays, in lists, tuples and dicts."
    )


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind, items = value[_TAG], value["items"]
    if kind == "tuple":
        return tuple(_decoded(one, tensors) for one in items)
    if kind == "dict":
        pairs = [(_decoded(k, tensors), _decoded(v, tensors)) for k, v in items]
        return dict(pairs)
    if kind == "bytes":
        return base64.b64decode(items)
    tensor = tensors[f"state/{items}"]
    if kind == "tensor":
        return tensor.clone()
    return tensor.numpy().copy() if kind == "array" else tensor.numpy()[()]
