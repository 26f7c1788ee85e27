# SPDX-License-Identifier: Apache-2.0
"""The state of a model that training changes, taken into a checkpoint and put back.

Checksums show that a file is as it was written, not that it holds a model's state. So
the form of the state is checked, and compared with the model, before any of it is used.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._kinds import (
    Kind,
    anything,
    count,
    dict_of,
    each_of,
    fields,
    like,
    list_of,
    number,
    optional,
    text,
)
from ipufit._poptorch import poptorch
from ipufit.engine import Executors
from ipufit.errors import ConfigError, DamagedCheckpointError
from ipufit.optimizers import Optimization, WeightAverage

from .settings import NOT_SETTINGS, config_in_words

Tensors = Dict[str, Tensor]
_OPTIMIZER_STATE = "ipu_state", "ipu_param"

_FORM = fields(
    {
        "optimizer": {
            "class": text,
            "groups": list_of(dict_of(anything)),
            "loss_scaling": number,
        },
        "updates": {"num_updates": count, "rates": dict_of(anything)},
        "average": optional(fields({"num_updates": count})),
        "tensors": dict_of(dict_of(text)),
    }
)
"""The state of any model; `config` and `versions` are for people."""


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
        """Take a checkpoint of weights, optimiser, averages and schedule.

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
        groups: dict[str, Mapping[str, Tensor]] = {
            name: files.copied_tensors(tensors)
            for name, tensors in groups_of_module(self.executors.module).items()
        }
        groups["optimizer"] = {
            f"{part}/{name}": torch.as_tensor(value).detach().clone()
            for part in _OPTIMIZER_STATE
            for name, value in (given.get(part) or {}).items()
        }
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
            state["average"] = average.state_dict()
            groups["average"] = state["average"].pop("averages")
        state["tensors"] = in_words(groups)
        return files.Checkpoint(groups, state)

    def check(self, checkpoint: files.Checkpoint) -> None:
        """Refuse a checkpoint that `put_back` can't take; nothing is changed.

        Raises:
            DamagedCheckpointError: No model has written the checkpoint.
            ConfigError: It is from another module, optimizer or schedule.
        """
        optimizer, state = self.optimization.optimizer, checkpoint.state
        check_form(checkpoint, _FORM)
        listed, given = state["tensors"], in_words(checkpoint.tensors)
        for group in sorted({*listed, *given}):
            before, now = listed.get(group, {}), given.get(group, {})
            for name in sorted({*before, *now}):
                there, was = now.get(name, "missing"), before.get(name, "missing")
                if there != was:
                    raise damaged(
                        checkpoint,
                        f"{name} of {group} is {there}, and was {was} when it was "
                        "saved",
                    )
        for group, own in groups_of_module(self.executors.module).items():
            check_weights(own, checkpoint.tensors.get(group, {}))
        saved = state["optimizer"]
        if saved["class"] != type(optimizer).__name__:
            raise ConfigError(
                f"The checkpoint is of {saved['class']}, and compile() got "
                f"{type(optimizer).__name__}. Compile with the same optimizer."
            )
        if (state["average"] is None) != (self.average is None):
            raise ConfigError(
                "Of checkpoint and optimizer, one keeps an average of the weights "
                "(ema_momentum) and the other doesn't. Compile with the same optimizer."
            )
        if "num_averaged" in (state["average"] or {}):
            raise ConfigError(
                "The checkpoint has an equal average of the weights (SWA of version "
                "0.1), which can't go on. Load the weights alone: "
                "model.load_weights(path / 'model.safetensors')."
            )
        groups = [_plain_group(group) for group in optimizer.param_groups]
        if len(saved["groups"]) != len(groups):
            raise ConfigError(
                f"The checkpoint's optimizer has {len(saved['groups'])} parameter "
                f"groups, and this one {len(groups)}. Compile with the same optimizer."
            )
        self._check_schedule(state["updates"])
        kinds = [fields({n: like(v) for n, v in group.items()}) for group in groups]
        own_form: dict[str, Any] = {
            "optimizer": {"groups": each_of(kinds)},
            "updates": self.optimization.state_kind,
        }
        if self.average is not None:
            own_form["average"] = self.average.state_kind
        check_form(checkpoint, fields(own_form))
        if self.average is not None:
            self.average.check_state(_averages(checkpoint))

    def _check_schedule(self, saved: Mapping[str, Any]) -> None:
        own = self.optimization.state_dict()
        names = [
            (set(rates), set(inner) if isinstance(inner, dict) else set())
            for rates in (own["rates"], saved["rates"])
            for inner in [rates.get("scheduler")]  # of torch
        ]
        if names[0] != names[1]:
            raise ConfigError(
                "The checkpoint was saved with another learning rate schedule than "
                "compile() got. Compile with the same lr_schedule."
            )
        if set(own.get("schedules", ())) != set(saved.get("schedules", ())):
            raise ConfigError(
                "The checkpoint was saved with schedules of other values than "
                "compile() got. Compile with the same schedules."
            )

    def put_back(self, checkpoint: files.Checkpoint) -> None:
        """Set weights, optimiser, averages and schedule as a checkpoint has them.

        The training program is dropped before.

        Raises:
            DamagedCheckpointError: No model has written the checkpoint.
            ConfigError: It is from another module, optimizer or schedule.
        """
        self.check(checkpoint)
        module, optimizer = self.executors.module, self.optimization.optimizer
        saved, tensors = checkpoint.state["optimizer"], checkpoint.tensors
        self.executors.drop_training()
        with torch.no_grad():
            for group, own in groups_of_module(module).items():
                for name, tensor in own.items():
                    tensor.copy_(tensors[group][name])
        if tensors["optimizer"]:
            parts = {p: under(f"{p}/", tensors["optimizer"]) for p in _OPTIMIZER_STATE}
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({**parts, "state": {}, "param_groups": groups})
        set_groups(optimizer, saved["groups"])
        if hasattr(optimizer, "loss_scaling"):
            optimizer.loss_scaling = saved["loss_scaling"]
        self.optimization.load_state_dict(checkpoint.state["updates"])
        if self.average is not None:
            self.average.load_state_dict(_averages(checkpoint))


