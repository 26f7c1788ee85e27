# SPDX-License-Identifier: Apache-2.0
"""The state that training changes, taken into a checkpoint and put back."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._kinds import each_of, fields, like
from ipufit._poptorch import poptorch
from ipufit.engine import Executors
from ipufit.errors import ConfigError
from ipufit.optimizers import Optimization, WeightAverage

from .saved_form import TRAINED_STATE, check_form, check_tensors, in_words
from .settings import NOT_SETTINGS, config_in_words

Tensors = Dict[str, Tensor]
_STATE, _PARAM = "ipu_state/", "ipu_param/"


@dataclass(frozen=True)
class TrainedState:
    """Everything that holds a part of the state that training changes.

    Attributes:
        executors: The programs, which have the weights.
        optimization: The optimiser and its schedule.
        average: The running average of the weights; None for none.
    """

    executors: Executors
    optimization: Optimization
    average: WeightAverage | None

    def take(self) -> files.Checkpoint:
        """A checkpoint of weights, optimiser, averages and the schedule's position.

        Its tensors are copies.
        """
        self.executors.fetch_weights()
        average = self.average
        if average is not None and average.is_swapped:  # the weights are meant
            average.swap_out()
            try:
                return self.take()
            finally:
                average.swap_in()
        optimizer = self.optimization.optimizer
        given = optimizer.state_dict()
        tensors: Tensors = {}
        for prefix, name in ((_STATE, "ipu_state"), (_PARAM, "ipu_param")):
            for key, value in (given.get(name) or {}).items():
                tensors[prefix + key] = torch.as_tensor(value).detach().clone()
        groups: dict[str, Mapping[str, Tensor]] = {
            name: files.copied_tensors(of_module)
            for name, of_module in groups_of_module(self.executors.module).items()
        }
        groups["optimizer"] = tensors
        state: dict[str, Any] = {
            "optimizer": {
                "class": type(optimizer).__name__,
                "groups": [_plain_group(group) for group in given["param_groups"]],
                "loss_scaling": float(getattr(optimizer, "loss_scaling", 1.0)),
            },
            "updates": self.optimization.state_dict(),
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
        state["tensors"] = in_words(groups)
        return files.Checkpoint(groups, state)

    def check(self, checkpoint: files.Checkpoint) -> None:
        """Refuse a checkpoint that `put_back` can't take; nothing is changed.

        Args:
            checkpoint: From a model of the same module and optimizer.

        Raises:
            DamagedCheckpointError: No model has written the checkpoint.
            ConfigError: It is from another module, optimizer or schedule.
        """
        optimizer, state = self.optimization.optimizer, checkpoint.state
        check_form(checkpoint, TRAINED_STATE)
        check_tensors(checkpoint)
        saved = state["optimizer"]
        for name, own in groups_of_module(self.executors.module).items():
            check_weights(own, checkpoint.tensors.get(name, {}))
        if saved["class"] != type(optimizer).__name__:
            raise ConfigError(
                f"The checkpoint is of {saved['class']}, and compile() got "
                f"{type(optimizer).__name__}. Compile with the same optimizer."
            )
        self._check_kind_of_average(state["average"])
        groups = [_plain_group(group) for group in optimizer.param_groups]
        if len(saved["groups"]) != len(groups):
            raise ConfigError(
                f"The checkpoint's optimizer has {len(saved['groups'])} parameter "
                f"groups, and this one {len(groups)}. Compile with the same optimizer."
            )
        _check_schedule(self.optimization, state["updates"])
        kinds = [fields({n: like(v) for n, v in group.items()}) for group in groups]
        own_form = {
            "optimizer": fields({"groups": each_of(kinds)}),
            "updates": self.optimization.state_kind,
        }
        check_form(checkpoint, fields(own_form))
        if self.average is not None:
            check_form(checkpoint, fields({"average": self.average.state_kind}))
            self.average.check_state(self._averages(checkpoint))

    def _check_kind_of_average(self, saved: Mapping[str, Any] | None) -> None:
        """Refuse the state of another average than is kept.

        Raises:
            ConfigError: One of the two is missing, or they are of two kinds.
        """
        if (saved is None) != (self.average is None):
            raise ConfigError(
                "Of checkpoint and optimizer, one keeps an average of the weights "
                "(ema_momentum) and the other doesn't. Compile with the same optimizer."
            )
        if saved is not None and "num_averaged" in saved:
            raise ConfigError(
                "The checkpoint has an equal average of the weights (SWA of version "
                "0.1), which can't go on. Load the weights alone: "
                "model.load_weights(path / 'model.safetensors')."
            )

    def put_back(self, checkpoint: files.Checkpoint) -> None:
        """Set weights, optimiser, averages and schedule as a checkpoint has them.

        The training program is dropped before.

        Args:
            checkpoint: From a model of the same module and optimizer.

        Raises:
            DamagedCheckpointError: No model has written the checkpoint.
            ConfigError: It is from another module, optimizer or schedule.
        """
        self.check(checkpoint)
        module, optimizer = self.executors.module, self.optimization.optimizer
        saved, tensors = checkpoint.state["optimizer"], checkpoint.tensors
        self.executors.drop_training()
        with torch.no_grad():
            for name, own in groups_of_module(module).items():
                for key, tensor in own.items():
                    tensor.copy_(tensors[name][key])
        if tensors["optimizer"]:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict(
                {
                    "ipu_state": under(_STATE, tensors["optimizer"]),
                    "ipu_param": under(_PARAM, tensors["optimizer"]),
                    "state": {},
                    "param_groups": groups,
                }
            )
        set_groups(optimizer, saved["groups"])
        if hasattr(optimizer, "loss_scaling"):
            optimizer.loss_scaling = saved["loss_scaling"]
        self.optimization.load_state_dict(checkpoint.state["updates"])
        if self.average is not None:
            self.average.load_state_dict(self._averages(checkpoint))

    @staticmethod
    def _averages(checkpoint: files.Checkpoint) -> dict[str, Any]:
        averages = checkpoint.tensors.get("average", {})
        return {**checkpoint.state["average"], "averages": averages}


def groups_of_module(module: torch.nn.Module) -> dict[str, Mapping[str, Tensor]]:
    """The tensors of a module, in the groups of a checkpoint.

    Returns:
        Its state dict, and the buffers that aren't in it (`persistent=False`), if any.
    """
    kept = module.state_dict()
    others = {name: b for name, b in module.named_buffers() if name not in kept}
    return {"model": kept, "buffers": others} if others else {"model": kept}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors whose names have a prefix, without it."""
    return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}


