# SPDX-License-Identifier: Apache-2.0
"""An optimiser's values in the log, as PopTorch words them."""

from __future__ import annotations

from dataclasses import fields
from typing import Iterator

from ipufit.emulator._optimizers.kinds import OptimizerKind
from ipufit.emulator._optimizers.values import (
    GroupVariables,
    OptimizerSettings,
    Variable,
)

_NAMES = {"lr": "learning_rate"}


def optimizer_log(settings: OptimizerSettings) -> Iterator[str]:
    """Describe an optimiser: the graph's first, then each group's.

    A value that is compiled into the program, and so may not change, is followed by
    `(const)`.

    Args:
        settings: The values read off the optimiser.

    Yields:
        A line for the log.

    Example:
        >>> import torch
        >>> from ipufit.emulator import optim
        >>> from ipufit.emulator._optimizers.settings import OptimizerReader
        >>> sgd = optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        >>> reader = OptimizerReader(relax_attribute_checks=False)
        >>> for line in optimizer_log(reader.read(sgd)):
        ...     print(line[:73])
        Updating graph optimizer with SGD, defaultLearningRate=0.1, defaultWeight
        Updating group 0 optimizer with SGD, learningRate=0.1, weightDecay=0 (con
    """
    yield "Updating graph optimizer with " + _join(
        settings.kind.family,
        *_variables(settings, settings.defaults, prefix="default_"),
        *_types(settings),
    )
    for index, group in enumerate(settings.groups):
        yield f"Updating group {index} optimizer with " + _join(
            settings.kind.family, *_variables(settings, group, prefix="")
        )


def _variables(
    settings: OptimizerSettings, group: GroupVariables, prefix: str
) -> Iterator[str]:
    for field in fields(group):
        variable = getattr(group, field.name)
        if variable is not field.default:
            yield _assignment(prefix + _NAMES.get(field.name, field.name), variable)
    if settings.kind is OptimizerKind.SGD2:  # its velocity is scaled as the loss is
        yield _assignment(f"{prefix}velocity_scaling", settings.scaling)
    yield _assignment("loss_scaling", settings.scaling)


def _types(settings: OptimizerSettings) -> Iterator[str]:
    is_sgd = settings.kind.family == "SGD"
    first = (
        settings.velocity_accum_type
        if is_sgd
        else settings.first_order_momentum_accum_type
    )
    types = {
        "accum_type": settings.accum_type,
        "first_order_momentum_accum_type": first,
        "second_order_momentum_accum_type": settings.second_order_momentum_accum_type,
    }
    for name, dtype in types.items():
        yield f"{_camel_case(name)}={str(dtype).rpartition('.')[2]}"


def _assignment(name: str, variable: Variable) -> str:
    suffix = " (const)" if variable.is_const else ""
    return f"{_camel_case(name)}={variable.value:g}{suffix}"


def _camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _join(*parts: str) -> str:
    return ", ".join(parts)
