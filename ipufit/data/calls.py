# SPDX-License-Identifier: Apache-2.0
"""The data of training and inference calls."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.util
import numbers
import tempfile
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ipufit._arguments import check_number, check_whole, shown
from ipufit._poptorch import poptorch
from ipufit._signals import uninterrupted
from ipufit._tree import Structure
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.errors import ConfigError, DataError
from ipufit.mixing import Mixing

from .arrays import ArrayDataset
from .datasets import ALONE, FlatDataset, Source, collate
from .loaders import plain_values
from .random_state import (
    HostRandomState,
    RandomState,
    hash_seed,
    random_state,
    set_random_state,
)
from .streams import Pass, StreamSource, StreamState
from .structure import Batch, SampleStructure


class Position(NamedTuple):
    """Position of a run in its data.

    Attributes:
        number: Number of the pass, from 0; each pass has another order.
        calls: Number of calls of that pass so far; each process counts them.
    """

    number: int = 0
    calls: int = 0


BEGINNING = Position()


class Place(NamedTuple):
    """The place of a run in its data, from which another process can continue.

    Attributes:
        seed: Seed of the orders.
        position: Number of the pass, and of its calls so far.
        random: Random states of this process, and of the user's own loader.
        stream: Place in the stream; None for samples that are loaded by index, and
            before the first pass.
    """

    seed: int
    position: Position
    random: RandomState
    stream: StreamState | None = None


def padded(indices: Tensor, length: int) -> Tensor:
    """Repeat the last index up to a length.

    Example:
        >>> padded(torch.tensor([3, 4]), 4)
        tensor([3, 4, 4, 4])
    """
    missing = max(length - len(indices), 0)
    return torch.cat((indices, indices[-1:].expand(missing)))


@dataclass(frozen=True)
class Division:
    """Divides the rows of a call between processes, in blocks of one update.

    So an update has the same samples for any number of processes. In inference a block
    is a pass: a process has the same samples for any number of passes in a call.

    Attributes:
        index: Index of this process, from 0.
        count: Number of processes.
        block: Rows of a block.
        rows: Rows of a call of one process; a multiple of `block`.

    Example:
        >>> division = Division(index=1, count=2, block=2, rows=4)
        >>> division.own(torch.arange(8))
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

    def own(self, rows: Tensor) -> Tensor:
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

    With a seed each pass has a new order. It depends only on the seed and the number of
    the pass, so a resumed run, or another process, finds the same order.

    Args:
        count: Number of samples.
        length: Number of indices in a pass.
        seed: Seed of the orders; None keeps the samples' own order.
        start: Position at which the next pass begins.
        division: Selects the indices of one process, in whole calls.
        tells_pass: Whether to yield keys of `FlatDataset`, which contain the number of
            the pass, instead of indices.
    """

    count: int
    length: int
    seed: int | None
    start: Position
    division: Division
    tells_pass: bool = False

    def __iter__(self) -> Iterator[int]:
        indices = self.indices()
        for start in range(0, len(indices), 65_536):  # a list takes 40 bytes a row
            yield from indices[start : start + 65_536].tolist()

    def indices(self) -> Tensor:
        """Return the indices of the next pass; fewer if it begins midway."""
        number, calls = self.start
        self.start = Position(number + 1)
        order: Any = torch.arange(self.count)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(hash_seed(self.seed, number))
            order = torch.randperm(self.count, generator=generator)
        order = padded(order, self.length)[: self.length]
        if self.tells_pass:
            order = order + number * self.count
        return self.division.own(order[calls * self.division.rows_of_all :])


class ClassWeights:
    """Computes the class weight of each sample.

    Classes that aren't in the table have weight 1, as in Keras.

    Args:
        table: Class index to weight, 0 or more.
        structure: Structure of a sample.
        has_labels: Whether the loss takes each output for a label of its own, 0 or 1,
            so that a row of several is no class.

    Raises:
        DataError: The table is invalid, or the samples have several targets, or
            weights already.

    Attributes:
        structure: The structure of the samples with weights.

    Example:
        >>> structure = SampleStructure(Structure.of(0), Structure.of(0))
        >>> weights = ClassWeights({1: 3.0}, structure)
        >>> weights.of(torch.tensor([0, 1]))
        tensor([1., 3.])
    """

    def __init__(
        self, table: Any, structure: SampleStructure, *, has_labels: bool = False
    ) -> None:
        if not isinstance(table, Mapping) or not table:
            raise DataError(
                f"class_weight={shown(table)} is not a dict of class index to weight. "
                "Make one, dict(enumerate(weights)), of a list or an array, such as "
                "that of sklearn's "
                "compute_class_weight('balanced', classes=..., y=...)."
            )
        for index, weight in table.items():
            if isinstance(index, bool) or not isinstance(index, numbers.Integral):
                raise DataError(
                    f"class_weight has the class {shown(index)}, which is no class "
                    "index: use whole numbers, as the targets do."
                )
            check_number(f"class_weight[{index}]", weight, least=0, allows_numpy=True)
        if structure.has_weights:
            raise DataError(
                "class_weight was given, and the data has sample weights: multiply "
                "them yourself and pass sample weights only."
            )
        if structure.targets.num_leaves != 1:
            raise DataError(
                f"class_weight needs one target, and the data has "
                f"{structure.targets.num_leaves}: pass sample weights instead."
            )
        self._table, self._has_labels = dict(table), has_labels
        self.structure = replace(structure, weights=Structure(None))

    def of(self, targets: Tensor) -> Tensor:
        """Return the weight of each row of targets, float32.

        Raises:
            DataError: Targets are neither class indices nor one-hot.
        """
        if targets.dim() > 1 and targets.shape[-1] > 1:
            if self._has_labels:
                raise DataError(
                    f"class_weight needs a class for each sample, and with this loss "
                    f"targets of shape {tuple(targets.shape)} are labels, 0 or 1 each. "
                    "Weigh labels in the loss, as torch.nn.BCEWithLogitsLoss(weight="
                    "..., pos_weight=...) does, or samples by sample_weight; or train "
                    "classes with 'cross_entropy'."
                )
            sums = targets.to(torch.float32).sum(dim=-1)
            if not torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
                raise DataError(
                    f"class_weight needs class indices or one-hot targets, and rows of "
                    f"targets of shape {tuple(targets.shape)} don't add up to 1. Pass "
                    "sample weights instead."
                )
            targets = targets.to(torch.float32).argmax(dim=-1)  # one-hot
        elif targets.is_floating_point() and not targets.eq(targets.round()).all():
            value = targets[targets.ne(targets.round())][0]
            raise DataError(
                f"class_weight needs class indices or one-hot targets, and a target is "
                f"{float(value):g}. Pass sample weights instead."
            )
        targets = targets.reshape(len(targets), -1)
        if targets.shape[1] == 1:
            targets = targets[:, 0]
        weights = torch.ones(targets.shape)
        for index, weight in self._table.items():
            weights[equals(targets, index)] = float(weight)
        return weights


def equals(targets: Tensor, index: int) -> Tensor:
    """Compare targets with a class index, which torch wraps into their dtype.

    Example:
        >>> equals(torch.tensor([156, 1], dtype=torch.uint8), -100)
        tensor([False, False])
    """
    if not targets.is_floating_point() and targets.dtype != torch.bool:
        limits = torch.iinfo(targets.dtype)
        if not limits.min <= index <= limits.max:
            return torch.zeros_like(targets, dtype=torch.bool)
    return targets.eq(index)


_OWN_NUMBERS = 1
"""Sets the seeds apart from those that are made of the same numbers elsewhere."""


class MixedRows:
    """Draws the mixing coefficients of each row of a call.

    Args:
        mixing: The user's mixup and CutMix.
        structure: Structure of a batch.
        example: A batch of one sample or more.
        plan: The factors of a call.
        division: Selects the rows of this process.

    Raises:
        ConfigError: Micro-batches have one sample.
        DataError: The samples can't be mixed.

    Attributes:
        structure: The structure of batches with coefficients.

    Example:
        >>> from ipufit._tree import Structure
        >>> pair = SampleStructure(Structure.of(0), Structure.of(0))
        >>> batch = pair.named([torch.rand(2, 3), torch.tensor([0, 1])])
        >>> division = Division(index=0, count=1, block=2, rows=2)
        >>> rows = MixedRows(Mixing(mixup=1.0), pair, batch, BatchPlan(2), division)
        >>> rows.of(batch.targets, seed=1, at=Position(0, 1)).shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        mixing: Mixing,
        structure: SampleStructure,
        example: Batch,
        plan: BatchPlan,
        division: Division,
    ) -> None:
        if plan.micro_batch_size == 1:
            raise ConfigError(
                f"augment={mixing!r} mixes the samples of a micro-batch, which has one "
                f"sample: a call takes {plan.describe()}. Use a larger "
                "micro_batch_size, or leave augment out."
            )
        if structure.num_inputs != 1:
            raise DataError(
                f"augment={mixing!r} needs one input, and the data has "
                f"{structure.num_inputs}: mix in forward, or pass one tensor."
            )
        self._mixing = mixing
        self._micro_batch_size = plan.micro_batch_size
        self._rows_of_all = division.rows_of_all
        own = division.own(torch.arange(division.rows_of_all))
        self._numbers = own[:: plan.micro_batch_size].div(
            plan.micro_batch_size, rounding_mode="floor"
        )
        self._size = _image_size(mixing, example.inputs[0])
        self._check_targets(example.targets)
        self.structure = replace(structure, is_mixed=True)

    def of(self, targets: Sequence[Tensor], seed: int, at: Position) -> Tensor:
        """Draw the coefficients of a call, `[rows, 1 or 6]`.

        Args:
            targets: Targets of the call.
            seed: Seed of the run.
            at: Number of the pass, and of its calls with this one.

        Raises:
            DataError: Targets are no classes.
        """
        self._check_targets(targets)
        first = max(at.calls - 1, 0) * self._rows_of_all // self._micro_batch_size
        seeds = [
            hash_seed(seed, at.number, first + number, _OWN_NUMBERS)
            for number in self._numbers.tolist()
        ]
        return self._mixing.coefficients(seeds, self._micro_batch_size, self._size)

    def _check_targets(self, leaves: Sequence[Tensor]) -> None:
        """Refuse targets that are neither classes nor their probabilities."""
        for targets in leaves:
            shape = list(targets.shape)
            if not targets.is_floating_point():
                if targets.dim() == 2 and _is_one_hot(targets):
                    continue
                if targets[0].numel() == 1:
                    continue
                reason = f"{targets[0].numel()} whole numbers for each sample"
            elif targets.dim() > 2:
                reason = "several rows for each sample"
            elif bool(torch.any(targets.lt(0) | targets.gt(1))):
                reason = "values outside of 0 to 1"
            else:
                continue
            raise DataError(
                f"augment={self._mixing!r} needs the class of each sample as its "
                f"target: an index, one-hot, or probabilities. Targets of {shape} have "
                f"{reason}. Leave augment out, or mix in forward."
            )


