# SPDX-License-Identifier: Apache-2.0
"""The random states of this process: Python's, NumPy's and torch's.

Transforms of a dataset draw from them, so a run that is resumed exactly needs them.
"""

from __future__ import annotations

import random
from typing import Any, Dict

import numpy as np
import torch
from torch import Tensor

from ipufit.errors import DataError

RandomState = Dict[str, Tensor]
"""Tensors by name, as a checkpoint keeps them."""


def random_state() -> RandomState:
    """The states now.

    Returns:
        Copies; NumPy's is that of its global generator.

    Example:
        >>> state = random_state()
        >>> first = random.random(), float(np.random.rand()), float(torch.rand(()))
        >>> set_random_state(state)
        >>> first == (random.random(), float(np.random.rand()), float(torch.rand(())))
        True
    """
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    _, keys, position, has_gauss, cached = numpy_state
    has_next = gauss is not None
    return {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, int(has_next), *words], dtype=torch.int64),
        "python_gauss": torch.tensor(gauss or 0.0, dtype=torch.float64),
        "numpy": torch.tensor(
            [int(position), int(has_gauss), *map(int, keys)], dtype=torch.int64
        ),
        "numpy_gauss": torch.tensor(float(cached), dtype=torch.float64),
    }


def set_random_state(state: RandomState) -> None:
    """Go on from states.

    Args:
        state: From `random_state`.

    Raises:
        DataError: It isn't from there.
    """
    try:
        version, has_next, *words = state["python"].tolist()
        gauss = float(state["python_gauss"]) if has_next else None
        position, has_gauss, *keys = state["numpy"].tolist()
        cached = float(state["numpy_gauss"])
        numpy_state: Any = (
            "MT19937",
            np.array(keys, dtype=np.uint32),
            position,
            has_gauss,
            cached,
        )
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(numpy_state)
        torch.set_rng_state(state["torch"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"These are no random states of Python, NumPy and torch: {error}. Take "
            "them from a checkpoint of the same versions."
        ) from error
