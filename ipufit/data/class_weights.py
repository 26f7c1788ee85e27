# SPDX-License-Identifier: Apache-2.0
"""`class_weight`: weights of samples by the class of their target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from ipufit._tree import Structure
from ipufit.errors import DataError

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
