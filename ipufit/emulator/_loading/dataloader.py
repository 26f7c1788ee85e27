# SPDX-License-Identifier: Apache-2.0
"""PopTorch's data loader: each batch has the rows of one call."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Iterator

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from ipufit.emulator._ground.custom_args import (
    flattenTensorStructure,
    reconstructTensorStructure,
)
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._loading.accessor import AsynchronousDataAccessor
from ipufit.emulator._options.options import Options
from ipufit.emulator.enums import DataLoaderMode
from ipufit.emulator.errors import createPoptorchError, require


class DataLoader(TorchDataLoader[Any]):
    """Loader whose batches hold the rows of one call.

    One call takes the combined batch, `batch_size * device iterations * input groups
    * gradient accumulation` rows, where input groups are the replicas divided by the
    input replica grouping (PopTorch user guide, "Efficient data batching"). Torch's
    loader is built with that size: `collate_fn`, workers and `loader.batch_size` see
    combined batches. The options are kept and frozen.

    A batch that is smaller at the end of the data is dropped by default; models can't
    take it.

    In the asynchronous modes a background process loads the data, see
    `AsynchronousDataAccessor`: a batch is valid until the next one is requested, and
    `terminate` ends the process. With `AsyncRebatched`, and with `Async` if
    `drop_last` is false, that process joins the workers' incomplete batches, so that
    at most one is lost or incomplete. As in PopTorch's code, but not its guide, the
    workers then load `rebatched_worker_size` elements at a time and by default a
    combined batch.

    With several processes, each loader of a map-style dataset reads its own block; if
    `shuffle` is set, of a permutation of the whole dataset that is the same in all
    processes and drawn anew in each epoch.

    Args:
        options: The options of the model that takes the batches. Gradient
            accumulation counts, so inference needs other options than training.
        dataset: A map-style or iterable dataset.
        batch_size: Rows of a micro-batch; `None` passes elements on as they are and
            needs `drop_last=False`.
        shuffle: Whether map-style data is shuffled; `None` means no.
        num_workers: Processes that load.
        drop_last: Whether an incomplete last batch is dropped.
        persistent_workers: Whether workers outlive an epoch; by default they do.
        auto_distributed_partitioning: Whether each process gets a part of the data.
        mode: Load in this process or in a background process.
        async_options: Arguments of the `AsynchronousDataAccessor`.
        rebatched_worker_size: Elements that workers load at a time when rebatching.
        batch_sampler: Gives the indices of one micro-batch after the other; the
            micro-batches of a call are concatenated.
        **kwargs: Other arguments of torch's `DataLoader`.

    Raises:
        AssertionError: If the options aren't `Options`; if several processes share an
            iterable dataset, or data without batches, or shuffle without a common
            seed (`Options.randomSeed`); or if a size for rebatching is out of range.
        Error: If `batch_sampler` is combined with `batch_size`, `shuffle` or automatic
            partitioning, or if the background process can't start.
        ValueError: Whatever torch's loader refuses.
        ZeroDivisionError: If there is less than one call's data for each process.

    Example:
        >>> import torch
        >>> from ipufit.emulator import DataLoader, Options
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(10))
        >>> loader = DataLoader(Options().deviceIterations(2), dataset, batch_size=2)
        >>> loader.combinedBatchSize, len(loader)
        (4, 2)
        >>> [batch[0].tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    def __init__(
        self,
        options: Options,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        self._accessor: AsynchronousDataAccessor | None = None
        self._shuffled_partition: Partition | None = None
        if batch_sampler is not None:
            if batch_size != 1 or shuffle:
                raise createPoptorchError(
                    "A batch_sampler decides on batches and their order: it excludes "
                    "batch_size and shuffle."
                )
            if options.Distributed.numProcesses > 1 and auto_distributed_partitioning:
                raise createPoptorchError(
                    "Data with a batch_sampler can't be partitioned for several "
                    "processes: pass auto_distributed_partitioning=False and a sampler "
                    "that does it."
                )
            batch_size = getattr(batch_sampler, "batch_size", 1)
        require(
            isinstance(options, Options),
            f"options must be poptorch.Options, not {type(options).__name__}.",
        )
        options._freeze()
        self._num_combined = Layout.from_options(options).input_blocks
        self._combined_batch_size: int | None = None
        if batch_size is not None:
            # As in PopTorch, there are no `options` without a batch size.
            self._options = options
            self._combined_batch_size = batch_size * self._num_combined
        combined = self._combined_batch_size
        self._user_drop_last = drop_last
        self._has_batch_sampler = batch_sampler is not None

        num_processes = options.Distributed.numProcesses
        is_partitioned = num_processes > 1 and auto_distributed_partitioning
        if isinstance(dataset, IterableDataset):
            require(
                not is_partitioned,
                "An iterable dataset can't be partitioned for several processes: pass "
                "auto_distributed_partitioning=False and let the dataset do it.",
            )
            if num_workers > 1 and "worker_init_fn" not in kwargs:
                logger.warning(
                    "Each of the %d workers will go through the whole iterable "
                    "dataset, so each element comes %d times. Pass a worker_init_fn "
                    "that gives each worker a part.",
                    num_workers,
                    num_workers,
                )
        elif batch_sampler is not None and combined is not None:
            # PopTorch warns whatever drop_last is.
            try:
                num_batches = len(batch_sampler)
            except TypeError:
                num_batches = None
            if num_batches is None or num_batches % self._num_combined:
                logger.warning(
                    "The batch sampler gives %s micro-batches and a call takes %d. An "
                    "incomplete last group is %s.",
                    "an unknown number of" if num_batches is None else num_batches,
                    self._num_combined,
                    "dropped" if drop_last else "smaller than the others",
                )
        elif combined and not drop_last and len(dataset) % (combined * num_processes):
            logger.warning(
                "The dataset has %d elements, which isn't a multiple of %d = %d per "
                "call (the combined batch size) * %d processes. With drop_last=False "
                "the last batch is smaller, and a model compiled for whole batches "
                "doesn't take it.",
                len(dataset),
                combined * num_processes,
                combined,
                num_processes,
            )
        if is_partitioned:
            require(
                not shuffle or options.exists("random_seed"),
                "To shuffle the data of several processes they need a common seed: "
                "call options.randomSeed(seed) in each of them.",
            )
            if combined is None:
                raise AssertionError(
                    "Data without batches (batch_size=None) can't be partitioned: pass "
                    "auto_distributed_partitioning=False."
                )
            dataset = Partition(
                dataset,
                options.Distributed.processId,
                num_processes,
                combined,
                drop_last=drop_last,
                seed=options("random_seed") if shuffle else None,
            )
            self._shuffled_partition = dataset if shuffle else None
            shuffle = False

        is_rebatched = mode == DataLoaderMode.AsyncRebatched
        if mode == DataLoaderMode.Async:
            # The accessor's slots have no place for a smaller batch at the end.
            is_rebatched = not drop_last and (combined or 1) > 1
        loaded_size = combined
        if is_rebatched:
            if combined is not None and rebatched_worker_size is not None:
                require(
                    rebatched_worker_size <= combined,
                    f"rebatched_worker_size = {rebatched_worker_size} must not exceed "
                    f"the combined batch size, {combined}.",
                )
                loaded_size = rebatched_worker_size
            if combined is not None:
                self.rebatched_drop_last = (
                    None if self._has_batch_sampler else drop_last
                )
        if batch_sampler is None:
            kwargs.update(batch_size=loaded_size, shuffle=bool(shuffle))
            kwargs.update(drop_last=drop_last and not is_rebatched)
        else:
            kwargs.update(batch_sampler=batch_sampler)
        if persistent_workers is None:
            persistent_workers = num_workers > 0
        super().__init__(
            dataset,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            **kwargs,
        )
        if mode in (DataLoaderMode.Async, DataLoaderMode.AsyncRebatched):
            async_options = async_options or {}
            require(
                "rebatched_size" not in async_options,
                "The DataLoader decides on rebatched_size: remove it from "
                "async_options and choose a mode instead.",
            )
            rebatched_size = combined if is_rebatched else None
            self._accessor = AsynchronousDataAccessor(
                self, rebatched_size=rebatched_size, **async_options
            )
            # Not a cycle: the process ends as soon as the loader isn't used any more.
            self._accessor._dataset = weakref.proxy(self)

    @property
    def combinedBatchSize(self) -> int | None:
        """Number of rows of one call; `None` without a batch size.

        Example:
            >>> from ipufit.emulator import DataLoader, Options
            >>> options = Options().replicationFactor(4).deviceIterations(2)
            >>> DataLoader(options, list(range(80)), batch_size=5).combinedBatchSize
            40
        """
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        """The options that were passed to the loader, frozen.

        Raises:
            AttributeError: If the loader has no batch size, as in PopTorch.

        Example:
            >>> from ipufit.emulator import DataLoader, Options
            >>> options = Options()
            >>> DataLoader(options, [1, 2]).options is options
            True
        """
        return self._options

    def terminate(self) -> None:
        """End the background process, if there is one.

        Afterwards an asynchronous loader can't be iterated over any more.

        Example:
            >>> from ipufit.emulator import DataLoader, Options
            >>> DataLoader(Options(), [1, 2]).terminate()
        """
        if self._accessor is not None:
            self._accessor.terminate()

    def __del__(self) -> None:
        # Absent if the loader was refused or is being unpickled.
        accessor = self.__dict__.get("_accessor")
        if accessor is not None:
            accessor.terminate()

    def __len__(self) -> int:
        """Return the number of batches.

        As in PopTorch it is an estimate in two cases: with iterable datasets it
        ignores what each worker loses; with a batch sampler it counts micro-batches
        or, when rebatching, what the elements of the dataset would fill.
        """
        if self._accessor is None or not hasattr(self, "rebatched_drop_last"):
            return super().__len__()
        num_full, num_remaining = divmod(
            len(self.dataset),  # type: ignore[arg-type]
            self._combined_batch_size or 1,
        )
        return num_full + bool(num_remaining and not self.rebatched_drop_last)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._accessor is not None:  # its process has a copy that shuffles
            return iter(self._accessor)
        if self._shuffled_partition is not None:
            self._shuffled_partition.shuffle()
        batches: Iterator[Any] = super().__iter__()
        if self._has_batch_sampler and self._num_combined != 1:
            return self._combine(batches)
        return batches

    def _combine(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Concatenate the micro-batches of each call along dimension 0.

        Leaves that aren't tensors are taken from the first micro-batch.
        """
        while True:
            group = list(itertools.islice(batches, self._num_combined))
            if len(group) < self._num_combined and (self._user_drop_last or not group):
                return
            leaves = [list(flattenTensorStructure(batch, group[0])) for batch in group]
            yield reconstructTensorStructure(
                group[0], [torch.cat(tensors) for tensors in zip(*leaves)]
            )


class Partition(Dataset[Any]):
    """The block of a dataset that one of several processes reads.

    With `drop_last` all blocks have the same length, a multiple of the combined
    batch, and what is behind the blocks is left over. Otherwise the blocks cover the
    dataset, and the first ones are one element longer if they must.

    With a seed, each `shuffle` draws one permutation of the whole dataset, the same
    in every process, and the block is a block of the permutation. Its offset
    alternates between two places, `leftovers` apart, beginning with the later one.

    As in PopTorch the leftovers of the shuffle are `len(dataset) % length`, which can
    be less than what lies outside the blocks. As there, only the permutation is in
    shared memory: persistent workers keep the offset of their first epoch.

    Args:
        dataset: The whole dataset; needs a length.
        process_index: Number of this process, from 0 on.
        num_processes: Number of processes that share the dataset.
        combined_batch_size: Elements that one process takes per call.
        drop_last: Whether all processes get the same number of full batches.
        seed: Seed common to all processes; None if the data is never shuffled.

    Raises:
        ZeroDivisionError: If `drop_last` leaves nothing to any process.

    Example:
        >>> block = Partition("abcdefghij", 1, 2, 2, drop_last=True, seed=None)
        >>> [block[index] for index in range(len(block))]
        ['e', 'f', 'g', 'h']
    """

    def __init__(
        self,
        dataset: Any,
        process_index: int,
        num_processes: int,
        combined_batch_size: int,
        *,
        drop_last: bool,
        seed: int | None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        size = len(dataset)
        if drop_last:
            per_call = combined_batch_size * num_processes
            self._length = combined_batch_size * (size // per_call)
            if self._length == 0:
                raise ZeroDivisionError(
                    f"The dataset has {size} elements, but one call takes {per_call} "
                    f"= {combined_batch_size} per process * {num_processes} processes. "
                    "Pass more data, a smaller batch, or drop_last=False."
                )
            self._base_offset = process_index * self._length
            self._leftovers = size % self._length
        else:
            share, remainder = divmod(size, num_processes)
            self._length = share + (process_index < remainder)
            self._base_offset = process_index * share + min(process_index, remainder)
            self._leftovers = 0
        self._offset = self._base_offset
        self._permutation: torch.Tensor | None = None
        self._generator_state: torch.Tensor | None = None
        # torch asks for it by name, to fetch several elements at once.
        if getattr(dataset, "__getitems__", None):
            self.__getitems__ = self._getitems

    def shuffle(self) -> None:
        """Draw the permutation of the next epoch and move the block."""
        generator = torch.Generator()
        if self._generator_state is not None:
            generator.set_state(self._generator_state)
        elif self._seed is not None:
            generator.manual_seed(self._seed)
        permutation = torch.randperm(len(self._dataset), generator=generator)
        self._generator_state = generator.get_state()
        if self._permutation is None:
            permutation.share_memory_()  # type: ignore[no-untyped-call]
            self._permutation = permutation
        else:  # in place: persistent workers see it
            self._permutation.copy_(permutation)
        is_at_base = self._offset == self._base_offset
        self._offset = self._base_offset + (self._leftovers if is_at_base else 0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[self._source_index(index)]

    def _getitems(self, indices: list[Any]) -> Any:
        return self._dataset.__getitems__([self._source_index(i) for i in indices])

    def _source_index(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(
                f"Index {int(index)} is outside this process's {self._length} elements."
            )
        if self._permutation is None:
            return self._offset + index
        return self._permutation[self._offset + index]
