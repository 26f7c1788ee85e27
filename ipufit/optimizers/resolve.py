# SPDX-License-Identifier: Apache-2.0
"""From names and torch's optimisers to PopTorch's.

PopTorch takes four of torch's optimisers as they are, but keeps their momentum only
until the next detach and compiles their settings in as constants. Its own ones have
neither fault, so torch's are rebuilt as PopTorch's, with their parameter groups.
"""

from __future__ import annotations

from typing import Any, Callable, Union

import torch

from ipufit._poptorch import poptorch
from ipufit.errors import ConfigError, UnsupportedError

from .kinds import ELSEWHERE, KINDS, NAMES, Kind
from .spec import Optimizer

OptimizerLike = Union[str, Optimizer, torch.optim.Optimizer]
"""A name, an `ipufit.Optimizer`, one of torch, or one of `poptorch.optim`."""

_HAS_NO_COUNTERPART = ("amsgrad", "maximize")


def resolve_optimizer(
    optimizer: OptimizerLike,
    module: torch.nn.Module,
    own: Callable[[Any], Any] | None = None,
) -> torch.optim.Optimizer:
    """Give the PopTorch optimiser that a name or another optimiser stands for.

    Names take PopTorch's defaults and a learning rate of 0.001 (0.01 for SGD).

    Args:
        optimizer: A name, an `ipufit.Optimizer`, a torch optimiser (SGD, Adam, AdamW,
            RMSprop), or one of `poptorch.optim`, which is used as it is.
        module: Its parameters are given to a named optimiser.
        own: Gives the module's parameter in the place of one of the module that it is
            a copy of. An optimiser of `poptorch.optim` has the module's parameters
            from then on.

    Returns:
        An optimiser of `poptorch.optim`.

    Raises:
        UnknownNameError: The name is unknown.
        ConfigError: It optimises something else than `module`.
        UnsupportedError: PopTorch has no such optimiser, or not that setting of it.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> adam = torch.optim.Adam(module.parameters(), lr=0.02)
        >>> resolve_optimizer(adam, module).param_groups[0]["lr"]
        0.02
    """
    if isinstance(optimizer, str):
        optimizer = Optimizer(optimizer)
    if isinstance(optimizer, Optimizer):
        return optimizer.bind(module)
    if isinstance(optimizer, (tuple, list, dict)):
        raise UnsupportedError(
            f"optimizer has several optimizers ({len(optimizer)}), and a program has "
            "one. Give parts of the module settings of their own as parameter groups: "
            "torch.optim.AdamW([{'params': model.head.parameters(), 'lr': 1e-3}, ...])."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"optimizer={optimizer!r} is neither a name ({', '.join(NAMES)}) nor "
            "an ipufit.Optimizer, nor an optimizer made with the module's parameters."
        )
    groups = _own_groups(optimizer, module, own or _itself)
    if isinstance(optimizer, poptorch.optim.Optimizer):
        for group, parameters in zip(optimizer.param_groups, groups):
            group["params"] = parameters
        return optimizer
    for kind in KINDS.values():
        if type(optimizer) is kind.torch_class:
            return _rebuild(optimizer, kind, groups)
    nearest = ELSEWHERE.get(type(optimizer).__name__.lower())
    raise UnsupportedError(
        f"{_class_name(optimizer)} can't run on an IPU"
        f"{'' if nearest is None else f' ({nearest})'}. Use one of "
        f"{', '.join(NAMES)}, torch.optim's SGD, Adam, AdamW or RMSprop, or "
        "an optimizer of poptorch.optim."
    )


def _own_groups(
    optimizer: torch.optim.Optimizer,
    module: torch.nn.Module,
    own: Callable[[Any], Any],
) -> list[list[Any]]:
    """The module's parameters in the groups of an optimiser."""
    groups = [[own(one) for one in group["params"]] for group in optimizer.param_groups]
    known = {id(parameter) for parameter in module.parameters()}
    strangers = sum(id(one) not in known for group in groups for one in group)
    if strangers:
        raise ConfigError(
            f"{strangers} parameters of this {_class_name(optimizer)} are not the "
            "module's. Make it with module.parameters() of the module that you passed "
            "to IPUModel, or with model.module.parameters()."
        )
    return groups


def _itself(parameter: Any) -> Any:
    return parameter


