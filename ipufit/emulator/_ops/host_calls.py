# SPDX-License-Identifier: Apache-2.0
"""`CPU`: a part of an inference model that runs on the host."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch import Tensor

from ipufit.emulator._tracing.state import current_trace, enclosing_trace
from ipufit.emulator.errors import createPoptorchError


class CPU:
    """Runs a layer on the host, in the middle of a model that is on the device.

    For inference only. While the model is traced the layer runs once, on zeros, to
    learn what it returns; afterwards once for each micro-batch.

    Args:
        layer_to_call: A function of tensors, or a module. A module's parameters then no
            longer require gradients.
        ID: Name for messages.

    Example:
        >>> double = CPU(lambda x: 2 * x, "double")
        >>> double(torch.tensor([1.0]))
        tensor([2.])
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)
        self._layer_to_call = layer_to_call
        self._ID = ID
        self.in_shapes: list[torch.Size] | None = None
        self.out_shapes: list[torch.Size] | None = None
        self.inputs: list[Tensor] | None = None
        self.outputs: list[Tensor] | None = None

    def __call__(self, *inputs: Tensor, **kwargs: Any) -> Any:
        """Call the layer.

        Args:
            *inputs: Tensors.
            **kwargs: Ignored, as in PopTorch.

        Returns:
            The tensor that the layer returns, or a list of what its list or tuple has.

        Raises:
            Error: In a trace: it is for training, a tensor isn't on the device, or
                the layer calls another one on the host.
        """
        enclosing = enclosing_trace()
        if enclosing is not None and "CPU" in enclosing.constructs:
            raise createPoptorchError(
                "Trying to enter CPU from another CPU op! CPU ops must not overlap. "
                f"The inner one is {self._ID!r}."
            )
        trace = current_trace()
        if trace is None:
            outputs = _listed(self._layer_to_call(*inputs))
        else:
            trace.refuse_training("CPU")
            with trace.inside("CPU"):
                # Not the layer itself: a trace refuses modules with weights.
                layer = functools.partial(self._layer_to_call)
                outputs = trace.record(call_on_host, layer, *inputs)
        self.in_shapes = [tensor.shape for tensor in inputs]
        self.out_shapes = [
            tensor.shape
            for tensor in (outputs if isinstance(outputs, list) else [outputs])
        ]
        return outputs

    def registerPersistentData(self) -> None:
        """Allocate the tensors that `execute` reads and writes, filled with zeros.

        PopTorch's backend calls this, the emulator doesn't.

        Raises:
            TypeError: The layer has not been called, so that no shapes are known.

        Example:
            >>> double = CPU(lambda x: 2 * x, "double")
            >>> _ = double(torch.tensor([1.0]))
            >>> double.registerPersistentData()
            >>> double.inputs, double.outputs
            ([tensor([0.])], [tensor([0.])])
        """
        if self.in_shapes is None or self.out_shapes is None:
            raise TypeError(
                f"The CPU op {self._ID!r} has not been called yet: the shapes of its "
                "tensors are unknown."
            )
        self.inputs = [torch.zeros(shape, device="cpu") for shape in self.in_shapes]
        self.outputs = [torch.zeros(shape, device="cpu") for shape in self.out_shapes]

    def execute(self) -> None:
        """Call the layer with `inputs`, and write its results to `outputs`.

        PopTorch's backend calls this, the emulator doesn't.

        Raises:
            TypeError: `registerPersistentData` hasn't been called.

        Example:
            >>> double = CPU(lambda x: 2 * x, "double")
            >>> _ = double(torch.tensor([1.0]))
            >>> double.registerPersistentData()
            >>> _ = double.inputs[0].fill_(3.0)
            >>> double.execute()
            >>> double.outputs
            [tensor([6.])]
        """
        if self.inputs is None or self.outputs is None:
            raise TypeError(
                f"The CPU op {self._ID!r} has no tensors of its own: call "
                "registerPersistentData() first."
            )
        outputs = _listed(self._layer_to_call(*self.inputs))
        if not isinstance(outputs, list):
            outputs = [outputs]
        for kept, output in zip(self.outputs, outputs):
            kept.copy_(output)


def call_on_host(layer: Callable[..., Any], *inputs: Tensor) -> Any:
    """Run the layer of a `CPU`, for the device."""
    if enclosing_trace() is not None:
        inputs = tuple(torch.zeros_like(tensor) for tensor in inputs)
    return _listed(layer(*inputs))


def _listed(outputs: Any) -> Any:
    return list(outputs) if isinstance(outputs, (list, tuple)) else outputs
