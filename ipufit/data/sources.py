# SPDX-License-Identifier: Apache-2.0
"""Convert users' data to a `Source`, and divide streams between processes.

Arrays and map-style datasets are loaded by index. Loaders, iterables and generators are
streams, which keep their own samplers, collate functions and workers.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import random
from dataclasses import dataclass
from types import ModuleType
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
)

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from ipufit._arguments import check_number
from ipufit._poptorch import custom_parser, poptorch
from ipufit._tree import Structure
from ipufit.distributed import Processes
from ipufit.errors import DataError, WholeStreamWarning, warn
from ipufit.types import Batch

from .datasets import (
    ALONE,
    NOTHING,
    ArrayDataset,
    CachedDataset,
    FlatDataset,
    IterableRows,
    Parts,
    SampleStructure,
    Source,
    arrays_behind,
    as_tensor,
    check_integers,
    checked_tensor,
    column_names,
    frame_values,
    is_frame,
    is_hugging_face,
    is_sparse,
    mixed,
    same_rows,
    short_list,
    split_columns,
    unchanged,
    without_columns,
)
from .random_state import (
    HostRandomState,
    RandomState,
    random_state,
    seed_all,
    set_random_state,
)

# A stream's place, for runs that are resumed ---------------------------------------

_TAG = "$"


class LoaderState(NamedTuple):
    """The state of a loader, and the rows that it gave and no call has taken yet.

    Attributes:
        state: The result of its `state_dict()`.
        rows: The last rows that were drawn; empty between two passes.
        num_left: Number of these that the next call begins with.
        num_drawn: Number of rows that the pass has drawn.
        has_ended: Whether the loader has given its last batch, so that it begins a new
            pass when it is asked again.
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


def load_state(loader: Any, kept: LoaderState, name: str) -> None:
    """Load a state into a loader, whose next pass goes on from it.

    Args:
        loader: A loader that keeps a state.
        kept: The state.
        name: Name of the data in error messages.

    Raises:
        DataError: The loader can't take the state.
    """
    try:
        loader.load_state_dict(kept.state)
        if kept.has_ended:
            # The pass that begins now goes on from one that has ended, and may draw
            # random numbers. The one after it begins as in a run that goes on.
            iter(loader)
    except Exception as error:  # a user's object may raise anything
        raise DataError(
            f"`{name}` can't go on from the state that the checkpoint has of it: "
            f"{error!r}. Pass a loader with the same dataset and settings."
        ) from error


def packed(kept: LoaderState) -> dict[str, Tensor]:
    """Convert a state to tensors, which a checkpoint can hold.

    Raises:
        DataError: The loader's state has values that no checkpoint can hold.

    Example:
        >>> kept = LoaderState({"seen": (1, None)}, [torch.zeros(2, 3)], num_left=2)
        >>> unpacked(packed(kept)).state
        {'seen': (1, None)}
    """
    tensors: dict[str, Tensor] = {}
    words = {
        "state": _encoded(kept.state, tensors, "state_dict()"),
        "num_rows": len(kept.rows),
        "num_left": kept.num_left,
        "num_drawn": kept.num_drawn,
        "has_ended": kept.has_ended,
    }
    text = json.dumps(words).encode()
    return {
        "json": torch.frombuffer(bytearray(text), dtype=torch.uint8),
        **{f"state/{name}": one for name, one in tensors.items()},
        **{f"rows/{i}": leaf.clone() for i, leaf in enumerate(kept.rows)},
    }


def unpacked(tensors: dict[str, Tensor]) -> LoaderState | None:
    """Convert tensors of `packed` to a state; return None if there are none.

    Raises:
        DataError: `packed` hasn't made them.
    """
    if not tensors:
        return None
    try:
        words = json.loads(tensors["json"].numpy().tobytes())
        rows = [tensors[f"rows/{i}"] for i in range(words["num_rows"])]
        state = _decoded(words["state"], tensors)
        counts = [words[name] for name in ("num_left", "num_drawn")]
        has_ended = bool(words["has_ended"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"it has no state of a loader: {error!r}") from error
    is_whole = all(type(one) is int and one >= 0 for one in counts)
    if not is_whole or any(len(leaf) < counts[0] for leaf in rows):
        raise DataError("it has no state of a loader: its counts are none")
    return LoaderState(state, rows, counts[0], counts[1], has_ended)


def _encoded(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Encode a value for JSON; values that JSON lacks are tagged.

    Args:
        value: Part of a state.
        tensors: The tensors and arrays in the value are added.
        where: The part, for messages.

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
            f"`x` keeps a state, so that a run can be resumed, and {where} in it is a "
            f"{type(value).__name__}, which no checkpoint can hold. Use numbers, text, "
            "bytes, tensors and arrays, in lists, tuples and dicts."
        )
    return {_TAG: kind, "items": items}


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(one, tensors) for one in value]
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


class Replay(NamedTuple):
    """The state of a pass from which the same blocks can be drawn again.

    Samplers and transforms draw random numbers, and so may other code between two
    blocks. All blocks but the last are drawn again only to be dropped. So only their
    order matters, and the random state before the last block.

    Attributes:
        num_blocks: Number of blocks that were drawn.
        at_start: Random states when the pass began.
        at_last: Random states before the last block was drawn.
    """

    num_blocks: int
    at_start: RandomState
    at_last: RandomState


