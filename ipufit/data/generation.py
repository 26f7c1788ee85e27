# SPDX-License-Identifier: Apache-2.0
"""Random samples of given shapes and types, made on the host: `generated`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ipufit._tree import CONSTANT, Structure
from ipufit.batching import check_positive
from ipufit.errors import ConfigError

from .arrays import in_memory
from .kinds import describe, is_indexed
from .seeds import mixed
from .source import IndexedSource, Source
from .values import as_tensor

_DISTINCT = 64

_WHOLE_RANGES = {torch.uint8: (0, 256), torch.bool: (0, 2)}
"""Ranges of types that need none to be given."""


def generated(spec: Any, n: int, *, seed: int = 0) -> GeneratedDataset:
    """A map-style dataset of random samples, for tests and benchmarks.

    A sample depends on `seed` and its index only, in whichever process it is made. It
    is made when it is asked for; `ipufit.CachedDataset(generated(spec, n))` makes all
    of them once, and keeps them in memory.

    Args:
        spec: A sample: tensors, arrays and numbers, nested in tuples, lists and dicts
            as a dataset of yours nests them, mostly `(input, target)`. Its shapes and
            types count. An integer is drawn from 0 (or from a negative least value) to
            the largest value that the example has there. Or the first sample of a
            map-style dataset: pass the dataset.

            In the place of each tensor there may be `(shape, dtype)` or `(shape,
            dtype, range)`. `dtype` is torch's, NumPy's or a name. `range` is an upper
            bound, which isn't drawn itself, or `(least, bound)`. Floats without a range
            are normally distributed, with mean 0 and deviation 1; whole numbers need
            one, other than uint8 and bool.
        n: Number of samples.
        seed: Seed of all samples.

    Raises:
        ConfigError: `spec` has something that is no tensor, or whole numbers without a
            range; or `n` is no positive whole number.

    Example:
        >>> images = generated((((3, 8, 8), "float32"), ((), "int64", 10)), 1000)
        >>> x, y = images[0]
        >>> x.shape, y.dtype, 0 <= y < 10
        (torch.Size([3, 8, 8]), torch.int64, tensor(True))
        >>> like_mine = generated({"ids": torch.tensor([5, 0, 99])}, 8)
        >>> like_mine[7]["ids"].shape
        torch.Size([3])
    """
    check_positive("n", n)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed={seed!r} is not a whole number.")
    if is_indexed(spec):
        if not len(spec):
            raise ConfigError("`spec` is a dataset without samples: nothing to copy.")
        spec = spec[0]
    made: list[Leaf] = []
    structure = _structure(spec, made, "spec")
    if not made:
        raise ConfigError(f"spec={spec!r:.80} has no tensors, so nothing is drawn.")
    return GeneratedDataset(structure, tuple(made), n, seed)


@dataclass(frozen=True)
class Leaf:
    """One tensor of a sample: how to draw it.

    Attributes:
        bounds: The least value, and a bound that isn't drawn; None for a normal
            distribution.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bounds: tuple[float, float] | None

    def drawn(self, generator: torch.Generator) -> Tensor:
        """Draw the tensor of one sample."""
        shape = self.shape
        if self.bounds is None:
            values = torch.randn(shape, generator=generator)
        elif self.dtype.is_floating_point:
            least, bound = self.bounds
            values = torch.rand(shape, generator=generator)
            values = values.mul_(bound - least).add_(least)
        else:
            first, end = map(int, self.bounds)
            values = torch.randint(first, end, shape, generator=generator)
        drawn: Tensor = values.to(self.dtype)
        return drawn


@dataclass(frozen=True, eq=False, repr=False)
class GeneratedDataset(Dataset):  # type: ignore[type-arg]
    """Random samples, as `generated` makes them.

    Attributes:
        structure: How a sample nests.
        leaves: How its tensors are drawn, in order.
        n: Number of samples.
        seed: Seed of all samples.
    """

    structure: Structure
    leaves: tuple[Leaf, ...]
    n: int
    seed: int

    def __len__(self) -> int:
        """The number of samples."""
        return self.n

    def __getitem__(self, index: int) -> Any:
        """One sample, always the same one; a negative index counts from the end.

        Raises:
            IndexError: There is no such sample.
        """
        at = int(operator.index(index))
        if not -self.n <= at < self.n:
            raise IndexError(f"There is no sample {at}: there are {self.n}.")
        generator = torch.Generator().manual_seed(mixed(self.seed, at % self.n))
        return self.structure.rebuild(leaf.drawn(generator) for leaf in self.leaves)

    def __repr__(self) -> str:
        tensors = ", ".join(f"{list(leaf.shape)} {leaf.dtype}" for leaf in self.leaves)
        return f"<{self.n} generated samples of {tensors}>"


def generated_like(source: Source, n: int) -> IndexedSource:
    """Random inputs in memory, of the shapes and types that others have.

    Targets and weights are those of the first sample: random ones may be none, as a
    class, a probability or a weight must be in its range.

    Args:
        source: The others; its first sample counts.
        n: Number of samples. The first 64 are drawn, and come again.
    """
    first = source.first()
    num_inputs = source.structure.num_inputs
    leaves = [_leaf_like(leaf, f"sample 0 of {source.name}") for leaf in first]
    structure = Structure.of([0] * len(leaves))
    drawn = GeneratedDataset(structure, tuple(leaves), min(n, _DISTINCT), 0)
    rows = torch.arange(n) % len(drawn)
    samples = zip(*(drawn[index] for index in range(len(drawn))))
    tensors = [torch.stack(leaf)[rows] for leaf in samples]
    for place in range(num_inputs, len(tensors)):
        given = as_tensor(first[place], source.name).to(tensors[place].dtype)
        tensors[place] = torch.stack([given] * n)
    return in_memory(tensors, source.structure, source.name)


