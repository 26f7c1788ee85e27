# SPDX-License-Identifier: Apache-2.0
"""The costs of the blocks of a module: what a pipeline's stages are made of."""

from __future__ import annotations

from typing import NamedTuple


class BlockCost(NamedTuple):
    """The costs of a micro-batch from the call of a submodule to that of the next.

    The blocks of a module are in the order in which `forward` runs them, and together
    they are all of it. A stage of a pipeline may begin where a block begins.

    Attributes:
        name: Name of the submodule whose call begins the block. The first block begins
            before it, with the module. Empty if the module has no submodule that may
            begin a stage; then it is one block.
        flops: Floating-point operations of the forward pass, where a multiplication and
            an addition are two. Matrix products, convolutions, attention and recurrent
            layers count; all else, such as activations, normalisation and pooling,
            counts nothing.
        weights: Names of the parameters that the block uses, also those that an earlier
            block has used before.
        parameters: Elements of the parameters that no earlier block has used.
        parameter_bytes: Bytes of these parameters on the device.
        trained_parameters: Elements of those of them that are trained, which have
            gradients and states of the optimiser.
        buffer_bytes: Bytes of the buffers on the device that no earlier block has used.
        saved_bytes: Bytes of the activations that are saved for the backward pass. One
            that several operations save counts once, in the first block that does.
        output_bytes: Bytes of all activations that this block or an earlier one has
            computed and a later one uses, skip connections included: they cross from
            one IPU to the next if a stage begins after this block.
        uncounted: Operators that compute much and have no formula here, so that `flops`
            leaves them out.

    Example:
        >>> BlockCost("head", flops=2_000, parameters=10).flops
        2000
    """

    name: str
    flops: int = 0
    weights: tuple[str, ...] = ()
    parameters: int = 0
    parameter_bytes: int = 0
    trained_parameters: int = 0
    buffer_bytes: int = 0
    saved_bytes: int = 0
    output_bytes: int = 0
    uncounted: tuple[str, ...] = ()
