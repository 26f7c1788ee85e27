# SPDX-License-Identifier: Apache-2.0
"""Divides an iterable dataset between the processes that load it.

Each of them has a copy of the dataset. torch leaves it to the copies to give different
samples: they ask `torch.utils.data.get_worker_info()`. One that doesn't ask would give
every sample once in each process.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Iterator

from torch.utils.data import IterableDataset, _utils, get_worker_info

from ipufit.errors import DataError


@dataclass(frozen=True, eq=False)
class WorkerSamples(IterableDataset):  # type: ignore[type-arg]
    """The samples that one loading process gives, of all.

    A dataset that asks for the number of its process before its first sample divides
    itself. Of any other, a process keeps every n-th sample.

    Args:
        dataset: The user's iterable dataset.
        name: Name of the data in error messages.
    """

    dataset: Any
    name: str = "x"

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        if info is None or info.num_workers == 1:
            yield from self.dataset
            return
        noted = _NotedInfo(info, self.dataset)
        worker: Any = _utils.worker
        worker._worker_info = noted
        try:
            yield from self._of_one_worker(noted, info)
        finally:
            worker._worker_info = info

    def _of_one_worker(self, noted: _NotedInfo, info: Any) -> Iterator[Any]:
        samples = iter(self.dataset)
        first = list(itertools.islice(samples, 1))
        if noted.was_asked:
            yield from first
            yield from samples
            return
        for number, sample in enumerate(itertools.chain(first, samples)):
            if noted.was_asked:
                raise DataError(
                    f"`{self.name}` asks get_worker_info() which process loads it "
                    "only after its first sample, when samples are divided already. "
                    "Ask at the beginning of __iter__."
                )
            if number % info.num_workers == info.id:
                yield sample


class _NotedInfo:
    """A stand-in for what `get_worker_info()` gives, which notes whether it is read.

    Args:
        info: The one of torch.
        dataset: The user's dataset, which torch has a wrapper of.
    """

    def __init__(self, info: Any, dataset: Any) -> None:
        self._info = info
        self.dataset = dataset
        self.was_asked = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the info, for `isinstance`."""
        return type(self._info)

    @property
    def id(self) -> int:
        """Number of the process that loads."""
        self.was_asked = True
        return int(self._info.id)

    @property
    def num_workers(self) -> int:
        """Number of processes that load."""
        self.was_asked = True
        return int(self._info.num_workers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)
