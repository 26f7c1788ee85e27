# SPDX-License-Identifier: Apache-2.0
"""Numbers for the tensors of a trace."""

from __future__ import annotations

from torch import Tensor

from ipufit.emulator._tracing.trace_state import enclosing_trace, require_tensor
from ipufit.emulator.errors import createPoptorchError


def getIpuTensorId(x: Tensor) -> int:
    """The number of a tensor that is on the device, while a model is traced.

    The numbers are the emulator's own: each trace counts its tensors from 0, in the
    order in which it meets them, weights and inputs first.

    Args:
        x: A weight, an input, or a result of them.

    Returns:
        The number; a tensor keeps it when it is changed in place.

    Raises:
        Error: `x` isn't a tensor of the device; outside `forward` none is.

    Example:
        >>> import torch
        >>> from ipufit.emulator import inferenceModel
        >>> class Curious(torch.nn.Module):
        ...     def forward(self, x):
        ...         y = x + 1
        ...         print(getIpuTensorId(x), getIpuTensorId(y))
        ...         return y
        >>> inferenceModel(Curious()).compile(torch.ones(1))
        0 1
    """
    require_tensor(x, "getIpuTensorId takes a tensor.")
    trace = enclosing_trace()
    if trace is None or not trace.recording.is_on_device(x):
        raise createPoptorchError(
            "Only tensors on the IPU have an id: the weights and inputs of a model and "
            "what `forward` computes from them, while it is traced."
        )
    numbers = [id(tensor) for tensor in trace.recording.tensors()]
    return numbers.index(id(x))
