# SPDX-License-Identifier: Apache-2.0
"""`Options.enableSyntheticData`: a device that makes its own inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ipufit.emulator._options.options import Options

_SEED = 0


def is_synthetic(options: Options) -> bool:
    """Whether the options ask for synthetic data, so that nothing is transferred.

    Example:
        >>> is_synthetic(Options().enableSyntheticData(True))
        True
    """
    return bool(options._Popart.options.get("syntheticDataMode", 0))


def synthetic_inputs(tensors: list[Tensor]) -> list[Tensor]:
    """Make inputs of the same shapes and types, the same ones in each call.

    Returns:
        Normally distributed numbers. Integers are zero: they may be indices.

    Example:
        >>> synthetic_inputs([torch.ones(2, dtype=torch.int32)])
        [tensor([0, 0], dtype=torch.int32)]
    """
    generator = torch.Generator().manual_seed(_SEED)
    return [
        torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if tensor.is_floating_point()
        else torch.zeros_like(tensor)
        for tensor in tensors
    ]


def unwritten_outputs(tensors: list[Tensor]) -> list[Tensor]:
    """Make outputs that nothing was written to; PopTorch doesn't even initialise them.

    Example:
        >>> unwritten_outputs([torch.ones(2)])
        [tensor([0., 0.])]
    """
    return [torch.zeros_like(tensor) for tensor in tensors]
