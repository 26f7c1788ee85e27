# SPDX-License-Identifier: Apache-2.0
"""PopTorch's data loader: each batch has the rows of one call."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Iterator

import torch.utils.data
from torch.utils.data import IterableDataset

from ipufit.emulator._ground.checks import require
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._loading.accessor import AsynchronousDataAccessor
from ipufit.emulator._loading.micro_batches import combine_micro_batches
from ipufit.emulator._loading.partition import Partition
from ipufit.emulator._options.options import Options
from ipufit.emulator.enums import DataLoaderMode
from ipufit.emulator.errors import createPoptorchError

logger = logging.getLogger("poptorch::python")


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A loader whose batches hold the rows of one call.

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
            _check_batch_sampler(
                options, batch_size, shuffle, auto_distributed_partitioning
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
        self._user_drop_last = drop_last
        self._has_batch_sampler = batch_sampler is not None

        num_processes = options.Distributed.numProcesses
        is_partitioned = num_processes > 1 and auto_distributed_partitioning
        if isinstance(dataset, IterableDataset):
            _check_iterable(is_partitioned, num_workers, kwargs)
        else:
            self._warn_if_indivisible(dataset, batch_sampler, num_processes)
            if is_partitioned:
                dataset = self._partition(dataset, options, shuffle)
                shuffle = False

        combined = self._combined_batch_size
        loaded_size, drops_loaded, rebatched_size = combined, drop_last, None
        if _is_rebatched(mode, combined, drop_last):
            loaded_size = _worker_batch_size(combined, rebatched_worker_size)
            drops_loaded, rebatched_size = False, combined
        if rebatched_size is not None:
            self.rebatched_drop_last = None if self._has_batch_sampler else drop_last
        if batch_sampler is None:
            kwargs.update(batch_size=loaded_size, drop_last=drops_loaded)
            kwargs.update(shuffle=bool(shuffle))
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
            self._start_accessor(async_options or {}, rebatched_size)

    def _warn_if_indivisible(
        self, dataset: Any, batch_sampler: Any, num_processes: int
    ) -> None:
        num_elements = len(dataset)
        if self._combined_batch_size is None:
            return
        if batch_sampler is not None:
            # PopTorch warns whatever drop_last is.
            num_batches = _length_or_none(batch_sampler)
            if num_batches is None or num_batches % self._num_combined:
                counted = "an unknown number of" if num_batches is None else num_batches
                fate = "dropped" if self._user_drop_last else "smaller than the others"
                logger.warning(
                    "The batch sampler gives %s micro-batches and a call takes %d. An "
                    "incomplete last group is %s.",
                    counted,
                    self._num_combined,
                    fate,
                )
            return
        per_call = self._combined_batch_size * num_processes
        if not self._user_drop_last and per_call and num_elements % per_call:
            logger.warning(
                "The dataset has %d elements, which isn't a multiple of %d = %d per "
                "call (the combined batch size) * %d processes. With drop_last=False "
                "the last batch is smaller, and a model compiled for whole batches "
                "doesn't take it.",
                num_elements,
                per_call,
                self._combined_batch_size,
                num_processes,
            )

    def _partition(
        self, dataset: Any, options: Options, shuffle: bool | None
    ) -> Partition:
        require(
            not shuffle or options.exists("random_seed"),
            "To shuffle the data of several processes they need a common seed: call "
            "options.randomSeed(seed) in each of them.",
        )
        if self._combined_batch_size is None:
            raise AssertionError(
                "Data without batches (batch_size=None) can't be partitioned: pass "
                "auto_distributed_partitioning=False."
            )
        share = Partition(
            dataset,
            options.Distributed.processId,
            options.Distributed.numProcesses,
            self._combined_batch_size,
            drop_last=self._user_drop_last,
            seed=options("random_seed") if shuffle else None,
        )
        if shuffle:
            self._shuffled_partition = share
        return share

    def _start_accessor(
        self, async_options: dict[str, Any], rebatched_size: int | None
    ) -> None:
        require(
            "rebatched_size" not in async_options,
            "The DataLoader decides on rebatched_size: remove it from async_options "
            "and choose a mode instead.",
        )
        self._accessor = AsynchronousDataAccessor(
            self, rebatched_size=rebatched_size, **async_options
        )
        # Not a cycle: the process ends as soon as the loader isn't used any more.
        self._accessor._dataset = weakref.proxy(self)

    @property
    def combinedBatchSize(self) -> int | None:
        """The rows of one call; `None` without a batch size.

        Example:
            >>> from ipufit.emulator import DataLoader, Options
            >>> options = Options().replicationFactor(4).deviceIterations(2)
            >>> DataLoader(options, list(range(80)), batch_size=5).combinedBatchSize
            40
        """
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        """The options that the loader was given, frozen.

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
        """The number of batches.

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
            return combine_micro_batches(
                batches, self._num_combined, drop_last=self._user_drop_last
            )
        return batches


def _is_rebatched(
    mode: DataLoaderMode, combined_batch_size: int | None, drop_last: bool
) -> bool:
    """Whether the background process joins what the workers have loaded.

    Its slots have no place for a smaller batch at the end.
    """
    if mode == DataLoaderMode.Async:
        return not drop_last and (combined_batch_size or 1) > 1
    return mode == DataLoaderMode.AsyncRebatched


def _worker_batch_size(
    combined_batch_size: int | None, rebatched_worker_size: int | None
) -> int | None:
    """Number of elements that workers load at a time when rebatching."""
    if combined_batch_size is None or rebatched_worker_size is None:
        return combined_batch_size
    require(
        rebatched_worker_size <= combined_batch_size,
        f"rebatched_worker_size = {rebatched_worker_size} must not exceed the "
        f"combined batch size, {combined_batch_size}.",
    )
    return rebatched_worker_size


def _check_batch_sampler(
    options: Options,
    batch_size: int | None,
    shuffle: bool | None,
    auto_distributed_partitioning: bool,
) -> None:
    if batch_size != 1 or shuffle:
        raise createPoptorchError(
            "A batch_sampler decides on batches and their order: it excludes "
            "batch_size and shuffle."
        )
    if options.Distributed.numProcesses > 1 and auto_distributed_partitioning:
        raise createPoptorchError(
            "Data with a batch_sampler can't be partitioned for several processes: "
            "pass auto_distributed_partitioning=False and a sampler that does it."
        )


def _check_iterable(
    is_partitioned: bool, num_workers: int, kwargs: dict[str, Any]
) -> None:
    require(
        not is_partitioned,
        "An iterable dataset can't be partitioned for several processes: pass "
        "auto_distributed_partitioning=False and let the dataset do it.",
    )
    if num_workers > 1 and "worker_init_fn" not in kwargs:
        logger.warning(
            "Each of the %d workers will go through the whole iterable dataset, so "
            "each element comes %d times. Pass a worker_init_fn that gives each "
            "worker a part.",
            num_workers,
            num_workers,
        )


def _length_or_none(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None
