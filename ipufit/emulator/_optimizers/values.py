# SPDX-License-Identifier: Apache-2.0
"""The values of an optimiser that the device needs, and which may change later.

The device runs no Python optimiser: it has kinds of its own, configured with values
read off an optimiser object (`settings.py`). Two readings compare equal when there is
nothing to send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Iterator, NamedTuple

import torch

from ipufit.emulator._optimizers.kinds import OptimizerKind
from ipufit.emulator.errors import Error


class Variable(NamedTuple):
    """A hyper-parameter and whether it is compiled into the program."""

    value: float
    is_const: bool


_UNUSED = Variable(0.0, is_const=True)


@dataclass(frozen=True)
class GroupVariables:
    """The hyper-parameters of one group; those its optimiser hasn't got are zero."""

    lr: Variable = _UNUSED
    weight_decay: Variable = _UNUSED
    momentum: Variable = _UNUSED
    dampening: Variable = _UNUSED
    nesterov: Variable = _UNUSED
    velocity_scaling: Variable = _UNUSED
    beta1: Variable = _UNUSED
    beta2: Variable = _UNUSED
    eps: Variable = _UNUSED
    alpha: Variable = _UNUSED
    max_weight_norm: Variable = _UNUSED

    def items(self) -> Iterator[tuple[str, Variable]]:
        """Iterate over names and variables."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)


@dataclass(frozen=True)
class OptimizerSettings:
    """One reading of an optimiser object.

    Attributes:
        scaling: The loss scaling and whether it is compiled in.
        defaults: Values for the parameters that are in no group.
        groups: Values for the parameters of each group.
        max_grad_norm: Largest global norm, infinite if there is no clipping.
        use_tf_variant: Whether RMSprop is TensorFlow's.
        accum_type: Type of accumulated gradients.
        velocity_accum_type: Type of SGD's velocity.
        first_order_momentum_accum_type: Type of Adam's, LAMB's and RMSprop's means.
        second_order_momentum_accum_type: Type of their second means.
    """

    kind: OptimizerKind
    scaling: Variable
    defaults: GroupVariables
    groups: tuple[GroupVariables, ...]
    max_grad_norm: float = math.inf
    use_tf_variant: bool = False
    accum_type: torch.dtype = torch.float32
    velocity_accum_type: torch.dtype = torch.float32
    first_order_momentum_accum_type: torch.dtype = torch.float32
    second_order_momentum_accum_type: torch.dtype = torch.float32

    @property
    def loss_scaling(self) -> float:
        """The factor of the loss before the backward pass."""
        return self.scaling.value

    @property
    def uses_running_mean(self) -> bool:
        """Whether gradients are accumulated as a running mean, whatever is asked.

        A 16-bit accumulator would overflow on a sum; only combined SGD, whose
        accumulator isn't typed by `accum_type`, is left alone.
        """
        is_combined = self.kind is OptimizerKind.SGD1
        return self.accum_type == torch.float16 and not is_combined

    def variables(self, group_index: int | None) -> GroupVariables:
        """Give the hyper-parameters of a group, or the defaults for None."""
        return self.defaults if group_index is None else self.groups[group_index]


def check_replaceable(old: OptimizerSettings, new: OptimizerSettings) -> None:
    """Check that the compiled program can go on with other values.

    Groups beyond those compiled are ignored: no parameter belongs to them. Dampening
    may change even as a constant, since PopART doesn't compare it (`sgd.cpp`), nor do
    the types of Adam's accumulators count, which stay as they were compiled.

    Args:
        old: The settings the model was compiled with, or has been given since.
        new: The settings to take over.

    Raises:
        Error: If the kind, a constant, a constant's being one, the largest gradient
            norm or SGD's accumulators differ.
        ValueError: If `accum_type` becomes float16: that needs another program.

    Example:
        >>> from ipufit.emulator import optim
        >>> from ipufit.emulator._optimizers.settings import OptimizerReader
        >>> sgd = optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        >>> reader = OptimizerReader(relax_attribute_checks=False)
        >>> old = reader.read(sgd)
        >>> sgd.param_groups[0]["lr"] = 0.2
        >>> check_replaceable(old, reader.read(sgd))
        >>> sgd.param_groups[0]["momentum"] = 0.9
        >>> check_replaceable(old, reader.read(sgd))
        Traceback (most recent call last):
        ...
        ipufit.emulator.errors.Error: ... Values are constant but do not match...
    """
    if new.uses_running_mean and not old.uses_running_mean:
        raise ValueError(
            "accum_type can not become torch.float16, because the executable is "
            "already compiled."
        )
    _check_kind(old, new)
    if new.max_grad_norm != old.max_grad_norm:
        raise _refusal(
            "Clip norm settings differ: max_grad_norm was "
            f"{old.max_grad_norm} when the model was compiled, now {new.max_grad_norm}"
        )
    if len(new.groups) < len(old.groups):
        raise _refusal(
            f"The model was compiled with {len(old.groups)} parameter groups, the "
            f"new optimizer has {len(new.groups)}"
        )
    _check_variable("loss_scaling", old.scaling, new.scaling)
    _check_group("the defaults", old.defaults, new.defaults)
    for index, (old_group, new_group) in enumerate(zip(old.groups, new.groups)):
        _check_group(f"group {index}", old_group, new_group)


def _check_kind(old: OptimizerSettings, new: OptimizerSettings) -> None:
    if old.kind.family != new.kind.family:
        raise _refusal(
            f"Can not replace optimizer of type {old.kind.name} "
            f"with one of type {new.kind.name}"
        )
    fixed = [
        ("mode", old.kind.mode, new.kind.mode),
        ("use_tf_variant", old.use_tf_variant, new.use_tf_variant),
    ]
    if old.kind.family == "SGD":
        velocity_types = old.velocity_accum_type, new.velocity_accum_type
        fixed.append(("accum_type", old.accum_type, new.accum_type))
        fixed.append(("velocity_accum_type", *velocity_types))
    changed = [f"{what} was {was}, now {now}" for what, was, now in fixed if was != now]
    if changed:
        raise _refusal(
            f"Can not replace this {old.kind.family} optimizer by one that needs "
            f"another program: {'; '.join(changed)}"
        )


def _check_group(where: str, old: GroupVariables, new: GroupVariables) -> None:
    for (name, was), (_, now) in zip(old.items(), new.items()):
        if name != "dampening":
            _check_variable(f"{name} of {where}", was, now)


def _check_variable(what: str, old: Variable, new: Variable) -> None:
    if old.is_const != new.is_const:
        raise _refusal(
            f"Can not replace a constant value with a non constant value. {what} was "
            f"{_describe(old)} when the model was compiled, now {_describe(new)}. "
            "Pass it to the optimizer's constructor, or mark it with "
            "variable_attrs.markAsVariable, before the model is compiled"
        )
    if old.is_const and old.value != new.value:
        raise _refusal(
            f"Values are constant but do not match. {what} was compiled as "
            f"{old.value}, now {new.value}. Pass it to the constructor of a "
            "poptorch.optim optimizer, or mark it with variable_attrs.markAsVariable, "
            "before the model is compiled"
        )


def _describe(variable: Variable) -> str:
    return f"{'constant' if variable.is_const else 'variable'} ({variable.value})"


def _refusal(message: str) -> Error:
    return Error(f"{message}.", type="popart_exception")
