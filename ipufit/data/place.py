# SPDX-License-Identifier: Apache-2.0
"""The place of a run in its data: everything that a resumed run continues from.

A `Place` keeps, for each kind of data:

* for all data: the seed of the orders, the `Position` (pass and calls) and the random
  states. Samples that are loaded by index need nothing else;
* for a stream, in `StreamState`: the number of batches that the pass has drawn, and the
  random states to draw them again;
* for a stream with `state_dict` and `load_state_dict`, in `LoaderState`: its own state,
  and the rows that it has returned and no call has taken. No batch is drawn again.

A generator can't begin anew, and goes on from where it is.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Mapping, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ipufit.errors import DataError

from .random_state import RandomState

TRAINED = "pass"
"""Name of the stream of training in a checkpoint."""

_TAG = "$"


class Position(NamedTuple):
    """The pass that a run is in, and the number of its calls so far.

    With the seed, this is enough to find the next samples of a dataset with indices.

    Attributes:
        number: Index of the pass, from 0; each pass has another order.
        calls: Number of calls of that pass so far; each process counts them.
    """

    number: int = 0
    calls: int = 0


class Place(NamedTuple):
    """Everything that a resumed run needs to continue in its training data.

    Attributes:
        seed: Seed of the orders.
        position: Index of the pass, and number of its calls so far.
        random: Random states of this process, and of the user's loader.
        stream: State of the pass over a stream; None for samples that are loaded by
            index, and before the first pass.
    """

    seed: int
    position: Position
    random: RandomState
    stream: StreamState | None = None


class StreamState(NamedTuple):
    """The state of a pass over a stream, from which another process can continue.

    The batches of most streams are drawn again and dropped, all but the last. Samplers
    and transforms draw random numbers, and so may other code between two batches. Of
    the dropped batches only the order matters, so two random states are enough: at the
    beginning of the pass and before the last batch.

    Attributes:
        num_batches: Number of batches that the pass has drawn.
        at_start: Random states when the pass began; empty before the first pass.
        at_last: Random states before the last batch was drawn.
        loader: State of a loader that has a `state_dict`, so that no batch is drawn
            again; None for other streams.
    """

    num_batches: int
    at_start: RandomState
    at_last: RandomState
    loader: LoaderState | None = None

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the random states and the loader's state, as a checkpoint has them.

        Args:
            name: Name of the stream in the checkpoint.

        Raises:
            DataError: The loader's state has values that no checkpoint can hold.
        """
        loader = {} if self.loader is None else self.loader.tensors()
        return {
            **{f"{name}/start/{n}": state for n, state in self.at_start.items()},
            **{f"{name}/last/{n}": state for n, state in self.at_last.items()},
            **{f"{_loader(name)}{n}": tensor for n, tensor in loader.items()},
        }

    @classmethod
    def of(
        cls, name: str, num_batches: int, tensors: Mapping[str, Tensor]
    ) -> StreamState | None:
        """Return the state of a stream in a checkpoint; None if no pass has begun.

        Args:
            name: Name of the stream in the checkpoint.
            num_batches: Number of batches that the pass has drawn.
            tensors: Tensors of this stream, and of others.

        Raises:
            DataError: The state of the loader is damaged.
        """
        of_loader = under(_loader(name), tensors)
        loader = LoaderState.of(of_loader) if of_loader else None
        if not num_batches:
            return None if loader is None else cls(0, {}, {}, loader)
        at_start, at_last = (under(f"{name}/{t}/", tensors) for t in ("start", "last"))
        return cls(num_batches, at_start, at_last, loader)

    def of_other_blocks(self) -> StreamState | None:
        """Return the state for a run whose blocks of rows are others than before.

        The random state before the last block is of no use then, nor is the state of
        the loader.
        """
        return self._replace(num_batches=0, loader=None) if self.num_batches else None


