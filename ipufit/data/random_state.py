# SPDX-License-Identifier: Apache-2.0
"""The random states of this process, and seeds made from several numbers."""

from __future__ import annotations

import hashlib
import random
from typing import Any, Dict, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit.errors import DataError


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and torch.

    Args:
        seed: Number of 63 bits.

    Example:
        >>> seed_all(3)
        >>> first = random.random(), float(torch.rand(()))
        >>> seed_all(3)
        >>> first == (random.random(), float(torch.rand(())))
        True
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks all devices


def hash_seed(*numbers: int) -> int:
    """Hash several numbers to a seed of 63 bits.

    Example:
        >>> hash_seed(1, 2) == hash_seed(1, 2), hash_seed(1, 2) == hash_seed(2, 1)
        (True, False)
    """
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


RandomState = Dict[str, Tensor]
"""Tensors by name, as a checkpoint keeps them."""


def random_state(generators: Sequence[torch.Generator] = ()) -> RandomState:
    """Copy the present random states to tensors.

    Args:
        generators: Generators of torch besides the global generator.

    Example:
        >>> state = random_state()
        >>> first = random.random(), float(np.random.rand()), float(torch.rand(()))
        >>> set_random_state(state)
        >>> first == (random.random(), float(np.random.rand()), float(torch.rand(())))
        True
    """
    return HostRandomState(generators).tensors()


class HostRandomState:
    """Copies the random states when it is made; used as a context, restores them.

    Args:
        generators: Generators of torch besides the global generator.
    """

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._owners = generators
        self._generators = [generator.get_state() for generator in generators]

    def has_changed(self) -> bool:
        """Return whether Python, NumPy or torch drew random numbers since the copy."""
        now = HostRandomState(self._owners).tensors()
        return any(not torch.equal(now[n], t) for n, t in self.tensors().items())

    def __enter__(self) -> HostRandomState:
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Restore the copied random states in this process."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for generator, state in zip(self._owners, self._generators):
            generator.set_state(state)

    def tensors(self) -> RandomState:
        """Return the states as tensors."""
        version, words, gauss = self._python
        _, keys, position, has_gauss, cached = self._numpy
        python = [version, int(gauss is not None), *words]
        numbers = [int(position), int(has_gauss), *map(int, keys)]
        return {
            "torch": self._torch,
            "python": torch.tensor(python, dtype=torch.int64),
            "python_gauss": torch.tensor(gauss or 0.0, dtype=torch.float64),
            "numpy": torch.tensor(numbers, dtype=torch.int64),
            "numpy_gauss": torch.tensor(float(cached), dtype=torch.float64),
            **{f"generator{i}": state for i, state in enumerate(self._generators)},
        }


def check_random_state(
    state: RandomState, generators: Sequence[torch.Generator] = ()
) -> None:
    """Refuse a state that `set_random_state` would refuse; change nothing.

    Raises:
        DataError: `state` isn't from `random_state`.
    """
    with HostRandomState(generators):
        set_random_state(state, generators)


def set_random_state(
    state: RandomState, generators: Sequence[torch.Generator] = ()
) -> None:
    """Set the random states of this process.

    Args:
        state: From `random_state`.
        generators: The same number of generators as in the call of `random_state`.

    Raises:
        DataError: `state` isn't from `random_state`. The random states stay as they
            were.
    """
    before = HostRandomState(generators)
    try:
        version, has_next, *python_words = state["python"].tolist()
        gauss = float(state["python_gauss"]) if has_next else None
        position, has_gauss, *keys = state["numpy"].tolist()
        cached = float(state["numpy_gauss"])
        words = np.array(keys, dtype=np.uint32)
        random.setstate((version, tuple(python_words), gauss))
        np.random.set_state(("MT19937", words, position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        for i, generator in enumerate(generators):
            generator.set_state(state[f"generator{i}"])
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        before.put_back()
        raise DataError(
            f"The saved random states don't fit this Python, NumPy or torch: {error}. "
            "Take them from a checkpoint of the same versions."
        ) from error