class Pass:
    """The blocks of one pass over a stream.

    Args:
        iterable: Iterable of batches.
        block_of: Converts a batch to a block.
        generators: Random generators, besides the global ones, that the iterable
            draws from.
        replay: State of the pass to repeat; None for a new pass.
        kept: State from which the iterable continues, so that nothing is repeated; None
            to begin, or to repeat.
        is_stateful: Whether the iterable has a state, for which rows are stored.

    Attributes:
        iterator: Iterator over the batches.
        first: A block that was drawn already and is returned first, or None.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        block_of: Callable[[Any], list[Tensor]],
        generators: Sequence[torch.Generator] = (),
        replay: Replay | None = None,
        kept: LoaderState | None = None,
        *,
        is_stateful: bool = False,
    ) -> None:
        self._block_of = block_of
        self._generators = generators
        self._replayed = replay if kept is None else None
        self._before = replay if kept is not None else None
        self._num_blocks = 0
        if self._replayed is not None:
            set_random_state(self._replayed.at_start, generators)
        self._at_start = self._at_last = HostRandomState(generators)
        self._has_ended = kept is not None and kept.has_ended
        self.iterator: Iterator[Any] = iter(() if self._has_ended else iterable)
        self.first: list[Tensor] | None = None
        self._last: list[Tensor] = []
        self._is_stateful = is_stateful
        self._num_rows = 0
        if kept is not None:
            self._last = kept.rows
            self._num_rows = kept.num_drawn - kept.num_left
            if kept.num_left:
                self.first = [leaf[-kept.num_left :] for leaf in kept.rows]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def __next__(self) -> list[Tensor]:
        block, self.first = self.first, None
        if block is None:
            block = self._block_of(self.draw())
        if self._is_stateful:
            self._num_rows += len(block[0])
            self._last = block
        return block

    def draw(self) -> Any:
        """Return the next batch of the iterable."""
        replayed = self._replayed
        if replayed is not None and self._num_blocks + 1 == replayed.num_blocks:
            set_random_state(replayed.at_last, self._generators)
        at_last = HostRandomState(self._generators)
        try:
            batch = next(self.iterator)
        except StopIteration:
            self._has_ended = True
            raise
        self._num_blocks += 1
        self._at_last = at_last
        return batch

    def replay(self) -> Replay:
        """Return the state from which the blocks so far can be drawn again."""
        start, last = self._at_start.tensors(), self._at_last.tensors()
        before = self._before
        if before is None:
            return Replay(self._num_blocks, start, last)
        at_last = last if self._num_blocks else before.at_last
        return Replay(before.num_blocks + self._num_blocks, before.at_start, at_last)

    def kept(self, state: Any, num_given: int) -> LoaderState:
        """Return the state from which the pass continues without repeating anything.

        Args:
            state: The present state of the iterable.
            num_given: Number of rows that calls have taken.
        """
        left = max(0, self._num_rows - num_given)
        rows = [leaf[-max(left, 1) :].clone() for leaf in self._last]
        return LoaderState(state, rows, left, self._num_rows, self._has_ended)


def generators_of(loader: Any) -> list[torch.Generator]:
    """List the generators that a torch loader and its samplers were given.

    Args:
        loader: Any iterable; only a torch loader has generators that can be found.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> own = torch.Generator()
        >>> generators_of(DataLoader([1, 2], shuffle=True, generator=own)) == [own]
        True
    """
    loader = loader.batches if isinstance(loader, FixedSizeBatches) else loader
    if not isinstance(loader, DataLoader):
        return []
    batch_sampler: Any = loader.batch_sampler
    inner = getattr(batch_sampler, "sampler", None)
    owners = (loader, loader.sampler, batch_sampler, inner)
    found = [getattr(owner, "generator", None) for owner in owners]
    unique = {id(one): one for one in found if isinstance(one, torch.Generator)}
    return list(unique.values())


# Several processes -----------------------------------------------------------------


class OwnLoading:
    """Goes through all indices of the user's loader, and loads those of one process.

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

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the indices of all batches of a pass.

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

    def peek(self, indices: list[Any]) -> Any:
        """Load the batch of some indices, and put back the random states.

        It is loaded in another process if the user's loader does so, because a dataset
        may open files there that processes can't share.
        """
        with HostRandomState():
            workers = min(self._loader.num_workers, 1)
            return next(iter(self._like_the_users([indices], workers)))

    def load(self, groups: Iterator[list[Any]]) -> Iterator[Any]:
        """Load batches as the user's loader does, one for each group of indices.

        Transforms have random numbers of their own. So other random numbers, such as
        the order of the samples, are equal in all processes.
        """
        if self._loader.num_workers:
            yield from self._like_the_users(groups, self._loader.num_workers)
            return
        for number, group in enumerate(groups):
            with HostRandomState():
                seed_all(mixed(self._seed, self._index, number))
                batch = next(iter(self._like_the_users([group], 0)))
            yield batch

    def _like_the_users(self, batch_sampler: Any, num_workers: int) -> Any:
        """Return a loader like the user's, with other indices."""
        users = self._loader
        names = ["collate_fn", "pin_memory", "pin_memory_device", "timeout"]
        names += ["worker_init_fn"]
        if num_workers:
            names += ["multiprocessing_context", "prefetch_factor"]
        generator = torch.Generator().manual_seed(mixed(self._seed, self._index))
        return DataLoader(
            users.dataset,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            generator=generator,
            **{name: getattr(users, name) for name in names if hasattr(users, name)},
        )


def has_own_indices(loader: Any) -> bool:
    """Return whether a loader takes samples by index, and loads as torch's does."""
    if not isinstance(loader, DataLoader) or isinstance(loader, poptorch.DataLoader):
        return False
    kind: Any = type(loader)
    batches: Any = loader.batch_sampler
    return (
        kind.__iter__ is DataLoader.__iter__
        and kind._get_iterator is DataLoader._get_iterator
        and batches is not None
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(batches, "__next__")  # it could be gone through only once
    )


def is_divided(stream: Any, processes: Processes, name: str) -> bool:
    """Return whether a stream has different samples in each process.

    An attribute `is_divided` of the stream, or of its dataset, says so. Without one it
    is true for loaders with a dividing sampler, PopTorch's partitioned loaders, and
    datasets of Hugging Face and WebDataset that are split by node.

    Args:
        stream: An iterable of samples or batches.
        processes: All processes; more than one.
        name: Name of the data in error messages.

    Raises:
        DataError: It is divided between another number of processes.
    """
    said = getattr(stream, "is_divided", None)
    if said is not None:
        return bool(said)
    if isinstance(stream, poptorch.DataLoader):
        options = getattr(stream, "options", None)
        if options is not None:
            count = int(options.Distributed.numProcesses)
            _check_count(count, processes, name)
        # PopTorch has put a dataset of its own around the user's.
        module = poptorch.DataLoader.__module__
        package = module.rpartition(".")[0] or module
        if f"{type(stream.dataset).__module__}.".startswith(f"{package}."):
            return True
    if isinstance(stream, DataLoader):
        batches = stream.batch_sampler
        for one in (stream.sampler, batches, getattr(batches, "sampler", None)):
            if getattr(one, "num_replicas", 1) == 1:
                continue
            _check_count(one.num_replicas, processes, name)  # type: ignore[union-attr]
            rank = getattr(one, "rank", processes.index)
            if rank != processes.index:
                raise DataError(
                    f"The sampler of `{name}` gives the samples of process {rank}, and "
                    f"this is process {processes.index}: pass "
                    "rank=ipufit.distributed.get_process_info().index to it."
                )
            return True
        return is_divided(stream.dataset, processes, name)
    stages = getattr(stream, "pipeline", None)
    if isinstance(stages, (list, tuple)):  # WebDataset's
        splitting = ("split_by_node", "ResampledShards", "ResampledShardList")
        return any(
            getattr(stage, "__name__", type(stage).__name__) in splitting
            or (hasattr(stage, "__iter__") and is_divided(stage, processes, name))
            for stage in stages
        )
    divided = getattr(stream, "_distributed", None)
    if is_hugging_face(stream) and divided is not None:
        _check_count(getattr(divided, "world_size", processes.count), processes, name)
        return True
    return False


def _check_count(count: int, processes: Processes, name: str) -> None:
    if count == processes.count:
        return
    raise DataError(
        f"`{name}` is divided between {count} processes, and there are "
        f"{processes.count}. Make its loader with the options of a config in that "
        "process, or a DistributedSampler with num_replicas=ipufit.distributed."
        "get_process_info().count; or pass the dataset, which ipufit divides itself."
    )


# The stream ------------------------------------------------------------------------


class RowsAreNoSamplesError(Exception):
    """Raised if a loader's rows aren't one for each index."""