def check_covers(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Refuse to train weights that the optimiser wasn't given.

    torch would leave them as they are; PopTorch trains them with the optimiser's
    defaults (PopTorch, `CompilerImpl.cpp`), which nobody expects.

    Raises:
        ConfigError: A trainable parameter is in none of the groups.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> check_covers(torch.optim.SGD([module.weight], lr=0.1), module)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: bias: trainable, but not among the optimizer's ...
    """
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        name
        for name, parameter in module.named_parameters()
        if id(parameter) not in given and parameter.requires_grad
    ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: trainable, but not among the optimizer's "
            "parameters. An IPU would train them with the optimizer's defaults. Freeze "
            "them with requires_grad_(False), or give them to the optimizer."
        )


def hyper_parameters(optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """Give the values of an optimiser that a device has copies of.

    PopTorch learns of a change only through `setOptimizer`; who remembers these can
    tell whether there was one.

    Returns:
        The values of each parameter group, then the loss scaling.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> before = hyper_parameters(sgd)
        >>> sgd.param_groups[0]["lr"] = 0.25
        >>> hyper_parameters(sgd) == before
        False
    """
    groups = [
        tuple((name, value) for name, value in group.items() if name != "params")
        for group in optimizer.param_groups
    ]
    return (*groups, getattr(optimizer, "loss_scaling", 1.0))


def program_key(optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    """Give what a program has compiled in of an optimiser: all but variable values.

    Args:
        optimizer: An optimiser of `poptorch.optim`.

    Returns:
        Its class and plain attributes, and for each group and the defaults the values
        that are constants and the parameters. One whose state doesn't begin with
        zeros has itself in it.

    Example:
        >>> weights = [torch.nn.Parameter(torch.zeros(1))]
        >>> one, other = (poptorch.optim.SGD(weights, lr=lr) for lr in (0.1, 0.2))
        >>> program_key(one) == program_key(other)
        True
    """
    is_constant = optimizer.variable_attrs.isConstant  # type: ignore[attr-defined]
    known = optimizer.defaults
    groups = [
        (
            tuple((n, group.get(n) if is_constant(n) else None) for n in known),
            tuple(id(parameter) for parameter in group.get("params", ())),
        )
        for group in (*optimizer.param_groups, known)
    ]
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (bool, int, float, str, torch.dtype))
        and not name.startswith("_")
        and not name.endswith("_is_dirty")
        and (name != "loss_scaling" or is_constant(name))
    }
    # PopART begins with other values than 0 only there (`sgd1decompose.cpp`).
    is_combined = getattr(optimizer, "use_combined_accum", False)
    return type(optimizer), groups, attributes, id(optimizer) if is_combined else None


def _rebuild(
    optimizer: torch.optim.Optimizer, kind: Kind, parameters: list[list[Any]]
) -> torch.optim.Optimizer:
    for name in _HAS_NO_COUNTERPART:
        if any(group.get(name) for group in optimizer.param_groups):
            raise UnsupportedError(
                f"{_class_name(optimizer)} with {name}=True can't run on an IPU: "
                f"PopTorch has no {name}. Leave it out."
            )
    for when in ("pre", "post"):
        if getattr(optimizer, f"_optimizer_step_{when}_hooks", None):
            raise UnsupportedError(
                f"{_class_name(optimizer)} has a step {when}-hook, and the steps are "
                "made on the device, where no hook is called. Use a callback: "
                "on_train_batch_begin and on_train_batch_end come around each call."
            )
    if optimizer.state:
        raise UnsupportedError(
            f"This {_class_name(optimizer)} has made steps already, and its state "
            "can't be moved to an IPU. Pass a new one."
        )
    settings = kind.known(optimizer.defaults)
    groups: list[dict[str, Any]] = [
        {"params": own, **{name: plain(group[name]) for name in settings}}
        for group, own in zip(optimizer.param_groups, parameters)
    ]
    defaults = {name: plain(optimizer.defaults[name]) for name in settings}
    if not isinstance(defaults["lr"], float):  # every group has its own
        defaults["lr"] = groups[0]["lr"]
    rebuilt: torch.optim.Optimizer = kind.poptorch_class(groups, **defaults)
    _drop_velocity(rebuilt)
    return rebuilt


def _drop_velocity(optimizer: torch.optim.Optimizer) -> None:
    """Let PopTorch do without a velocity if there is no momentum, as torch does.

    A momentum that may change costs a tensor per weight. And without momentum torch
    ignores the dampening, which PopTorch applies.
    """
    values = (*optimizer.param_groups, optimizer.defaults)
    if "momentum" not in optimizer.defaults:
        return
    for group in values:
        if group["momentum"] == 0 and "dampening" in group:
            group["dampening"] = 0.0
    if all(group["momentum"] == 0 for group in values):
        optimizer.variable_attrs.markAsConstant("momentum")  # type: ignore[attr-defined]


def plain(value: Any) -> Any:
    """Convert a group's value to what PopTorch takes: no tensors, tuples of floats.

    Example:
        >>> plain([torch.tensor(0.5), 1])
        (0.5, 1.0)
    """
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(plain(element) for element in value)
    return float(value) if type(value) is int else value


def _class_name(value: object) -> str:
    return f"{type(value).__module__.split('._')[0]}.{type(value).__qualname__}"
