# SPDX-License-Identifier: Apache-2.0
"""Samples that come in blocks, one block after the other."""

from __future__ import annotations

import abc
import base64
import hashlib
import json
import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ipufit._poptorch import poptorch
from ipufit.distributed import Processes, times_asked
from ipufit.errors import DataError, WholeStreamWarning

from .datasets import ArrayDataset, is_hugging_face
from .random_state import (
    HostRandomState,
    RandomState,
    mixed,
    random_state,
    seed_all,
    set_random_state,
)
from .structure import NOTHING, SampleStructure, check_integers, same_rows
from .workers import carried

_TAG = "$"


class LoaderState(NamedTuple):
    """The state of a loader, and what was drawn of it and isn't trained on yet.

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
        """Whether a pass has ended, and the next hasn't begun."""
        return self.has_ended and not self.rows


def is_stateful(loader: Any) -> bool:
    """Whether a loader gives its state and takes one, as torchdata's protocol has it.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> is_stateful(DataLoader([1, 2]))
        False
    """
    return all(
        callable(getattr(loader, name, None))
        for name in ("state_dict", "load_state_dict")
    )


def load_state(loader: Any, kept: LoaderState, name: str) -> None:
    """Have a loader go on from a state, in the next pass over it.

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
    """A state as tensors, which a checkpoint can hold.

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
    """The state that `packed` made tensors of; None if there are none.

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
    """A value as JSON knows it; what JSON doesn't know is tagged.

    Args:
        value: Part of a state.
        tensors: Gets the tensors and arrays.
        where: The part, for messages.

    Raises:
        DataError: The value is of another type.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [_encoded(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if type(value) is list else {_TAG: "tuple", "items": items}
    if isinstance(value, dict):
        pairs = [
            [_encoded(key, tensors, where), _encoded(v, tensors, f"{where}[{key!r}]")]
            for key, v in value.items()
        ]
        return {_TAG: "dict", "items": pairs}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "items": base64.b64encode(value).decode()}
    if isinstance(value, (Tensor, np.ndarray, np.number, np.bool_)):
        name = str(len(tensors))
        tensors[name] = torch.as_tensor(value).detach().cpu().clone()
        kinds = {Tensor: "tensor", np.ndarray: "array"}
        kind = next((k for t, k in kinds.items() if isinstance(value, t)), "scalar")
        return {_TAG: kind, "items": name}
    raise DataError(
        f"`x` keeps a state, so that a run can be resumed, and {where} in it is a "
        f"{type(value).__name__}, which no checkpoint can hold. Use numbers, text, "
        "bytes, tensors and arrays, in lists, tuples and dicts."
    )


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    kind, items = value[_TAG], value["items"]
    if kind == "tuple":
        return tuple(_decoded(one, tensors) for one in items)
    if kind == "dict":
        pairs = [(_decoded(k, tensors), _decoded(v, tensors)) for k, v in items]
        return dict(pairs)
    if kind == "bytes":
        return base64.b64decode(items)
    tensor = tensors[f"state/{items}"]
    if kind == "tensor":
        return tensor.clone()
    return tensor.numpy().copy() if kind == "array" else tensor.numpy()[()]


class Replay(NamedTuple):
    """The state of a pass, with which the same blocks can be drawn again.

    Samplers and transforms draw random numbers, and so may others between two blocks.
    Blocks before the last one are drawn again only to be dropped, so that their order
    and the random state before the last block are all that matters.

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
        iterable: Gives batches.
        block_of: Makes a block of a batch.
        generators: Random generators, besides the global ones, that the iterable
            draws from.
        replay: State of the pass to repeat; None for a new pass.
        kept: State that the iterable goes on from, so that nothing is repeated; None to
            begin, or to repeat.
        is_stateful: Whether the iterable keeps a state, for which rows are kept.

    Attributes:
        iterator: Iterator over the batches.
        first: A block that was drawn already and is given out first, or None.
        last: The block that was given out last; None if none is to be kept.
        num_rows: Number of rows that were given out, if a state is kept.

    Example:
        >>> list(Pass([1, 2], lambda batch: [torch.tensor(batch)]))
        [[tensor(1)], [tensor(2)]]
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
        self.iterator: Iterator[Any] = carried(() if self._has_ended else iterable)
        self.first: list[Tensor] | None = None
        self.last: list[Tensor] | None = None
        self._is_stateful = is_stateful
        self.num_rows = 0
        if kept is not None:
            self.last = kept.rows
            self.num_rows = kept.num_drawn - kept.num_left
            if kept.num_left:
                self.first = [leaf[-kept.num_left :] for leaf in kept.rows]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def __next__(self) -> list[Tensor]:
        block, self.first = self.first, None
        if block is None:
            block = self._block_of(self.draw())
        if self._is_stateful:
            self.num_rows += len(block[0])
            self.last = block
        return block

    def draw(self) -> Any:
        """The next batch, as the iterable gives it."""
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
        """The state with which the blocks drawn so far can be drawn again."""
        start, last = self._at_start.tensors(), self._at_last.tensors()
        if self._before is None:
            return Replay(self._num_blocks, start, last)
        drawn = self._before.num_blocks
        at_last = last if self._num_blocks else self._before.at_last
        return Replay(drawn + self._num_blocks, self._before.at_start, at_last)

    def kept(self, state: Any, num_given: int) -> LoaderState:
        """The state from which the pass goes on without drawing anything again.

        Args:
            state: The state of the iterable now.
            num_given: Number of rows that calls have taken.
        """
        left = max(0, self.num_rows - num_given)
        rows = [leaf[-max(left, 1) :].clone() for leaf in self.last or ()]
        return LoaderState(state, rows, left, self.num_rows, self._has_ended)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a torch loader and its samplers were given, each once.

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


_WEBDATASET_RULES = {"split_by_node", "ResampledShards", "ResampledShardList"}
"""Stages of WebDataset's pipelines that give each process shards of its own."""


def is_own_part_of(stream: Any, processes: Processes, name: str) -> bool:
    """Whether a stream is known to give each process samples of its own.

    Args:
        stream: An iterable of samples or batches.
        processes: All processes; more than one.
        name: Name of the data in error messages.

    Raises:
        DataError: It is divided between another number of processes.
    """
    if isinstance(stream, poptorch.DataLoader):
        _check_count(_processes_of(stream, processes), processes, name)
        if _is_partitioned(stream):
            return True
    if isinstance(stream, DataLoader):
        sampler = _dividing_sampler(stream)
        if sampler is not None:
            _check_count(sampler.num_replicas, processes, name)
            if getattr(sampler, "rank", processes.index) != processes.index:
                raise DataError(
                    f"The sampler of `{name}` gives the samples of process "
                    f"{sampler.rank}, and this is process {processes.index}: pass "
                    "rank=ipufit.distributed.get_process_info().index to it."
                )
            return True
        return is_own_part_of(stream.dataset, processes, name)
    stages = getattr(stream, "pipeline", None)
    if isinstance(stages, (list, tuple)):  # WebDataset's
        return any(
            getattr(stage, "__name__", type(stage).__name__) in _WEBDATASET_RULES
            or (hasattr(stage, "__iter__") and is_own_part_of(stage, processes, name))
            for stage in stages
        )
    divided = getattr(stream, "_distributed", None)
    if is_hugging_face(stream) and divided is not None:
        _check_count(getattr(divided, "world_size", processes.count), processes, name)
        return True
    return False


def may_divide_unseen(stream: Any) -> bool:
    """Whether a stream may be divided by a dataset that we can't see asking.

    PopTorch's loader leaves it to an iterable dataset to divide itself, which may ask
    in another process that loads.
    """
    is_of_poptorch = isinstance(stream, poptorch.DataLoader)
    return is_of_poptorch and isinstance(stream.dataset, IterableDataset)


def divided_by_its_rule(samples: Any, processes: Processes) -> Any:
    """An iterable dataset of samples, divided if its kind has a rule that we apply.

    That is Hugging Face's `split_dataset_by_node`. Any other dataset is returned as
    it is, and so is one that was divided before.
    """
    is_whole = getattr(samples, "_distributed", True) is None
    if not processes.are_several or not is_hugging_face(samples) or not is_whole:
        return samples
    # The package is there, as it has made this dataset.
    from datasets.distributed import (  # type: ignore[import-not-found,unused-ignore]
        split_dataset_by_node,
    )

    return split_dataset_by_node(samples, processes.index, processes.count)


def has_own_indices(loader: Any) -> bool:
    """Whether a loader takes samples by index, and loads as torch's does.

    Args:
        loader: The user's loader, or another iterable.
    """
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


def _dividing_sampler(loader: Any) -> Any:
    """The sampler of a loader that divides indices between processes, if any."""
    batches = loader.batch_sampler
    for one in (loader.sampler, batches, getattr(batches, "sampler", None)):
        if getattr(one, "num_replicas", 1) != 1:
            return one
    return None


def _is_partitioned(loader: Any) -> bool:
    """Whether PopTorch's loader has put a dataset of its own around the user's.

    It does so for several processes, but not with auto_distributed_partitioning=False.
    """
    module = poptorch.DataLoader.__module__
    package = module.rpartition(".")[0] or module
    return f"{type(loader.dataset).__module__}.".startswith(f"{package}.")


def _processes_of(loader: Any, processes: Processes) -> int:
    options = getattr(loader, "_options", None) or getattr(loader, "options", None)
    if options is None:
        return processes.count
    return int(options.Distributed.numProcesses)


def _check_count(count: int, processes: Processes, name: str) -> None:
    if count == processes.count:
        return
    raise DataError(
        f"`{name}` is divided between {count} processes, and there are "
        f"{processes.count}. Make its loader with the options of a config in that "
        "process, or a DistributedSampler with num_replicas=ipufit.distributed."
        "get_process_info().count; or pass the dataset, which ipufit divides itself."
    )


ALONE = Processes()

Block = List[Tensor]
"""Stacked samples: the leaves of a structure, with dim 0 counting rows."""


class Source(abc.ABC):
    """Samples of one structure.

    Args:
        structure: How a sample nests.
        num_samples: Number of samples; None if unknown.
        name: Name of the data in error messages.

    Attributes:
        batch_size: Batch size of the user's own loader; None if there is none.
        dataset: Map-style dataset of the samples; None for a stream.
        generators: Random generators that the user's own loader draws from.
        is_one_shot: Whether the samples can be gone through only once.
        num_certain: Number of samples of a pass, if it is certain; None else. An
            example has that of its data.
        num_ahead: Number of samples that workers of the user's own loader load ahead;
            None without such.
    """

    def __init__(
        self, structure: SampleStructure, num_samples: int | None, name: str = "x"
    ) -> None:
        self.structure = structure
        self.num_samples = num_samples
        self.name = name
        self.batch_size: int | None = None
        self.dataset: Any = None
        self.generators: Sequence[torch.Generator] = ()
        self.is_one_shot = False
        self.num_certain: int | None = None
        self.num_ahead: int | None = None

    @property
    def is_in_memory(self) -> bool:
        """Whether the samples are arrays, of which any number is there at once."""
        return isinstance(self.dataset, ArrayDataset)

    @abc.abstractmethod
    def first(self) -> list[Tensor]:
        """The leaves of the first sample."""

    def require_targets(self, name: str, purpose: str) -> None:
        """Refuse samples without targets.

        Raises:
            DataError: Samples have no targets, or targets or weights are no numbers.
        """
        targets, weights = self.structure.targets, self.structure.weights
        if not weights.num_leaves and weights != NOTHING:
            raise DataError(
                f"The sample weights of `{name}` are no numbers: the first is "
                f"{weights.rebuild([])!r}."
            )
        if not targets.num_leaves and targets != NOTHING:
            raise DataError(
                f"The targets of `{name}` are no numbers: the first is "
                f"{targets.rebuild([])!r}. Encode them as numbers."
            )
        if not targets.num_leaves:
            raise DataError(
                f"`{name}` has no targets to {purpose} with: pass y, or a dataset of "
                "pairs (input, target)."
            )

    def example(self, rows: int, *, inputs_only: bool = False) -> list[Tensor]:
        """A batch that holds the first sample `rows` times, in shared memory."""
        leaves = self.first()
        if inputs_only:
            leaves = leaves[: self.structure.num_inputs]
        return [leaf.expand(rows, *leaf.shape) for leaf in leaves]

    def check(self, batch: Sequence[Tensor], sample_of: Callable[[int], int]) -> None:
        """Refuse numbers that an IPU can't hold; arrays were checked when they came.

        Args:
            batch: Tensors of a call.
            sample_of: Gives the index of the sample in a row of the batch.

        Raises:
            DataError: An integer needs more than 32 bits.
        """
        if not isinstance(self.dataset, ArrayDataset):
            check_integers(batch, self.structure, self.name, sample_of)


class IndexedSource(Source):
    """Samples of a map-style dataset.

    Args:
        dataset: Items are flat tuples: the leaves of `structure`.
        structure: How the leaves nest.
        num_samples: Number of samples.
        name: Name of the data in error messages.
    """

    num_samples: int

    def __init__(
        self,
        dataset: Any,
        structure: SampleStructure,
        num_samples: int,
        name: str = "x",
    ) -> None:
        super().__init__(structure, num_samples, name)
        self.dataset = dataset
        self.num_certain = num_samples
        self._first: list[Tensor] = []

    def first(self) -> list[Tensor]:
        """The leaves of the first sample, which is read once."""
        if not self._first:
            self._first = list(self.dataset[0])
        return list(self._first)


class RowsAreNoSamplesError(Exception):
    """A loader makes rows of its own, not one of each index."""


class StreamSource(Source):
    """Samples that come in blocks, one block after the other.

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
        is_own_part: Whether the stream gives samples of this process only; None to
            have it asked.
        own_loading: The stream's indices, and what loads samples of them, in the place
            of `blocks`; None if it isn't taken apart.

    Raises:
        DataError: The stream is empty, its first batch can't be used, or it isn't the
            same in all processes.

    Attributes:
        rows_of_first: Number of samples in the first block.
        is_own_part: Whether the stream gives samples of this process only.
        is_stateful: Whether the stream keeps a state, from which it can go on.
    """

    is_own_part = False

    def __init__(
        self,
        blocks: Iterable[Any],
        parts_of: Callable[[Any], Sequence[Any]],
        *,
        name: str,
        num_samples: int | None = None,
        processes: Processes = ALONE,
        is_own_part: bool | None = None,
        own_loading: OwnLoading | None = None,
    ) -> None:
        # What samples look like is known when the first are drawn.
        super().__init__(SampleStructure(NOTHING), num_samples, name)
        self._iterable = blocks if own_loading is None else own_loading
        self._parts_of = parts_of
        self._replay: Replay | None = None
        self._kept: LoaderState | None = None
        self.is_stateful = own_loading is None and is_stateful(blocks)
        self._processes = processes
        self.own_loading = own_loading
        self.generators = generators_of(blocks)
        self._first: list[Tensor] = []
        self.rows_of_first = 0
        times = times_asked()
        begun = self._new_pass()
        # PopTorch's accessor is its own iterator, but begins anew.
        is_accessor = isinstance(blocks, poptorch.AsynchronousDataAccessor)
        self.is_one_shot = begun.iterator is blocks and not is_accessor
        try:
            batch = begun.draw()
        except StopIteration:
            batch = None
        else:
            begun.first = self._take_first(batch)
        if processes.are_several:
            has_asked = times_asked() > times or getattr(batch, "has_asked", False)
            self.is_own_part = self._agree(has_asked, is_own_part, begun.first)
        elif not self._first:
            raise DataError(f"`{name}` has no samples.")
        self._begun: Pass | None = begun

    def _take_first(self, batch: Any) -> Block:
        """See what samples look like, and return the block that a pass gives first."""
        loading = self.own_loading
        given = batch if loading is None else loading.peek(batch[:1])
        parts = self._parts_of(given)
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

    def _agree(self, has_asked: bool, is_own: bool | None, first: Any) -> bool:
        """Whether this process gets samples of its own, as all processes see it.

        Raises:
            DataError: There are no samples; or the processes get other samples, and
                nothing says that these are their parts.
        """
        seen = (has_asked, _digest(first), self.structure, len(self._first))
        all_seen = self._processes.gathered(seen)
        filled = [other for other in all_seen if other[-1]]
        if not filled:
            raise DataError(f"`{self.name}` has no samples.")
        are_same = len({digest for _, digest, *_ in all_seen}) == 1
        has_asked = any(asked for asked, *_ in all_seen)
        if not are_same and may_divide_unseen(self._iterable):
            is_own = True
        if is_own or has_asked:
            if len(filled) < len(all_seen):
                firsts = self._processes.gathered(self._first)
                self.structure = filled[0][2]
                self._first = self._first or next(one for one in firsts if one)
                self.rows_of_first = self.rows_of_first or 1
            elif are_same and not is_own and self._processes.is_first:
                warnings.warn(
                    f"`{self.name}` asks for the number of its process, and begins "
                    f"with the same samples in all {self._processes.count}. If they "
                    "all read the same, each sample counts several times: give each "
                    "process a part, or don't ask.",
                    WholeStreamWarning,
                    stacklevel=2,
                )
            return True
        if not are_same:
            raise DataError(
                f"`{self.name}` begins with other samples in one process than in "
                "another. If it gives each of them a part, have it ask ipufit."
                "distributed.get_process_info() in __iter__ for the number of the "
                "process; otherwise have it shuffle with the same seed everywhere."
            )
        if self._processes.is_first and self.own_loading is None:
            warnings.warn(
                f"Each of the {self._processes.count} processes reads all of "
                f"`{self.name}` and keeps its share of every batch. Have the dataset "
                "give each process a part, by ipufit.distributed.get_process_info() in "
                "__iter__; or pass a dataset with __getitem__, which is read only "
                "where its samples are used.",
                WholeStreamWarning,
                stacklevel=2,
            )
        return False

    def first(self) -> list[Tensor]:
        """The leaves of the first sample."""
        return list(self._first)

    @property
    def is_spent(self) -> bool:
        """Whether the samples were given out and can't come again."""
        return self.is_one_shot and self._begun is None

    def first_pass(self) -> Replay | None:
        """The state of the first pass, if none of it was given out yet."""
        return None if self._begun is None else self._begun.replay()

    def loader_state(self) -> Any:
        """The state of a stream that keeps one."""
        loader: Any = self._iterable
        return loader.state_dict()

    def go_on(
        self, replay: Replay | None, *, is_due: bool, kept: LoaderState | None = None
    ) -> None:
        """Have the next pass go on where that of an interrupted run was.

        It is repeated, unless the stream keeps a state. A generator can't begin anew,
        and stays as it is.

        Args:
            replay: State of the interrupted pass; None if none had begun.
            is_due: Whether that was the first pass, of which nothing was given out:
                its first block is drawn now.
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
            return
        if is_due and replay is not None:
            self._begun = self._new_pass()
            self._begun.first = next(self._begun)

    def blocks(self) -> Pass | Iterator[Block]:
        """All blocks, from the beginning if the stream can begin anew."""
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
        block_of = self.block_of if self.own_loading is None else list
        return Pass(
            self._iterable,
            block_of,
            self.generators,
            replay,
            kept,
            is_stateful=self.is_stateful,
        )

    def _flatten(self, parts: Sequence[Any]) -> Block:
        where = f"A batch of `{self.name}`"
        return same_rows(self.structure.flatten_like("the first", parts, where), where)

    def block_of(self, batch: Any) -> Block:
        """The block of a batch, which must look like the first.

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


def _digest(first: Any) -> str:
    """A text that tells a block, or a list of indices, from others."""
    digest = hashlib.sha256()
    for leaf in first or ():
        if isinstance(leaf, Tensor):
            digest.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