def _is_one_hot(targets: Tensor) -> bool:
    is_binary = torch.all(targets.eq(0) | targets.eq(1))
    return bool(is_binary & torch.all(targets.sum(dim=1).le(1)))


def _image_size(mixing: Mixing, inputs: Tensor) -> tuple[int, int] | None:
    """Return height and width of images; None without CutMix.

    Raises:
        DataError: The inputs are neither numbers to mix nor images.
    """
    shape = tuple(inputs.shape[1:])
    if not inputs.is_floating_point() and inputs.dtype != torch.uint8:
        raise DataError(
            f"augment={mixing!r} mixes the inputs, and they are whole numbers "
            f"({inputs.dtype}), as indices are. Pass floats, or images of uint8."
        )
    if not mixing.cutmix:
        return None
    if len(shape) < 2:
        raise DataError(
            f"augment={mixing!r} cuts boxes out of images, and a sample has shape "
            f"{shape}: its last two axes must be height and width. Use "
            "Mixing(mixup=...) alone."
        )
    return int(shape[-2]), int(shape[-1])


class Loading(NamedTuple):
    """Settings for loading map-style data.

    Attributes:
        num_workers: Number of processes that load; 0 to load in this one.
        mode: `loader_mode` of `IPUConfig`.
    """

    num_workers: int = 0
    mode: str = "sync"


