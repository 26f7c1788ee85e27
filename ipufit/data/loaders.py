# SPDX-License-Identifier: Apache-2.0
"""Loaders and iterables of users: their settings, division, and batches."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    _utils,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from ipufit._poptorch import custom_parser, poptorch
from ipufit.distributed import Processes
from ipufit.errors import DataError, suggesting_constructor

from .arrays import as_tensor, without_columns
from .datasets import Parts, is_hugging_face
from .random_state import HostRandomState, hash_seed, seed_all

_SAMPLERS = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_MOST_OBJECTS = 10_000
"""Largest number of objects of a dataset whose attributes are compared."""

_NOTED_BY_TORCH = {"_IterableDataset_len_called", "_iterator"}
"""Attributes that torch's loader changes while it loads."""


def describe(x: Any) -> str:
    """Name the type of `x` for error messages.

    Example:
        >>> describe(3), describe(torch.zeros(1))
        ('a int', 'a torch.Tensor')
    """
    return f"a {type(x).__module__}.{type(x).__qualname__}".replace("builtins.", "")


def batch_size_of(x: Any) -> int | None:
    """Return the batch size of the user's loader: the samples of one update."""
    if isinstance(x, poptorch.DataLoader):
        combined = x.combinedBatchSize
        return None if combined is None else combined // x.options.device_iterations
    size = getattr(x, "batch_size", None)
    return size if isinstance(size, int) else None


def length_of(x: Any) -> int | None:
    """Return the number of samples of a torch loader; None if it is unknown."""
    if not isinstance(x, DataLoader) or isinstance(x.dataset, IterableDataset):
        return None
    kind = type(x.batch_sampler)
    is_known = kind is BatchSampler or kind.__module__.startswith("torchdata.")
    if x.batch_size is None or not is_known:
        return None  # batches of a batch sampler may differ in size
    if isinstance(x, poptorch.DataLoader) or not hasattr(x.sampler, "__len__"):
        return None
    sampler: Any = x.sampler
    count = len(sampler)
    return count - count % x.batch_size if x.drop_last else count


def gives_what_it_says(x: Any) -> bool:
    """Return whether the number of samples that `length_of` returns is certain.

    It isn't certain if the user's code may return more or fewer samples: a collate
    function that leaves some out, a sampler, or a loader of another class.

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


def generators_of(loader: Any) -> list[torch.Generator]:
    """List the generators that a torch loader and its samplers were given.

    Args:
        loader: Any iterable. The list is empty unless it is a torch loader.

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
    generators = [getattr(owner, "generator", None) for owner in owners]
    unique = {id(g): g for g in generators if isinstance(g, torch.Generator)}
    return list(unique.values())


def plain_values(data: Any) -> list[str]:
    """List the numbers and strings in attributes of a loader, sampler and dataset."""
    values: list[str] = []
    seen: set[int] = set()
    due = [data]
    while due and len(seen) < _MOST_OBJECTS:
        owner = due.pop()
        if id(owner) in seen or isinstance(owner, (type, ModuleType)):
            continue
        seen.add(id(owner))
        for name, value in list(getattr(owner, "__dict__", {}).items()):
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


def is_divided(stream: Any, processes: Processes, name: str) -> bool:
    """Return whether a stream has different samples in each process.

    The attribute `is_divided` of the stream, or of its dataset, decides. Without the
    attribute it is true for loaders with a dividing sampler, PopTorch's partitioned
    loaders, and datasets of Hugging Face and WebDataset that are split by node.

    Args:
        stream: An iterable of samples or batches.
        processes: All processes; a single process has all samples.
        name: Name of the data in error messages.

    Raises:
        DataError: The stream is divided between another number of processes.
    """
    if not processes.are_several:
        return False
    said = getattr(stream, "is_divided", None)
    if said is not None:
        return bool(said)
    if isinstance(stream, poptorch.DataLoader):
        options = getattr(stream, "options", None)
        if options is not None:
            count = int(options.Distributed.numProcesses)
            _check_count(count, processes, name)
        # PopTorch has wrapped the user's dataset in its own.
        module = poptorch.DataLoader.__module__
        package = module.rpartition(".")[0] or module
        if f"{type(stream.dataset).__module__}.".startswith(f"{package}."):
            return True
    if isinstance(stream, DataLoader):
        batches = stream.batch_sampler
        for sampler in (stream.sampler, batches, getattr(batches, "sampler", None)):
            if getattr(sampler, "num_replicas", 1) == 1:
                continue
            _check_count(sampler.num_replicas, processes, name)  # type: ignore[union-attr]
            rank = getattr(sampler, "rank", processes.index)
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


def loads_by_index(loader: Any) -> bool:
    """Return whether a loader takes samples by index, and loads like torch's."""
    if not isinstance(loader, DataLoader) or isinstance(loader, poptorch.DataLoader):
        return False
    kind: Any = type(loader)
    batches: Any = loader.batch_sampler
    return (
        kind.__iter__ is DataLoader.__iter__
        and kind._get_iterator is DataLoader._get_iterator
        and batches is not None
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(batches, "__next__")  # an iterator can be used only once
    )


