# SPDX-License-Identifier: Apache-2.0
"""Samples to compile for: the first of the data, or shapes and types alone."""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.distributed import Processes
from ipufit.errors import DataError

from .adapters import as_source
from .host_random import HostRandomState
from .kinds import describe, is_array_like
from .passes import generators_of
from .source import ALONE, Source, StreamSource


class ExampleSource(Source):
    """The first sample of a source, of which there are as many as one asks for.

    Args:
        source: The data; only its first sample is taken.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source.structure, None, source.name)
        self.batch_size = source.batch_size
        self.num_certain = source.num_certain
        self._is_in_memory = source.is_in_memory
        self._first = source.first()

    @property
    def is_in_memory(self) -> bool:
        """Whether the samples of the data are arrays."""
        return self._is_in_memory

    def first(self) -> list[Tensor]:
        """The leaves of the first sample."""
        return list(self._first)


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
    """Samples to compile for; of data no more is read than their kind needs.

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
        x, y, sample_weight = map(_filled, (x, y, sample_weight))
    before = HostRandomState(generators_of(x))
    try:
        source = as_source(
            x,
            y,
            sample_weight,
            inputs_only=inputs_only,
            num_workers=num_workers,
            processes=processes,
        )
    finally:
        before.put_back()
    if is_whole or isinstance(source, StreamSource):
        return source
    return ExampleSource(source)


def _filled(value: Any) -> Any:
    """Nested arrays, with zeros in the place of tensors that have no values.

    The zeros take the memory of one sample.
    """
    if isinstance(value, Mapping):
        return {key: _filled(element) for key, element in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_filled(element) for element in value)
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    if not value.dim():
        return torch.zeros((), dtype=value.dtype)
    return torch.zeros(value.shape[1:], dtype=value.dtype).expand(value.shape)
