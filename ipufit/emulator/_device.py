# SPDX-License-Identifier: Apache-2.0
"""The device's side of a compiled model: its weights, and how it runs a call.

Nothing here is shared with the host's module. Weights move only through `upload`
and `download`, so that a copy which a script forgets is missing here as it would be
on a pod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._dtypes import device_tensor
from ._layout import Inputs, Layout, Outputs
from ._program import Program
from .enums import MeanReductionStrategy, ReductionType

if TYPE_CHECKING:
    from ._update_rules import DeviceOptimizer
    from .options import Options


class DeviceWeights:
    """The weights of one model on its replicas.

    Parameters are equal on all replicas, so they are stored once. A buffer that the
    program changes has a copy of its own on each.

    Args:
        program: Says which weights there are, and which change.
        host: Host tensors by name; their values are uploaded.
        replicas: Number of replicas.
    """

    def __init__(
        self, program: Program, host: dict[str, Tensor], replicas: int
    ) -> None:
        self._volatile = [name in program.volatile_weights for name in host]
        self._is_volatile = any(self._volatile)
        shared: dict[str, Tensor] = {}
        for name in program.weight_names:
            tensor = device_tensor(host[name].detach(), copy=True)
            wants_grad = host[name].requires_grad and tensor.is_floating_point()
            shared[name] = tensor.requires_grad_(wants_grad and program.has_loss)
        own = [
            name for name in program.updated_weights if not shared[name].requires_grad
        ]
        self._replicas = [shared] + [
            {**shared, **{name: shared[name].clone() for name in own}}
            for _ in range(1, replicas)
        ]
        self._arguments = [list(weights.values()) for weights in self._replicas]

    @property
    def trained(self) -> dict[str, Tensor]:
        """The weights that have gradients."""
        return {
            name: tensor
            for name, tensor in self._replicas[0].items()
            if tensor.requires_grad
        }

    def arguments(self, replica: int) -> list[Tensor]:
        """What the program takes on `replica`, in order."""
        arguments = self._arguments[replica]
        if not self._is_volatile:
            return arguments
        pairs = zip(arguments, self._volatile)
        return [tensor.clone() if changes else tensor for tensor, changes in pairs]

    @torch.no_grad()
    def upload(self, host: dict[str, Tensor]) -> None:
        """Take the host's values."""
        for weights in self._replicas:
            for name, tensor in weights.items():
                tensor.copy_(device_tensor(host[name].detach()))

    @torch.no_grad()
    def download(self, host: dict[str, Tensor]) -> None:
        """Write the first replica's values into the host's tensors."""
        for name, tensor in self._replicas[0].items():
            host[name].detach().copy_(tensor)


class DeviceRng:
    """The random state of a device: torch's generator, apart from the host's.

    Args:
        seed: Where its stream begins.

    Example:
        >>> rng = DeviceRng(seed=1)
        >>> with rng:
        ...     first = torch.rand(2)
        >>> with DeviceRng(seed=1):
        ...     print(torch.equal(torch.rand(2), first))
        True
    """

    def __init__(self, seed: int) -> None:
        self._state = torch.Generator().manual_seed(seed).get_state()
        self._host_state: Tensor | None = None

    def __enter__(self) -> None:
        self._host_state = torch.random.get_rng_state()
        torch.random.set_rng_state(self._state)

    def __exit__(self, *exception: object) -> None:
        if self._host_state is not None:
            self._state = torch.random.get_rng_state()
            torch.random.set_rng_state(self._host_state)


def run_inference(
    program: Program,
    weights: DeviceWeights,
    layout: Layout,
    inputs: Inputs,
    outputs: Outputs,
) -> None:
    """One call of an inference model: every micro-batch once."""
    for step in range(layout.steps):
        for replica, rows in inputs.micro_batches(step):
            with torch.no_grad():  # each time: the program may leave it otherwise
                results = program.run(*weights.arguments(replica), *rows)
            outputs.add(step, replica, results)


def run_training(
    program: Program,
    weights: DeviceWeights,
    layout: Layout,
    inputs: Inputs,
    outputs: Outputs,
    optimizer: DeviceOptimizer,
    reduction: GradientReduction,
) -> None:
    """One call of a training model: D weight updates.

    Each update accumulates the gradients of G micro-batches on each of R replicas,
    reduces them as asked, and steps the optimiser once (PopART, `popprograms.cpp`).
    """
    trained = weights.trained
    for iteration in range(layout.device_iterations):
        first = iteration * layout.gradient_accumulation
        for step in range(first, first + layout.gradient_accumulation):
            for replica, rows in inputs.micro_batches(step):
                with torch.enable_grad():
                    *results, loss = program.run(*weights.arguments(replica), *rows)
                reduction.backward(loss)
                outputs.add(step, replica, tuple(results))
        optimizer.step(reduction.take_gradients(trained))


class GradientReduction:
    """How the gradients of the micro-batches of an update become one.

    Args:
        divisor: G * R for a mean, 1 for a sum.
        is_running: Divide each gradient before it is added (`Running`) instead of
            their sum afterwards (`Post`).
        loss_scaling: What the loss is multiplied by; the optimiser divides it out.
    """

    def __init__(self, divisor: int, is_running: bool, loss_scaling: float) -> None:
        self._divisor = 1 if is_running else divisor
        self._scale = loss_scaling / divisor if is_running else loss_scaling

    @classmethod
    def from_options(
        cls, options: Options, layout: Layout, loss_scaling: float
    ) -> GradientReduction:
        """Read the reduction off the options."""
        training = options.Training
        kind = training.accumulation_and_replication_reduction_type
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        is_mean = kind == ReductionType.Mean
        return cls(
            divisor=layout.gradient_accumulation * layout.replicas if is_mean else 1,
            is_running=strategy == MeanReductionStrategy.Running,
            loss_scaling=loss_scaling,
        )

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch; none if nothing is trained."""
        if loss.requires_grad:
            torch.autograd.backward(loss, torch.full_like(loss, self._scale))

    def take_gradients(self, trained: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """The reduced gradients; the next update starts from nothing."""
        gradients: dict[str, Tensor | None] = {}
        for name, tensor in trained.items():
            gradients[name], tensor.grad = tensor.grad, None
        if self._divisor != 1:
            present = [g for g in gradients.values() if g is not None]
            if present:
                torch._foreach_div_(present, float(self._divisor))
        return gradients