class StreamSource(Source):
    """Samples that come in blocks, such as the batches of a loader.

    The first block is drawn at once, to see what samples look like. The first pass
    gives it out again, so that nothing is drawn twice.

    In several processes a pass begins with the random states of process 0, so that
    streams that shuffle give the same order everywhere.

    Args:
        blocks: An iterable of batches as the user makes them.
        parts_of: Takes a batch apart: inputs, targets, weights.
        name: Name of the data in error messages.
        num_samples: Number of samples of all processes; None if unknown.
        processes: Processes that divide the samples.
        is_own_part: Whether the stream gives samples of this process only.
        own_loading: The stream's indices, and what loads samples of them, in the place
            of `blocks`; None if it isn't taken apart.

    Raises:
        DataError: The stream is empty, its first batch can't be used, or it isn't the
            same in all processes.

    Attributes:
        rows_of_first: Number of samples in the first block.
        is_stateful: Whether the stream keeps a state, from which it can go on, as
            torchdata's protocol has it.
    """

    def __init__(
        self,
        blocks: Iterable[Any],
        parts_of: Callable[[Any], Sequence[Any]],
        *,
        name: str,
        num_samples: int | None = None,
        processes: Processes = ALONE,
        is_own_part: bool = False,
        own_loading: OwnLoading | None = None,
    ) -> None:
        # What samples look like is known when the first are drawn.
        super().__init__(SampleStructure(NOTHING), num_samples, name)
        self._iterable: Any = blocks if own_loading is None else own_loading
        self._parts_of = parts_of
        self._replay: Replay | None = None
        self._kept: LoaderState | None = None
        self.is_stateful = own_loading is None and all(
            callable(getattr(blocks, method, None))
            for method in ("state_dict", "load_state_dict")
        )
        self._processes = processes
        self.is_own_part = is_own_part
        self.own_loading = own_loading
        self.generators = generators_of(blocks)
        self.rows_of_first = 0
        begun = self._new_pass()
        # PopTorch's accessor is its own iterator, but begins anew.
        is_accessor = isinstance(blocks, poptorch.AsynchronousDataAccessor)
        self.is_one_shot = begun.iterator is blocks and not is_accessor
        try:
            batch = begun.draw()
        except StopIteration:
            pass
        else:
            begun.first = self._take_first(batch)
        if processes.are_several:
            self._agree(begun.first)
        elif not self._first:
            raise DataError(f"`{name}` has no samples.")
        self._begun: Pass | None = begun
        self._values = plain_values(self._iterable)

    def _take_first(self, batch: Any) -> Batch:
        """Set the structure of samples, and return the first block of a pass."""
        loading = self.own_loading
        parts = self._parts_of(batch if loading is None else loading.peek(batch[:1]))
        self.structure = self._structure_of(parts)
        block = self._flatten(parts)
        if not len(block[0]):
            raise DataError(f"The first batch of `{self.name}` has no rows.")
        self._first = [leaf[0].clone() for leaf in block]
        if loading is None:
            self.rows_of_first = len(block[0])
            return block
        if len(block[0]) != 1:
            raise RowsAreNoSamplesError
        self.rows_of_first = len(batch)
        return list(batch)

    def _agree(self, first: Any) -> None:
        """Compare the beginning of the stream with other processes.

        Raises:
            DataError: There are no samples; or the processes have different samples,
                although the stream isn't marked as divided.
        """
        digest = hashlib.sha256()
        for leaf in first or ():  # of a block, or indices
            if isinstance(leaf, Tensor):
                whole = leaf.contiguous().reshape(-1).view(torch.uint8)
                digest.update(whole.numpy().data)
            else:
                digest.update(repr(leaf).encode())
        seen = (digest.hexdigest(), self.structure, bool(self._first))
        all_seen = self._processes.gathered(seen)
        structures = [structure for _, structure, is_filled in all_seen if is_filled]
        if not structures:
            raise DataError(f"`{self.name}` has no samples.")
        if self.is_own_part:
            if len(structures) < len(all_seen):
                firsts = self._processes.gathered(self._first)
                self.structure = structures[0]
                self._first = self._first or next(one for one in firsts if one)
                self.rows_of_first = self.rows_of_first or 1
            return
        if len({one for one, *_ in all_seen}) > 1:
            raise DataError(
                f"`{self.name}` begins with other samples in one process than in "
                "another. If it gives each of them a part, give it (or its dataset) "
                "the attribute is_divided = True; otherwise have it shuffle with the "
                "same seed everywhere."
            )
        if self._processes.is_first and self.own_loading is None:
            warn(
                f"Each of the {self._processes.count} processes reads all of "
                f"`{self.name}` and keeps its share of every batch. Have the dataset "
                "give each process a part, by ipufit.distributed.get_process_info() in "
                "__iter__, and set its attribute is_divided = True; or pass a dataset "
                "with __getitem__, which is read only where its samples are used.",
                WholeStreamWarning,
            )

    def first_pass(self) -> Replay | None:
        """Return the state of the first pass, if none of it was used yet."""
        return None if self._begun is None else self._begun.replay()

    def loader_state(self) -> Any:
        """Return the state of a stateful stream."""
        return self._iterable.state_dict()

    def go_on(
        self, replay: Replay | None, *, is_due: bool, kept: LoaderState | None = None
    ) -> None:
        """Let the next pass continue where that of an interrupted run stopped.

        It is repeated, unless the stream is stateful. A generator can't begin anew, and
        stays as it is.

        Args:
            replay: State of the interrupted pass; None if none had begun.
            is_due: Whether that was the first pass, of which nothing was used: its
                first block is drawn now.
            kept: State of the stream; None to repeat the pass.

        Raises:
            DataError: The stream can't take the state.
        """
        if self.is_one_shot:
            return
        self._begun, self._replay = None, replay
        if kept is not None:
            load_state(self._iterable, kept, self.name)
            self._kept = None if kept.is_between else kept
        elif is_due and replay is not None:
            self._begun = self._new_pass()
            self._begun.first = next(self._begun)
            self._values = plain_values(self._iterable)

    def begin_epoch(self) -> None:
        """Call a hook of Keras's dataset."""
        if isinstance(self._iterable, KerasBatches):
            self._iterable.begin_epoch()

    def end_epoch(self) -> None:
        """Call a hook of Keras's dataset."""
        if isinstance(self._iterable, KerasBatches):
            self._iterable.end_epoch()

    def blocks(self) -> Pass | Iterator[Batch]:
        """Return the blocks of the next pass."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            if self.is_one_shot or plain_values(self._iterable) == self._values:
                return begun
            # A callback has changed the data since, as `sampler.set_epoch` does.
            self._replay = begun.replay()
        return iter(()) if self.is_one_shot else self._new_pass()

    def _new_pass(self) -> Pass:
        replay, self._replay = self._replay, None
        kept, self._kept = self._kept, None
        if replay is None and self._processes.are_several:
            state = self._processes.first(random_state(self.generators))
            set_random_state(state, self.generators)
        return Pass(
            self._iterable,
            self.block_of if self.own_loading is None else list,
            self.generators,
            replay,
            kept,
            is_stateful=self.is_stateful,
        )

    def _structure_of(self, parts: Sequence[Any]) -> SampleStructure:
        return SampleStructure.of(parts)

    def _flatten(self, parts: Sequence[Any]) -> Batch:
        where = f"A batch of `{self.name}`"
        return same_rows(self.structure.flatten_like("the first", parts, where), where)

    def block_of(self, batch: Any) -> Batch:
        """Flatten a batch, which must look like the first.

        Raises:
            DataError: It doesn't.
        """
        block = self._flatten(self._parts_of(batch))
        paths = [*self.structure.paths(), "the mask"]
        for path, leaf, first in zip(paths, block, self._first):
            if leaf.shape[1:] != first.shape or leaf.dtype != first.dtype:
                what = "samples" if self.structure.rows is None else path
                raise DataError(
                    f"A batch of `{self.name}` has {what} of {leaf.dtype} and shape "
                    f"{tuple(leaf.shape[1:])}, and the first had {first.dtype} and "
                    f"{tuple(first.shape)}. The shapes of a compiled model are fixed: "
                    "pad or crop samples to one shape."
                )
        return block


class FixedSizeBatches:
    """Batches that are whole micro-batches of fixed sizes, such as padded graphs.

    `fit`, `evaluate` and `predict` take it where they take a dataset. A forward pass
    gets one batch as it is, so tensors may differ in their first dimension: nodes,
    edges and graphs. A mask says which rows of outputs, targets and weights are samples
    and which are padding. Loss and metrics are those of the samples alone, each with
    the same weight in its whole update, and `predict` returns the samples' rows.

    What counts samples elsewhere counts batches here: `batch_size` in `fit` is the
    number of batches of an update, gradient accumulation times replicas, and may be
    left out. A module's own loss is the mean over the samples of its batch.

    Args:
        batches: Loader, list or another iterable of batches: inputs, `(inputs,
            targets)` or `(inputs, targets, weights)`. Inputs are tensors, nested in
            tuples, lists and dicts, or of types with a parser that
            `poptorch.registerCustomArgParser` was given, such as PyG's `Batch`. A
            tensor has the same shape in all batches.
        mask: Name of an entry or attribute of the inputs that is `[rows]`, True for
            samples; an entry of a dict isn't given to the module. Or a function that
            returns it for a batch.

    Raises:
        DataError: `batches` is no iterable, or `mask` neither a name nor a function.

    Example:
        >>> import torch, ipufit
        >>> class Sums(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(1, 1)
        ...     def forward(self, x, graph):  # [nodes, 1], [nodes] -> [graphs, 1]
        ...         h = self.layer(x)
        ...         zeros = torch.zeros(3, 1, device=x.device)
        ...         return zeros.scatter_add(0, graph.unsqueeze(1), h)
        >>> graph = torch.tensor([0, 0, 1, 2, 2])  # the third graph is padding
        >>> mask = torch.tensor([True, True, False])
        >>> inputs = {"x": torch.ones(5, 1), "graph": graph, "mask": mask}
        >>> data = ipufit.FixedSizeBatches([(inputs, torch.ones(3, 1))] * 4, "mask")
        >>> model = ipufit.IPUModel(Sums())
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(data, epochs=2, verbose=0)
        >>> model.predict(data, verbose=0).shape  # four batches of two graphs
        torch.Size([8, 1])
    """

    def __init__(
        self, batches: Iterable[Any], mask: str | Callable[[Any], Any]
    ) -> None:
        if not isinstance(batches, Iterable):
            raise DataError(
                f"FixedSizeBatches got {describe(batches)}, which is no iterable of "
                "batches. Pass a loader, or a list of batches."
            )
        if not (isinstance(mask, str) or callable(mask)):
            raise DataError(
                f"mask={mask!r} is neither the name of an entry of the inputs, such as "
                "'graphs_mask', nor a function of a batch that returns a mask."
            )
        self.batches, self.mask = batches, mask

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches."""
        return iter(self.batches)


def is_keras_dataset(x: Any) -> bool:
    """Check whether `x` is a `PyDataset` of Keras, or a `Sequence` of Keras 2."""
    return any(
        base.__name__ in ("PyDataset", "Sequence")
        and base.__module__.partition(".")[0] in ("keras", "tf_keras", "tensorflow")
        for base in type(x).__mro__
    )


class KerasBatches:
    """The batches of a `keras.utils.PyDataset`, in the order that Keras gives them.

    Args:
        dataset: Gives each batch by its number.
        shuffle: Whether each pass draws a new order of the batches, with Python's
            `random` as Keras does.
    """

    def __init__(self, dataset: Any, shuffle: bool) -> None:
        self.dataset, self.shuffle = dataset, shuffle
        self.num_begun = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        count = getattr(self.dataset, "num_batches", None)
        if count is None and hasattr(self.dataset, "__len__"):
            count = len(self.dataset)
        if count is None:
            return map(self.dataset.__getitem__, itertools.count())
        order = list(range(count))
        if self.shuffle:
            random.shuffle(order)
        return map(self.dataset.__getitem__, order)

    def begin_epoch(self) -> None:
        """Call the dataset's hook, after which a pass that has begun begins anew."""
        begin = getattr(self.dataset, "on_epoch_begin", None)
        if begin is not None and begin.__module__.partition(".")[0] != "keras":
            begin()
            self.num_begun += 1  # which `plain_values` sees

    def end_epoch(self) -> None:
        """Call the dataset's hook."""
        if hasattr(self.dataset, "on_epoch_end"):
            self.dataset.on_epoch_end()


@dataclass(frozen=True)
class WholeParts:
    """Splits a batch that is a whole micro-batch into its parts and its mask.

    Args:
        parts_of: Splits a batch into inputs, targets and weights.
        mask: The mask of `FixedSizeBatches`.
    """

    parts_of: Parts
    mask: str | Callable[[Any], Any]

    def __call__(self, batch: Any) -> Sequence[Any]:
        """Return inputs, targets, weights and the mask; None for what is missing.

        Raises:
            DataError: The batch has no such mask or targets, or the mask isn't 1-d.
        """
        where, names = f"A batch of `{self.parts_of.name}`", self.parts_of.columns
        is_tuple = isinstance(batch, (tuple, list))
        inputs, rest = (batch[0], batch[1:]) if is_tuple and batch else (batch, ())
        if isinstance(self.mask, str):
            mask = _entry(inputs, self.mask, where)
            inputs = without_columns(inputs, [self.mask])
        else:
            mask = self.mask(batch)
        mask = as_tensor(mask, f"The mask of {where[0].lower()}{where[1:]}")
        if mask.dim() != 1 or not len(mask):
            raise DataError(
                f"{where} has a mask of shape {tuple(mask.shape)}: it must be [rows], "
                "True for each row of the outputs that is a sample."
            )
        parts: Sequence[Any]
        if names and custom_parser(inputs) is not None:  # which keeps its targets
            named = {name: _entry(inputs, name, where) for name in names}
            parts = (inputs, named[names[0]] if self.parts_of.is_single else named)
            parts = parts[:1] if self.parts_of.inputs_only else parts
        else:
            parts = self.parts_of((inputs, *rest) if is_tuple else inputs)
        return [*(*parts, None, None)[:3], mask.ne(0).to(torch.float32)]


def _entry(inputs: Any, name: str, where: str) -> Any:
    """Return an entry of a mapping, or an attribute of another object."""
    if isinstance(inputs, Mapping):
        found, known = inputs.get(name), f". It has: {', '.join(map(str, inputs))}"
    else:
        found, known = getattr(inputs, name, None), f": it is {describe(inputs)}"
    if found is None:
        raise DataError(f"{where} has no {name!r}{known}.")
    return found


class WholeSource(StreamSource):
    """Micro-batches of `FixedSizeBatches`: the tensors of each are a row, `[1, ...]`.

    A row ends with the mask.
    """

    def _structure_of(self, parts: Sequence[Any]) -> SampleStructure:
        inputs, targets, weights = [
            NOTHING if part is None else Structure.of_batch(part, custom_parser)
            for part in parts[:3]
        ]
        return SampleStructure(
            inputs, targets, weights, is_padded=True, rows=len(parts[3])
        )

    def _flatten(self, parts: Sequence[Any]) -> Batch:
        structure, where = self.structure, f"A batch of `{self.name}`"
        leaves = structure.flatten_like("the first", parts, where)
        paths, mask = structure.paths(), parts[3]
        for path, leaf in zip(paths, leaves):
            if not isinstance(leaf, (Tensor, np.ndarray, np.generic, int, float)):
                raise DataError(
                    f"{where} has {describe(leaf)} as its {path}, for which PopTorch "
                    "has no parser. Register one, poptorch.registerCustomArgParser("
                    f"{type(leaf).__name__}, parser), or give tensors in a dict. The "
                    "parser of PyG's types comes with `import poptorch_geometric`."
                )
        tensors = [as_tensor(leaf, where) for leaf in leaves]
        for path, tensor in list(zip(paths, tensors))[structure.num_inputs :]:
            if tensor.shape[:1] != mask.shape:
                raise DataError(
                    f"{where} has {path} of shape {tuple(tensor.shape)}, and a mask of "
                    f"{len(mask)} rows: give one row for each entry of the mask."
                )
        return [tensor.unsqueeze(0) for tensor in (*tensors, mask)]


def plain_values(data: Any) -> list[str]:
    """Return the numbers and strings in attributes of a loader, sampler and dataset."""
    values: list[str] = []
    seen: set[int] = set()
    due = [data]
    while due and len(seen) < _MOST_OBJECTS:
        one = due.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType)):
            continue
        seen.add(id(one))
        for name, value in list(getattr(one, "__dict__", {}).items()):
            if name in _NOTED_BY_TORCH:
                continue
            parts = list(value.values()) if isinstance(value, dict) else value
            for part in parts[:64] if isinstance(parts, (list, tuple)) else [parts]:
                if isinstance(part, Tensor) and part.dim() == 0 and part.is_cpu:
                    part = part.item()
                if isinstance(part, (int, float, str)):
                    values.append(repr(part))  # NaN has a text that equals itself
                else:
                    due.append(part)
    return values


