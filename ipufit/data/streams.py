# SPDX-License-Identifier: Apache-2.0
"""Samples that come in blocks, and their division between processes."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ipufit._poptorch import poptorch
from ipufit.distributed import Processes
from ipufit.errors import DataError, WholeStreamWarning, warn
from ipufit.types import Batch

from .datasets import ALONE, Source, is_hugging_face
from .random_state import (
    HostRandomState,
    RandomState,
    mixed,
    random_state,
    seed_all,
    set_random_state,
)
from .structure import NOTHING, SampleStructure, same_rows

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
        before = HostRandomState()
        try:
            workers = min(self._loader.num_workers, 1)
            return next(iter(self._like_the_users([indices], workers)))
        finally:
            before.put_back()

    def load(self, groups: Iterator[list[Any]]) -> Iterator[Any]:
        """Load batches as the user's loader does, one for each group of indices.

        Transforms have random numbers of their own. So other random numbers, such as
        the order of the samples, are equal in all processes.
        """
        if self._loader.num_workers:
            yield from self._like_the_users(groups, self._loader.num_workers)
            return
        for number, group in enumerate(groups):
            before = HostRandomState()
            seed_all(mixed(self._seed, self._index, number))
            try:
                batch = next(iter(self._like_the_users([group], 0)))
            finally:
                before.put_back()
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

    def _take_first(self, batch: Any) -> Batch:
        """Set the structure of samples, and return the first block of a pass."""
        loading = self.own_loading
        parts = self._parts_of(batch if loading is None else loading.peek(batch[:1]))
        self.structure = SampleStructure.of(parts)
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
                digest.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy())
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

    def blocks(self) -> Pass | Iterator[Batch]:
        """Return the blocks of the next pass."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return begun
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

    def _flatten(self, parts: Sequence[Any]) -> Batch:
        where = f"A batch of `{self.name}`"
        return same_rows(self.structure.flatten_like("the first", parts, where), where)

    def block_of(self, batch: Any) -> Batch:
        """Flatten a batch, which must look like the first.

        Raises:
            DataError: It doesn't.
        """
        block = self._flatten(self._parts_of(batch))
        for leaf, first in zip(block, self._first):
            if leaf.shape[1:] != first.shape or leaf.dtype != first.dtype:
                raise DataError(
                    f"A batch of `{self.name}` has samples of {leaf.dtype} and shape "
                    f"{tuple(leaf.shape[1:])}, and the first had {first.dtype} and "
                    f"{tuple(first.shape)}. The shapes of a compiled model are fixed: "
                    "pad or crop samples to one shape."
                )
        return block