class LoaderState(NamedTuple):
    """The state of a loader, and the rows that it has returned and no call has taken.

    Attributes:
        state: The result of the loader's `state_dict()`.
        rows: The last rows that were drawn; empty between two passes.
        num_left: Number of rows, at the end of `rows`, that the next call begins with.
        num_drawn: Number of rows that the pass has drawn.
        has_ended: Whether the loader has returned its last batch, so that it begins a
            new pass at the next request.
    """

    state: Any
    rows: list[Tensor]
    num_left: int = 0
    num_drawn: int = 0
    has_ended: bool = False

    @property
    def is_between(self) -> bool:
        """Whether one pass has ended and the next has not begun."""
        return self.has_ended and not self.rows

    def tensors(self) -> dict[str, Tensor]:
        """Convert the state to tensors, which a checkpoint can hold.

        Raises:
            DataError: The loader's state has values that no checkpoint can hold.

        Example:
            >>> kept = LoaderState({"seen": (1, None)}, [torch.zeros(2, 3)], num_left=2)
            >>> LoaderState.of(kept.tensors()).state
            {'seen': (1, None)}
        """
        tensors: dict[str, Tensor] = {}
        words = {
            "state": _encoded(self.state, tensors, "state_dict()"),
            "num_rows": len(self.rows),
            "num_left": self.num_left,
            "num_drawn": self.num_drawn,
            "has_ended": self.has_ended,
        }
        text = json.dumps(words).encode()
        return {
            "json": torch.frombuffer(bytearray(text), dtype=torch.uint8),
            **{f"state/{name}": tensor for name, tensor in tensors.items()},
            **{f"rows/{i}": leaf.clone() for i, leaf in enumerate(self.rows)},
        }

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> LoaderState:
        """Convert the result of `tensors` back to a state.

        Raises:
            DataError: The tensors aren't from `tensors`.
        """
        try:
            words = json.loads(tensors["json"].numpy().tobytes())
            rows = [tensors[f"rows/{i}"] for i in range(words["num_rows"])]
            state = _decoded(words["state"], tensors)
            counts = [words[name] for name in ("num_left", "num_drawn")]
            has_ended = bool(words["has_ended"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"the state of its loader can't be read: {error!r}"
            ) from error
        is_whole = all(type(number) is int and number >= 0 for number in counts)
        if not is_whole or any(len(leaf) < counts[0] for leaf in rows):
            raise DataError("the state of its loader has invalid counts")
        return cls(state, rows, counts[0], counts[1], has_ended)


def _loader(name: str) -> str:
    """Return the prefix of the tensors of a stream's loader."""
    return "loader/" if name == TRAINED else f"{name}/loader/"


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, by names without the prefix."""
    return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}


def _encoded(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Encode a value for JSON; values that JSON lacks are tagged.

    Args:
        value: Part of a state.
        tensors: The tensors and arrays in the value are added.
        where: Name of the part in error messages.

    Raises:
        DataError: The value is of another type.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    items: Any = []
    if isinstance(value, (list, tuple)):
        items = [_encoded(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
        if type(value) is list:
            return items
        kind = "tuple"
    elif isinstance(value, dict):
        kind = "dict"
        for key, element in value.items():
            pair = [_encoded(key, tensors, where)]
            items.append([*pair, _encoded(element, tensors, f"{where}[{key!r}]")])
    elif isinstance(value, bytes):
        kind, items = "bytes", base64.b64encode(value).decode()
    elif isinstance(value, (Tensor, np.ndarray, np.number, np.bool_)):
        kinds = {Tensor: "tensor", np.ndarray: "array"}
        kind = next((k for t, k in kinds.items() if isinstance(value, t)), "scalar")
        items = str(len(tensors))
        tensors[items] = torch.as_tensor(value).detach().cpu().clone()
    else:
        raise DataError(
            f"A loader keeps a state, so that a run can be resumed, and {where} in it "
            f"is a {type(value).__name__}, which no checkpoint can hold. Use numbers, "
            "text, bytes, tensors and arrays, in lists, tuples and dicts."
        )
    return {_TAG: kind, "items": items}


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(element, tensors) for element in value]
    if not isinstance(value, dict):
        return value
    kind, items = value[_TAG], value["items"]
    if kind == "tuple":
        return tuple(_decoded(items, tensors))
    if kind == "dict":
        return {_decoded(k, tensors): _decoded(v, tensors) for k, v in items}
    if kind == "bytes":
        return base64.b64decode(items)
    tensor = tensors[f"state/{items}"]
    if kind == "tensor":
        return tensor.clone()
    return tensor.numpy().copy() if kind == "array" else tensor.numpy()[()]