def check_weights(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse the weights of another module.

    Raises:
        ConfigError: A name, shape or dtype differs.
    """
    odd = files.names_that_differ(own, given, "shape", "dtype")
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
        if name not in NOT_SETTINGS
        and isinstance(value, (bool, int, float, str, tuple, type(None)))
    }


def _check_schedule(optimization: Optimization, saved: Mapping[str, Any]) -> None:
    own = optimization.state_dict()
    if _names(own["rates"]) != _names(saved["rates"]):
        raise ConfigError(
            "The checkpoint was saved with another learning rate schedule than "
            "compile() got. Compile with the same lr_schedule."
        )
    if set(own.get("schedules", ())) != set(saved.get("schedules", ())):
        raise ConfigError(
            "The checkpoint was saved with schedules of other values than compile() "
            "got. Compile with the same schedules."
        )


def _names(rates: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Names in the state of rates, and in that of a scheduler of torch."""
    inner = rates.get("scheduler")
    return set(rates), set(inner) if isinstance(inner, dict) else set()


def set_groups(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]
) -> None:
    """Give parameter groups the settings that a checkpoint has of them."""
    for group, values in zip(optimizer.param_groups, saved):
        for name in _plain_group(group):
            value = values[name]
            group[name] = tuple(value) if isinstance(value, list) else value
