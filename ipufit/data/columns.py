# SPDX-License-Identifier: Apache-2.0
"""Add tensors to a training batch: class weights, shares, divisors, mixing.

These tensors are called columns here. `Batch` in `structure.py` names the tensors of a
batch with them, and `SampleStructure` says which of them a batch has.
"""

from __future__ import annotations

import numbers
from dataclasses import replace
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from ipufit._arguments import check_number, shown
from ipufit._tree import Structure
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.errors import ConfigError, DataError
from ipufit.mixing import Mixing

from .datasets import Source
from .indexed import Division
from .place import Position
from .random_state import hash_seed
from .structure import Batch, SampleStructure


class ClassWeights:
    """Computes the class weight of each sample.

    Classes that aren't in the table have weight 1, as in Keras.

    Args:
        table: Class index to weight, 0 or more.
        structure: Structure of a sample.
        has_labels: Whether the loss takes each output for a label of its own, 0 or 1:
            a row of several targets then isn't a class.

    Raises:
        DataError: The table is invalid, or the samples have several targets, or
            weights already.

    Attributes:
        structure: The structure of the samples with weights.

    Example:
        >>> structure = SampleStructure(Structure.of(0), Structure.of(0))
        >>> weights = ClassWeights({1: 3.0}, structure)
        >>> weights.of(torch.tensor([0, 1]))
        tensor([1., 3.])
    """

    def __init__(
        self, table: Any, structure: SampleStructure, *, has_labels: bool = False
    ) -> None:
        if not isinstance(table, Mapping) or not table:
            raise DataError(
                f"class_weight={shown(table)} is not a dict of class index to weight. "
                "dict(enumerate(weights)) makes a dict of a list or an array, such as "
                "sklearn's compute_class_weight('balanced', classes=..., y=...)."
            )
        for index, weight in table.items():
            if isinstance(index, bool) or not isinstance(index, numbers.Integral):
                raise DataError(
                    f"class_weight has the class {shown(index)}, which is no class "
                    "index: use whole numbers, as the targets do."
                )
            check_number(f"class_weight[{index}]", weight, least=0, allows_numpy=True)
        if structure.has_weights:
            raise DataError(
                "class_weight can't be used with data that has sample weights: "
                "multiply them yourself and pass sample weights only."
            )
        if structure.targets.num_leaves != 1:
            raise DataError(
                f"class_weight needs one target, and the data has "
                f"{structure.targets.num_leaves}: pass sample weights instead."
            )
        self._table, self._has_labels = dict(table), has_labels
        self.structure = replace(structure, weights=Structure(None))

    def of(self, targets: Tensor) -> Tensor:
        """Return the weight of each row of targets, float32.

        Raises:
            DataError: Targets are neither class indices nor one-hot.
        """
        if targets.dim() > 1 and targets.shape[-1] > 1:
            if self._has_labels:
                raise DataError(
                    "class_weight needs one class per sample, but this loss takes "
                    "several 0/1 labels per sample (targets of shape "
                    f"{tuple(targets.shape)}). Weight them in the loss, "
                    "torch.nn.BCEWithLogitsLoss(weight=..., pos_weight=...), or "
                    "weight samples by sample_weight; or train classes with "
                    "'cross_entropy'."
                )
            sums = targets.to(torch.float32).sum(dim=-1)
            if not torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
                raise DataError(
                    f"class_weight needs class indices or one-hot targets, and rows of "
                    f"targets of shape {tuple(targets.shape)} don't add up to 1. Pass "
                    "sample weights instead; for a class at each position those of "
                    "positions, sample_weight=torch.tensor([1.0, 3.0])[y]."
                )
            targets = targets.to(torch.float32).argmax(dim=-1)  # one-hot
        elif targets.is_floating_point() and not targets.eq(targets.round()).all():
            value = targets[targets.ne(targets.round())][0]
            raise DataError(
                f"class_weight needs class indices or one-hot targets, and a target is "
                f"{float(value):g}. Pass sample weights instead."
            )
        targets = targets.reshape(len(targets), -1)
        if targets.shape[1] == 1:
            targets = targets[:, 0]
        weights = torch.ones(targets.shape)
        for index, weight in self._table.items():
            weights[equals(targets, index)] = float(weight)
        return weights


def equals(targets: Tensor, index: int) -> Tensor:
    """Compare targets with a class index that their dtype may not hold.

    torch would wrap the index into the dtype: -100 is 156 in uint8.

    Example:
        >>> equals(torch.tensor([156, 1], dtype=torch.uint8), -100)
        tensor([False, False])
    """
    if not targets.is_floating_point() and targets.dtype != torch.bool:
        limits = torch.iinfo(targets.dtype)
        if not limits.min <= index <= limits.max:
            return torch.zeros_like(targets, dtype=torch.bool)
    return targets.eq(index)