class DividedLoader:
    """Iterates over all indices of the user's loader, and loads those of one process.

    Every process iterates over all indices, with the same random numbers, and loads
    only the samples that belong to it.

    Args:
        loader: The user's loader of a map-style dataset.
        index: Index of this process.
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
        """Load the batch of some indices, and restore the random states.

        If the user's loader has workers, the batch is loaded in a worker too, because a
        dataset may open files there that processes can't share.
        """
        with HostRandomState():
            workers = min(self._loader.num_workers, 1)
            return next(iter(self._copied_loader([indices], workers)))

    def load(self, groups: Iterator[list[Any]]) -> Iterator[Any]:
        """Load batches as the user's loader does, one for each group of indices.

        Transforms draw from separate random numbers. So other random numbers, such as
        the order of the samples, are equal in all processes.
        """
        if self._loader.num_workers:
            yield from self._copied_loader(groups, self._loader.num_workers)
            return
        for number, group in enumerate(groups):
            with HostRandomState():
                seed_all(hash_seed(self._seed, self._index, number))
                batch = next(iter(self._copied_loader([group], 0)))
            yield batch

    def _copied_loader(self, batch_sampler: Any, num_workers: int) -> Any:
        """Return a loader like the user's, with other indices."""
        users = self._loader
        names = ["collate_fn", "pin_memory", "pin_memory_device", "timeout"]
        names += ["worker_init_fn"]
        if num_workers:
            names += ["multiprocessing_context", "prefetch_factor"]
        generator = torch.Generator().manual_seed(hash_seed(self._seed, self._index))
        return DataLoader(
            users.dataset,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            generator=generator,
            **{name: getattr(users, name) for name in names if hasattr(users, name)},
        )


@dataclass(frozen=True, eq=False)
class IterableRows(IterableDataset):  # type: ignore[type-arg]
    """A dataset of an iterable of samples that several workers may load.

    Each worker has a copy of the dataset. A dataset that calls
    `torch.utils.data.get_worker_info()` before its first sample is assumed to
    divide itself. From any other dataset, each of n workers takes every n-th sample.

    Args:
        rows: Iterable of samples, which can be iterated over several times.
        name: Name of the data in error messages.
    """

    rows: Iterable[Any]
    name: str = "x"

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of this worker."""
        info: Any = get_worker_info()
        if info is None or info.num_workers == 1:
            yield from self.rows
            return
        worker: Any = _utils.worker
        noting = _WorkerInfoSpy(info, self.rows)
        worker._worker_info = noting
        try:
            is_divided = None
            for number, sample in enumerate(self.rows):
                has_asked = noting.has_asked
                if is_divided is None:
                    is_divided = has_asked
                elif is_divided != has_asked:
                    raise DataError(
                        f"`{self.name}` asks get_worker_info() which process loads it "
                        "only after its first sample, when samples are divided "
                        "already. Ask at the beginning of __iter__."
                    )
                if is_divided or number % info.num_workers == info.id:
                    yield sample
        finally:
            worker._worker_info = info


class _WorkerInfoSpy:
    """Records whether a dataset reads the index or the number of workers."""

    def __init__(self, info: Any, dataset: Any) -> None:
        self._info = info
        self.dataset = dataset
        self.has_asked = False

    def __getattr__(self, name: str) -> Any:
        self.has_asked = self.has_asked or name in ("id", "num_workers")
        return getattr(self._info, name)


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
        dataset: The `PyDataset`, which returns each batch by its index.
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
        """Call the dataset's hook; a pass that has begun already starts again."""
        begin = getattr(self.dataset, "on_epoch_begin", None)
        if begin is not None and begin.__module__.partition(".")[0] != "keras":
            begin()
            self.num_begun += 1  # which `plain_values` sees

    def end_epoch(self) -> None:
        """Call the dataset's hook."""
        if hasattr(self.dataset, "on_epoch_end"):
            self.dataset.on_epoch_end()


@suggesting_constructor
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
        DataError: `batches` must be an iterable, and `mask` a name or a function.

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
                f"FixedSizeBatches got {describe(batches)}, which isn't an iterable of "
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
        if names and custom_parser(inputs) is not None:  # keeps targets in inputs
            named = {name: _entry(inputs, name, where) for name in names}
            parts = (inputs, named[names[0]] if self.parts_of.is_single else named)
            parts = parts[:1] if self.parts_of.inputs_only else parts
        else:
            parts = self.parts_of((inputs, *rest) if is_tuple else inputs)
        return [*(*parts, None, None)[:3], mask.ne(0).to(torch.float32)]


def _entry(inputs: Any, name: str, where: str) -> Any:
    """Return an entry of a mapping, or an attribute of another object."""
    if isinstance(inputs, Mapping):
        entry, known = inputs.get(name), f". It has: {', '.join(map(str, inputs))}"
    else:
        entry, known = getattr(inputs, name, None), f": it is {describe(inputs)}"
    if entry is None:
        raise DataError(f"{where} has no {name!r}{known}.")
    return entry