_MOST_OBJECTS = 10_000
"""Objects of a dataset whose attributes are compared."""

_NOTED_BY_TORCH = {"_IterableDataset_len_called", "_iterator"}
"""Attributes in which torch's loader notes what it has done."""

_MOST_ARRAYS = 8
"""Lists of more arrays are probably lists of samples."""

_STREAM_ROWS = 64
"""Samples that are stacked at a time when a dataset gives them one by one."""

FrameColumns = Sequence[Optional[Sequence[Any]]]
"""For each leaf of nested arrays the names of its columns, if it is a frame."""


def as_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    name: str = "x",
    num_workers: int = 0,
    inputs_only: bool = False,
    left_out: Sequence[str] = (),
    columns: FrameColumns = (),
    processes: Processes = ALONE,
    shuffle: bool = False,
) -> Source:
    """Convert data in any form that users may pass to a source.

    Args:
        x: Tensors, NumPy arrays, pandas frames or sparse matrices, nested in tuples,
            lists or dicts, with samples in dim 0; a map-style `Dataset` or a Hugging
            Face dataset of samples; an `IterableDataset` of samples; or a `DataLoader`,
            a `poptorch.DataLoader`, a generator or another iterable of batches; or
            `FixedSizeBatches`. Samples and batches are an input, `(input, target)` or
            `(input, target, weight)`.
        y: Targets, if `x` is arrays; or the names of the target columns, if `x` has
            named columns.
        sample_weight: One number per sample, if `x` is arrays.
        name: Name of the data in error messages.
        num_workers: Number of processes that load an `IterableDataset`.
        inputs_only: Whether targets and weights in samples are ignored, of any type.
        left_out: Columns to ignore, if samples have columns.
        columns: `Source.columns` of the data that the model was trained on: frames
            give these columns, in this order.
        processes: Processes that divide the samples. They exchange the beginning of a
            stream.
        shuffle: Whether the batches of a `PyDataset` come in a new order in each pass.

    Raises:
        DataError: The data is of an unusable kind, empty, or of unequal lengths; or a
            stream that isn't the same in all processes.

    Example:
        >>> source = as_source(torch.zeros(5, 2), torch.zeros(5))
        >>> source.num_samples, source.structure.has_targets
        (5, True)
    """
    if isinstance(x, Source):
        return x
    if is_keras_dataset(x):
        x = KerasBatches(x, shuffle)
    elif isinstance(x, FixedSizeBatches) and is_keras_dataset(x.batches):
        x = FixedSizeBatches(KerasBatches(x.batches, shuffle), x.mask)
    targets = column_names(y)
    is_single = isinstance(y, str)
    if is_array_like(x):
        x = without_columns(x, left_out)
        if targets is not None:
            x, y = split_columns(x, targets, is_single, f"`{name}`")
        y = None if inputs_only else y
        return from_arrays(x, y, sample_weight, name=name, columns=columns)
    if not is_indexed(x) and not is_stream(x):
        raise DataError(
            f"`{name}` is {describe(x)}. Pass tensors, NumPy arrays, pandas frames, a "
            "torch Dataset (with __getitem__ and __len__), an IterableDataset, a "
            "DataLoader, or a generator of batches. An object whose items are batches "
            "needs DataLoader(x, batch_size=None)."
        )
    has_lists = is_hugging_face(x)
    parts_of = Parts(targets, is_single, name, has_lists, inputs_only, left_out)
    _refuse_beside(x, None if targets else y, sample_weight)
    if isinstance(x, FixedSizeBatches):
        return _from_whole(x, parts_of, name, processes)
    if is_indexed(x):
        return _from_dataset(x, parts_of, name)
    if isinstance(x, IterableDataset) or is_hugging_face(x):
        workers = num_workers if isinstance(x, IterableDataset) else 0
        return _from_samples(x, parts_of, name, workers, processes)
    return _from_batches(x, parts_of, name, processes)


