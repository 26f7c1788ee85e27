# SPDX-License-Identifier: Apache-2.0
"""How a stream is divided between processes: by the rule that its kind has."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ipufit._poptorch import poptorch
from ipufit.distributed import Processes
from ipufit.errors import DataError

from .kinds import is_hugging_face

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
