# SPDX-License-Identifier: Apache-2.0
"""Values of a model's weights, for histograms."""

from __future__ import annotations

from typing import Any, Iterator

import numpy as np


def is_histogram_due(freq: int, epoch: int) -> bool:
    """Return whether histograms are due: after the first epoch, then every `freq`.

    Args:
        freq: Number of epochs from one histogram to the next; 0 for none.
        epoch: Index of the epoch, from 0.

    Example:
        >>> [epoch for epoch in range(6) if is_histogram_due(2, epoch)]
        [0, 2, 4]
    """
    return freq > 0 and epoch % freq == 0


def histogram_values(model: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the finite values of each weight and each floating-point buffer, by name.

    All weights are copied to the host. A tensor without finite values is left out.

    Args:
        model: Model with `copied_weights`.

    Yields:
        Name in the state dict, and float32 values in one dimension.
    """
    for name, tensor in model.copied_weights().items():
        if tensor.is_floating_point():
            values: np.ndarray[Any, Any] = tensor.float().reshape(-1).numpy()
            finite = values[np.isfinite(values)]
            if finite.size:
                yield name, finite
