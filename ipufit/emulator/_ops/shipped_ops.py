# SPDX-License-Identifier: Apache-2.0
"""The custom operations that PopTorch has itself, in the domain `poptorch.custom_ops`.

PopTorch compiles some functions of torch to them, and programs call them through
`poptorch.custom_op` (PopTorch, `popart_compiler/source/custom_operations`). Those for
gradients can't be called. `HostOp` is `poptorch.CPU`.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import embedding, interpolate, softplus

from ipufit.emulator._layout.pod import ipu_model_is_on
from ipufit.emulator.errors import Error

DOMAIN = "poptorch.custom_ops"


def _fast_gather_last_dim(data: Tensor, index: Tensor, /, **attributes: Any) -> Tensor:
    """`FastGatherLastDim.cpp`: `torch.gather` along the last dimension."""
    if ipu_model_is_on():
        raise _refused("requires hardware but IPU model is enabled")
    if data.dim() != index.dim():
        raise _refused(
            "Input and Index tensors do not have same rank: "
            f"{tuple(data.shape)} and {tuple(index.shape)}"
        )
    if data.shape[:-1] != index.shape[:-1]:
        raise _refused(
            "Index tensor must have same dimensions as Input except for last dim: "
            f"{tuple(data.shape)} and {tuple(index.shape)}"
        )
    if not data.is_floating_point() or index.dtype not in (torch.int32, torch.int64):
        raise _refused(
            "Input must be float32 or float16 and Index int32: "
            f"{data.dtype} and {index.dtype}"
        )
    result: Tensor = torch.gather(data, -1, index.long())
    return result


def _refused(why: str) -> Error:
    return Error(f"FastGatherLastDim: {why}.", type="popart_exception")


def _torch_softplus(x: Tensor, /, **attributes: Any) -> Tensor:
    """`TorchSoftplus.cpp`: linear above a threshold of 1 unless there is another."""
    beta = attributes.get("beta", 1.0)
    threshold = attributes.get("threshold", 1.0)
    result: Tensor = softplus(x, beta=beta, threshold=threshold)
    return result


def _embedding(weight: Tensor, indices: Tensor, /, **attributes: Any) -> Tensor:
    """`Embedding.cpp`: the row of `padding_idx` gets no gradient."""
    return embedding(indices, weight, padding_idx=attributes.get("padding_idx"))


def _upsample_bilinear_2d(x: Tensor, /, **attributes: Any) -> Tensor:
    """`UpsampleBilinear2d.cpp`: by 2 unless there is another `scaling_factor`."""
    result: Tensor = interpolate(
        x,
        scale_factor=attributes.get("scaling_factor", 2.0),
        mode="bilinear",
        align_corners=bool(attributes.get("align_corners", 0)),
    )
    return result


SHIPPED_OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "Embedding": _embedding,
    "FastGatherLastDim": _fast_gather_last_dim,
    "TorchSoftplus": _torch_softplus,
    "UpsampleBilinear2d": _upsample_bilinear_2d,
}
"""Name to the same computation with functions of torch."""
