# SPDX-License-Identifier: Apache-2.0
"""What training has learnt, to a checkpoint and back."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any, Dict, Mapping

import numpy as np
import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._poptorch import poptorch
from ipufit.errors import ConfigError
from ipufit.optimizers import Updates, WeightAverage

from .executors import Executors
from .settings import config_in_words

Tensors = Dict[str, Tensor]
_STATE, _PARAM = "ipu_state/", "ipu_param/"


@dataclass(frozen=True)
class Learnt:
    """What training has learnt, wherever it is.

    Attributes:
        executors: The programs.
        updates: The optimiser and its schedule.
        average: The running average of the weights; None for none.
    """

    executors: Executors
    updates: Updates
    average: WeightAverage | None

    def take(self) -> files.Checkpoint:
        """Weights, the optimiser's state, averages, the schedule's place.

        Returns:
            A checkpoint; its tensors are copies.
        """
        self.executors.fetch_weights()
        average = self.average
        if average is not None and average.is_swapped:  # the weights are meant
            average.swap_out()
            try:
                return self.take()
            finally:
                average.swap_in()
        state_dict = self.executors.module.state_dict()
        optimizer = self.updates.optimizer
        given = optimizer.state_dict()
        tensors: Tensors = {}
        for prefix, name in ((_STATE, "ipu_state"), (_PARAM, "ipu_param")):
            for key, value in (given.get(name) or {}).items():
                tensors[prefix + key] = torch.as_tensor(value).detach().clone()
        groups: dict[str, Mapping[str, Tensor]] = {
            "model": files.copied_tensors(state_dict),
            "optimizer": tensors,
        }
        temporary = _temporary_buffers(self.executors.module)
        if temporary:
            groups["buffers"] = files.copied_tensors(temporary)
        state: dict[str, Any] = {
            "optimizer": {
                "class": type(optimizer).__name__,
                "groups": [_plain_group(group) for group in given["param_groups"]],
                "loss_scaling": float(getattr(optimizer, "loss_scaling", 1.0)),
            },
            "updates": self.updates.state_dict(),
            "config": config_in_words(self.executors.config),
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "numpy": np.__version__,
                "poptorch": str(getattr(poptorch, "__version__", "")),
            },
            "average": None,
        }
        if average is not None:
            averaged = average.state_dict()
            groups["average"] = averaged.pop("averages")
            state["average"] = averaged
        return files.Checkpoint(groups, state)

    def put_back(self, checkpoint: files.Checkpoint) -> None:
        """Have what a checkpoint learnt; the training program is dropped before.

        Args:
            checkpoint: From a model of the same module and optimizer.

        Raises:
            ConfigError: It is from another.
        """
        module, optimizer = self.executors.module, self.updates.optimizer
        weights = checkpoint.tensors.get("model", {})
        check_weights(module.state_dict(), weights)
        saved = checkpoint.state.get("optimizer")
        if saved is None or saved["class"] != type(optimizer).__name__:
            found = "no optimizer" if saved is None else saved["class"]
            raise ConfigError(
                f"The checkpoint is of {found}, and compile() got "
                f"{type(optimizer).__name__}. Compile with the same optimizer."
            )
        if (checkpoint.state["average"] is None) != (self.average is None):
            raise ConfigError(
                "Of checkpoint and optimizer, one keeps a running average of the "
                "weights (ema_momentum) and the other doesn't. Compile with the same "
                "optimizer."
            )
        groups = _groups_of(optimizer, saved["groups"])
        _check_schedule(self.updates, checkpoint.state["updates"])
        self.executors.drop_training()
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                tensor.copy_(weights[name])
            buffers = checkpoint.tensors.get("buffers", {})
            for name, tensor in _temporary_buffers(module).items():
                if name in buffers and buffers[name].shape == tensor.shape:
                    tensor.copy_(buffers[name])
        tensors = checkpoint.tensors.get("optimizer", {})
        if tensors:
            optimizer.load_state_dict(
                {
                    "ipu_state": under(_STATE, tensors),
                    "ipu_param": under(_PARAM, tensors),
                    "state": {},
                    "param_groups": groups,
                }
            )
        set_groups(optimizer, saved["groups"])
        if hasattr(optimizer, "loss_scaling"):
            optimizer.loss_scaling = saved["loss_scaling"]
        self.updates.load_state_dict(checkpoint.state["updates"])
        if self.average is not None:
            averages = checkpoint.tensors.get("average", {})
            self.average.load_state_dict(
                {**checkpoint.state["average"], "averages": averages}
            )


def _temporary_buffers(module: torch.nn.Module) -> Tensors:
    """Buffers that aren't in the state dict (`persistent=False`)."""
    kept = module.state_dict()
    return {name: b for name, b in module.named_buffers() if name not in kept}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors whose names have a prefix, without it."""
    return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}


def check_weights(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse the weights of another module.

    Raises:
        ConfigError: They are.
    """
    odd = [
        name
        for name in sorted({*own, *given})
        if name not in own
        or name not in given
        or own[name].shape != given[name].shape
        or own[name].dtype != given[name].dtype
    ]
    if odd:
        raise ConfigError(
            f"The checkpoint has the weights of another module: {', '.join(odd)} are "
            "only in one of the two, or have other shapes or types."
        )


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings as JSON knows them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in group.items()
        if name != "params"
        and isinstance(value, (bool, int, float, str, tuple, type(None)))
    }


def _groups_of(
    optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    own = optimizer.state_dict()["param_groups"]
    if len(own) != len(saved):
        raise ConfigError(
            f"The checkpoint's optimizer has {len(saved)} parameter groups, and this "
            f"one {len(own)}. Compile with the same optimizer."
        )
    return [{**group, **_tuples(values)} for group, values in zip(own, saved)]


def _check_schedule(updates: Updates, saved: Mapping[str, Any]) -> None:
    own, given = updates.state_dict()["rates"], saved["rates"]
    inner, inner_given = own.get("scheduler", {}), given.get("scheduler", {})
    if own.keys() != given.keys() or inner.keys() != inner_given.keys():
        raise ConfigError(
            "The checkpoint was saved with another learning rate schedule than "
            "compile() got. Compile with the same lr_schedule."
        )


def set_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    """Give parameter groups the settings that a checkpoint has of them."""
    for group, values in zip(optimizer.param_groups, saved):
        group.update(_tuples(values))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
