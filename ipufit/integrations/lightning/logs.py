# SPDX-License-Identifier: Apache-2.0
"""`self.log` of a LightningModule: to `ipufit.log`, or refused."""

from __future__ import annotations

from typing import Any, Mapping, NoReturn

import torch

from ipufit.errors import ConfigError, UnsupportedError

_IGNORED = (
    *("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph"),
    *("sync_dist", "sync_dist_group", "add_dataloader_idx", "batch_size"),
    *("metric_attribute", "rank_zero_only"),
)
"""Arguments of `LightningModule.log` after name and value, in their order."""


class StepLog:
    """The values that one step logs.

    Attributes:
        values: Tensors of one element, by name.
    """

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Take one value, with the arguments of `LightningModule.log`.

        Every value is averaged over all samples of an epoch, and shown on the bar. So
        `reduce_fx` must be a mean, and the other arguments make no difference.

        Raises:
            ConfigError: The value is no tensor of one element, or the name is taken.
            UnsupportedError: `reduce_fx` is no mean, or the value is an object of
                torchmetrics.
        """
        settings = {**dict(zip(_IGNORED, args)), **kwargs}
        reduced = settings.get("reduce_fx", "mean")
        if reduced not in ("mean", torch.mean):
            raise UnsupportedError(
                f"log({name!r}) has reduce_fx={reduced!r}. ipufit averages what is "
                "logged over all samples: leave it out, or use a metric of compile()."
            )
        if hasattr(value, "compute") and hasattr(value, "update"):
            raise UnsupportedError(metric_refusal(f"log({name!r})"))
        if name in self.values:
            raise ConfigError(
                f"log({name!r}) was called twice in one step: give the values names of "
                "their own."
            )
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ConfigError(
                f"log({name!r}) got {_shown(value)}. A step runs once in Python, and a "
                "number would stay what it was then: pass a tensor of one element that "
                "is computed from the batch or the weights, such as a mean."
            )
        self.values[name] = value

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kw: Any) -> None:
        """Take several values, with the arguments of `LightningModule.log_dict`."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **kw)


class NoLog:
    """Refuses what is logged where there is no step.

    Args:
        where: The place, for the message.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse one value.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"log({name!r}) was called in {self._where}. Log in training_step or "
            "validation_step: ipufit averages each value over all samples of an epoch, "
            "and a callback gets the figures in on_epoch_end(epoch, logs)."
        )

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kw: Any) -> None:
        """Refuse several values."""
        for name, value in dictionary.items():
            self.log(name, value)


def metric_refusal(what: str) -> str:
    """The message for an object of torchmetrics in a step.

    Args:
        what: The place where it was used, as code.
    """
    return (
        f"{what} uses an object of torchmetrics, which keeps what it has seen on the "
        "host, and a step runs on the device. Log the mean over the batch, "
        "self.log('acc', (logits.argmax(1) == y).float().mean()): its average over "
        "all samples is exact. Or return {'loss': loss, 'outputs': logits}, and give "
        "the metric to from_lightning(module, metrics=[...])."
    )


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)
