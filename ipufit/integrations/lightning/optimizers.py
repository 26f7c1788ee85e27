# SPDX-License-Identifier: Apache-2.0
"""Reads what `configure_optimizers` returns: one optimizer, and its scheduler."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
from torch.optim import lr_scheduler

from ipufit.errors import ConfigError, UnknownNameError, UnsupportedError
from ipufit.optimizers import PerEpoch

from .schedulers import Every, Plateau

_KEYS = (
    *("scheduler", "interval", "frequency", "monitor"),
    *("strict", "name", "reduce_on_plateau"),
)
"""Keys of Lightning's dict of a scheduler."""

_ONE = (
    "A program has one optimizer. Give parts of the module settings of their own as "
    "parameter groups: torch.optim.AdamW([{'params': self.head.parameters(), 'lr': "
    "1e-3}, ...]). Parts that are trained in turn, as in a GAN, are models of their "
    "own."
)


class Configured(NamedTuple):
    """The arguments of `compile` and `fit` that `configure_optimizers` stands for.

    Attributes:
        optimizer: The one optimizer.
        lr_schedule: Argument of `compile`; None for no schedule.
        plateau: A scheduler that each `fit` steps by a figure; None for none.
    """

    optimizer: Any
    lr_schedule: Any
    plateau: Plateau | None


def read_optimizers(configured: Any) -> Configured:
    """Read what `configure_optimizers` has returned.

    Args:
        configured: An optimizer; a list with one; two lists, with an optimizer and with
            schedulers; a dict with `"optimizer"` and maybe `"lr_scheduler"` and
            `"monitor"`; or a list with such a dict. A scheduler is one of torch, or a
            dict with `"scheduler"`, `"interval"` (`"epoch"` or `"step"`),
            `"frequency"`, `"monitor"` and `"strict"`.

    Raises:
        ConfigError: It is none of these.
        UnknownNameError: A dict has a key that means nothing.
        UnsupportedError: There are several optimizers or schedulers.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> warmup = lr_scheduler.LinearLR(sgd)
        >>> per_update = {"scheduler": warmup, "interval": "step"}
        >>> read = read_optimizers({"optimizer": sgd, "lr_scheduler": per_update})
        >>> read.optimizer is sgd, read.lr_schedule is warmup, read.plateau
        (True, True, None)
    """
    optimizers, schedulers, monitor = _split(configured)
    if len(optimizers) != 1:
        raise UnsupportedError(
            f"configure_optimizers returned {len(optimizers)} optimizers. {_ONE}"
        )
    if len(schedulers) > 1:
        raise UnsupportedError(
            f"configure_optimizers returned {len(schedulers)} schedulers of one "
            "optimizer. Make one of them: torch.optim.lr_scheduler.SequentialLR for "
            "one after the other, ChainedScheduler for all at once."
        )
    if not schedulers:
        return Configured(optimizers[0], None, None)
    return _scheduled(optimizers[0], _settings(schedulers[0], monitor))


def _split(configured: Any) -> tuple[Sequence[Any], Sequence[Any], str | None]:
    """The optimizers, their schedulers, and the name of a figure to monitor."""
    if isinstance(configured, dict):
        return _of_dict(configured)
    if isinstance(configured, (list, tuple)):
        parts = list(configured)
        if len(parts) == 2 and isinstance(parts[0], (list, tuple)):
            schedulers = parts[1]
            is_several = isinstance(schedulers, (list, tuple))
            return parts[0], schedulers if is_several else [schedulers], None
        if parts and all(isinstance(part, dict) for part in parts):
            split = [_of_dict(part) for part in parts]
            optimizers = [one for found, _, _ in split for one in found]
            schedulers = [one for _, found, _ in split for one in found]
            return optimizers, schedulers, split[0][2]
        if parts and all(_is_optimizer(part) for part in parts):
            return parts, [], None
    elif _is_optimizer(configured):
        return [configured], [], None
    if configured is None:
        raise UnsupportedError(
            "configure_optimizers returned None, so nothing would be trained. Return "
            "an optimizer, or use evaluate() and predict() of an ipufit.IPUModel."
        )
    raise ConfigError(
        f"configure_optimizers returned {configured!r}. Return an optimizer, "
        "[optimizer], ([optimizer], [scheduler]), or {'optimizer': ..., "
        "'lr_scheduler': ...}."
    )


def _of_dict(given: dict[str, Any]) -> tuple[Sequence[Any], Sequence[Any], str | None]:
    for name in given:
        if name not in ("optimizer", "lr_scheduler", "monitor", "frequency"):
            known = ("optimizer", "lr_scheduler", "monitor")
            raise UnknownNameError("key of configure_optimizers", str(name), known)
    if "optimizer" not in given:
        raise ConfigError(
            "configure_optimizers returned a dict without 'optimizer': it has "
            f"{', '.join(map(repr, given)) or 'nothing'}."
        )
    scheduler = given.get("lr_scheduler")
    schedulers = [] if scheduler is None else [scheduler]
    return [given["optimizer"]], schedulers, given.get("monitor")


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _settings(scheduler: Any, monitor: str | None) -> dict[str, Any]:
    """Lightning's dict of a scheduler, with its defaults."""
    defaults = {
        "interval": "epoch",
        "frequency": 1,
        "monitor": monitor,
        "strict": True,
    }
    given = scheduler if isinstance(scheduler, dict) else {"scheduler": scheduler}
    for name in given:
        if name not in _KEYS:
            raise UnknownNameError("key of a scheduler", str(name), _KEYS)
    settings = {**defaults, **given}
    if "scheduler" not in given:
        raise ConfigError(
            "A scheduler's dict of configure_optimizers has no 'scheduler': it has "
            f"{', '.join(map(repr, given)) or 'nothing'}."
        )
    if settings["interval"] not in ("epoch", "step"):
        raise ConfigError(
            f"A scheduler has interval={settings['interval']!r}: use 'epoch' or 'step'."
        )
    every = settings["frequency"]
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(
            f"A scheduler has frequency={every!r}: use a whole number of 1 or more."
        )
    return settings


def _scheduled(optimizer: Any, settings: dict[str, Any]) -> Configured:
    scheduler, every = settings["scheduler"], settings["frequency"]
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        if settings["monitor"] is None:
            raise ConfigError(
                "configure_optimizers has ReduceLROnPlateau and doesn't say by which "
                "figure. Return {'optimizer': ..., 'lr_scheduler': {'scheduler': ..., "
                "'monitor': 'val_loss'}}."
            )
        if settings["interval"] == "step":
            raise UnsupportedError(
                "configure_optimizers has ReduceLROnPlateau with interval='step'. A "
                "program makes its updates without asking for figures: use "
                "interval='epoch'."
            )
        strict = bool(settings["strict"])
        plateau = Plateau(scheduler, settings["monitor"], every, strict)
        return Configured(optimizer, None, plateau)
    if every > 1:
        scheduler = Every(scheduler, every)
    per_epoch = settings["interval"] == "epoch"
    return Configured(optimizer, PerEpoch(scheduler) if per_epoch else scheduler, None)
