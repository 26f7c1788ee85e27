# SPDX-License-Identifier: Apache-2.0
"""Samples that are loaded by index: their order, their division between processes."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import tempfile
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ipufit._poptorch import poptorch
from ipufit._signals import uninterrupted
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.errors import DataError

from .arrays import ArrayDataset
from .datasets import FlatDataset, collate
from .loaders import plain_values
from .place import Position
from .random_state import HostRandomState, hash_seed


@dataclass(frozen=True)
class Division:
    """Divides the rows of a call between processes, in blocks of one update.

    So an update has the same samples for any number of processes. In inference a block
    is a forward pass: a process has the same samples for any `device_iterations`.

    Attributes:
        index: Index of this process, from 0.
        count: Number of processes.
        block: Rows of a block.
        rows: Rows of a call of one process; a multiple of `block`.

    Example:
        >>> division = Division(index=1, count=2, block=2, rows=4)
        >>> division.select(torch.arange(8))
        tensor([2, 3, 6, 7])
        >>> division.num_of_each(7)
        (4, 3)
    """

    index: int
    count: int
    block: int
    rows: int

    @classmethod
    def of(cls, processes: Processes, plan: BatchPlan) -> Division:
        """Return the division of the calls of a plan."""
        rows = plan.samples_per_call
        return cls(processes.index, processes.count, plan.samples_per_update, rows)

    @property
    def rows_of_all(self) -> int:
        """Number of rows of a call in all processes."""
        return self.rows * self.count

    def select(self, rows: Tensor) -> Tensor:
        """Return the rows of this process.

        Args:
            rows: `[rows, ...]`; a multiple of the blocks of all processes.
        """
        if self.count == 1:
            return rows
        blocks = rows.reshape(-1, self.count, self.block, *rows.shape[1:])
        return torch.flatten(blocks[:, self.index], 0, 1)

    def num_of_each(self, num_rows: int) -> tuple[int, ...]:
        """Count each process's rows among the first `num_rows`."""
        whole, rest = divmod(num_rows, self.block * self.count)
        return tuple(
            whole * self.block + min(max(rest - index * self.block, 0), self.block)
            for index in range(self.count)
        )

    def num_in_updates(self, num_of_each: tuple[int, ...]) -> Tensor:
        """Return the number of unpadded rows, in all processes, of each update.

        Args:
            num_of_each: Unpadded rows of each process; its padding follows them.
        """
        first = torch.arange(0, self.rows, self.block)
        counts = [(number - first).clamp(0, self.block) for number in num_of_each]
        return torch.stack(counts).sum(dim=0)


@dataclass(eq=False)
class Order(Sampler[int]):
    """Yields every index once, then the last one again up to a length.

    With a seed each pass has a new order. It depends only on the seed and the index of
    the pass, so a resumed run, or another process, finds the same order.

    Args:
        count: Number of samples.
        length: Number of indices in a pass.
        seed: Seed of the orders; None keeps the samples' own order.
        division: Selects the indices of one process, in whole calls.
        start: Position at which the next pass begins.
        tells_pass: Whether to yield keys of `FlatDataset`, which contain the index of
            the pass, instead of indices.
    """

    count: int
    length: int
    seed: int | None
    division: Division
    start: Position = Position()  # noqa: RUF009 - it can't change
    tells_pass: bool = False

    def __iter__(self) -> Iterator[int]:
        indices = self.indices()
        self.start = Position(self.start.number + 1)
        for start in range(0, len(indices), 65_536):  # a list takes 40 bytes a row
            yield from indices[start : start + 65_536].tolist()

    def indices(self) -> Tensor:
        """Return the indices of the next pass, from `start` on."""
        number, calls = self.start
        order: Any = torch.arange(self.count)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(hash_seed(self.seed, number))
            order = torch.randperm(self.count, generator=generator)
        if self.length > self.count:
            padding = order[-1:].expand(self.length - self.count)
            order = torch.cat([order, padding])
        order = order[calls * self.division.rows_of_all : self.length]
        if self.tells_pass:
            order = order + number * self.count
        return self.division.select(order)


_MODES = {
    "sync": poptorch.DataLoaderMode.Sync,
    "async": poptorch.DataLoaderMode.Async,
    "async_rebatched": poptorch.DataLoaderMode.AsyncRebatched,
}


