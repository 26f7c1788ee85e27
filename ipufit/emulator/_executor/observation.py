# SPDX-License-Identifier: Apache-2.0
"""The tensors inside the program of an executor that users can name and see."""

from __future__ import annotations

from torch import Tensor

from ipufit.emulator._executor.model_state import NOT_COMPILED, ModelState


class Observation:
    """The names of a program's tensors, and the values of those that are anchored."""

    def __init__(self, state: ModelState) -> None:
        self._state = state

    def getTensorNames(self) -> list[str]:
        """List the names that `Options.anchorTensor` accepts for the compiled model.

        Weights have their own names, a gradient is `Gradient___fc.weight`, a weight
        that was updated `UpdatedVar___fc.weight`, and inputs are `input`, `input/1`.
        The optimiser's tensors have PopART's names, such as `Accl1___fc.weight` and
        `lossScaling_FLOAT`. A result of the forward pass is named by the path of its
        module and PopART's operator, such as `encoder/fc/Relu:0`; where PopART
        computes a function of torch in several steps there is one, with torch's name:
        `fc/Linear:0`. There are no gradients of such results here.

        Raises:
            AssertionError: Not compiled.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU())
            >>> inference = inferenceModel(layers)
            >>> inference.compile(torch.ones(1, 2))
            >>> inference.getTensorNames()
            ['0.weight', '0.bias', 'input', '0/Linear:0', '1/Relu:0']
        """
        executable = self._state.executable
        if executable is None:
            raise AssertionError(NOT_COMPILED)
        return list(executable.tensor_names)

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """The value of an anchored tensor in the last call.

        It comes back as the outputs do: as many of them as the output mode of the
        options selects, whatever mode the anchor was given, as in PopTorch. A gradient
        is that of one micro-batch on one replica, before gradients are accumulated and
        reduced, and multiplied by the loss scaling. A weight is what a micro-batch
        computes with; `UpdatedVar___` is what the update after it makes of it.

        Args:
            short_name: The name that was given to `Options.anchorTensor`.

        Raises:
            AssertionError: There is no such anchor, or the model hasn't run.

        Example:
            >>> import torch
            >>> from ipufit.emulator import Options, inferenceModel
            >>> options = Options()
            >>> options.anchorTensor("hidden", "0/Mul:0")
            >>> class Double(torch.nn.Module):
            ...     def forward(self, x):
            ...         return x * 2
            >>> double_twice = torch.nn.Sequential(Double(), Double())
            >>> inference = inferenceModel(double_twice, options)
            >>> inference(torch.ones(1))
            tensor([4.])
            >>> inference.getAnchoredTensor("hidden")
            tensor([2.])
        """
        last_call = self._state.last_call
        if last_call is None or short_name not in last_call.anchored:
            names = ", ".join(self._state.options.anchored_tensors) or "none"
            raise AssertionError(
                f"No tensor with name {short_name} found. After a call of the model "
                f"there are: {names}."
            )
        return last_call.anchored[short_name]
