# SPDX-License-Identifier: Apache-2.0
"""Mixup and CutMix: each sample is mixed with another of its micro-batch.

The host draws the share of each sample to keep, and the box to cut out. The device
mixes the inputs, and the loss weights the targets of both samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from ._arguments import ArgumentRepr, check_number
from .errors import ConfigError, suggesting_constructor


@suggesting_constructor
@dataclass(frozen=True, repr=False)
class Mixing(ArgumentRepr):
    """Mixup and CutMix of the samples that a model is trained on.

    Each sample is mixed with the previous one in its micro-batch, and the first with
    the last. Shuffled data has other pairs in every epoch.

    Mixup adds pixels: `x = share * x + (1 - share) * other`. CutMix cuts a box out, and
    puts the same box of the other sample there; `share` is the part that is left. In
    both the loss is `share * loss(y) + (1 - share) * loss(y of the other)`. With both,
    each sample has one of them, with equal probability. `evaluate` and `predict` never
    mix.

    Everything is drawn on the host, from the seed of the run (`IPUConfig(seed=...)`)
    and the number of the micro-batch in its pass over the data. So a run that is
    resumed in mid-epoch draws the same numbers. So does a run with other numbers of
    replicas, gradient accumulation, device iterations or processes, if the micro-batch
    size is the same.

    Args:
        mixup: Alpha of mixup. Shares come from Beta(alpha, alpha), and at least a half
            of each sample is kept. 0.2 is usual for ImageNet; 0 for no mixup.
        cutmix: Alpha of CutMix: the part of the image that is kept comes from
            Beta(alpha, alpha). 1.0 is usual; 0 for no CutMix.
        probability: Probability of each sample to be mixed.

    Raises:
        ConfigError: A number is out of its range, or both alphas are 0.

    Sources:
        Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018), and Yun et
        al., "CutMix" (2019), whose box is cut off at the borders of the image.

    Example:
        >>> from ipufit import IPUConfig, IPUModel
        >>> images, classes = torch.rand(8, 3, 4, 4), torch.arange(8) % 2
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
        >>> model = IPUModel(network, IPUConfig(micro_batch_size=4, seed=1))
        >>> mixing = Mixing(mixup=0.2, cutmix=1.0)
        >>> model.compile("sgd", "cross_entropy", augment=mixing, label_smoothing=0.1)
        >>> list(model.fit(images, classes, verbose=0).history)
        ['loss']
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            check_number(name, value, least=0, of="Mixing")
        if not self.mixup and not self.cutmix:
            raise ConfigError(
                "Mixing() mixes nothing: pass an alpha, as in Mixing(mixup=0.2) or "
                "Mixing(cutmix=1.0)."
            )
        check_number("probability", self.probability, above=0, most=1, of="Mixing")

    def coefficients(
        self, seeds: Sequence[int], rows: int, size: tuple[int, int] | None = None
    ) -> Tensor:
        """Draw the coefficients for mixing the samples of some micro-batches.

        Args:
            seeds: A seed for each micro-batch.
            rows: Number of samples of a micro-batch.
            size: Height and width of the images; None without CutMix.

        Returns:
            `[len(seeds) * rows, 1 or 6]`, float32: `Coefficients` of each sample,
            without CutMix only the first.

        Example:
            >>> Mixing(mixup=0.2).coefficients([1], rows=2)
            tensor([[0.9975],
                    [0.9641]])
        """
        uniform, blend, keep = self._draw_numbers(seeds, rows)
        is_mixed = uniform[0] < self.probability
        has_box = np.full(is_mixed.shape, size is not None)
        if self.mixup and self.cutmix:
            has_box = uniform[1] < 0.5
        blend = np.where(is_mixed & ~has_box, np.maximum(blend, 1 - blend), 1.0)
        columns = [blend, blend]
        if size is None:
            columns = [blend]
        else:
            cut = np.where(is_mixed & has_box, np.sqrt(1 - keep), 0.0)
            for length, place in zip(size, uniform[2:]):
                half, centre = length * cut / 2, length * place
                for edge in (centre - half, centre + half):
                    columns.append(np.rint(np.clip(edge, 0, length)))
            top, bottom, left, right = columns[2:]
            area = (bottom - top) * (right - left) / (size[0] * size[1])
            columns[0] = blend * (1 - area)
        drawn = torch.stack([torch.from_numpy(column) for column in columns], dim=1)
        return drawn.to(torch.float32)

    def _draw_numbers(self, seeds: Sequence[int], rows: int) -> tuple[Any, Any, Any]:
        """Draw the random numbers for all samples.

        Returns:
            `[4, samples]`, uniform from 0 to 1: they decide whether a sample is mixed,
            whether by mixup or CutMix, and the row and column of the box; and two
            tensors `[samples]` from the Beta distributions of `mixup` and `cutmix`.
        """
        # The streams of RandomState are the same in every version of NumPy.
        random = np.random.RandomState(0)
        uniform = np.empty((4, len(seeds), rows))
        betas = np.ones((2, len(seeds), rows))
        for at, seed in enumerate(seeds):
            random.seed([seed % 2**32, seed >> 32])  # a new RandomState is slow
            uniform[:, at] = random.random_sample((4, rows))
            for kind, alpha in enumerate((self.mixup, self.cutmix)):
                if alpha:
                    betas[kind, at] = random.beta(alpha, alpha, rows)
        return uniform.reshape(4, -1), betas[0].ravel(), betas[1].ravel()


