# SPDX-License-Identifier: Apache-2.0
"""Notes whether a stream asks which process it is for, and so divides itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Sequence

from torch.utils.data import DataLoader, IterableDataset

from ipufit._poptorch import poptorch
from ipufit.distributed import times_asked


class Noted(NamedTuple):
    """A batch, and whether its stream had asked before it was made."""

    batch: Any
    has_asked: bool


@dataclass(frozen=True)
class PartsOfNoted:
    """Takes a noted batch apart as others are.

    Args:
        parts_of: Takes a batch apart: inputs, targets, weights.
    """

    parts_of: Callable[[Any], Sequence[Any]]

    def __call__(self, noted: Any) -> Sequence[Any]:
        """The parts of the batch."""
        return self.parts_of(noted.batch)


def noting(stream: Any) -> Any:
    """A loader as the given one, whose batches are `Noted`; None for other streams.

    A dataset may ask in the processes that load. Only what these give can tell so.

    Args:
        stream: The user's stream.
    """
    kind = type(stream)
    if kind is not DataLoader or isinstance(stream, poptorch.DataLoader):
        return None
    if not isinstance(stream.dataset, IterableDataset) or not stream.num_workers:
        return None
    settings = {
        name: getattr(stream, name)
        for name in (
            "batch_size",
            "num_workers",
            "pin_memory",
            "pin_memory_device",
            "timeout",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "persistent_workers",
        )
        if hasattr(stream, name)
    }
    if stream.batch_size is not None:
        settings["drop_last"] = stream.drop_last
    return DataLoader(
        stream.dataset,
        collate_fn=_NotingCollate(stream.collate_fn),
        worker_init_fn=_NotingStart(stream.worker_init_fn),
        **settings,
    )


_times_at_start = 0
"""How many times this process had asked when it began to load."""


@dataclass(frozen=True)
class _NotingStart:
    """Begins to note in a process that loads."""

    worker_init_fn: Any

    def __call__(self, number: int) -> None:
        global _times_at_start
        _times_at_start = times_asked()
        if self.worker_init_fn is not None:
            self.worker_init_fn(number)


@dataclass(frozen=True)
class _NotingCollate:
    """Adds to a batch whether its dataset has asked."""

    collate_fn: Any

    def __call__(self, samples: Any) -> Noted:
        return Noted(self.collate_fn(samples), times_asked() > _times_at_start)
