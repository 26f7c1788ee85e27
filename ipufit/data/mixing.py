# SPDX-License-Identifier: Apache-2.0
"""Adds columns to training calls: class weights and mixing coefficients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from ipufit._tree import Structure
from ipufit.batching import BatchPlan
from ipufit.errors import ConfigError, DataError
from ipufit.mixing import Mixing

from .order import Division, Position
from .random_state import mixed
from .structure import SampleStructure


class ClassWeights:
    """Gives each sample the weight of its class.

    Classes that aren't mentioned have weight 1, as in Keras.

    Args:
        table: Class index to weight, 0 or more.
        structure: How a sample nests.

    Raises:
        DataError: The table is no such table, or the samples have several targets, or
            weights already.

    Attributes:
        structure: The structure of the samples with weights.

    Example:
        >>> structure = SampleStructure(Structure.of(0), Structure.of(0))
        >>> weights = ClassWeights({1: 3.0}, structure)
        >>> weights.of([torch.zeros(2, 4), torch.tensor([0, 1])])
        tensor([1., 3.])
    """

    def __init__(self, table: Any, structure: SampleStructure) -> None:
        if not isinstance(table, Mapping) or not table:
            raise DataError(
                f"class_weight={table!r} is not a dict of class index to weight."
            )
        for index, weight in table.items():
            if isinstance(index, bool) or not isinstance(index, int):
                raise DataError(
                    f"class_weight has the class {index!r}, which is no class index: "
                    "use whole numbers, as the targets do."
                )
            if not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
                raise DataError(
                    f"class_weight[{index}]={weight!r} is not a number of 0 or more."
                )
        if structure.has_weights:
            raise DataError(
                "class_weight was given, and the data has sample weights: multiply "
                "them yourself and pass sample weights only."
            )
        if structure.targets.num_leaves != 1:
            raise DataError(
                f"class_weight needs one target, and the data has "
                f"{structure.targets.num_leaves}: pass sample weights instead."
            )
        self._table = dict(table)
        self._target = structure.num_inputs
        self.structure = replace(structure, weights=Structure(None))

    def of(self, batch: Sequence[Tensor]) -> Tensor:
        """The weight of each row of a batch, float32.

        Raises:
            DataError: Targets are neither class indices nor one-hot.
        """
        targets = batch[self._target]
        if targets.dim() > 1 and targets.shape[-1] > 1:
            sums = targets.to(torch.float32).sum(dim=-1)
            if not torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
                raise DataError(
                    f"class_weight needs class indices or one-hot targets, and rows of "
                    f"targets of shape {tuple(targets.shape)} don't add up to 1. Pass "
                    "sample weights instead."
                )
            targets = targets.argmax(dim=-1)  # one-hot
        targets = targets.reshape(len(targets), -1)
        if targets.shape[1] == 1:
            targets = targets[:, 0]
        weights = torch.ones(targets.shape)
        for index, weight in self._table.items():
            weights[targets == index] = float(weight)
        return weights


_OWN_NUMBERS = 1
"""Sets the seeds apart from those that are made of the same numbers elsewhere."""


class MixedRows:
    """Gives each row of a call the coefficients that it is mixed by.

    Args:
        mixing: How samples are mixed.
        structure: How a batch nests.
        example: A batch of one sample or more.
        plan: The factors of a call.
        division: Which rows of a call belong to this process.

    Raises:
        ConfigError: Micro-batches have one sample.
        DataError: The samples can't be mixed.

    Attributes:
        structure: The structure of batches with coefficients.

    Example:
        >>> from ipufit._tree import Structure
        >>> pair = SampleStructure(Structure.of(0), Structure.of(0))
        >>> batch = [torch.rand(2, 3), torch.tensor([0, 1])]
        >>> division = Division(index=0, count=1, block=2, rows=2)
        >>> rows = MixedRows(Mixing(mixup=1.0), pair, batch, BatchPlan(2), division)
        >>> rows.of(batch, seed=1, at=Position(0, 1)).shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        mixing: Mixing,
        structure: SampleStructure,
        example: Sequence[Tensor],
        plan: BatchPlan,
        division: Division,
    ) -> None:
        if plan.micro_batch_size == 1:
            raise ConfigError(
                f"augment={mixing!r} mixes the samples of a micro-batch, which has one "
                f"sample: a call takes {plan.describe()}. Use a larger "
                "micro_batch_size, or leave augment out."
            )
        if structure.num_inputs != 1:
            raise DataError(
                f"augment={mixing!r} needs one input, and the data has "
                f"{structure.num_inputs}: mix in forward, or pass one tensor."
            )
        self._mixing = mixing
        self._micro_batch_size = plan.micro_batch_size
        self._rows_of_all = division.rows_of_all
        own = division.own(torch.arange(division.rows_of_all))
        self._numbers = own[:: plan.micro_batch_size].div(
            plan.micro_batch_size, rounding_mode="floor"
        )
        self._targets = slice(1, 1 + structure.targets.num_leaves)
        self._size = _image_size(mixing, example[0])
        self._check_targets(example)
        self.structure = replace(structure, is_mixed=True)

    def of(self, batch: Sequence[Tensor], seed: int, at: Position) -> Tensor:
        """The coefficients of a call, `[rows, 1 or 6]`, as `Mixing` draws them.

        Args:
            batch: Tensors of the call.
            seed: Seed of the run.
            at: Number of the pass, and of its calls with this one.

        Raises:
            DataError: Targets are no classes.
        """
        self._check_targets(batch)
        first = max(at.calls - 1, 0) * self._rows_of_all // self._micro_batch_size
        seeds = [
            mixed(seed, at.number, first + number, _OWN_NUMBERS)
            for number in self._numbers.tolist()
        ]
        return self._mixing.coefficients(seeds, self._micro_batch_size, self._size)

    def _check_targets(self, batch: Sequence[Tensor]) -> None:
        """Refuse targets that are neither classes nor their probabilities."""
        for targets in batch[self._targets]:
            shape = list(targets.shape)
            if not targets.is_floating_point():
                if targets.dim() == 2 and _is_one_hot(targets):
                    continue
                if targets[0].numel() == 1:
                    continue
                reason = f"{targets[0].numel()} whole numbers for each sample"
            elif targets.dim() > 2:
                reason = "several rows for each sample"
            elif bool(torch.any(targets.lt(0) | targets.gt(1))):
                reason = "values outside of 0 to 1"
            else:
                continue
            raise DataError(
                f"augment={self._mixing!r} needs the class of each sample as its "
                f"target: an index, one-hot, or probabilities. Targets of {shape} have "
                f"{reason}. Leave augment out, or mix in forward."
            )


def _is_one_hot(targets: Tensor) -> bool:
    is_binary = torch.all(targets.eq(0) | targets.eq(1))
    return bool(is_binary & torch.all(targets.sum(dim=1).le(1)))


def _image_size(mixing: Mixing, inputs: Tensor) -> tuple[int, int] | None:
    """Height and width of images; None without CutMix.

    Raises:
        DataError: The inputs are neither numbers to mix nor images.
    """
    shape = tuple(inputs.shape[1:])
    if not inputs.is_floating_point() and inputs.dtype != torch.uint8:
        raise DataError(
            f"augment={mixing!r} mixes the inputs, and they are whole numbers "
            f"({inputs.dtype}), as indices are. Pass floats, or images of uint8."
        )
    if not mixing.cutmix:
        return None
    if len(shape) < 2:
        raise DataError(
            f"augment={mixing!r} cuts boxes out of images, and a sample has shape "
            f"{shape}: its last two axes must be height and width. Use "
            "Mixing(mixup=...) alone."
        )
    return int(shape[-2]), int(shape[-1])