def groups_of_module(module: torch.nn.Module) -> dict[str, Mapping[str, Tensor]]:
    """The tensors of a module, in the groups of a checkpoint.

    Returns:
        Its state dict, and the buffers that aren't in it (`persistent=False`), if any.
    """
    kept = module.state_dict()
    others = {name: b for name, b in module.named_buffers() if name not in kept}
    return {"model": kept, "buffers": others} if others else {"model": kept}


def set_groups(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]
) -> None:
    """Give parameter groups the settings that a checkpoint has of them."""
    for group, values in zip(optimizer.param_groups, saved):
        for name in _plain_group(group):
            value = values[name]
            group[name] = tuple(value) if isinstance(value, list) else value


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings as JSON knows them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in group.items()
        if name not in NOT_SETTINGS
        and isinstance(value, (bool, int, float, str, tuple, type(None)))
    }


def _averages(checkpoint: files.Checkpoint) -> dict[str, Any]:
    averages = checkpoint.tensors.get("average", {})
    return {**checkpoint.state["average"], "averages": averages}


def under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors whose names have a prefix, without it."""
    return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}


def in_words(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, str]]:
    """The dtype and shape of each tensor of each group, in the order of names.

    A tensor of a loaded checkpoint has this order, too, so a resumed run writes the
    same bytes as an unbroken one.

    Example:
        >>> in_words({"model": {"w": torch.zeros(2, 3)}})
        {'model': {'w': 'float32 [2, 3]'}}
    """
    return {
        group: {
            name: f"{str(one.dtype)[len('torch.') :]} {list(one.shape)}"
            for name, one in sorted(named.items())
        }
        for group, named in tensors.items()
    }


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


def check_form(checkpoint: files.Checkpoint, kind: Kind) -> None:
    """Refuse a checkpoint whose state is of another kind.

    Raises:
        DamagedCheckpointError: The state is of another kind.
    """
    fault = kind(checkpoint.state, "state")
    if fault is not None:
        raise damaged(checkpoint, fault)


def damaged(checkpoint: files.Checkpoint, fault: str) -> DamagedCheckpointError:
    """The error of a checkpoint that no model has written."""
    name = "The checkpoint" if checkpoint.path is None else repr(str(checkpoint.path))
    return DamagedCheckpointError(
        f"{name} isn't one that a model has written: {fault}. Use another one."
    )
