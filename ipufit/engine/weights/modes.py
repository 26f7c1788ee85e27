# SPDX-License-Identifier: Apache-2.0
"""Train and eval mode of a module that is traced, and the parts that are trained."""

from __future__ import annotations

import contextlib
from itertools import repeat
from operator import attrgetter
from typing import Iterator

import torch
from torch._C import DisableTorchFunctionSubclass

from ipufit.errors import ConfigError


@contextlib.contextmanager
def mode(
    module: torch.nn.Module, *, training: bool, root: torch.nn.Module | None = None
) -> Iterator[None]:
    """Put `module` and its children in train or eval mode, and back.

    PopTorch traces a module in the mode it is in, and calls neither `train` nor
    `eval` itself. To be trained, submodules that are in eval mode stay so if the user's
    module is in train mode: somebody has frozen them.

    Args:
        module: The module that is traced.
        training: True for train mode, False for eval mode.
        root: The user's module inside of it.

    Example:
        >>> module = torch.nn.Dropout()
        >>> with mode(module, training=False):
        ...     module.training
        False
        >>> module.training
        True
    """
    before: dict[torch.nn.Module, bool] = {m: m.training for m in module.modules()}
    module.train(training)
    if training and before[module] and (root is None or before[root]):
        for child, was_training in before.items():
            if not was_training:  # frozen by the user, such as batch norm
                child.training = False
    try:
        yield
    finally:
        for child, was_training in before.items():
            child.training = was_training


def trained_modes(module: torch.nn.Module) -> list[bool]:
    """Whether each part of a module is trained in train mode: frozen ones aren't.

    Args:
        module: The user's module. If it is in train mode, its parts in eval mode are
            frozen.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.BatchNorm1d(2).eval())
        >>> trained_modes(module), trained_modes(module.eval())
        ([True, False], [True, True])
    """
    return [part.training or not module.training for part in module.modules()]


class TrainedParts:
    """The parts of a module that a program trains, and their modes.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> parts = TrainedParts(module)
        >>> _ = module.bias.requires_grad_(False)
        >>> parts == TrainedParts(module)
        False
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._parts = list(module.modules())
        self._weights = list(module.parameters())
        self._before = self._now()

    def _now(self) -> tuple[list[bool], list[bool]]:
        """Modes, and whether each parameter requires a gradient.

        PopTorch fetches all weights when somebody looks at a parameter that it trains:
        not for this.
        """
        modes = list(map(attrgetter("training"), self._parts))
        if not modes[0]:
            modes = [True] * len(modes)
        with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
            named = repeat("requires_grad")
            return modes, list(map(object.__getattribute__, self._weights, named))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainedParts) and other._before == self._before

    def check(self) -> None:
        """Refuse to go on if somebody has frozen or unfrozen a part.

        Raises:
            ConfigError: A part has changed; the message names it.
        """
        now = self._now()
        if now == self._before:
            return
        names = [name or "module" for name, _ in self._module.named_modules()]
        weights = [name for name, _ in self._module.named_parameters()]
        for what, named, is_of, was in (
            ("train mode", names, now[0], self._before[0]),
            ("trained", weights, now[1], self._before[1]),
        ):
            for name, new, old in zip(named, is_of, was):
                if new != old:
                    raise ConfigError(
                        f"{name} was {'' if old else 'not '}{what} when the model was "
                        f"compiled and is {'' if new else 'not '}now: the program "
                        "goes on as it was compiled. Freeze and unfreeze between fits."
                    )
