# SPDX-License-Identifier: Apache-2.0
"""Room for the gradients of large models, while an update accumulates.

torch puts the first gradient of each weight wherever there is room between activations,
which are freed then. What is left are holes that the next micro-batch can't use: some
120 MiB for a transformer of 109 million parameters. Here gradients have their own block
from the beginning, and large tables none until the end (`row_gradients`).
"""

from __future__ import annotations

import contextlib
from typing import Callable, Iterator

import torch
from torch import Tensor

from ipufit.emulator._device.replacing import replaced
from ipufit.emulator._device.row_gradients import Table, with_tables
from ipufit.emulator._device.runner import Call
from ipufit.emulator._device.segments import Function

_LEAST_BYTES = 64 * 2**20  # smaller models don't need it
_LEAST_TABLE_BYTES = 8 * 2**20
_ALIGNMENT = 16  # elements: tensors of their own begin at such places

# Added to it, each number stays what it is, bit by bit; not so with zero, to -0.
_NOTHING = -0.0


class LargeGradients:
    """Makes the programs of large models that accumulate gradients in a block."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._copy: tuple[Function, dict[int, Table]] | None = None

    def room_for(self, call: Call) -> Room | None:
        """Make room for a training call; None for one that needs none.

        Args:
            call: Its updates are of several micro-batches.
        """
        weights = [w for w in call.weights.trained.values() if _is_plain(w)]
        if sum(map(_num_bytes, weights)) < _LEAST_BYTES:
            return None
        trained, arguments = call.weights.trained, call.arguments(0)
        is_large = tuple(
            trained.get(name) is weight
            and _is_plain(weight)
            and _num_bytes(weight) >= _LEAST_TABLE_BYTES
            for name, weight in zip(call.program.weight_names, arguments)
        )
        key = call.program.run, is_large
        if self._copy is None or key != self._of:
            self._of, self._copy = key, with_tables(*key)
        function, by_index = self._copy
        tables = [(arguments[index], table) for index, table in by_index.items()]
        apart = {id(weight) for weight, _ in tables}
        return Room(function, tables, [w for w in weights if id(w) not in apart])


class Room:
    """A block for the gradients of the updates of one call.

    Args:
        function: The program that adds gradients of `tables` to these.
        tables: Gradients that are kept by rows, each after its weight.
        weights: All other weights that have room in the block.
    """

    def __init__(
        self,
        function: Function,
        tables: list[tuple[Tensor, Table]],
        weights: list[Tensor],
    ) -> None:
        self._function = function
        self._tables = tables
        self._weights = weights
        self._parts = _in_one_block([weight.shape for weight in weights])

    @contextlib.contextmanager
    def accumulating(self, call: Call) -> Iterator[None]:
        """Accumulate the gradients of one update, while the context is open."""
        for _, table in self._tables:
            table.forget()  # what a call has left that failed midway
        reached: set[int] = set()
        with contextlib.ExitStack() as stack:
            for index, (weight, part) in enumerate(zip(self._weights, self._parts)):
                weight.grad = part.fill_(_NOTHING)
                hook = weight.register_hook(_noting(index, reached))  # type: ignore[no-untyped-call,unused-ignore]
                stack.callback(hook.remove)
            stack.enter_context(replaced(call.program, run=self._function))
            yield
        for index, weight in enumerate(self._weights):
            if index not in reached:
                weight.grad = None  # the loss doesn't depend on it
        for weight, table in self._tables:
            weight.grad = table.take(weight)


def _in_one_block(shapes: list[torch.Size]) -> list[Tensor]:
    """Make float32 tensors side by side."""
    sizes = [-(-shape.numel() // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
    parts = torch.split(torch.empty(sum(sizes)), sizes)
    return [part[: s.numel()].view(s) for part, s in zip(parts, shapes)]


def _noting(index: int, reached: set[int]) -> Callable[[Tensor], None]:
    """Make a hook that notes that a weight has got a gradient."""

    def note(gradient: Tensor | None) -> None:
        if gradient is not None:
            reached.add(index)

    return note


def _is_plain(weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.is_contiguous()


def _num_bytes(weight: Tensor) -> int:
    return int(weight.numel() * weight.element_size())
