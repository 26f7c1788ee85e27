# SPDX-License-Identifier: Apache-2.0
"""The samples that `fit` trains on and validates on."""

from __future__ import annotations

from typing import Any

from ipufit.distributed import Processes
from ipufit.errors import DataError

from .adapters import as_source
from .columns import column_names
from .datasets import ArrayDataset
from .kinds import describe
from .source import ALONE, IndexedSource, Source, StreamSource


def fit_sources(
    x: Any,
    y: Any,
    sample_weight: Any,
    validation_split: float,
    validation_data: Any,
    *,
    num_workers: int = 0,
    processes: Processes = ALONE,
) -> tuple[Source, Source | None]:
    """The samples that `fit` trains on, and those it validates on, if any.

    Args:
        x: Training samples in any form that `as_source` takes.
        y: Targets, or names of target columns.
        sample_weight: One number per sample, if `x` is arrays.
        validation_split: Fraction of the samples to validate on; 0 for none. Ignored
            if there is `validation_data`.
        validation_data: Samples of any form, `(x, y)` or `(x, y, sample_weight)`.
        num_workers: Number of processes that load an `IterableDataset`.
        processes: Processes that divide the samples.

    Raises:
        DataError: The data can't be used, or can't be split.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(4, 1), torch.zeros(4)
        >>> train, validation = fit_sources(x, y, None, 0.5, None)
        >>> train.num_samples, validation.num_samples
        (2, 2)
    """
    if validation_data is None and validation_split:
        return split_validation(x, y, validation_split, sample_weight)
    loading: dict[str, Any] = {"num_workers": num_workers, "processes": processes}
    source = as_source(x, y, sample_weight, **loading)
    if validation_data is None:
        return source, None
    if validation_data is x and isinstance(source, StreamSource):
        # A loader may allow only one iterator at a time, with processes behind it.
        return source, source
    return source, validation_source(validation_data, y, **loading)


def validation_source(
    validation_data: Any,
    y: Any = None,
    *,
    num_workers: int = 0,
    processes: Processes = ALONE,
) -> Source:
    """The samples to validate on.

    Args:
        validation_data: As for `fit_sources`.
        y: Names of target columns, if it has columns.
        num_workers: As for `fit_sources`.
        processes: As for `fit_sources`.

    Raises:
        DataError: The data can't be used.
    """
    loading: dict[str, Any] = {"num_workers": num_workers, "processes": processes}
    given = validation_data
    if not isinstance(given, (tuple, list)):
        given = (given, y) if column_names(y) else (given,)
    elif len(given) not in (2, 3):
        raise DataError(
            f"`validation_data` has {len(given)} parts: pass a dataset, a pair (x, y), "
            "or (x, y, sample_weight)."
        )
    return as_source(*given, name="validation_data", **loading)


def split_validation(
    x: Any, y: Any, fraction: float, sample_weight: Any = None
) -> tuple[Source, Source]:
    """Split arrays before any shuffling: the last samples validate, as in Keras.

    Args:
        x: Arrays of inputs.
        y: Arrays of targets.
        fraction: Fraction of the samples that validate; between 0 and 1.
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
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise DataError(f"validation_split={fraction!r} is not a number.")
    whole = as_source(x, y, sample_weight)
    if not isinstance(whole.dataset, ArrayDataset) or whole.dataset.rows is not None:
        raise DataError(
            f"validation_split={fraction} needs arrays, and `x` is {describe(x)}. "
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
        IndexedSource(ArrayDataset(part), whole.structure, len(part[0]))
        for part in parts
    )
    return train, validation


def num_trained_on(count: int, fraction: float) -> int:
    """How many samples `validation_split` leaves for training; 0 if it is no share.

    Example:
        >>> num_trained_on(10, 0.25)
        7
    """
    return int(count * (1.0 - fraction)) if 0 < fraction < 1 else 0