def as_batch(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    left_out: Sequence[str] = (),
    columns: FrameColumns = (),
) -> Source:
    """Convert one batch of arrays to a source.

    Args:
        x: Arrays of inputs, nested.
        y: Arrays of targets.
        sample_weight: Arrays of weights.
        left_out: Columns to ignore, if `x` has columns.
        columns: As for `as_source`.

    Raises:
        DataError: The arguments are no arrays, or arrays that can't be used.

    Example:
        >>> as_batch(torch.zeros(5, 2)).num_samples
        5
    """
    if not is_array_like(x):
        raise DataError(
            f"`x` is {describe(x)}. Pass the arrays of one batch, or use fit, "
            "evaluate and predict."
        )
    x = without_columns(x, left_out)
    return from_arrays(x, y, sample_weight, name="x", columns=columns)


def from_arrays(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    name: str,
    columns: FrameColumns = (),
) -> Source:
    """Make a source of nested arrays, whose dim 0 counts samples.

    Args:
        x: Inputs.
        y: Targets; None if there are none.
        sample_weight: Weights; None if all samples weigh the same.
        name: Name of the inputs in error messages.
        columns: As for `as_source`.

    Raises:
        DataError: The arrays are empty, hold no numbers or too large ones, or their
            lengths differ.
    """
    wheres = (f"`{name}`", "`y`", "`sample_weight`")
    x = _mapped(_chooser(columns, wheres[0]), x)
    own_columns: list[Any] = []
    _mapped(lambda v: own_columns.append(_columns_of(v)), x)
    values = (x, y, sample_weight)
    given = [unframed(value, where) for value, where in zip(values, wheres)]
    structure = SampleStructure.of(given)
    leaves = []
    for value, where, part in zip(given, wheres, structure.parts):
        if part == NOTHING and value is None:
            continue
        if not part.num_leaves:
            raise DataError(f"{where} holds no arrays: it is {str(value)[:80]}.")
        for leaf in part.flatten(value):
            leaves.append(checked_tensor(leaf, where))
            if not leaves[-1].dim():
                raise DataError(
                    f"{where} holds a single number where an array belongs: dim 0 "
                    "counts samples. Give an array with a row for each; make a list of "
                    "numbers one, as with torch.tensor."
                )
    _check_lengths(structure, leaves, name)
    tensors = same_rows(leaves, f"`{name}`")
    tensors = [
        leaf if leaf.dtype == torch.float64 else tensor
        for leaf, tensor in zip(leaves, tensors)
    ]
    if not len(tensors[0]):
        raise DataError(f"`{name}` has no samples.")
    source = in_memory(tensors, structure, name)
    source.columns = own_columns
    return source