class IndexLoader:
    """Loads the rows of calls from samples that are taken by index.

    Worker processes (`num_workers`) live for one pass, as torch's do, so that each pass
    sees changes of the dataset. The process of an asynchronous loader takes seconds to
    start. It lives until `close`, or until numbers or strings of the dataset have
    changed.

    PopTorch's asynchronous loader reports only that an error occurred in the data
    fetcher. Its process prints the error itself, where notebooks and logs miss it. So
    the dataset writes the traceback to a temporary file.

    Args:
        dataset: The samples; None if they are a stream.
        plan: The factors of a call.
        options: Options of the program.
        num_workers: Number of processes that load; 0 to load in this process.
        mode: `loader_mode` of `IPUConfig`.
        are_several: Whether several processes divide the samples.

    Attributes:
        is_seeded: Whether each sample is loaded with its own seed, so that it is the
            same in whichever process it is loaded. True if other processes load, or
            if several processes divide the samples; False for samples in memory, which
            draw no random numbers.
    """

    def __init__(
        self,
        dataset: ArrayDataset | FlatDataset | None,
        plan: BatchPlan,
        options: poptorch.Options,
        num_workers: int,
        mode: str,
        *,
        are_several: bool,
    ) -> None:
        self._plan, self._options = plan, options
        self._num_workers, self._mode = num_workers, mode
        self._is_elsewhere = num_workers > 0 or mode != "sync"
        self._error_file: Path | None = None
        if mode != "sync":
            name = f"ipufit-{uuid.uuid4().hex}.txt"
            self._error_file = Path(tempfile.gettempdir(), name)
        self._dataset: Any = dataset
        self.is_seeded = False
        if isinstance(dataset, FlatDataset):
            self.is_seeded = self._is_elsewhere or are_several
            # Another `IndexLoader` may load the dataset with other seeds.
            self._dataset = replace(dataset, error_file=self._error_file)
        self._loader: Any = None
        self._iterator: Any = None
        self._values: list[Any] = []

    def rows(self, order: Order, seed: int) -> Iterator[list[Tensor]]:
        """Begin a pass, which draws from torch's generator at once.

        Args:
            order: Keys of the samples of this process; the next iteration yields the
                next pass. An asynchronous loader keeps its first order.
            seed: Seed of the random numbers that samples draw, if each is seeded.

        Returns:
            The batches of calls, as lists of tensors.

        Raises:
            DataError: The process that loads has failed.
        """
        if isinstance(self._dataset, ArrayDataset) and not self._is_elsewhere:
            if self._dataset.rows is not None:
                torch.empty((), dtype=torch.int64).random_()  # as a loader draws a seed
            rows = self._plan.samples_per_call
            keys = order.indices()
            ends = range(rows, len(keys) + 1, rows)
            return (self._dataset.gathered(keys[end - rows : end]) for end in ends)
        if self.is_seeded:
            self._dataset.seed = seed
        with self._loading_errors():
            values = plain_values(self._dataset)
            if self._mode == "sync" or values != self._values:
                self.close()
            self._values = values
            with uninterrupted:  # else nobody ends processes that have just begun
                if self._loader is None:
                    self._loader = self._new_loader(order)
                self._iterator = iter(self._loader)
        return self._each(self._iterator)

    def _each(self, iterator: Iterator[Any]) -> Iterator[list[Tensor]]:
        keeps_random = self.is_seeded and not self._is_elsewhere
        while True:  # `for` calls iter(), and PopTorch's begins anew
            before = HostRandomState() if keeps_random else None
            try:
                with self._loading_errors():
                    batch = next(iterator, None)
            finally:
                if before is not None:
                    before.put_back()
            if batch is None:
                return
            yield list(batch)

    @uninterrupted
    def close(self) -> None:
        """End the loading processes; the next pass starts new ones."""
        self._take_error()
        loader, self._loader = self._loader, None
        iterator, self._iterator = self._iterator, None
        if loader is not None:
            loader.terminate()
        # torch has no public way to end workers while something refers to their
        # iterator, such as the traceback of an error.
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()

    @contextlib.contextmanager
    def _loading_errors(self) -> Iterator[None]:
        try:
            yield
        except (AssertionError, poptorch.Error) as error:
            if "data fetcher" not in str(error) and "worker" not in str(error):
                raise
            raise DataError(
                f"Samples could not be loaded. {error}\n{self._take_error()}".rstrip()
            ) from error

    def _take_error(self) -> str:
        """Return the traceback of an error, or `""`, and delete its file."""
        file = self._error_file
        if file is None or not file.exists():
            return ""
        text = file.read_text(encoding="utf-8")
        file.unlink()
        return text

    def _new_loader(self, order: Order) -> Any:
        plan, num_workers, mode = self._plan, self._num_workers, self._mode
        given: dict[str, Any] = {}
        if mode != "sync":
            # Else each process that sends tensors makes a temporary folder of its own,
            # which it can't delete when it is ended.
            multiprocessing.util.get_temp_dir()
        else:
            given["persistent_workers"] = False
            # torch draws a seed when processes start. A resumed run starts them once
            # more than others do, which must not change torch's own generator.
            given["generator"] = torch.Generator() if num_workers else None
        if mode == "async_rebatched" and plan.samples_per_call == 1:
            mode = "async"  # PopTorch refuses to rebatch calls of one row
        return poptorch.DataLoader(
            self._options,
            self._dataset,
            batch_size=plan.micro_batch_size,
            num_workers=num_workers,
            drop_last=True,
            auto_distributed_partitioning=False,  # the order is divided already
            mode=_MODES[mode],
            collate_fn=collate,
            sampler=order,
            **given,
        )
