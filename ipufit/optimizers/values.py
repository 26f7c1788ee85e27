# SPDX-License-Identifier: Apache-2.0
"""The values of an optimizer: variable, constant, and as checkpoints have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import torch

KERNEL_SETTINGS = ("capturable", "differentiable", "foreach", "fused", "maximize")
"""Settings of torch's kernels. IPUs don't use them, and they vary between versions."""

_NOT_SAVED = ("params", "initial_lr", "decoupled_weight_decay", *KERNEL_SETTINGS)
_PLAIN = (bool, int, float, str)
_BETAS = {"beta1": 0, "beta2": 1}


@dataclass(frozen=True)
class OptimizerValues:
    """The values of an optimizer: settings of its parameter groups, and attributes.

    Args:
        optimizer: An optimizer of `poptorch.optim`, or of torch if PopTorch takes it.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> before = OptimizerValues(sgd).variable
        >>> sgd.param_groups[0]["lr"] = 0.25
        >>> OptimizerValues(sgd).variable == before
        False
    """

    optimizer: Any

    @property
    def variable(self) -> tuple[object, ...]:
        """The settings of each group, and the loss scaling; devices have copies.

        PopTorch sends a change only in `setOptimizer`; callers compare these values to
        find a change.
        """
        groups = self.optimizer.param_groups
        values = [{n: v for n, v in g.items() if n != "params"} for g in groups]
        return *values, getattr(self.optimizer, "loss_scaling", 1.0)

    @property
    def constant(self) -> tuple[object, ...]:
        """The values of an optimizer of `poptorch.optim` that are compiled in.

        The values are its class and plain attributes, and the constant settings and
        parameters of each group and of the defaults. An optimizer whose state doesn't
        begin with zeros is included itself, since a program can't be used for another.

        Example:
            >>> from ipufit import poptorch
            >>> weights = [torch.nn.Parameter(torch.zeros(1))]
            >>> sgds = [poptorch.optim.SGD(weights, lr=lr) for lr in (0.1, 0.2)]
            >>> OptimizerValues(sgds[0]).constant == OptimizerValues(sgds[1]).constant
            True
        """
        optimizer = self.optimizer
        is_constant = optimizer.variable_attrs.isConstant
        known = optimizer.defaults
        groups = [
            (
                {name: group.get(name) for name in known if is_constant(name)},
                [id(parameter) for parameter in group.get("params", ())],
            )
            for group in (*optimizer.param_groups, known)
        ]
        attributes = {
            name: value
            for name, value in self._attributes().items()
            if not name.endswith("_is_dirty")
            and (name != "loss_scaling" or is_constant(name))
        }
        # Only here PopART begins with values other than 0 (`sgd1decompose.cpp`).
        is_combined = getattr(optimizer, "use_combined_accum", False)
        itself = id(optimizer) if is_combined else None
        return type(optimizer), groups, attributes, itself

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of all groups, sizes of groups and attributes, by name."""
        groups = self.optimizer.param_groups
        settings = {
            name: [group.get(name) for group in groups]
            for name in groups[0]
            if name not in _NOT_SAVED
        }
        # Equal settings may belong to groups of other sizes.
        settings["parameters per group"] = [len(group["params"]) for group in groups]
        return {**settings, **self._attributes()}

    def _attributes(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self.optimizer).items()
            if isinstance(value, (*_PLAIN, torch.dtype)) and not name.startswith("_")
        }

    def plain(self) -> dict[str, Any]:
        """Return class, groups and loss scaling as a file has them."""
        groups = [
            {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in group.items()
                if name not in _NOT_SAVED
                and isinstance(value, (*_PLAIN, tuple, type(None)))
            }
            for group in self.optimizer.param_groups
        ]
        scaling = float(getattr(self.optimizer, "loss_scaling", 1.0))
        name = type(self.optimizer).__name__
        return {"class": name, "groups": groups, "loss_scaling": scaling}

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Set the values that `plain` of the same optimizer has returned."""
        groups = self.optimizer.param_groups, self.plain()["groups"], plain["groups"]
        for group, names, values in zip(*groups):
            for name in names:
                value = values[name]
                group[name] = tuple(value) if isinstance(value, list) else value
        if hasattr(self.optimizer, "loss_scaling"):
            self.optimizer.loss_scaling = plain["loss_scaling"]


def value_of(group: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a parameter group; "beta1" and "beta2" select from `betas`.

    Example:
        >>> value_of({"lr": 0.1, "betas": (0.9, 0.99)}, "beta2")
        0.99
    """
    return group["betas"][_BETAS[name]] if name in _BETAS else group[name]


def set_value(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a setting of a parameter group, by a name as for `value_of`."""
    if name in _BETAS:
        betas = list(group["betas"])
        betas[_BETAS[name]] = value
        name, value = "betas", tuple(betas)
    group[name] = value


def mark_variable(optimizer: Any, name: str) -> None:
    """Tell PopTorch that a setting may change after the program is compiled.

    Args:
        optimizer: An optimizer of PopTorch.
        name: Name of the setting, as for `set_value`.
    """
    optimizer.variable_attrs.markAsVariable("betas" if name in _BETAS else name)


def plain(value: Any) -> Any:
    """Convert a setting of torch for PopTorch: no tensors, tuples of floats.

    Example:
        >>> plain([torch.tensor(0.5), 1])
        (0.5, 1.0)
    """
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(plain(element) for element in value)
    return float(value) if type(value) is int else value


def numeric_settings(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names, as for `value_of`, of numeric settings except the rate.

    Example:
        >>> from ipufit import poptorch
        >>> weights = [torch.nn.Parameter(torch.zeros(1))]
        >>> numeric_settings(poptorch.optim.RMSprop(weights))[:2]
        ['momentum', 'alpha']
    """
    group, defaults = optimizer.param_groups[0], optimizer.defaults
    numbers = [name for name in group if type(group[name]) in (int, float)]
    names = [name for name in numbers if name in defaults and name != "lr"]
    return [*names, *(_BETAS if "betas" in defaults else ())]