_OWN_NUMBERS = 1
"""Makes the seeds of mixing differ from other seeds of the same numbers."""


class MixedRows:
    """Draws the mixing coefficients of each row of a call.

    Args:
        mixing: The user's mixup and CutMix.
        structure: Structure of a batch.
        example: A batch of one sample or more.
        plan: The factors of a call.
        division: Selects the rows of this process.

    Raises:
        ConfigError: Micro-batches have one sample.
        DataError: The samples can't be mixed.

    Attributes:
        structure: The structure of batches with coefficients.

    Example:
        >>> from ipufit._tree import Structure
        >>> pair = SampleStructure(Structure.of(0), Structure.of(0))
        >>> batch = pair.named([torch.rand(2, 3), torch.tensor([0, 1])])
        >>> division = Division(index=0, count=1, block=2, rows=2)
        >>> rows = MixedRows(Mixing(mixup=1.0), pair, batch, BatchPlan(2), division)
        >>> rows.of(batch.targets, seed=1, at=Position(0, 1)).shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        mixing: Mixing,
        structure: SampleStructure,
        example: Batch,
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
        own = division.select(torch.arange(division.rows_of_all))
        self._numbers = own[:: plan.micro_batch_size].div(
            plan.micro_batch_size, rounding_mode="floor"
        )
        self._size = _image_size(mixing, example.inputs[0])
        self._check_targets(example.targets)
        self.structure = replace(structure, is_mixed=True)

    def of(self, targets: Sequence[Tensor], seed: int, at: Position) -> Tensor:
        """Draw the coefficients of a call, `[rows, 1 or 6]`.

        Args:
            targets: Targets of the call.
            seed: Seed of the run.
            at: Index of the pass, and number of its calls, this call included.

        Raises:
            DataError: Targets must be classes.
        """
        self._check_targets(targets)
        first = max(at.calls - 1, 0) * self._rows_of_all // self._micro_batch_size
        seeds = [
            hash_seed(seed, at.number, first + number, _OWN_NUMBERS)
            for number in self._numbers.tolist()
        ]
        return self._mixing.coefficients(seeds, self._micro_batch_size, self._size)

    def _check_targets(self, leaves: Sequence[Tensor]) -> None:
        """Refuse targets that are neither classes nor their probabilities."""
        for targets in leaves:
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
    """Return height and width of images; None without CutMix.

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


def shares(is_real: Tensor, num_of_all: Tensor, num_processes: int = 1) -> Tensor:
    """Compute the weight of each row of a call in the loss of its update.

    Args:
        is_real: `[rows, ...]`, float32: 0 for padding, else 1.
        num_of_all: Number of unpadded rows of all processes in each update.
        num_processes: Number of processes, which have the same number of rows.

    Returns:
        float32 of the same shape: 0 for padding. Over all processes, the weights in an
        update sum to the number of its rows, so that the mean over all rows is the mean
        over the unpadded rows.

    Example:
        >>> shares(torch.tensor([1.0, 1, 1, 0, 0, 0]), torch.tensor([2, 1, 0]))
        tensor([1., 1., 2., 0., 0., 0.])
        >>> shares(torch.tensor([1.0, 0]), torch.tensor([3]), num_processes=2)
        tensor([1.3333, 0.0000])
    """
    per_update = is_real.reshape(len(num_of_all), -1)
    counts = num_of_all.unsqueeze(1).clamp(min=1)
    rows = per_update.shape[1] * num_processes
    return (per_update * (rows / counts)).reshape(is_real.shape)


