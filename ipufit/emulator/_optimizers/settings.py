# SPDX-License-Identifier: Apache-2.0
"""Reading an optimiser object into the device's settings.

Accepted are PopTorch's optimisers, torch's SGD, Adam, AdamW and RMSprop, and classes
derived from them, which count as what they derive from. PopTorch 3.4 decides by
`isinstance`; AdamW is tried before Adam, because newer torch derives it from Adam.
"""

from __future__ import annotations

import logging
import math
import numbers
from typing import Any, Iterable, Mapping

import torch

from ipufit.emulator._optimizers.base import Optimizer, logger
from ipufit.emulator._optimizers.lamb import LAMB
from ipufit.emulator._optimizers.optimizers import AdamW
from ipufit.emulator._optimizers.values import (
    GroupVariables,
    OptimizerKind,
    OptimizerSettings,
    Variable,
    check_replaceable,
)
from ipufit.emulator.errors import Error

__all__ = [
    "GroupVariables",
    "OptimizerKind",
    "OptimizerReader",
    "OptimizerSettings",
    "Variable",
    "check_replaceable",
    "optimizer_kind",
]

_ADAM = ("lr", "betas", "eps", "weight_decay")
_GROUP_NAMES: dict[str, tuple[str, ...]] = {
    "SGD1": (
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "velocity_scaling",
    ),
    "SGD2": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "ADAM": _ADAM,
    "ADAMW": _ADAM,
    "ADAMW_NO_BIAS": _ADAM,
    "RMSPROP": ("lr", "momentum", "weight_decay", "alpha", "eps"),
    "RMSPROP_CENTERED": ("lr", "momentum", "weight_decay", "alpha", "eps"),
    "LAMB": (*_ADAM, "max_weight_norm"),
    "LAMB_NO_BIAS": (*_ADAM, "max_weight_norm"),
}

_TYPE_NAMES = (
    "accum_type",
    "velocity_accum_type",
    "first_order_momentum_accum_type",
    "second_order_momentum_accum_type",
)

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
        "use_combined_accum",
        "bias_correction",
        "max_grad_norm",
        "max_weight_norm",
        "use_tf_variant",
        *_TYPE_NAMES,
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
            Its values now.

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
        group_names = _TORCH_GROUP_NAMES.union(_GROUP_NAMES[kind.name])
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


def optimizer_kind(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    """Say which of the device's optimisers stands for an optimiser object.

    Args:
        optimizer: Any object.

    Returns:
        The kind its class, and a few of its attributes, ask for.

    Raises:
        AssertionError: If there is none, or RMSprop's groups want different ones.

    Example:
        >>> weights = [torch.nn.Parameter(torch.zeros(2))]
        >>> optimizer_kind(torch.optim.AdamW(weights)).name
        'ADAMW'
    """
    if isinstance(optimizer, torch.optim.SGD):
        is_combined = getattr(optimizer, "use_combined_accum", False)
        return OptimizerKind.SGD1 if is_combined else OptimizerKind.SGD2
    if isinstance(optimizer, torch.optim.AdamW):
        if isinstance(optimizer, AdamW) and not optimizer.bias_correction:
            return OptimizerKind.ADAMW_NO_BIAS
        return OptimizerKind.ADAMW
    if isinstance(optimizer, torch.optim.Adam):
        return OptimizerKind.ADAM
    if isinstance(optimizer, torch.optim.RMSprop):
        return _rmsprop_kind(optimizer)
    if isinstance(optimizer, LAMB):
        corrects = optimizer.bias_correction
        return OptimizerKind.LAMB if corrects else OptimizerKind.LAMB_NO_BIAS
    raise AssertionError(
        "Unsupported optimizer type. Types supported are poptorch.optim's SGD, Adam, "
        "AdamW, RMSprop and LAMB, and torch.optim's SGD, Adam, AdamW and RMSprop; got "
        f"{type(optimizer).__name__}."
    )


def _rmsprop_kind(optimizer: torch.optim.RMSprop) -> OptimizerKind:
    centered = {bool(group.get("centered")) for group in optimizer.param_groups}
    if len(centered) > 1:
        raise AssertionError(
            "All parameter groups must have the same value for the 'centered' "
            "attribute: the device has one RMSprop for all of them."
        )
    if centered == {True}:
        return OptimizerKind.RMSPROP_CENTERED
    return OptimizerKind.RMSPROP


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
    for name in _GROUP_NAMES[kind.name]:
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
    # Torch's optimisers don't tell what was given, so a default's value is constant.
    ordinary = {
        "weight_decay": 0.01 if kind.mode == "AdamW" else 0.0,
        "momentum": 0.0,
        "dampening": 0.0,
        "velocity_scaling": 1.0,
        "eps": 1e-8,
    }
    return name not in ordinary or value == ordinary[name]


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
    if kind.family != "SGD" and kind.mode not in ("Adam", "AdamW"):
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
