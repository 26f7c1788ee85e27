# SPDX-License-Identifier: Apache-2.0
"""Computes the samples of a map-style dataset once, and stacks them.

Samples that aren't the same each time are refused. Some are computed twice before
anything is stored, and all of them if random numbers were drawn meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ipufit._tree import ConstantChangedError, Structure
from ipufit.errors import DataError

from .datasets import table_row
from .host_random import HostRandomState, random_state, set_random_state
from .kinds import is_hugging_face
from .seeds import mixed, seed_all
from .values import dense_tensor

_CHUNK_ROWS = 32
"""Samples that a process computes and sends at a time."""

_NUM_CHECKED = 16
"""Samples that are computed twice before any is stored."""

_NUM_REPEATED = 64
"""Samples that are computed again, at least, if random numbers were drawn."""

_FILL, _CHECK, _REPEAT = range(3)
"""First numbers of the seeds with which samples are stored, checked and repeated."""


def filled(dataset: Any, num_workers: int = 0) -> tuple[Structure, list[Tensor]]:
    """Compute all samples and stack them; the caller's random states don't change.

    Args:
        dataset: Map-style dataset with at least one sample.
        num_workers: Number of processes that compute samples; 0 to use this one.

    Returns:
        How a sample nests, and its leaves, `[num_samples, ...]`.

    Raises:
        DataError: Samples can't be stacked, aren't the same each time, or hold no
            numbers; or they need more memory than there is.

    Example:
        >>> structure, (x, y) = filled([(torch.zeros(3), 1), (torch.ones(3), 0)])
        >>> x.shape, y
        (torch.Size([2, 3]), tensor([1, 0]))
    """
    caller = random_state()
    try:
        rows = _Rows(dataset)
        checked = _computed_twice(rows)
        stored = rows.room(len(rows))

        def store(first: int, chunk: list[Tensor]) -> None:
            for tensor, part in zip(stored, chunk):
                tensor[first : first + len(part)].copy_(part)

        def compare(first: int, chunk: list[Tensor]) -> None:
            rows.require_same(first, [t[first:] for t in stored], chunk)

        has_drawn = _each_chunk(rows, mixed(_FILL), num_workers, store)
        for index, leaves in checked.items():
            compare(index, leaves)
        if has_drawn:
            for number in range(-(-_NUM_REPEATED // len(rows))):
                _each_chunk(rows, mixed(_REPEAT, number), num_workers, compare)
        return rows.structure, stored
    finally:
        set_random_state(caller)


def _computed_twice(rows: _Rows) -> dict[int, list[Tensor]]:
    """Some samples by index, as `[1, ...]`, that are the same with other seeds."""
    last = len(rows) - 1
    spread = min(_NUM_CHECKED - 1, last)
    checked = {}
    for index in sorted({last * i // max(spread, 1) for i in range(spread + 1)}):
        seed_all(mixed(_CHECK, 0, index))
        leaves = [leaf[None].clone() for leaf in rows[index]]
        seed_all(mixed(_CHECK, 1, index))
        try:
            again = rows.computed(index)
        except _UnlikeFirstError as error:
            raise _not_the_same(index, error.reason) from None
        rows.require_same(index, leaves, [leaf[None] for leaf in again])
        checked[index] = leaves
    return checked


@dataclass(eq=False)
class _UnlikeFirstError(Exception):
    """A sample differs from the first one in structure, shape or type."""

    reason: str
    advice: str


class _Rows:
    """Samples as lists of tensors, which must look like those of the first sample.

    Args:
        dataset: Map-style dataset with at least one sample.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._is_table = is_hugging_face(dataset)
        sample = self._sample(0)
        self.structure = Structure.of(sample)
        self._paths = self.structure.paths("sample")
        if not self._paths:
            raise DataError(f"Sample 0 of `dataset` holds no numbers: {sample!r:.80}.")
        leaves = self._tensors(sample, 0)
        self._first = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> list[Tensor]:
        try:
            return self.computed(index)
        except _UnlikeFirstError as error:
            if index == 0:
                raise _not_the_same(0, error.reason) from None
            raise DataError(
                f"Sample {index} of `dataset` can't be stacked with sample 0: "
                f"{error.reason}. {error.advice}"
            ) from None

    def computed(self, index: int) -> list[Tensor]:
        """The leaves of a sample.

        Raises:
            _UnlikeFirstError: It differs from what the first sample was at first.
        """
        sample = self._sample(index)
        try:
            tensors = self._tensors(sample, index)
        except ConstantChangedError as error:
            advice = "Only numbers are stored by sample: leave it out."
            raise _UnlikeFirstError(str(error), advice) from None
        except TypeError as error:
            reason = f"it nests differently: {error}"
            raise _UnlikeFirstError(reason, "Give all samples one structure.") from None
        for path, own, (shape, dtype, _) in zip(self._paths, tensors, self._first):
            if own.shape != shape:
                raise _UnlikeFirstError(
                    f"{path} has shape {tuple(own.shape)}, and had {tuple(shape)}",
                    "Pad or crop samples to one shape.",
                )
            if own.dtype != dtype:
                raise _UnlikeFirstError(
                    f"{path} is of {own.dtype}, and was of {dtype}",
                    "Convert all samples to one type.",
                )
        return tensors

    def _sample(self, index: int) -> Any:
        sample = self._dataset[index]
        return table_row(sample) if self._is_table else sample

    def _tensors(self, sample: Any, index: int) -> list[Tensor]:
        leaves = self.structure.flatten(sample, "sample")
        return [dense_tensor(leaf, f"Sample {index} of `dataset`") for leaf in leaves]

    def room(self, count: int) -> list[Tensor]:
        """Empty tensors for `count` samples.

        Raises:
            DataError: There is not enough memory.
        """
        try:
            return [
                torch.empty((count, *shape), dtype=dtype, device=device)
                for shape, dtype, device in self._first
            ]
        except RuntimeError as error:
            each = sum(
                shape.numel() * torch.empty((), dtype=dtype).element_size()
                for shape, dtype, _ in self._first
            )
            raise DataError(
                f"{count} samples of `dataset`, of {each} bytes each, don't fit into "
                f"memory: {error}. Leave it uncached."
            ) from error

    def require_same(
        self, first: int, stored: Sequence[Tensor], again: Sequence[Tensor]
    ) -> None:
        """Refuse samples that change when they are computed again.

        Args:
            first: Index of the first sample.
            stored: Leaves of the samples, `[count or more, ...]`.
            again: Leaves of the same samples, computed again, `[count, ...]`.

        Raises:
            DataError: A sample has changed.
        """
        for path, tensor, new in zip(self._paths, stored, again):
            old = tensor[: len(new)]
            if torch.equal(old, new):
                continue
            differs = (old != new) & ~((old != old) & (new != new))  # NaN is like NaN
            counts = differs.reshape(len(new), -1).sum(dim=1)
            if not counts.any():
                continue
            row = int(counts.nonzero()[0])
            difference = (
                f"differs in {int(counts[row])} of {new[row].numel()} numbers"
                if new.dim() > 1
                else f"is {old[row].item()} once and {new[row].item()} the next time"
            )
            raise _not_the_same(first + row, f"{path} {difference}")


