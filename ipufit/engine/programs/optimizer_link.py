# SPDX-License-Identifier: Apache-2.0
"""Keeps a device's optimiser in step with the one on the host."""

from __future__ import annotations

from typing import Mapping

import torch
from torch._C import DisableTorchFunctionSubclass

from ipufit.optimizers import hyper_parameters

from .programs import TrainingProgram

_LOSS_SCALE_FACTOR = "lossScaleUpdateFactor"


def bind_optimizer(program: TrainingProgram, optimizer: torch.optim.Optimizer) -> None:
    """Have a program train with an optimiser of the kind that it was compiled with.

    One without a state begins at the beginning, as in a program that was just compiled.

    Args:
        program: Attached or not.
        optimizer: An optimiser of `poptorch.optim`.
    """
    executor, previous = program.executor, program.optimizer
    if previous is not optimizer:
        if not optimizer.has_state():  # type: ignore[attr-defined]
            _give_first_state(optimizer, previous)
            if program.random_state is not None:
                executor.rng_state = program.random_state
        program.optimizer, program.sent = optimizer, ()
    if previous is not optimizer or not executor.isAttachedToDevice():
        # Another program may have had it meanwhile: `optimizer.state_dict()` reads from
        # the executor that it was set on last.
        give_states(optimizer, program.step)
        executor.setOptimizer(optimizer)


def give_states(optimizer: torch.optim.Optimizer, step: torch.nn.Module) -> None:
    """Give an optimiser states for weights that it hasn't trained so far.

    PopTorch gives a program the state that the optimiser has from another one, and
    logs a line for each tensor of it that is missing: those of layers that were frozen
    then. They begin with zeros, as on the device. (Values such as learning rates are
    sent before the first call; what stands for them here doesn't count.)

    Args:
        optimizer: An optimiser of `poptorch.optim`.
        step: Module that PopTorch traces; its parameters have PopTorch's names.
    """
    if not optimizer.has_state():  # type: ignore[attr-defined]
        return
    state = optimizer.state_dict()
    given = {n: state[n] for n in ("ipu_state", "ipu_param") if state.get(n)}
    with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
        weights = {name: weight.shape for name, weight in step.named_parameters()}
    full = {name: _completed(tensors, weights) for name, tensors in given.items()}
    if any(len(full[name]) > len(given[name]) for name in given):
        optimizer.load_state_dict({**state, **full})


def _completed(
    tensors: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Add tensors to an optimiser's state for the weights that have none.

    Args:
        tensors: Tensors of the state by name: the kind of state, `___`, the weight.
        weights: Shapes of all weights, by name.
    """
    kinds: dict[str, list[str]] = {}
    for key in tensors:
        start, mark, name = key.rpartition("___")
        if name in weights:
            kinds.setdefault(start + mark, []).append(name)
    full = dict(tensors)
    for kind, names in kinds.items():
        has_shape = all(tensors[kind + name].shape == weights[name] for name in names)
        like = torch.as_tensor(tensors[kind + names[0]])
        for name, shape in weights.items():
            if name not in names:
                full[kind + name] = like.new_zeros(shape if has_shape else like.shape)
    return full


def send_changes(program: TrainingProgram) -> None:
    """Send the optimiser's values to the device if it has others."""
    values = hyper_parameters(program.optimizer)
    if values != program.sent:
        program.executor.setOptimizer(program.optimizer)
        program.sent = values


def _give_first_state(
    optimizer: torch.optim.Optimizer, previous: torch.optim.Optimizer
) -> None:
    """Give an optimiser the state that one on a device begins with.

    That is zeros, and 1 for the factor of automatic loss scaling (PopART,
    `addStateTensor`; `program_key` leaves out the optimiser that begins otherwise).

    Args:
        optimizer: An optimiser without a state.
        previous: One of the same kind and parameters; the device has its state.
    """
    state = previous.state_dict()
    if state["ipu_state"] is None:
        return
    first = {
        name: torch.full_like(torch.as_tensor(value), float(name == _LOSS_SCALE_FACTOR))
        for name, value in state["ipu_state"].items()
    }
    optimizer.load_state_dict(
        {
            **optimizer.state_dict(),
            "ipu_state": first,
            "ipu_param": state["ipu_param"],
        }
    )