def _structure(spec: Any, made: list[Leaf], where: str) -> Structure:
    """The nesting of a sample; how to draw its tensors is appended to `made`."""
    if _is_described(spec):
        made.append(_described_leaf(spec, where))
        return Structure.of(0)
    top = Structure.of(spec)
    if top.kind == CONSTANT:
        return top
    if not top.children and top.kind is None:
        made.append(_leaf_like(spec, where))
        return top
    steps = top.keys or range(len(top.children))
    elements = spec.values() if top.keys else spec
    children = tuple(
        _structure(element, made, f"{where}[{step!r}]")
        for step, element in zip(steps, elements)
    )
    return Structure(top.kind, top.keys, children)


def _is_described(spec: Any) -> bool:
    """Whether a spec is `(shape, dtype)` or `(shape, dtype, range)`."""
    if not isinstance(spec, (tuple, list)) or len(spec) not in (2, 3):
        return False
    shape, dtype = spec[:2]
    is_shape = isinstance(shape, int) or (
        isinstance(shape, (tuple, list)) and all(isinstance(n, int) for n in shape)
    )
    return is_shape and (
        isinstance(dtype, (str, torch.dtype, np.dtype, type))
        and not isinstance(dtype, bool)
    )


def _described_leaf(spec: Sequence[Any], where: str) -> Leaf:
    shape, given, *ranges = spec
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(size > 0 for size in sizes):
        raise ConfigError(f"{where} has the shape {shape!r}: sizes are 1 or more.")
    dtype = _dtype(given, where)
    if ranges:
        return Leaf(sizes, dtype, _bounds(ranges[0], dtype, where))
    if dtype.is_floating_point:
        return Leaf(sizes, dtype, None)
    if dtype not in _WHOLE_RANGES:
        raise ConfigError(
            f"{where}={tuple(spec)!r} has whole numbers and no range, so that a class "
            f"or an index may not exist. Say how many there are: ({shape!r}, "
            f"{given!r}, 10) for 0 to 9."
        )
    return Leaf(sizes, dtype, _WHOLE_RANGES[dtype])


def _leaf_like(example: Any, where: str) -> Leaf:
    """How to draw a tensor like an example of it."""
    if isinstance(example, Tensor) and example.is_meta:
        return _described_leaf((tuple(example.shape), example.dtype), where)
    if not isinstance(example, (Tensor, np.ndarray, np.generic, bool, int, float)):
        raise ConfigError(
            f"{where} is {describe(example)}: give an example of the tensor, or "
            "(shape, dtype)."
        )
    tensor = as_tensor(example, f"`{where}`")
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if dtype.is_floating_point:
        return Leaf(shape, dtype, None)
    if dtype in _WHOLE_RANGES:
        return Leaf(shape, dtype, _WHOLE_RANGES[dtype])
    values = tensor.reshape(-1).tolist()
    return Leaf(shape, dtype, (min([0, *values]), max([0, *values]) + 1))


def _dtype(given: Any, where: str) -> torch.dtype:
    """Torch's type of one of torch, of NumPy, or a name."""
    dtype: Any = given
    if not isinstance(given, torch.dtype):
        name = given if isinstance(given, str) else _name_of(given)
        dtype = getattr(torch, name.replace("torch.", ""), None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise ConfigError(
            f"{where} has the type {given!r}, which is none of torch's types of real "
            "numbers: 'float32', 'float16', 'int64', 'int32', 'uint8', 'bool' or the "
            "like."
        )
    return torch.float32 if dtype == torch.float64 else dtype  # as IPUs have it


def _name_of(given: Any) -> str:
    try:
        return str(np.dtype(given).name)
    except TypeError:
        return ""


def _bounds(given: Any, dtype: torch.dtype, where: str) -> tuple[float, float]:
    pair = tuple(given) if isinstance(given, (tuple, list)) else (0, given)
    kinds = (int, float) if dtype.is_floating_point else (int,)
    is_pair = len(pair) == 2 and all(
        isinstance(one, kinds) and not isinstance(one, bool) for one in pair
    )
    if not is_pair or not pair[0] < pair[1]:
        kind = "numbers" if dtype.is_floating_point else "whole numbers"
        raise ConfigError(
            f"{where} has the range {given!r}: give an upper bound such as 10, which "
            f"isn't drawn itself, or (least, bound), of {kind}."
        )
    if not dtype.is_floating_point:
        least, most = _limits(dtype)
        if pair[0] < least or pair[1] > most + 1:
            raise ConfigError(
                f"{where} has the range {given!r}, and {dtype} on an IPU holds {least} "
                f"to {most}."
            )
    return pair[0], pair[1]


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the largest whole number of a type on an IPU."""
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(torch.int32 if dtype == torch.int64 else dtype)
    return int(info.min), int(info.max)
