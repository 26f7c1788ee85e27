# SPDX-License-Identifier: Apache-2.0
"""Loads one process's samples as the user's loader of a map-style dataset would."""

from __future__ import annotations

from collections import deque
from typing import Any, Iterator, List

import torch
from torch.utils.data import DataLoader

from .carrying import carried
from .host_random import HostRandomState
from .seeds import mixed, seed_all

Indices = List[Any]
"""Keys of a dataset, as its sampler gives them."""


class OwnLoading:
    """The user's loader, taken apart: its indices, and what loads samples of them.

    Every process goes through all indices, with the same random numbers, and loads
    those of its own samples only.

    Args:
        loader: The user's loader of a map-style dataset.
        index: Number of this process.
    """

    def __init__(self, loader: Any, index: int) -> None:
        self._loader = loader
        self._index = index
        self._seed = 0
        self._has_begun = False
        self._own: Any = None
        self._groups = _Groups()

    def __iter__(self) -> Iterator[Indices]:
        """The indices of all batches of a pass.

        Random numbers are drawn as torch's loader draws them: first a seed for the
        processes that load, then what the samplers draw.
        """
        loader = self._loader
        batches = iter(loader.batch_sampler)
        if not (self._has_begun and loader.persistent_workers):
            drawn = torch.empty((), dtype=torch.int64)
            self._seed = int(drawn.random_(generator=loader.generator))
        self._has_begun = True
        return (list(batch) for batch in batches)

    def peek(self, indices: Indices) -> Any:
        """The batch of some indices; random states stay, and so does a file handle.

        It is loaded in another process if the user's loader does so, because a dataset
        may open files there that processes can't share.
        """
        before = HostRandomState()
        try:
            loader = self._like_the_users([indices], min(self._loader.num_workers, 1))
            return next(iter(loader))
        finally:
            before.put_back()

    def load(self, groups: Iterator[Indices]) -> Iterator[Any]:
        """Batches as the user's loader makes them, one for each group of indices.

        Transforms have random numbers of their own. So what is drawn besides, such as
        the order of the samples, is the same in all processes.

        Args:
            groups: Indices of this process's samples.
        """
        private = _PrivateRandom(mixed(self._seed, self._index))
        self._groups.begin(groups, private)
        if self._own is None:
            self._own = self._like_the_users(self._groups, self._loader.num_workers)
        self._own.generator.manual_seed(mixed(self._seed, self._index))
        with private:
            batches = carried(self._own)
        while True:
            with private:
                batch = next(batches, private)
            if batch is private:
                return
            yield batch

    def _like_the_users(self, batch_sampler: Any, num_workers: int) -> Any:
        """A loader as the user's, with other indices."""
        users = self._loader
        settings = {
            name: getattr(users, name)
            for name in (
                "collate_fn",
                "pin_memory",
                "pin_memory_device",
                "timeout",
                "worker_init_fn",
            )
            if hasattr(users, name)
        }
        if num_workers:
            settings["multiprocessing_context"] = users.multiprocessing_context
            settings["prefetch_factor"] = users.prefetch_factor
            settings["persistent_workers"] = (
                users.persistent_workers and batch_sampler is self._groups
            )
        return DataLoader(
            users.dataset,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            generator=torch.Generator(),
            **settings,
        )


class _PrivateRandom:
    """Random states beside the usual ones, in force within `with`.

    Within a `with` in a `with` the usual ones are in force.
    """

    def __init__(self, seed: int) -> None:
        before = HostRandomState()
        seed_all(seed)
        self._other = HostRandomState()
        before.put_back()

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        now = HostRandomState()
        self._other.put_back()
        self._other = now


class _Groups:
    """A batch sampler whose groups of indices are given for each pass anew."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Iterator[Indices], _PrivateRandom]] = deque()

    def begin(self, groups: Iterator[Indices], private: _PrivateRandom) -> None:
        """Give the groups of the next pass."""
        self._waiting.clear()
        self._waiting.append((groups, private))

    def __iter__(self) -> Iterator[Indices]:
        groups, private = self._waiting.popleft()
        while True:
            with private:
                group = next(groups, None)
            if group is None:
                return
            yield group
