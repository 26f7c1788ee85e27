# SPDX-License-Identifier: Apache-2.0
"""Transforms the inputs of many samples at once."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from ipufit._tree import Structure
from ipufit.errors import DataError

from .cached import CachedDataset, require_map_style
from .together import together_of


class TransformedDataset(Dataset):  # type: ignore[type-arg]
    """A dataset whose inputs are transformed many at a time.

    Transforms of tensors, such as those of `torchvision.transforms.v2`, take batches as
    well as single samples. One call for a batch takes a fraction of the time of one
    call for each sample. `fit`, `evaluate`, `predict` and torch's loaders ask for whole
    batches. The dataset is mostly in memory: a `TensorDataset`, or a `CachedDataset` of
    raw samples.

    A transform must treat the samples of a batch independently of each other. `fit`,
    `evaluate` and `predict` transform the first batch sample by sample, too. If the
    results differ, samples are transformed one by one throughout, as batches of one. So
    they are from the first batch on in which a transform draws random numbers, which
    would be the same for all samples of a batch. torch's own loaders look at neither.

    Args:
        dataset: Has `__len__` and `__getitem__`. Its samples are an input, or a tuple
            of an input, a target and a weight. Inputs are tensors, arrays or numbers of
            one shape, which may nest; no images of PIL.
        transform: Takes the inputs of a batch, stacked to `[samples, ...]`, and returns
            those that take their place.

    Raises:
        DataError: The dataset is a stream, or the transform gives another number of
            samples.

    Example:
        >>> import torch
        >>> raw = TensorDataset(torch.tensor([[0, 255], [51, 0]]), torch.tensor([0, 1]))
        >>> dataset = TransformedDataset(raw, lambda x: x.to(torch.float32) / 255)
        >>> dataset[1]
        (tensor([0.2000, 0.0000]), tensor(1))
    """

    def __init__(self, dataset: Any, transform: Callable[[Any], Any]) -> None:
        require_map_style(dataset)
        is_tensors = type(dataset) is TensorDataset and len(dataset) > 0
        self._dataset = CachedDataset(dataset) if is_tensors else dataset
        self._transform = transform

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        """One sample."""
        return self._transformed([self._dataset[index]])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples: torch's loaders use this method if it exists."""
        together = together_of(self._dataset)
        if together is not None:
            return self._transformed(together(indices))
        return self._transformed([self._dataset[index] for index in indices])

    def _transformed(self, samples: Sequence[Any]) -> list[Any]:
        has_parts = isinstance(samples[0], (tuple, list))
        inputs = [sample[0] if has_parts else sample for sample in samples]
        outputs = self._transform(default_collate(inputs))
        structure = Structure.of(outputs)
        leaves = structure.flatten(outputs)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(samples):
                continue
            found = tuple(leaf.shape) if isinstance(leaf, Tensor) else repr(leaf)[:80]
            raise DataError(
                f"`transform` got the inputs of {len(samples)} samples and returned "
                f"{found}: it must return tensors with as many rows. Transforms of "
                "single samples belong into the dataset."
            )
        rows = zip(*(leaf.unbind() for leaf in leaves))
        new = [structure.rebuild(row) for row in rows]
        if not has_parts:
            return new
        return [(x, *sample[1:]) for x, sample in zip(new, samples)]
