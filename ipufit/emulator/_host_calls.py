# SPDX-License-Identifier: Apache-2.0
"""`CPU`: a part of an inference model that runs on the host."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from ._trace_state import active_state, current_trace
from .errors import createPoptorchError


class CPU:
    """Run a layer on the host, in the middle of a model that is on the device.

    For inference only. While the model is traced the layer runs once, on zeros, to
    learn what it returns; afterwards once for each micro-batch.

    Args:
        layer_to_call: A function of tensors, or a module, whose parameters no longer
            require gradients then.
        ID: A name for the call.

    Example:
        >>> double = CPU(lambda x: 2 * x, "double")
        >>> double(torch.tensor([1.0]))
        tensor([2.])
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)
        self.layer_to_call = layer_to_call
        self.ID = ID

    def __call__(self, *inputs: Tensor, **kwargs: Any) -> Any:
        """Call the layer.

        Args:
            *inputs: Tensors.
            **kwargs: Ignored, as PopTorch does.

        Returns:
            The tensor that the layer returns, or a list if there are several.

        Raises:
            Error: In a trace: it is for training, a tensor isn't on the device, or
                the layer calls another one on the host.
        """
        state = active_state()
        if state is not None and "CPU" in state.open:
            raise createPoptorchError(
                "Trying to enter CPU from another CPU op! CPU ops must not overlap. "
                f"The inner one is {self.ID!r}."
            )
        trace = current_trace()
        if trace is None:
            return _single(self.layer_to_call(*inputs))
        trace.refuse_training("CPU")
        with trace.inside("CPU"):
            return trace.call(call_on_host, _HostLayer(self.layer_to_call), *inputs)


class _HostLayer:
    """A layer that a trace doesn't look into."""

    def __init__(self, layer: Callable[..., Any]) -> None:
        self.call = layer


def call_on_host(layer: _HostLayer, *inputs: Tensor) -> Any:
    """What the device does for `CPU`: ask the host."""
    if active_state() is not None:
        inputs = tuple(torch.zeros_like(tensor) for tensor in inputs)
    return _single(layer.call(*inputs))


def _single(outputs: Any) -> Any:
    if not isinstance(outputs, (list, tuple)):
        return outputs
    return outputs[0] if len(outputs) == 1 else list(outputs)
