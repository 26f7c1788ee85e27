# SPDX-License-Identifier: Apache-2.0
"""The optimiser on the host, and the one on the device of a training program."""

from __future__ import annotations

import torch

from ipufit.optimizers import hyper_parameters

from .programs import TrainingProgram

_LOSS_SCALE_FACTOR = "lossScaleUpdateFactor"


def bind_optimizer(program: TrainingProgram, optimizer: torch.optim.Optimizer) -> None:
    """Have a program train with an optimiser of the kind that it was compiled with.

    One without a state begins at the beginning, as in a program that was just compiled.

    Args:
        program: Attached or not.
        optimizer: Of `poptorch.optim`.
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
        executor.setOptimizer(optimizer)


def send_changes(program: TrainingProgram) -> None:
    """Send the values of the optimiser that were changed since they were sent last."""
    values = hyper_parameters(program.optimizer)
    if values != program.sent:
        program.executor.setOptimizer(program.optimizer)
        program.sent = values


def _give_first_state(
    optimizer: torch.optim.Optimizer, previous: torch.optim.Optimizer
) -> None:
    """Give an optimiser the state that a device's has when it is compiled.

    That is zeros, and 1 for the factor of automatic loss scaling (PopART,
    `addStateTensor`; `program_key` leaves out the optimiser that begins otherwise).

    Args:
        optimizer: Without a state.
        previous: Of the same kind and parameters; the device has its state.
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