_MODES = {
    "sync": poptorch.DataLoaderMode.Sync,
    "async": poptorch.DataLoaderMode.Async,
    "async_rebatched": poptorch.DataLoaderMode.AsyncRebatched,
}


PLAIN = Loading()

Rows = Tuple[List[Tensor], Tuple[int, ...]]
"""Rows of a call of this process, and the number of samples of each process in it."""


class Call(NamedTuple):
    """The data of one call, and how much of it is samples.

    Attributes:
        batch: The tensors of a `SampleStructure`, in order: the rows of this process.
        num_real: Number of rows that are samples; they come before the padding.
        num_real_of_each: Number of samples of each process in this call, in their
            order.
        num_masked: Number of samples of all processes in this call of a training, if
            its rows are whole micro-batches.
    """

    batch: list[Tensor]
    num_real: int
    num_real_of_each: tuple[int, ...]
    num_masked: int | None = None

    @property
    def num_real_of_all(self) -> int:
        """Number of rows of all processes in this call that aren't padding."""
        return sum(self.num_real_of_each)

    @property
    def num_samples_of_all(self) -> int:
        """Number of samples of all processes in this call of a training."""
        return self.num_real_of_all if self.num_masked is None else self.num_masked


def shares(is_real: Tensor, num_of_all: Tensor, num_processes: int = 1) -> Tensor:
    """Compute the weight of each row of a call in the loss of its update.

    Args:
        is_real: `[rows, ...]`, float32: 0 for padding, else 1.
        num_of_all: Number of unpadded rows of all processes in each update.
        num_processes: Number of processes, each with as many rows.

    Returns:
        float32 of the same shape: 0 for padding. Over all processes, the weights in an
        update sum to the number of its rows, so that the mean over all rows is the mean
        over the unpadded ones.

    Example:
        >>> shares(torch.tensor([1.0, 1, 1, 0, 0, 0]), torch.tensor([2, 1, 0]))
        tensor([1., 1., 2., 0., 0., 0.])
        >>> shares(torch.tensor([1.0, 0]), torch.tensor([3]), num_processes=2)
        tensor([1.3333, 0.0000])
    """
    per_update = is_real.reshape(len(num_of_all), -1)
    counts = num_of_all.unsqueeze(1).clamp(min=1)
    rows = per_update.shape[1] * num_processes
    return (per_update * (rows / counts)).reshape(is_real.shape)


