# SPDX-License-Identifier: Apache-2.0
"""Reading an optimiser object into the device's settings."""

from __future__ import annotations

import logging
import math
import numbers
from typing import Any, Iterable, Mapping

import torch

from ipufit.emulator._optimizers.base import ATTRIBUTES, Optimizer, logger
from ipufit.emulator._optimizers.kinds import OptimizerKind, optimizer_kind
from ipufit.emulator._optimizers.values import (
    GroupVariables,
    OptimizerSettings,
    Variable,
)
from ipufit.emulator.errors import Error

_TYPE_NAMES = [name for name in ATTRIBUTES if name.endswith("accum_type")]

# Optimisers of torch itself: the device knows what they do.
_TORCH_CLASSES = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
)

# Never unexpected: what torch, some versions later than others, puts there itself.
_TORCH_GROUP_NAMES = frozenset(
    [
        "params",
        "param_names",
        "amsgrad",
        "centered",
        "foreach",
        "maximize",
        "capturable",
        "differentiable",
        "fused",
        "decoupled_weight_decay",
    ]
)
_OPTIMIZER_NAMES = frozenset(
    [
        "defaults",
        "state",
        "param_groups",
        "variable_attrs",
        "state_dict",
        "ipu_state_is_dirty",
        "host_state_is_dirty",
        "loss_scaling",
        *ATTRIBUTES,
    ]
)


