# SPDX-License-Identifier: Apache-2.0
"""The state of a training run, to a checkpoint and back.

A run that is resumed from it goes on bit by bit as the one that wasn't interrupted:
weights, optimiser, averages, schedules, callbacks, History, figures of the epoch under
way, the place in the data, and the random states of the device and of this process.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any, Dict, Mapping

import numpy as np
import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.callbacks import CallbackList
from ipufit.checkpoint import Checkpoint
from ipufit.data import Place, TrainingBatches
from ipufit.errors import ConfigError
from ipufit.optimizers import Updates, WeightAverage
from ipufit.state import RunState

from .executors import Executors
from .host_random import random_state, set_random_state
from .training import Training

Tensors = Dict[str, Tensor]
_STATE, _PARAM = "ipu_state/", "ipu_param/"
_TENSOR = "$tensor"


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

    def take(self) -> Checkpoint:
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
            "model": _copies(state_dict),
            "optimizer": tensors,
        }
        state: dict[str, Any] = {
            "optimizer": {
                "class": type(optimizer).__name__,
                "groups": [_plain_group(group) for group in given["param_groups"]],
                "loss_scaling": float(getattr(optimizer, "loss_scaling", 1.0)),
            },
            "updates": self.updates.state_dict(),
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
        return Checkpoint(groups, state)

    def put_back(self, checkpoint: Checkpoint) -> None:
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
        self.executors.drop_training()
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                tensor.copy_(weights[name])
        tensors = checkpoint.tensors.get("optimizer", {})
        if tensors:
            optimizer.load_state_dict(
                {
                    "ipu_state": _under(_STATE, tensors),
                    "ipu_param": _under(_PARAM, tensors),
                    "state": {},
                    "param_groups": groups,
                }
            )
        _set_groups(optimizer, saved["groups"])
        if hasattr(optimizer, "loss_scaling"):
            optimizer.loss_scaling = saved["loss_scaling"]
        self.updates.load_state_dict(checkpoint.state["updates"])
        if self.average is not None:
            averages = checkpoint.tensors.get("average", {})
            self.average.load_state_dict(
                {**checkpoint.state["average"], "averages": averages}
            )


def _copies(state_dict: Mapping[str, Tensor]) -> Tensors:
    """Copies of tensors; those that share memory share a copy."""
    made: dict[tuple[int, Any, Any], Tensor] = {}
    copies = {}
    for name, tensor in state_dict.items():
        key = tensor.data_ptr(), tensor.shape, tensor.stride()
        if key not in made or not tensor.numel():
            made[key] = tensor.detach().clone()
        copies[name] = made[key]
    return copies


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}


@dataclass(frozen=True)
class Snapshot:
    """What a run's state is spread over.

    Attributes:
        training: The program, the optimiser, the figures.
        batches: The data.
        hooks: The callbacks.
        run: Where it stands.
    """

    training: Training
    batches: TrainingBatches
    hooks: CallbackList
    run: RunState

    @property
    def learnt(self) -> Learnt:
        """What training has learnt."""
        training = self.training
        return Learnt(training.executors, training.updates, training.average)

    # Take -------------------------------------------------------------------

    def take(self) -> Checkpoint:
        """The state now, between two calls.

        Returns:
            A checkpoint; its tensors are copies.

        Raises:
            UnsupportedError: A streamed metric is in the middle of an epoch.
        """
        training, run = self.training, self.run
        learnt = self.learnt.take()
        callbacks: Tensors = {}
        state = {
            **learnt.state,
            "run": {
                "epoch": run.epoch + run.is_epoch_done,
                "calls": 0 if run.is_epoch_done else run.calls,
                "updates": run.updates,
                "samples": run.samples,
                "stop_reason": run.stop_reason,
            },
            "data": {
                "seed": self.batches.seed,
                "place": list(self.batches.place),
                "num_samples": self.batches.source.num_samples,
            },
            "plan": asdict(training.plan),
            "figures": None if run.is_epoch_done else training.figures.state_dict(),
            "callbacks": _without_arrays(self.hooks.state_dict(), callbacks),
        }
        host = {f"host/{name}": value for name, value in random_state().items()}
        device = training.executors.device_random_state()
        random = {**host, "device": torch.tensor(device or [], dtype=torch.int64)}
        groups = {**learnt.tensors, "callbacks": callbacks, "random": random}
        return Checkpoint(groups, state)

    # Put back ---------------------------------------------------------------

    def put_back(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; `on_train_begin` was called, programs are ready.

        What was learnt was put back before.

        Args:
            checkpoint: From `take` of a run with the same settings.

        Raises:
            ConfigError: The callbacks are others.
        """
        state, tensors = checkpoint.state, checkpoint.tensors
        training, run = self.training, self.run
        self.hooks.load_state_dict(
            _with_arrays(state["callbacks"], tensors.get("callbacks", {}))
        )
        # Hooks that began the run may have set rates; these are the ones it had.
        _set_groups(training.updates.optimizer, state["optimizer"]["groups"])
        training.updates.load_state_dict(state["updates"])
        run.epoch, run.calls = state["run"]["epoch"], state["run"]["calls"]
        run.updates, run.samples = state["run"]["updates"], state["run"]["samples"]
        run.stop_reason = state["run"]["stop_reason"]
        if state["figures"] is not None:
            training.figures.load_state_dict(state["figures"])
        random = tensors["random"]
        device = random["device"].tolist()
        if device:
            training.executors.set_device_random_state(device)
        host = {n[5:]: t for n, t in random.items() if n.startswith("host/")}
        if run.calls:  # beginning a loader draws numbers: only then
            self.batches.on_begun = lambda: set_random_state(host)
        else:
            set_random_state(host)


def check_same_run(
    checkpoint: Checkpoint, training: Training, num_samples: int | None
) -> None:
    """Refuse to go on with other settings than the checkpoint's.

    Raises:
        ConfigError: The factors of a call or the data are others.
    """
    if "run" not in checkpoint.state:
        raise ConfigError(
            "The checkpoint holds a model, but not the place of a run: it was not "
            "saved while fit() ran. Load it with model.load(path)."
        )
    saved, now = checkpoint.state["plan"], asdict(training.plan)
    odd = [
        f"{n} was {saved.get(n)} and is {now[n]}" for n in now if saved.get(n) != now[n]
    ]
    before = checkpoint.state["data"]["num_samples"]
    if before != num_samples:
        odd.append(f"samples were {before} and are {num_samples}")
    if odd:
        raise ConfigError(
            f"The run can't be resumed exactly: {'; '.join(odd)}. Use the settings and "
            "data that it began with."
        )


def place_of(checkpoint: Checkpoint) -> Place:
    """Where in the data to go on."""
    number, calls = checkpoint.state["data"]["place"]
    return Place(int(number), int(calls))


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


def _set_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, saved):
        group.update(_tuples(values))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}


def _without_arrays(value: Any, tensors: Tensors) -> Any:
    """Plain values, with arrays put into `tensors` and their names in their place."""
    if isinstance(value, (Tensor, np.ndarray)):
        name = str(len(tensors))
        tensors[name] = torch.as_tensor(value).detach().cpu().clone()
        return {_TENSOR: name, "is_array": isinstance(value, np.ndarray)}
    if isinstance(value, dict):
        return {key: _without_arrays(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(one, tensors) for one in value]
    return value


def _with_arrays(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            tensor = tensors[value[_TENSOR]]
            return tensor.numpy() if value["is_array"] else tensor
        return {key: _with_arrays(one, tensors) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_arrays(one, tensors) for one in value]
    return value