class Coefficients(NamedTuple):
    """Coefficients for mixing the samples of micro-batches, each `[rows]`.

    Attributes:
        share: Share of the sample's own target in the loss.
        blend: Weight of the sample's own pixels outside the box; the same as `share`
            without CutMix.
        box: Top, bottom, left and right of the box, in pixels, with all pixels of the
            other sample; None without CutMix.
    """

    share: Tensor
    blend: Tensor
    box: tuple[Tensor, Tensor, Tensor, Tensor] | None

    @classmethod
    def of(cls, columns: Tensor) -> Coefficients:
        """Split the tensor that `Mixing.coefficients` returns; traceable."""
        if columns.shape[1] == 1:
            return cls(columns[:, 0], columns[:, 0], None)
        share, blend, top, bottom, left, right = (columns[:, i] for i in range(6))
        return cls(share, blend, (top, bottom, left, right))


def mixed_inputs(inputs: Tensor, columns: Tensor) -> Tensor:
    """Mix the inputs of one micro-batch; traceable.

    Args:
        inputs: `[rows, ...]`, floating; with CutMix its last axes are height and width.
        columns: Result of `Mixing.coefficients`.

    Returns:
        Tensor of the same shape and type.

    Example:
        >>> mixed_inputs(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.75], [1.0]]))
        tensor([[0.7500],
                [0.0000]])
    """
    coefficients = Coefficients.of(columns)
    kept = coefficients.blend.reshape((-1, *(1,) * (inputs.dim() - 1)))
    if coefficients.box is not None:
        top, bottom, left, right = coefficients.box
        height, width = inputs.shape[-2:]
        rows = _mark_inside(height, top, bottom).reshape(-1, height, 1)
        columns_inside = _mark_inside(width, left, right).reshape(-1, 1, width)
        box = rows.mul(columns_inside)
        box = box.reshape((-1, *(1,) * (inputs.dim() - 3), height, width))
        kept = kept.mul(1.0 - box)
    kept = kept.to(inputs.dtype)
    return inputs.mul(kept) + rolled(inputs).mul(1.0 - kept)


def _mark_inside(length: int, first: Tensor, end: Tensor) -> Tensor:
    """Return `[rows, length]`: 1 for positions in `[first, end)`, else 0."""
    places = torch.arange(length, dtype=torch.float32, device=first.device)
    is_after = places.reshape(1, -1).ge(first.reshape(-1, 1)).to(torch.float32)
    is_before = places.reshape(1, -1).lt(end.reshape(-1, 1)).to(torch.float32)
    return is_after.mul(is_before)


def rolled(values: Tensor, micro_batch_size: int | None = None) -> Tensor:
    """Replace each row of a micro-batch by the row before, the first by the last.

    Args:
        values: `[rows, ...]`.
        micro_batch_size: Rows of a micro-batch; None if `values` is one.

    Example:
        >>> rolled(torch.tensor([1, 2, 3, 4]), 2)
        tensor([2, 1, 4, 3])
    """
    others: Tensor
    if micro_batch_size is None:
        others = torch.roll(values, 1, 0)
    else:
        parts = values.reshape(-1, micro_batch_size, *values.shape[1:])
        others = torch.roll(parts, 1, 1).reshape(values.shape)
    return others