class OptimizerReader:
    """Reads the optimisers one executor is given, and remembers the first.

    The first reading records the names of all attributes. Later ones warn, once for
    each message, about names that weren't there: a program that sets them probably
    expects an effect, and they have none.

    Args:
        relax_attribute_checks: Log those warnings as debug messages instead.
        automatic_loss_scaling: Whether the device adapts the loss scaling, which makes
            it variable.

    Example:
        >>> from ipufit.emulator import optim
        >>> sgd = optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
        >>> settings = OptimizerReader(relax_attribute_checks=False).read(sgd)
        >>> settings.kind.name, settings.groups[0].lr
        ('SGD2', Variable(value=0.5, is_const=False))
    """

    def __init__(
        self, relax_attribute_checks: bool, automatic_loss_scaling: bool = False
    ) -> None:
        self._level = logging.DEBUG if relax_attribute_checks else logging.WARNING
        self._automatic_loss_scaling = automatic_loss_scaling
        self._known: dict[str, set[str]] = {}
        self._logged: set[str] = set()

    def read(self, optimizer: torch.optim.Optimizer) -> OptimizerSettings:
        """Convert an optimiser to settings.

        Args:
            optimizer: One of PopTorch's or an accepted one of torch's.

        Returns:
            The values that it has now.

        Raises:
            AssertionError: If the device has no such optimiser, or an attribute is
                missing or of the wrong type.
            ValueError: If it uses a variant the device doesn't have.
            Error: If a value makes no sense to the device.

        Example:
            >>> reader = OptimizerReader(relax_attribute_checks=False)
            >>> weights = [torch.nn.Parameter(torch.zeros(2))]
            >>> reader.read(torch.optim.Adagrad(weights))
            Traceback (most recent call last):
            ...
            AssertionError: Unsupported optimizer type. Types supported ...
        """
        kind = optimizer_kind(optimizer)
        self._warn_if_custom(optimizer)
        self._check_names(kind, optimizer)
        groups = [optimizer.defaults, *optimizer.param_groups]
        for values in groups:
            _check_variants(kind, values)
        defaults, *others = [_group(kind, optimizer, values) for values in groups]
        return OptimizerSettings(
            kind=kind,
            scaling=self._loss_scaling(optimizer),
            defaults=defaults,
            groups=tuple(others),
            max_grad_norm=_max_grad_norm(kind, optimizer),
            use_tf_variant=bool(getattr(optimizer, "use_tf_variant", False)),
            **_accumulation_types(optimizer),
        )

    def _loss_scaling(self, optimizer: torch.optim.Optimizer) -> Variable:
        value = _number("loss_scaling", getattr(optimizer, "loss_scaling", 1.0))
        if value == 0.0:
            raise Error(
                "Loss scaling cannot be 0: no gradient would be left.",
                type="popart_exception",
            )
        attributes = getattr(optimizer, "variable_attrs", None)
        if attributes is None:
            is_const = value == 1.0
        else:
            is_const = attributes.isConstant("loss_scaling")
        return Variable(value, is_const and not self._automatic_loss_scaling)

    def _warn_if_custom(self, optimizer: torch.optim.Optimizer) -> None:
        cls = type(optimizer)
        bases = (torch.optim.Optimizer, Optimizer)
        if cls not in _TORCH_CLASSES and not set(bases).intersection(cls.__bases__):
            self._log(
                logging.WARNING,
                f"{cls.__name__} is a custom optimizer: Poptorch does not run Python "
                "optimizer code directly, so it is treated as the optimizer it "
                "derives from",
            )

    def _check_names(
        self, kind: OptimizerKind, optimizer: torch.optim.Optimizer
    ) -> None:
        is_first = not self._known
        group_names = _TORCH_GROUP_NAMES.union(kind.variables)
        found: list[tuple[str, Iterable[str], frozenset[str]]] = [
            ("default group variable", optimizer.defaults, group_names),
            ("optimizer attribute", vars(optimizer), _OPTIMIZER_NAMES),
        ]
        for index, values in enumerate(optimizer.param_groups):
            found.append((f"group {index} attribute", values, group_names))
        for what, names, readable in found:
            public = {name for name in names if not name.startswith("_")}
            if is_first:
                self._known[what] = public
                continue
            unexpected = sorted(public - readable - self._known.get(what, set()))
            if unexpected:
                self._log(
                    self._level,
                    f"Ignoring unexpected {what} in {kind.name} optimizer: "
                    f"{unexpected}",
                )

    def _log(self, level: int, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.log(level, message)


def _check_variants(kind: OptimizerKind, values: Mapping[str, Any]) -> None:
    if kind.family != "Adam":
        return
    if values.get("amsgrad", False):
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
    # Newer torch has it and PopTorch's hasn't: to ignore it would train otherwise.
    if kind is OptimizerKind.ADAM and values.get("decoupled_weight_decay", False):
        raise ValueError(
            "Adam's decoupled_weight_decay is not supported: use AdamW, which is that."
        )


def _group(
    kind: OptimizerKind, optimizer: torch.optim.Optimizer, values: Mapping[str, Any]
) -> GroupVariables:
    variables: dict[str, Variable] = {}
    for name in kind.variables:
        if name not in values:
            raise AssertionError(
                f"Mandatory attribute {name} not found in optimizer group"
            )
        if name == "betas":
            pair = _betas(values[name])
        else:
            pair = {name: _number(name, values[name])}
        for key, value in pair.items():
            is_const = _is_constant(kind, optimizer, name, value)
            variables[key] = Variable(value, is_const)
    return GroupVariables(**variables)


def _is_constant(
    kind: OptimizerKind, optimizer: torch.optim.Optimizer, name: str, value: float
) -> bool:
    attributes = getattr(optimizer, "variable_attrs", None)
    if attributes is not None:
        return bool(attributes.isConstant(name))
    if name == "lr":
        return False
    return name not in kind.ordinary or value == kind.ordinary[name]


def _number(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise AssertionError(
            f"Expected a number for {name} but got {value!r} "
            f"of type {type(value).__name__}"
        )
    return float(value)


def _betas(value: object) -> dict[str, float]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise AssertionError(f"Expected a pair for betas, a tuple, but got {value!r}")
    beta1, beta2 = value
    return {"beta1": _number("beta1", beta1), "beta2": _number("beta2", beta2)}


def _max_grad_norm(kind: OptimizerKind, optimizer: torch.optim.Optimizer) -> float:
    if not kind.clips:
        return math.inf
    value = _number("max_grad_norm", getattr(optimizer, "max_grad_norm", math.inf))
    if math.isnan(value):
        raise Error(
            "Maximum norm of gradients cannot be NaN.", type="poptorch_cpp_error"
        )
    return value


def _accumulation_types(optimizer: torch.optim.Optimizer) -> dict[str, torch.dtype]:
    types = {}
    for name in _TYPE_NAMES:
        dtype = getattr(optimizer, name, torch.float32)
        if dtype not in (torch.float32, torch.float16):
            raise ValueError(
                f"{name} must be torch.float32 or torch.float16, got {dtype!r}."
            )
        types[name] = dtype
    return types