def pad(batch: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Repeat the last row of a batch up to `rows`.

    Example:
        >>> pad([torch.tensor([1, 2])], 4)
        [tensor([1, 2, 2, 2])]
    """
    missing = rows - len(batch[0])
    if not missing:
        return list(batch)
    return [torch.cat([t, t[-1:].expand(missing, *t.shape[1:])]) for t in batch]


def rebatched(
    blocks: Iterable[list[Tensor]], rows: int, most: int | None = None
) -> Iterator[tuple[list[Tensor], int]]:
    """Cut and join blocks of any number of rows into batches of `rows`.

    Rows that wait for the next block are copied, because an asynchronous loader uses
    its memory again.

    Args:
        blocks: Blocks of the same structure.
        rows: Number of rows of a batch.
        most: Number of rows after which to stop, without drawing another block; None
            for all.

    Yields:
        A batch and its number of rows, which is less than `rows` only at the end.

    Example:
        >>> blocks = [[torch.tensor([1, 2])], [torch.tensor([3])]]
        >>> [batch[0].tolist() for batch, _ in rebatched(blocks, 2)]
        [[1, 2], [3]]
    """
    kept: list[list[Tensor]] = []
    num_kept = num_seen = 0
    iterator = iter(blocks)
    while num_seen != most:
        block = next(iterator, None)
        if block is None:
            break
        at, size = 0, len(block[0])
        if most is not None:
            size = min(size, most - num_seen)
        num_seen += size
        while size - at >= rows - num_kept:
            end = at + rows - num_kept
            kept.append([leaf[at:end] for leaf in block])
            yield _joined(kept), rows
            kept, num_kept, at = [], 0, end
        if at < size:
            kept.append([leaf[at:size].clone() for leaf in block])
            num_kept += size - at
    if num_kept:
        yield _joined(kept), num_kept


def _joined(parts: Sequence[list[Tensor]]) -> list[Tensor]:
    return parts[0] if len(parts) == 1 else [torch.cat(leaf) for leaf in zip(*parts)]


class _Batches:
    """Base of the classes that load and divide the data of calls.

    Samples are loaded by index, or cut out of a stream. Processes of `num_workers` live
    for one pass, as torch's do, so that each pass sees changes of the dataset. The
    process of an asynchronous loader takes seconds to start, and lives until `close` or
    until numbers or strings of the dataset have changed.

    PopTorch's asynchronous loader says only that an error occurred in the data fetcher.
    The other process prints the error itself, where notebooks and logs miss it. So the
    dataset writes its traceback to a temporary file.

    Attributes:
        plan_of_samples: The factors of a call, in samples where the source's items are
            whole micro-batches.
        is_seeded: Whether each sample is loaded with its own seed, so that it is the
            same in whichever process it is loaded. It is set if other processes load,
            or if several train. Samples in memory draw nothing.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        loading: Loading,
        processes: Processes,
    ) -> None:
        self.source = source
        self.structure = source.structure
        self._plan, self._options, self._loading = plan, options, loading
        self.plan_of_samples = source.structure.of_samples(plan)
        self._rows = plan.samples_per_call
        self._processes = processes
        self._division = Division.of(processes, plan)
        self._is_elsewhere = loading.num_workers > 0 or loading.mode != "sync"
        self._error_file = Path(tempfile.gettempdir(), f"ipufit-{uuid.uuid4().hex}.txt")
        self._dataset: Any = source.dataset
        self.is_seeded = False
        if isinstance(source.dataset, FlatDataset):
            self.is_seeded = self._is_elsewhere or processes.are_several
            # Another may load it with other seeds.
            reported = self._error_file if loading.mode != "sync" else None
            self._dataset = replace(source.dataset, error_file=reported)
        self._loader: Any = None
        self._iterator: Any = None
        self._values: list[Any] = []

    def _loaded(self, order: Order, seed: int) -> Iterator[list[Tensor]]:
        """Begin a pass, which draws from torch's generator at once.

        Args:
            order: Keys of the samples of this process: those of another pass each
                time. An asynchronous loader keeps its first order.
            seed: Seed of the random numbers that samples draw, if they have their own.

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
            if self._loading.mode == "sync" or values != self._values:
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

    def is_real(self, call: Call) -> Tensor | None:
        """Return which rows of a call's outputs are samples; None if all are."""
        structure = self.structure
        if structure.rows is not None:
            (share,) = structure.named(call.batch).share
            mask = share.gt(0)
            mask[call.num_real :] = False
            return mask.flatten()
        if call.num_real == self._rows:
            return None
        return torch.arange(self._rows).lt(call.num_real)

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
        with contextlib.suppress(FileNotFoundError):
            text = self._error_file.read_text(encoding="utf-8")
            self._error_file.unlink()
            return text
        return ""

    def _new_loader(self, order: Order) -> Any:
        plan, (num_workers, mode) = self._plan, self._loading
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

    def _parts(
        self,
        source: StreamSource,
        blocks: Iterator[list[Tensor]],
        most: int | None = None,
    ) -> Iterator[tuple[list[Tensor], int]]:
        """Cut a pass over a stream into the rows of this process for each call.

        Args:
            source: The stream.
            blocks: Its pass.
            most: Number of samples of all processes after which to stop.
        """
        division, count = self._division, self._processes.count
        if source.own_loading is not None:
            # Samples to leave out are loaded, too: transforms draw random numbers.
            batches = source.own_loading.load(self._groups(source, blocks, most))
            return rebatched(map(source.block_of, batches), self._rows)
        if source.is_own_part or count == 1:
            if most is not None:  # the first processes take one more if they must
                most = most // count + (division.index < most % count)
            return rebatched(blocks, self._rows, most)
        return (
            (
                [division.own(leaf) for leaf in pad(batch, division.rows_of_all)],
                division.num_of_each(num_real)[division.index],
            )
            for batch, num_real in rebatched(blocks, division.rows_of_all, most)
        )

    def _groups(
        self, source: StreamSource, blocks: Iterator[Any], most: int | None
    ) -> Iterator[list[Any]]:
        """Group the indices of this process's samples, from batches of all indices."""
        indices = itertools.islice(itertools.chain.from_iterable(blocks), most)
        own = self._division.own(torch.arange(self._division.rows_of_all)).tolist()
        size = min(self._division.block, source.rows_of_first)
        while True:
            call = list(itertools.islice(indices, self._division.rows_of_all))
            if not call:
                return
            mine = [call[row] for row in own if row < len(call)]
            for at in range(0, len(mine), size):
                yield mine[at : at + size]

    def _shared(
        self, parts: Iterator[tuple[list[Tensor], int]], last: Sequence[Tensor] = ()
    ) -> Iterator[Rows]:
        """Yield calls until no process has samples left.

        Before each call the processes exchange how many samples they have for it. So
        all make the same number of calls, however uneven the ends of their streams are.
        A process without samples repeats its last row, as padding does.

        Args:
            parts: Rows of this process for each call, and the number of samples in
                them.
            last: The row before those of `parts`; empty if there is none.
        """
        are_several = self._processes.are_several
        while True:
            batch, num_real = next(parts, ([], 0))
            each: tuple[int, ...] = (num_real,)
            if are_several:
                counts = torch.zeros(self._processes.count, dtype=torch.int64)
                counts[self._processes.index] = num_real
                each = tuple(self._processes.summed(counts).tolist())
            if not any(each):
                return
            if are_several and batch:
                last = [leaf[-1:].clone() for leaf in batch]  # memory is used again
            yield pad(batch or last or self.source.example(1), self._rows), each


