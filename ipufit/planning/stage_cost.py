# SPDX-License-Identifier: Apache-2.0
"""The costs of a stage of a pipeline, for one micro-batch, as plain numbers."""

from __future__ import annotations

from typing import NamedTuple


class StateCost(NamedTuple):
    """A tensor of the optimiser's state.

    Attributes:
        num_elements: Number of its elements.
        num_bytes: Bytes of all of them.
    """

    num_elements: int
    num_bytes: int


class WeightCost(NamedTuple):
    """A parameter on a device.

    Attributes:
        name: Its name in the module.
        num_elements: Number of its elements.
        num_bytes: Bytes of all of them.
        state: Tensors that the optimiser keeps for it; empty if it isn't trained.
        accumulator_bytes: Bytes of the sum of its gradients, where an update has
            several micro-batches; 0 if the state holds it, or there is none.
        gradient_bytes: Bytes of its gradient; 0 if it isn't trained.
    """

    name: str
    num_elements: int
    num_bytes: int
    state: tuple[StateCost, ...] = ()
    accumulator_bytes: int = 0
    gradient_bytes: int = 0


class StageCost(NamedTuple):
    """The contents of a stage, and the costs of one micro-batch there.

    Bytes of activations are those of tensors on a device, where no number has more than
    32 bits. Views of one tensor count as one.

    Attributes:
        stage: Number of the stage, from 0.
        ipu: Its IPU in a replica, from 0.
        names: Names of the submodules or blocks that it begins with.
        weights: Parameters that it is the first stage to use.
        buffer_bytes: Bytes of the buffers that it is the first to use.
        flops: Floating-point operations of the forward pass: those of matrix products,
            convolutions and the like.
        input_bytes: Bytes of the tensors that come from the host or other stages.
        saved_bytes: Bytes of the tensors that torch saves for the backward pass.
        kept_bytes: Bytes of the tensors that recomputation starts from: inputs, and
            outputs of submodules that `recompute` names.
        made_bytes: Bytes of its inputs and of all tensors that its operators make.
        num_kept: Number of submodules that `recompute` names in it.
        uncounted: Operators that compute much and aren't in `flops`.
    """

    stage: int
    ipu: int
    names: tuple[str, ...] = ()
    weights: tuple[WeightCost, ...] = ()
    buffer_bytes: int = 0
    flops: int = 0
    input_bytes: int = 0
    saved_bytes: int = 0
    kept_bytes: int = 0
    made_bytes: int = 0
    num_kept: int = 0
    uncounted: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Elements of its parameters.

        Example:
            >>> StageCost(0, 0, weights=(WeightCost("w", 6, 24),)).num_parameters
            6
        """
        return sum(weight.num_elements for weight in self.weights)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its parameters."""
        return sum(weight.num_bytes for weight in self.weights)


def imbalance(flops: tuple[int, ...]) -> float:
    """The slowest stage's work over the mean: 1 where all have the same.

    Args:
        flops: Work of each stage.

    Example:
        >>> imbalance((1, 3))
        1.5
    """
    total = sum(flops)
    return max(flops) * len(flops) / total if total else 1.0