def _not_the_same(index: int, reason: str) -> DataError:
    return DataError(
        f"Sample {index} of `dataset` isn't the same when it is computed again: "
        f"{reason}. A cache would freeze one of them for every epoch. Cache the "
        "dataset without its random transforms, and apply those in a dataset around "
        "the cache; or leave it uncached."
    )


class _Chunk(NamedTuple):
    """Consecutive samples, stacked."""

    leaves: list[Tensor]
    has_drawn: bool


@dataclass(frozen=True, eq=False)
class _Chunks(Dataset):  # type: ignore[type-arg]
    """The samples in chunks of `_CHUNK_ROWS`.

    Args:
        seed: Seed of the random numbers that they draw.
    """

    rows: _Rows
    seed: int

    def __len__(self) -> int:
        return -(-len(self.rows) // _CHUNK_ROWS)

    def __getitem__(self, number: int) -> _Chunk | DataError:
        """A chunk; or its error, which torch would bury in a traceback if raised."""
        seed_all(mixed(self.seed, number))
        begun = HostRandomState()
        first = number * _CHUNK_ROWS
        count = min(_CHUNK_ROWS, len(self.rows) - first)
        try:
            leaves = self.rows.room(count)
            for row in range(count):  # copied at once: a dataset may reuse its memory
                for leaf, part in zip(leaves, self.rows[first + row]):
                    leaf[row] = part
        except DataError as error:
            return error
        return _Chunk(leaves, begun.has_changed())


def _each_chunk(
    rows: _Rows, seed: int, num_workers: int, use: Callable[[int, list[Tensor]], None]
) -> bool:
    """Compute all samples.

    Args:
        rows: The samples.
        seed: Seed of the random numbers that they draw.
        num_workers: Number of processes that compute samples; 0 to use this one.
        use: Takes the index of the first sample of a chunk, and the stacked samples.

    Returns:
        Whether any sample drew random numbers.
    """
    chunks = _Chunks(rows, seed)
    loader: Any = DataLoader(
        chunks, batch_size=None, num_workers=num_workers, collate_fn=_identity
    )
    iterator = iter(loader)
    has_drawn = False
    try:
        for number, chunk in enumerate(iterator):
            if isinstance(chunk, DataError):
                raise chunk
            use(number * _CHUNK_ROWS, chunk.leaves)
            has_drawn = has_drawn or chunk.has_drawn
    finally:
        if num_workers:
            # The traceback of an error would keep the processes, and torch has no
            # public way to end them.
            iterator._shutdown_workers()
    return has_drawn


def _identity(chunk: Any) -> Any:
    return chunk