class TrainingBatches(_Batches):
    """The calls of a training's passes over the data.

    Args:
        plan: The factors of a call.
        options: Options of the training model.
        shuffle: Whether to draw a new order for every pass. Streams keep their order.
        seed: Seed of the orders, of samples that other processes load, and of mixing;
            None draws one from torch's global generator.
        drop_last: True to leave out samples that don't fill a call; `"pad"` to fill
            the call with rows that don't count.
        class_weight: Class index to weight; None if all classes weigh the same.
        has_labels: As for `ClassWeights`.
        mixing: Mixup and CutMix; None without mixing.
        ignored: Indices of targets that losses ignore.
        loading: Settings for loading map-style data.
        num_passes: Number of the first pass.
        processes: Processes that divide each update. All of them use the order of
            process 0.

    Raises:
        ConfigError: Micro-batches have one sample, and samples are mixed.
        DataError: There are not enough samples for one call, or `class_weight` or
            `mixing` can't be used.

    Attributes:
        structure: Structure of a batch.
        position: Number of the pass, and number of its calls so far.
        seed: Seed of the orders.
        is_seeded: Whether each sample has random numbers of its own.
        num_calls: Number of calls of a pass; None while unknown.
        num_dropped: Number of samples of all processes that a pass leaves out; None
            while unknown.
        num_empty_updates: Number of updates of the last call that have only padding.
        ran_out: Whether the last epoch was cut short.
        is_spent: Whether the data is a generator that has ended.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        *,
        shuffle: bool,
        seed: int | None = None,
        drop_last: bool | str = True,
        class_weight: Any = None,
        has_labels: bool = False,
        mixing: Mixing | None = None,
        ignored: tuple[int, ...] = (),
        loading: Loading = PLAIN,
        num_passes: int = 0,
        processes: Processes = ALONE,
    ) -> None:
        super().__init__(source, plan, options, loading, processes)
        self.position = Position(num_passes)
        self._class_weights: ClassWeights | None = None
        if source.structure.rows is not None and (class_weight or mixing):
            what = "class_weight" if class_weight else "augment"
            raise DataError(
                f"{what} needs the samples one by one, and those of FixedSizeBatches "
                "are in whole micro-batches: leave it out. Batches may have sample "
                "weights, (inputs, targets, weights)."
            )
        if class_weight is not None:
            self._class_weights = ClassWeights(
                class_weight, source.structure, has_labels=has_labels
            )
            self.structure = self._class_weights.structure
        rows_of_all = self._division.rows_of_all
        is_padding = drop_last in ("pad", False)
        count = source.num_samples
        if count is not None and count < rows_of_all and not is_padding:
            raise DataError(
                f"`x` has {count} samples, but one training call takes "
                f"{plan.describe_as_too_large()}"
            )
        # A loader of the user's may give fewer samples than it says.
        may_be_short = isinstance(source, StreamSource) or (count or 0) % rows_of_all
        self._is_padding = is_padding and bool(may_be_short)
        if self._is_padding:
            self.structure = replace(self.structure, is_padded=True)
        self._num_masked: int | None = None
        self._example = source.structure.named(source.example(1))
        rows_per_update = self._division.block * self._division.count
        self._micro_batches = rows_per_update // plan.micro_batch_size
        self.count(ignored)
        self._mixed_rows: MixedRows | None = None
        if mixing is not None:
            self._mixed_rows = MixedRows(
                mixing, self.structure, self._example, plan, self._division
            )
            self.structure = self._mixed_rows.structure
        self.num_calls: int | None = None
        self.num_dropped: int | None = 0 if is_padding else None
        self.num_empty_updates = 0
        if count is not None:
            self._count(count)
        if shuffle or self.is_seeded or mixing is not None:
            if seed is None:
                # Drawn here and not in a process that loads: those copy this one.
                seed = int(torch.empty((), dtype=torch.int64).random_())
            seed = processes.first(seed)
        self.seed = seed or 0
        self._shuffle = shuffle
        self._pass: Pass | None = None
        self._is_exhausted = False
        self._calls_of_pass: Iterator[Call] | None = None
        self._calls_of_epoch: int | None = None
        self.ran_out = self.is_spent = False

    def count(self, ignored: tuple[int, ...]) -> None:
        """Set the indices of ignored targets that are counted for each update.

        Nothing needs to be counted if each micro-batch is an update.
        """
        if self._micro_batches > 1 or self.structure.is_padded:
            targets = self._example.targets
            are_floats = all(target.is_floating_point() for target in targets)
            ignored = () if are_floats else ignored
            self.structure = replace(self.structure, ignored=ignored)

    def _count(
        self, num_samples: int, last_of_each: tuple[int, ...] | None = None
    ) -> None:
        """Set the number of calls of a pass, and of the samples that it leaves out.

        Args:
            num_samples: Number of samples of all processes.
            last_of_each: Samples of each process in the last call; None if each update
                is full before the next begins.
        """
        rows = self._division.rows_of_all
        self.num_calls = self.position.calls
        if last_of_each is None:
            self.num_calls = -(-num_samples // rows)
            last_of_each = self._division.num_of_each(num_samples % rows or rows)
        if not self._is_padding:
            self.num_calls, self.num_dropped = divmod(num_samples, rows)
            return
        in_updates = self._division.num_in_updates(last_of_each)
        self.num_empty_updates = int(in_updates.eq(0).sum())

    # A run that is resumed ----------------------------------------------------

    def state_dict(self) -> Place:
        """Return the place in the data after the last call.

        Raises:
            DataError: The loader's own error.
        """
        source, stream = self.source, None
        if isinstance(source, StreamSource):
            stream = source.state_dict()
            if self.position.calls and self._pass is not None:
                is_part = source.is_own_part or not self._processes.are_several
                rows = self._rows if is_part else self._division.rows_of_all
                stream = self._pass.state_dict(self.position.calls * rows)
        now = random_state(source.generators)
        return Place(self.seed, self.position, now, stream)

    def load_state_dict(self, place: Place) -> None:
        """Continue from the place of an interrupted run.

        Earlier samples are not loaded, except from a stream without a state, whose
        batches are drawn and dropped.
        """
        self.seed, self.position, self._pass = place.seed, place.position, None
        source, is_due = self.source, not place.position.calls
        if isinstance(source, StreamSource):
            source.load_state_dict(place.stream, is_due=is_due)
        set_random_state(place.random, source.generators)

    # Epochs -------------------------------------------------------------------

    def set_epochs(self, steps_per_epoch: int | None, num_epochs: int) -> None:
        """Divide the calls into epochs, which by default are passes.

        Args:
            steps_per_epoch: Updates per epoch; None for whole passes.
            num_epochs: Number of epochs to come.

        Raises:
            ConfigError: `steps_per_epoch` is no multiple of the updates of a call.
            DataError: A generator would be needed for several passes.
        """
        if steps_per_epoch is not None:
            check_whole("steps_per_epoch", steps_per_epoch, least=1)
            updates = self._plan.device_iterations
            calls, rest = divmod(steps_per_epoch, updates)
            if rest:
                near = [n * updates for n in (calls, calls + 1) if n]
                raise ConfigError(
                    f"steps_per_epoch={steps_per_epoch} is no multiple of the "
                    f"{updates} updates that a call makes "
                    f"(device_iterations). The nearest are {near}."
                )
            self._calls_of_epoch = calls
        elif num_epochs > 1 and self.source.is_one_shot:
            raise DataError(
                f"`x` is a generator, which can be gone through once, and epochs ask "
                f"for {num_epochs} passes. Give steps_per_epoch, or pass a loader or a "
                "dataset, which can be begun anew."
            )

    @property
    def calls_per_epoch(self) -> int | None:
        """Number of calls per epoch; None if unknown."""
        number = self._calls_of_epoch
        return self.num_calls if number is None else number

    def epoch(self, num_done: int = 0) -> Iterator[Call]:
        """Yield the calls of the next epoch.

        With `steps_per_epoch` an epoch continues where the last one ended, and begins a
        new pass only if the last pass was complete (Keras's rule). An epoch that runs
        out of data in the middle is cut short.

        Args:
            num_done: Number of calls of the epoch that an interrupted run has made.
        """
        self.source.begin_epoch()
        if self._calls_of_epoch is None:
            yield from self
        else:
            self.ran_out = False
            for number in range(num_done, self._calls_of_epoch):
                call = self._next(may_restart=number == 0)
                if call is None:
                    self.ran_out = True
                    break
                yield call
        self.source.end_epoch()

    def _next(self, *, may_restart: bool) -> Call | None:
        """Return the next call; None at the end of the data."""
        if self._calls_of_pass is None:
            self._calls_of_pass = iter(self)
        call = next(self._calls_of_pass, None)
        if call is None:
            self._calls_of_pass = None
            self.is_spent = self.source.is_one_shot
            if may_restart and not self.is_spent:
                return self._next(may_restart=False)
        return call

    # Calls --------------------------------------------------------------------

    def example(self) -> list[Tensor]:
        """Return a batch with the shapes of a call."""
        example = self.source.example(self._rows)
        each = (self._rows,) * self._processes.count
        return self._completed(example, each, is_example=True)

    def begin_next_pass(self) -> None:
        """Move to the next pass if this one has ended."""
        if self._is_exhausted:
            self._is_exhausted = False
            self.position = Position(self.position.number + 1)

    def __iter__(self) -> Iterator[Call]:
        """Yield the calls of one pass, from the current position on."""
        self.begin_next_pass()
        source, index = self.source, self._processes.index
        rows_of_all = self._division.rows_of_all
        # Coming to the position draws numbers that the interrupted run has drawn.
        is_resumed = self.position.calls > 0
        now = random_state(source.generators) if is_resumed else None
        if isinstance(source, StreamSource):
            batches = self._streamed(source)
        else:
            batches = self._indexed()
        if now is not None:
            set_random_state(now, source.generators)
        num_samples = self.position.calls * rows_of_all
        each = None
        for batch, each in batches:
            num_all = sum(each)
            num_samples += num_all
            if num_all < rows_of_all and not self._is_padding:
                break  # what is left at the end
            source.check(batch, self._sample_of)
            self.position = self.position._replace(calls=self.position.calls + 1)
            batch = self._completed(batch, each)
            yield Call(batch, each[index], each, num_masked=self._num_masked)
        if isinstance(source, StreamSource):
            self._count(num_samples, each)
        self._is_exhausted = True

    def _streamed(self, source: StreamSource) -> Iterator[Rows]:
        """Cut a stream into calls, from the position on."""
        self._pass = source.blocks()
        last: Sequence[Tensor] = [leaf[-1:] for leaf in self._pass.last]
        parts = self._parts(source, self._pass)
        num_skipped = 0 if self._pass.skips else self.position.calls
        for batch, _ in itertools.islice(parts, num_skipped):
            last = [leaf[-1:].clone() for leaf in batch]
        return self._shared(parts, last)

    def _indexed(self) -> Iterator[Rows]:
        """Load samples by index, from the position on."""
        done = self.position.calls
        if done and done == self.num_calls:
            return iter(())  # PopTorch's asynchronous loader refuses to load nothing
        count, rows = self.source.num_samples or 0, self._division.rows_of_all
        lefts = range(count - done * rows, 0, -rows)
        return (
            (batch, self._division.num_of_each(min(left, rows)))
            for batch, left in zip(self._loaded(self._order(), self.seed), lefts)
        )

    def _order(self) -> Order:
        """Return the order of samples that are taken by index, from the position on."""
        count = self.source.num_samples or 0
        is_whole = self._is_padding or self._processes.are_several
        return Order(
            count,
            (self.num_calls or 0) * self._division.rows_of_all if is_whole else count,
            self.seed if self._shuffle else None,
            self.position,
            self._division,
            tells_pass=self.is_seeded,
        )

    def _sample_of(self, row: int) -> int:
        """Return the index of the sample in a row of the next call."""
        if isinstance(self.source, StreamSource):
            return self.position.calls * self._rows + row
        return int(self._order().indices()[row]) % (self.source.num_samples or 1)

    def _completed(
        self, batch: list[Tensor], each: tuple[int, ...], *, is_example: bool = False
    ) -> list[Tensor]:
        """Add class weights, shares, divisors and mixing coefficients to a batch.

        Args:
            batch: Tensors of a call, as the data has them.
            each: Number of unpadded rows of each process.
            is_example: Whether only the shapes matter.
        """
        structure, division, is_real = self.structure, self._division, None
        parts = self.source.structure.named(batch)
        if self._class_weights is not None:
            weights = self._class_weights.of(parts.targets[0])
            parts = parts._replace(weights=[weights])
        if structure.is_padded:
            is_item = torch.arange(self._rows).lt(each[division.index])
            is_real, counts = is_item.to(torch.float32), division.num_in_updates(each)
            if structure.rows is not None:
                is_real = parts.share[0].mul(is_item.unsqueeze(1))
                own = is_real.reshape(len(counts), -1).sum(dim=1)
                counts = self._processes.summed(own)
                self._num_masked = int(counts.sum())
            parts = parts._replace(share=[shares(is_real, counts, division.count)])
        if structure.ignored:
            counts = self._counts(parts.targets, is_real)
            if self._processes.are_several and not is_example:
                counts = self._processes.summed(counts)
            divisors = counts.clamp(min=1).to(torch.float32).div(self._micro_batches)
            divisors = divisors.repeat_interleave(division.block, dim=0)
            # Items that are whole micro-batches are joined along their first axis.
            is_whole = structure.rows is not None
            divisors = divisors.unsqueeze(1) if is_whole else divisors
            parts = parts._replace(divisors=[divisors])
        if self._mixed_rows is not None:
            mixing = self._mixed_rows.of(parts.targets, self.seed, self.position)
            parts = parts._replace(mixing=[mixing])
        return parts.tensors()

    def _counts(self, targets: Sequence[Tensor], is_real: Tensor | None) -> Tensor:
        """Count the targets of each update that aren't ignored, in this process.

        Args:
            targets: Targets of a call.
            is_real: 0 for rows that are padding, else 1; `[rows]`, or `[items, rows]`
                of items that are whole micro-batches. None without padding.

        Returns:
            `[updates, indices * targets]`, int64.
        """
        shape = (self._rows,) if is_real is None else is_real.shape
        counts = [
            equals(one, index).logical_not_().reshape(*shape, -1).sum(dim=-1)
            for index in self.structure.ignored or ()
            for one in targets
        ]
        of_rows = torch.stack(counts, dim=-1)
        if is_real is not None:
            of_rows.mul_(is_real.ne(0).unsqueeze(-1))
        updates = self._rows // self._division.block
        return of_rows.reshape(updates, -1, len(counts)).sum(dim=1)


class InferenceBatches(_Batches):
    """The calls that contain every sample once, in order.

    Args:
        plan: The factors of a call.
        options: Options of the inference model.
        max_rows: Number of samples after which to stop; None for all samples.
        loading: Settings for loading map-style data.
        seed: Seed of samples that an asynchronous loader loads: the same in every pass.
        processes: Processes that divide the samples.

    Attributes:
        structure: Structure of a batch.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        *,
        max_rows: int | None = None,
        loading: Loading = PLAIN,
        seed: int | None = None,
        processes: Processes = ALONE,
    ) -> None:
        super().__init__(source, plan, options, loading, processes)
        self._max_rows = max_rows
        self._seed = seed or 0
        self._ongoing: Iterator[list[Tensor]] | None = None

    @property
    def num_samples(self) -> int | None:
        """Number of samples of all processes; None if unknown."""
        count, most = self.source.num_samples, self._max_rows
        return count if count is None or most is None else min(count, most)

    @property
    def num_calls(self) -> int | None:
        """Number of calls, equal in all processes; None if unknown."""
        count = self.num_samples
        return None if count is None else -(-count // self._division.rows_of_all)

    @property
    def passes_per_call(self) -> int:
        """Number of forward passes over all replicas in a call, which hooks count."""
        return self._plan.device_iterations

    def num_passes(self, num_rows: int) -> int:
        """Count the forward passes over all replicas that samples take.

        Args:
            num_rows: Number of samples of all processes. The first one has as many of
                them in each call as any.
        """
        of_first = self._division.num_of_each(num_rows)[0]
        return -(-of_first // self._plan.samples_per_update)

    def left_over(self, num_rows: int | Sequence[int]) -> list[int]:
        """Return the numbers of rows that don't fill a micro-batch, in any process.

        Args:
            num_rows: Number of samples of all processes, or of each.
        """
        size = self._plan.micro_batch_size
        if isinstance(num_rows, int):
            num_rows = self._division.num_of_each(num_rows)
        return sorted({number % size for number in num_rows} - {0})

    def example(self, *, inputs_only: bool = True) -> list[Tensor]:
        """Return tensors with the shapes of a call."""
        return self.source.example(self._rows, inputs_only=inputs_only)

    def __iter__(self) -> Iterator[Call]:
        """Yield the calls; padding follows the real rows and repeats the last one."""
        source, index = self.source, self._processes.index
        source.begin_epoch()
        rows = self._streamed(source) if isinstance(source, StreamSource) else None
        is_empty = True
        for batch, each in self._indexed() if rows is None else rows:
            is_empty = False
            yield Call(batch, each[index], each)
        if is_empty:
            raise DataError(
                "There are no more samples: a generator can be gone through once. Pass "
                "a loader or a dataset, which can be begun anew."
            )
        source.end_epoch()

    def _indexed(self) -> Iterator[Rows]:
        """Load samples that are taken by index."""
        count, rows = self.num_samples or 0, self._division.rows_of_all
        length = -(-count // rows) * rows
        order = Order(count, length, None, BEGINNING, self._division)
        seed = self._seed
        if self.is_seeded and self._loading.mode == "sync":
            # Each pass draws other numbers, as without processes that load.
            seed = int(torch.empty((), dtype=torch.int64).random_())
            seed = self._processes.first(seed)
        for number, batch in enumerate(self._loaded(order, seed)):
            at = number * self._rows
            self.source.check(
                batch,
                lambda row, at=at: int(order.indices()[at + row]),  # type: ignore[misc]
            )
            yield batch, self._division.num_of_each(min(count - number * rows, rows))

    def _streamed(self, source: StreamSource) -> Iterator[Rows]:
        """Cut a stream into calls."""
        blocks: Iterator[list[Tensor]] | None = self._ongoing
        if blocks is None:
            blocks = source.blocks()
            if self._max_rows is not None and source.is_one_shot:
                self._ongoing = blocks  # of a generator the next ones come then
        done = 0
        for batch, each in self._shared(self._parts(source, blocks, self._max_rows)):
            source.check(batch, done.__add__)
            done += sum(each)
            yield batch, each
