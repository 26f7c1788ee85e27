# SPDX-License-Identifier: Apache-2.0
"""What an executor shows of the inside of its program."""

from __future__ import annotations

from torch import Tensor

from ipufit.emulator._executor.state import NOT_COMPILED, ExecutorState
from ipufit.emulator._program.program import Program
from ipufit.emulator._program.tensor_names import named_nodes, weight_tensor_names


class Observation(ExecutorState):
    """The tensors of a program, and the values of those that are anchored."""

    def getTensorNames(self) -> list[str]:
        """What `Options.anchorTensor` can anchor in the compiled model.

        Weights have their own names, a gradient is `Gradient___fc.weight`, a weight
        that was updated `UpdatedVar___fc.weight`, and inputs are `input`, `input/1`.
        The optimiser's tensors have PopART's names, such as `Accl1___fc.weight` and
        `lossScaling_FLOAT`. A result of the forward pass is named by the path of its
        module and PopART's operator, such as `encoder/fc/Relu:0`; where PopART
        computes a function of torch in several steps there is one, with torch's name:
        `fc/Linear:0`. There are no gradients of such results here.

        Returns:
            The names.

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
        if not self.isCompiled():
            raise AssertionError(NOT_COMPILED)
        return list(self._tensor_names)

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """The value of an anchored tensor in the last call.

        It comes back as the outputs do: as many of them as the output mode of the
        options selects, whatever mode the anchor was given, as in PopTorch. A gradient
        is that of one micro-batch on one replica, before gradients are accumulated and
        reduced, and multiplied by the loss scaling. A weight is what a micro-batch
        computes with; `UpdatedVar___` is what the update after it makes of it.

        Args:
            short_name: The name that was given to `Options.anchorTensor`.

        Returns:
            The tensor.

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
        if short_name not in self._anchored:
            raise AssertionError(
                f"No tensor with name {short_name} found. After a call of the model "
                f"there are: {', '.join(self._options.anchored_tensors) or 'none'}."
            )
        return self._anchored[short_name]

    def _names_of(self, program: Program) -> list[str]:
        """All names in a program that was just traced, and of its optimiser."""
        host = self._host_weights
        trained = [
            name
            for name, weight in host.items()
            if program.has_loss and weight.requires_grad and weight.is_floating_point()
        ]
        names = [*named_nodes(program), *weight_tensor_names(trained)]
        if self._optimizer_link is not None:
            names += self._optimizer_link.tensor_names(trained, host)
        return names