def _columns_of(value: Any) -> Sequence[Any] | None:
    """Return the names of a frame's columns; None if it has none, or one twice."""
    names = list(value.columns) if is_frame(value) and hasattr(value, "columns") else []
    return names if names and len(set(names)) == len(names) else None


def _chooser(columns: FrameColumns, where: str) -> Callable[[Any], Any]:
    """Return a function that gives frames the columns of those trained on, in order.

    Args:
        columns: For each leaf of the data the names of its columns, if it was a frame.
        where: Name of the data in error messages.
    """
    each = iter(columns)

    def chosen(value: Any) -> Any:
        names, own = next(each, None), _columns_of(value)
        if names is None or own is None:
            return value
        missing = [name for name in names if name not in own]
        if missing:
            raise DataError(
                f"{where} lacks the columns {', '.join(map(repr, missing))}, which the "
                f"model was trained with. It has: {', '.join(map(repr, own))}."
            )
        return value[list(names)]

    return chosen


def in_memory(
    tensors: list[Tensor],
    structure: SampleStructure,
    name: str,
    rows: Tensor | None = None,
) -> Source:
    """Make a source of the leaves of a structure, `[num_samples, ...]`.

    Args:
        tensors: The leaves.
        structure: How samples nest.
        name: Name of the data in error messages.
        rows: Rows of the tensors that are samples; None if all are.

    Raises:
        DataError: An integer needs more than 32 bits.
    """
    checked = tensors
    if rows is not None:  # only integers are looked at
        checked = [t[rows if t.dtype == torch.int64 else rows[:0]] for t in tensors]
    check_integers(checked, structure, name)
    dataset = ArrayDataset(tensors, rows)
    return Source(structure, len(dataset), name, dataset)