class TrainingColumns:
    """Adds class weights, shares, divisors and mixing coefficients to batches.

    Args:
        source: The samples.
        plan: The factors of a call.
        division: Selects the rows of this process.
        processes: Processes that divide each update.
        class_weight: Class index to weight; None if all classes weigh the same.
        has_labels: As for `ClassWeights`.
        mixing: Mixup and CutMix; None without mixing.
        is_padded: Whether calls may have padding.

    Raises:
        ConfigError: Micro-batches have one sample, and samples are mixed.
        DataError: `class_weight` or `mixing` can't be used.

    Attributes:
        structure: Structure of a batch.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        division: Division,
        processes: Processes,
        *,
        class_weight: Any = None,
        has_labels: bool = False,
        mixing: Mixing | None = None,
        is_padded: bool = False,
    ) -> None:
        self._source, self._division, self._processes = source, division, processes
        self.structure = source.structure
        rows_per_update = division.block * division.count
        self._micro_batches = rows_per_update // plan.micro_batch_size
        self._class_weights: ClassWeights | None = None
        if source.structure.rows is not None and (class_weight or mixing):
            what = "class_weight" if class_weight else "augment"
            raise DataError(
                f"{what} needs the samples one by one, and those of FixedSizeBatches "
                "are in whole micro-batches: leave it out. Batches may have sample "
                "weights, (inputs, targets, weights)."
            )
        if class_weight is not None:
            self._class_weights = ClassWeights(
                class_weight, source.structure, has_labels=has_labels
            )
            self.structure = self._class_weights.structure
        if is_padded:
            self.structure = replace(self.structure, is_padded=True)
        self._mixed_rows: MixedRows | None = None
        if mixing is not None:
            self._mixed_rows = MixedRows(
                mixing, self.structure, self._example, plan, division
            )
            self.structure = self._mixed_rows.structure

    @property
    def _example(self) -> Batch:
        return self._source.structure.named(self._source.example(1))

    def count(self, ignored: tuple[int, ...]) -> None:
        """Set the class indices of ignored targets, which are counted for each update.

        Has no effect if each micro-batch is an update.
        """
        if self._micro_batches > 1 or self.structure.is_padded:
            targets = self._example.targets
            are_floats = all(target.is_floating_point() for target in targets)
            ignored = () if are_floats else ignored
            self.structure = replace(self.structure, ignored=ignored)

    def add(
        self,
        batch: list[Tensor],
        each: tuple[int, ...],
        seed: int,
        at: Position,
        *,
        is_example: bool = False,
    ) -> tuple[list[Tensor], int | None]:
        """Add the columns to a batch.

        Args:
            batch: Tensors of a call, without columns.
            each: Number of unpadded rows of each process.
            seed: Seed of the run.
            at: Index of the pass, and number of its calls, this call included.
            is_example: Whether only the shapes matter.

        Returns:
            All tensors of the call; and the number of samples of all processes in the
            call if its rows are whole micro-batches, else None.
        """
        structure, division, is_real = self.structure, self._division, None
        is_complete = not (structure.is_padded or structure.ignored)
        if is_complete and self._class_weights is None and self._mixed_rows is None:
            return batch, None
        parts, num_masked = self._source.structure.named(batch), None
        if self._class_weights is not None:
            weights = self._class_weights.of(parts.targets[0])
            parts = parts._replace(weights=[weights])
        if structure.is_padded:
            is_item = torch.arange(division.rows).lt(each[division.index])
            share, counts = is_item.to(torch.float32), division.num_in_updates(each)
            if structure.rows is not None:
                share = parts.share[0].mul(is_item.unsqueeze(1))
                in_updates = share.reshape(len(counts), -1).sum(dim=1)
                counts = self._processes.summed(in_updates)
                num_masked = int(counts.sum())
            parts = parts._replace(share=[shares(share, counts, division.count)])
            is_real = share
        if structure.ignored:
            counts = self._counts(parts.targets, is_real)
            if self._processes.are_several and not is_example:
                counts = self._processes.summed(counts)
            divisors = counts.clamp(min=1).to(torch.float32).div(self._micro_batches)
            divisors = divisors.repeat_interleave(division.block, dim=0)
            # Items that are whole micro-batches are joined along their first axis.
            is_whole = structure.rows is not None
            divisors = divisors.unsqueeze(1) if is_whole else divisors
            parts = parts._replace(divisors=[divisors])
        if self._mixed_rows is not None:
            mixing = self._mixed_rows.of(parts.targets, seed, at)
            parts = parts._replace(mixing=[mixing])
        return parts.tensors(), num_masked

    def _counts(self, targets: Sequence[Tensor], is_real: Tensor | None) -> Tensor:
        """Count the targets of each update that aren't ignored, in this process.

        Args:
            targets: Targets of a call.
            is_real: 0 for rows that are padding, else 1: `[rows]`, or `[items, rows]`
                if items are whole micro-batches. None without padding.

        Returns:
            `[updates, indices * targets]`, int64.
        """
        shape = (self._division.rows,) if is_real is None else is_real.shape
        counts = [
            equals(leaf, index).logical_not_().reshape(*shape, -1).sum(dim=-1)
            for index in self.structure.ignored or ()
            for leaf in targets
        ]
        of_rows = torch.stack(counts, dim=-1)
        if is_real is not None:
            of_rows.mul_(is_real.ne(0).unsqueeze(-1))
        updates = self._division.rows // self._division.block
        return of_rows.reshape(updates, -1, len(counts)).sum(dim=1)