def unframed(value: Any, where: str) -> Any:
    """Replace the frames and sparse matrices in nested arrays by arrays.

    Args:
        value: Nested arrays, frames and sparse matrices.
        where: Name of the value in error messages.
    """

    def array(value: Any) -> Any:
        if is_sparse(value):
            return value.toarray()
        return frame_values(value, where) if is_frame(value) else value

    return _mapped(array, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each element of nested mappings, tuples and lists."""
    if isinstance(value, Mapping) and not is_sparse(value):  # dok_matrix is a dict
        return {key: _mapped(function, element) for key, element in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(function, element) for element in value)
    return function(value)


def _check_lengths(
    structure: SampleStructure, leaves: Sequence[Tensor], name: str
) -> None:
    lengths = [len(leaf) for leaf in leaves if leaf.dim()]
    if len(set(lengths)) <= 1:
        return
    num_inputs, num_targets = structure.num_inputs, structure.targets.num_leaves
    parts = {
        "inputs": lengths[:num_inputs],
        "targets": lengths[num_inputs : num_inputs + num_targets],
        "weights": lengths[num_inputs + num_targets :],
    }
    advice = ""
    if any(p.kind is list and p.num_leaves > _MOST_ARRAYS for p in structure.parts):
        advice = (
            " A list has one array for each input or target; make rows of samples "
            "one array, as with torch.stack, or with "
            "torch.nn.utils.rnn.pad_sequence if they have different lengths."
        )
    counts = [f"{n} {short_list(some)}" for n, some in parts.items() if some]
    raise DataError(
        f"The arrays of `{name}` have different numbers of samples: "
        f"{', '.join(counts)}. Dim 0 must be the same for all.{advice}"
    )


def _from_dataset(dataset: Any, parts_of: Parts, name: str) -> Source:
    num_samples = len(dataset)
    if not num_samples:
        raise DataError(f"`{name}` has no samples.")
    base, rows = arrays_behind(dataset) or (None, None)
    if base is not None:
        stacked = base.stacked if isinstance(base, CachedDataset) else base.tensors
        parts = parts_of(stacked)  # nests as a sample does
        structure = SampleStructure.of(parts)
        leaves = structure.flatten(parts)
        # As float32 only samples that the subset hasn't may be too large.
        if rows is None or all(leaf.dtype != torch.float64 for leaf in leaves):
            where = f"A sample of `{name}`"
            tensors = [checked_tensor(leaf, where) for leaf in leaves]
            return in_memory(tensors, structure, name, rows)
    structure = SampleStructure.of(parts_of(dataset[0]))
    flat = FlatDataset(dataset, parts_of, structure, name)
    flat[0]  # bad samples are refused here, not in the middle of a run
    return Source(structure, num_samples, name, flat)


def _from_samples(
    samples: Any, parts_of: Parts, name: str, num_workers: int, processes: Processes
) -> StreamSource:
    is_own_part = processes.are_several and is_divided(samples, processes, name)
    is_whole_table = getattr(samples, "_distributed", True) is None
    if processes.are_several and is_hugging_face(samples) and is_whole_table:
        # The package is there, as it has made this dataset.
        from datasets.distributed import (  # type: ignore[import-not-found,unused-ignore]
            split_dataset_by_node,
        )

        samples = split_dataset_by_node(samples, processes.index, processes.count)
        is_own_part = True
    if not isinstance(samples, IterableDataset) or num_workers > 1:
        samples = IterableRows(samples, name)
    collate = _Collate(parts_of, name)
    loader = DataLoader(
        samples, _STREAM_ROWS, num_workers=num_workers, collate_fn=collate
    )
    return StreamSource(
        loader, unchanged, name=name, processes=processes, is_own_part=is_own_part
    )


def _from_batches(
    batches: Any, parts_of: Parts, name: str, processes: Processes
) -> StreamSource:
    count, size = length_of(batches), batch_size_of(batches)
    settings: dict[str, Any] = {
        "name": name,
        "num_samples": count,
        "processes": processes,
        "is_own_part": processes.are_several and is_divided(batches, processes, name),
    }
    stream = None
    if processes.are_several and not settings["is_own_part"]:
        before = HostRandomState(generators_of(batches))
        if has_own_indices(batches):
            loading = OwnLoading(batches, processes.index)
            try:
                stream = StreamSource(
                    batches, parts_of, own_loading=loading, **settings
                )
            except RowsAreNoSamplesError:
                before.put_back()
    if stream is None:
        stream = StreamSource(batches, parts_of, **settings)
    stream.batch_size = size or stream.rows_of_first
    if stream.rows_of_first not in (size, count):
        stream.num_samples = None  # a collate function makes rows of its own
    elif not stream.is_own_part and gives_what_it_says(batches):
        stream.num_certain = count
    stream.num_ahead = num_loaded_ahead(batches)
    if stream.is_own_part:  # its loader counts those of one process
        stream.batch_size *= processes.count
        if stream.num_samples is not None:
            stream.num_samples *= processes.count
    return stream


def _from_whole(
    x: FixedSizeBatches, parts_of: Parts, name: str, processes: Processes
) -> WholeSource:
    batches: Any = x.batches
    options = getattr(batches, "options", None)  # None of one without a batch size
    if isinstance(batches, poptorch.DataLoader) and options is not None:
        layout = {
            "device iterations": options.device_iterations,
            "gradient accumulation": options.Training.gradient_accumulation,
            "replicas": options.replication_factor,
        }
        joined = [f"{n} {what}" for what, n in layout.items() if n != 1]
        if joined:
            raise DataError(
                f"The loader of `{name}` joins several micro-batches in a batch: its "
                f"options have {', '.join(joined)}. Make it without options: ipufit "
                "takes the layout from IPUConfig, and joins them itself."
            )
    try:
        count = len(batches)
    except (TypeError, NotImplementedError):  # of stream packing in random order
        count = None
    is_own_part = processes.are_several and is_divided(batches, processes, name)
    stream = WholeSource(
        batches,
        WholeParts(parts_of, x.mask),
        name=name,
        num_samples=count,
        processes=processes,
        is_own_part=is_own_part,
    )
    if isinstance(batches, (list, tuple)):
        stream.num_certain = count
    elif is_own_part and count is not None:  # its loader counts those of one process
        stream.num_samples = count * processes.count
    return stream


@dataclass(frozen=True)
class _Collate:
    """Stacks the samples of an iterable dataset into a batch `(inputs, ...)`."""

    parts_of: Parts
    name: str

    def __call__(self, samples: Sequence[Any]) -> Sequence[Any]:
        structure = SampleStructure.of(self.parts_of(samples[0]))
        rows = FlatDataset(samples, self.parts_of, structure, self.name)
        flat = [rows[index] for index in range(len(rows))]
        leaves = iter([torch.stack(leaf) for leaf in zip(*flat)])
        return [None if s == NOTHING else s.rebuild(leaves) for s in structure.parts]


def _refuse_beside(x: Any, y: Any, sample_weight: Any) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if isinstance(value, (DataLoader, Dataset)):
            raise DataError(
                f"`{name}` is {describe(value)}, beside {describe(x)}. Pass one: that "
                "of the validation is fit(train, validation_data=other), and others "
                "are gone through by an evaluate() of their own."
            )
        if value is not None:
            raise DataError(
                f"`{name}` was given beside {describe(x)}, whose samples contain it "
                "themselves: pass arrays, or samples (input, target, weight)."
            )


def example_of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    inputs_only: bool = False,
    is_whole: bool = False,
    is_spare: bool = False,
    num_workers: int = 0,
    processes: Processes = ALONE,
) -> Source:
    """Make a source to compile for, and read as little data as possible.

    That is the first sample of a dataset, and the first batch of a loader. Random
    states are put back, so that the data begins as it would have without this.

    Args:
        x: As for `as_source`. Tensors on the device "meta" have shapes and types and
            no values.
        y: As for `as_source`.
        sample_weight: As for `as_source`.
        inputs_only: As for `as_source`.
        is_whole: Whether the number of samples counts too.
        is_spare: Whether nobody else goes through the data, so that a generator may
            lose its first batch.
        num_workers: As for `as_source`.
        processes: As for `as_source`.

    Raises:
        DataError: Data that can't be used; or a generator that isn't spare.

    Example:
        >>> source = example_of(torch.empty(8, 3, device="meta"))
        >>> source.first()
        [tensor([0., 0., 0.])]
    """
    is_accessor = isinstance(x, poptorch.AsynchronousDataAccessor)
    if hasattr(x, "__next__") and not (is_accessor or is_spare):
        raise DataError(
            f"`x` is {describe(x)}, which can be gone through once: an example would "
            "take its first batch away. Pass one batch, or tensors of its shapes on "
            'the device "meta".'
        )
    if is_array_like(x):
        x, y, sample_weight = _mapped(_filled, (x, y, sample_weight))
    loading: dict[str, Any] = {"num_workers": num_workers, "processes": processes}
    with HostRandomState(generators_of(x)):
        source = as_source(x, y, sample_weight, inputs_only=inputs_only, **loading)
    if is_whole or isinstance(source, StreamSource):
        return source
    first = Source(source.structure, None, source.name, first=source.first())
    first.batch_size, first.num_certain = source.batch_size, source.num_certain
    first.is_in_memory = source.is_in_memory
    return first


def _filled(value: Any) -> Any:
    """Return zeros for a tensor without values, in the memory of one sample."""
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    if not value.dim():
        return torch.zeros((), dtype=value.dtype)
    return torch.zeros(value.shape[1:], dtype=value.dtype).expand(value.shape)


def fit_sources(
    x: Any,
    y: Any,
    sample_weight: Any,
    validation_split: float,
    validation_data: Any,
    *,
    num_workers: int = 0,
    processes: Processes = ALONE,
    shuffle: bool = False,
) -> tuple[Source, dict[str, Source]]:
    """Make the source that `fit` trains on, and those that it validates on.

    Args:
        x: Training samples in any form that `as_source` takes.
        y: Targets, or names of target columns.
        sample_weight: One number per sample, if `x` is arrays.
        validation_split: Fraction of the samples to validate on; 0 for none. Ignored
            if there is `validation_data`.
        validation_data: Samples of any form, `(x, y)` or `(x, y, sample_weight)`; or
            several such sets by name.
        num_workers: Number of processes that load an `IterableDataset`.
        processes: Processes that divide the samples.
        shuffle: As for `as_source`, in training.

    Returns:
        The training samples; and the sets to validate on by name, `""` for the only
        one. It is empty if there are none.

    Raises:
        DataError: The data can't be used, or can't be split.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(4, 1), torch.zeros(4)
        >>> train, validated = fit_sources(x, y, None, 0.5, None)
        >>> train.num_samples, validated[""].num_samples
        (2, 2)
    """
    if validation_split is not None:
        check_number("validation_split", validation_split, least=0, below=1)
    if validation_data is None and validation_split:
        train, validation = split_validation(x, y, validation_split, sample_weight)
        return train, {"": validation}
    loading: dict[str, Any] = {"num_workers": num_workers, "processes": processes}
    source = as_source(x, y, sample_weight, shuffle=shuffle, **loading)
    loading["columns"] = source.columns
    if validation_data is None:
        return source, {}
    # A loader may allow only one iterator at a time, with processes behind it.
    again = source if isinstance(source, StreamSource) else None
    return source, validation_sources(validation_data, y, x, again, **loading)


def validation_sources(
    validation_data: Any,
    y: Any = None,
    x: Any = None,
    source_of_x: Source | None = None,
    **loading: Any,
) -> dict[str, Source]:
    """Make the sources to validate on.

    Args:
        validation_data: As for `fit_sources`.
        y: Names of target columns, if it has columns.
        x: The training data.
        source_of_x: Its source, if that is to be used again; None for a new one.
        **loading: Arguments for `as_source`.

    Returns:
        The sources by the names of the sets; `""` names the only one.

    Raises:
        DataError: The data can't be used, or it isn't clear whether it is named sets.
    """
    sources = {}
    for key, given in _named_sets(validation_data, x).items():
        name = f"validation_data[{key!r}]" if key else "validation_data"
        if given is x and source_of_x is not None:
            sources[key] = source_of_x
            continue
        if not isinstance(given, (tuple, list)):
            given = (given, y) if column_names(y) else (given,)
        elif len(given) not in (2, 3):
            raise DataError(
                f"`{name}` has {len(given)} parts: pass a dataset, a pair (x, y), or "
                "(x, y, sample_weight)."
            )
        sources[key] = as_source(*given, name=name, **loading)
    return sources


def _named_sets(given: Any, x: Any) -> Mapping[str, Any]:
    """Return the sets to validate on by name; `""` names the only one.

    A mapping has named sets if its values are datasets, loaders or tuples (x, y). If
    its values are arrays, or it has the keys of a training input, it is an input.

    Args:
        given: The validation data.
        x: The training data.

    Raises:
        DataError: Some values could be sets and others couldn't, or a name is none.
    """
    if not isinstance(given, Mapping):
        return {"": given}
    keys = set(x) if isinstance(x, Mapping) else set()

    def is_set(one: Any) -> bool:
        if isinstance(one, Mapping):
            return bool(keys) and set(one) == keys
        is_pair = isinstance(one, (tuple, list)) and len(one) in (2, 3)
        return is_array_like(one[0]) if is_pair else not is_array_like(one)

    unlike = [key for key, one in given.items() if not is_set(one)]
    are_arrays = all(is_array_like(one) for one in given.values())
    if len(unlike) == len(given) or (are_arrays and set(given) == keys):
        return {"": given}
    if unlike:
        one = unlike[0]
        raise DataError(
            f"`validation_data` has sets of samples, and under {one!r} "
            f"{describe(given[one])}: give each set as a dataset, a loader or a tuple "
            "(x, y). If the keys are those of an input, pass (inputs, targets), or a "
            "dataset."
        )
    for name in given:
        if not isinstance(name, str) or not name:
            raise DataError(
                f"`validation_data` has a set with the name {name!r}: use a string "
                "that isn't empty, such as 'test', for metrics called val_test_loss."
            )
    return given


def split_validation(
    x: Any, y: Any, fraction: float, sample_weight: Any = None
) -> tuple[Source, Source]:
    """Split arrays in order: the last samples validate, as in Keras.

    Args:
        x: Arrays of inputs.
        y: Arrays of targets.
        fraction: Fraction of the samples to validate on; between 0 and 1.
        sample_weight: Arrays of weights.

    Returns:
        Training samples, the first `floor(n * (1 - fraction))`, and the rest.

    Raises:
        DataError: The samples aren't in memory, or one part would be empty.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(10, 1), torch.zeros(10)
        >>> [part.num_samples for part in split_validation(x, y, 0.3)]
        [7, 3]
    """
    whole = as_source(x, y, sample_weight)
    if not isinstance(whole.dataset, ArrayDataset) or whole.dataset.rows is not None:
        raise DataError(
            f"validation_split={fraction!r} needs arrays, and `x` is {describe(x)}. "
            "Split it with torch.utils.data.random_split and pass validation_data, or "
            "hold it in memory as ipufit.CachedDataset."
        )
    count = len(whole.dataset)
    at = num_trained_on(count, fraction)
    if not at:
        raise DataError(
            f"validation_split={fraction} of {count} samples leaves {at} "
            "for training: use a fraction between 0 and 1 that leaves some to each."
        )
    tensors = whole.dataset.tensors
    parts = ([t[:at] for t in tensors], [t[at:] for t in tensors])
    train, validation = (
        Source(whole.structure, len(part[0]), dataset=ArrayDataset(part))
        for part in parts
    )
    train.columns = whole.columns
    return train, validation


def num_trained_on(count: int, fraction: float) -> int:
    """Count the samples that `validation_split` leaves for training.

    Example:
        >>> num_trained_on(10, 0.25)
        7
    """
    return int(count * (1.0 - fraction)) if 0 < fraction < 1 else 0


_DISTINCT = 64
_RANGES = {torch.uint8: (0, 256), torch.bool: (0, 2)}


def generated_like(source: Source, n: int) -> Source:
    """Draw random inputs of the shapes and types that a source has.

    Whole numbers are drawn from the range of the first sample's. Targets and weights
    are those of the first sample: random ones may be none, as a class, a probability or
    a weight must be in its range.

    Args:
        source: The others; its first sample counts.
        n: Number of samples. The first 64 are drawn, and come again.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for place, leaf in enumerate(source.first()):
        example = as_tensor(leaf, source.name)
        if place >= source.structure.num_inputs:
            tensors.append(torch.stack([example] * n))
            continue
        shape, dtype = (min(n, _DISTINCT), *example.shape), example.dtype
        if dtype.is_floating_point:
            drawn = torch.randn(shape, generator=generator)
        else:
            values = [0, *example.reshape(-1).tolist()]
            least, bound = _RANGES.get(dtype, (min(values), max(values) + 1))
            drawn = torch.randint(least, bound, shape, generator=generator)
        tensors.append(drawn.to(dtype)[torch.arange(n) % len(drawn)])
    return in_memory(tensors, source.structure, source.name)


_SAMPLERS = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def is_array_like(x: Any) -> bool:
    """Check whether `x` is an array, a frame, a sparse matrix, or these nested."""
    return (
        isinstance(x, (Tensor, np.ndarray))
        or is_frame(x)
        or is_sparse(x)
        or (isinstance(x, (tuple, list, Mapping)) and len(x) > 0)
    )


def is_indexed(x: Any) -> bool:
    """Check whether `x` is a dataset whose samples are taken by index."""
    if isinstance(x, (IterableDataset, DataLoader)):
        return False
    is_dataset = isinstance(x, Dataset) or is_hugging_face(x)
    return is_dataset and hasattr(x, "__len__") and hasattr(x, "__getitem__")


def is_stream(x: Any) -> bool:
    """Check whether `x` is an iterable, but no collection of arrays."""
    return isinstance(x, Iterable) and not isinstance(
        x, (str, bytes, set, frozenset, tuple, list, Mapping)
    )


def batch_size_of(x: Any) -> int | None:
    """Return the batch size of the user's loader: the samples of one update."""
    if isinstance(x, poptorch.DataLoader):
        combined = x.combinedBatchSize
        return None if combined is None else combined // x.options.device_iterations
    size = getattr(x, "batch_size", None)
    return size if isinstance(size, int) else None


def length_of(x: Any) -> int | None:
    """Return the number of samples that a torch loader will give; None if unknown."""
    if not isinstance(x, DataLoader) or isinstance(x.dataset, IterableDataset):
        return None
    kind = type(x.batch_sampler)
    is_known = kind is BatchSampler or kind.__module__.startswith("torchdata.")
    if x.batch_size is None or not is_known:
        return None  # a sampler of batches needn't give all of one size
    if isinstance(x, poptorch.DataLoader) or not hasattr(x.sampler, "__len__"):
        return None
    sampler: Any = x.sampler
    count = len(sampler)
    return count - count % x.batch_size if x.drop_last else count


def gives_what_it_says(x: Any) -> bool:
    """Check whether the number that `length_of` gives of a loader is certain.

    It isn't where code of the user's may give more or fewer samples: a collate function
    that leaves some out, a sampler, or a loader of another class.

    Example:
        >>> loader = DataLoader(range(8), batch_size=4)
        >>> gives_what_it_says(loader)
        True
        >>> loader.collate_fn = list
        >>> gives_what_it_says(loader)
        False
    """
    return (
        type(x) is DataLoader
        and type(x.sampler) in _SAMPLERS
        and x.collate_fn is default_collate
    )


def num_loaded_ahead(x: Any) -> int | None:
    """Count the samples that a loader's workers load ahead; None without workers.

    Example:
        >>> loader = DataLoader([1], batch_size=4, num_workers=1, prefetch_factor=5)
        >>> num_loaded_ahead(loader)
        20
        >>> num_loaded_ahead(DataLoader(range(8), batch_size=4))
    """
    if not isinstance(x, DataLoader) or not x.num_workers:
        return None
    return (x.prefetch_factor or 2) * x.num_workers * (x.batch_size or 1)


def describe(x: Any) -> str:
    """Name the type of `x` for error messages.

    Example:
        >>> describe(3), describe(np.zeros(1))
        ('a int', 'a numpy.ndarray')
    """
    return f"a {type(x).__module__}.{type(x).__qualname__}".replace("builtins.", "")
