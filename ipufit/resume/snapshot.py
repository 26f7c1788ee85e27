# SPDX-License-Identifier: Apache-2.0
"""The state of a training run, to a checkpoint and back.

A run that is resumed from it goes on bit by bit as the one that wasn't interrupted:
weights, those of losses, optimiser, averages, schedules, callbacks, History, figures of
the epoch under way, the place in the data, and the random states of the device and of
this process.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._poptorch import poptorch
from ipufit.callbacks import CallbackList
from ipufit.data import (
    Position,
    Replay,
    Source,
    StreamSource,
    TrainingBatches,
    check_random_state,
    random_state,
)
from ipufit.engine import Training
from ipufit.errors import ConfigError, DataError
from ipufit.state import RunState

from .saved_form import REFERENCE, TENSOR, check_form, damaged, in_words, of_run
from .settings import check_settings, refuse
from .trained import Learnt, Tensors, check_weights, set_groups, under

_HOST, _PASS, _VALIDATION = "host/", "pass", "validation"
_LOSSES = "losses"


@dataclass(frozen=True)
class Snapshot:
    """What a run's state is spread over.

    Attributes:
        training: The program, the optimiser, the figures.
        batches: The data.
        hooks: The callbacks.
        run: Where it stands.
        validation: The data to validate on; None for none.
        settings: What the run was told, in words.
    """

    training: Training
    batches: TrainingBatches
    hooks: CallbackList
    run: RunState
    validation: Source | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def learnt(self) -> Learnt:
        """What training has learnt."""
        training = self.training
        return Learnt(training.executors, training.optimization, training.average)

    # Take -------------------------------------------------------------------

    def take(self) -> files.Checkpoint:
        """The state now, between two calls.

        Returns:
            A checkpoint; its tensors are copies.

        Raises:
            UnsupportedError: A streamed metric is in the middle of an epoch.
        """
        training, run = self.training, self.run
        if run.is_epoch_done:
            self.batches.begin_next_pass()
        learnt = self.learnt.take()
        callbacks: Tensors = {}
        replays = {_PASS: self.batches.replay(), _VALIDATION: None}
        if isinstance(self.validation, StreamSource):
            replays[_VALIDATION] = self.validation.first_pass()
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
                "place": list(self.batches.position),
                "num_samples": self.batches.source.num_samples,
                "num_blocks": {
                    name: 0 if replay is None else replay.num_blocks
                    for name, replay in replays.items()
                },
            },
            "plan": asdict(training.plan),
            "settings": dict(self.settings),
            "figures": None if run.is_epoch_done else training.figures.state_dict(),
            "callbacks": _without_arrays(self.hooks.state_dict(), callbacks),
        }
        device = training.executors.device_random_state()
        random = {"device": _as_int64(device or [])}
        now = random_state(self.batches.source.generators)
        random.update({_HOST + name: tensor for name, tensor in now.items()})
        for name, replay in replays.items():
            random.update(_replay_tensors(name, replay))
        groups = {**learnt.tensors, "callbacks": callbacks, "random": random}
        losses = self._tensors_of_losses()
        if losses:
            groups[_LOSSES] = files.copied_tensors(losses)
        state["tensors"] = in_words(groups)
        return files.Checkpoint(groups, state)

    def _tensors_of_losses(self) -> Tensors:
        """What losses keep, such as a weight that a callback anneals."""
        modules = torch.nn.ModuleList(self.training.figures.objective.modules)
        return dict([*modules.named_parameters(), *modules.named_buffers()])

    # Put back ---------------------------------------------------------------

    def check(self, checkpoint: files.Checkpoint) -> None:
        """Refuse a checkpoint that can't be put back, before any of it is.

        Args:
            checkpoint: That `check_has_run` has let pass.

        Raises:
            DamagedCheckpointError: It isn't one that a run has written.
            ConfigError: It is of another model, or the callbacks are others.
        """
        self.learnt.check(checkpoint)
        self.hooks.check_state(_callbacks_of(checkpoint))
        if _LOSSES in checkpoint.tensors:
            check_weights(self._tensors_of_losses(), checkpoint.tensors[_LOSSES])
        generators = self.batches.source.generators
        random, counts = checkpoint.tensors.get("random", {}), _num_blocks(checkpoint)
        states = [under(_HOST, random)]
        for name in (_PASS, _VALIDATION):
            replay = _replay(name, counts, random)
            if replay is not None:
                states += [replay.at_start, replay.at_last]
        device = random.get("device")
        if device is None or device.dtype != torch.int64 or device.dim() != 1:
            raise damaged(checkpoint, "it has no random state of the device")
        try:
            for state in states:
                check_random_state(state, generators)
        except DataError as error:
            raise damaged(checkpoint, str(error)) from error

    def put_back(self, checkpoint: files.Checkpoint) -> None:
        """Go on from a checkpoint; `on_train_begin` was called, programs are ready.

        What was learnt was put back before.

        Args:
            checkpoint: That `check` has let pass, of a run with the same settings.

        Raises:
            ConfigError: The figures of the epoch under way are others.
            DamagedCheckpointError: The device can't take the random state.
        """
        state = checkpoint.state
        training, run = self.training, self.run
        if state["figures"] is not None:
            training.figures.check_state(state["figures"])
        self._put_back_device(checkpoint)
        with torch.no_grad():
            for name, tensor in checkpoint.tensors.get(_LOSSES, {}).items():
                self._tensors_of_losses()[name].copy_(tensor)
        # Before the hooks, which may look at it.
        run.epoch, run.calls = state["run"]["epoch"], state["run"]["calls"]
        run.updates, run.samples = state["run"]["updates"], state["run"]["samples"]
        run.stop_reason = state["run"]["stop_reason"]
        self.hooks.load_state_dict(_callbacks_of(checkpoint))
        # Hooks that began the run may have set rates; these are the ones it had.
        set_groups(training.optimization.optimizer, state["optimizer"]["groups"])
        training.optimization.load_state_dict(state["updates"])
        if state["figures"] is not None:
            training.figures.load_state_dict(state["figures"])
        random, counts = checkpoint.tensors["random"], _num_blocks(checkpoint)
        if isinstance(self.validation, StreamSource):
            replay = _replay(_VALIDATION, counts, random)
            self.validation.go_on(replay, is_due=True)
        replay = _replay(_PASS, counts, random)
        self.batches.go_on(under(_HOST, random), replay)

    def _put_back_device(self, checkpoint: files.Checkpoint) -> None:
        executors = self.training.executors
        device = checkpoint.tensors["random"]["device"].tolist()
        try:
            if device:
                executors.set_device_random_state([n % 2**64 for n in device])
        except (ValueError, poptorch.Error) as error:
            raise damaged(checkpoint, f"its random state is none: {error}") from error


def _callbacks_of(checkpoint: files.Checkpoint) -> Any:
    """The callbacks' states, with their arrays."""
    return _with_arrays(checkpoint, checkpoint.state["callbacks"])


def _num_blocks(checkpoint: files.Checkpoint) -> Mapping[str, int]:
    counts: Mapping[str, int] = checkpoint.state["data"]["num_blocks"]
    return counts


def _as_int64(numbers: Sequence[int]) -> Tensor:
    """Numbers below 2^64, as seeds are, by their bits."""
    signed = [n - 2**64 if n >= 2**63 else n for n in numbers]
    return torch.tensor(signed, dtype=torch.int64)


def _replay_tensors(name: str, replay: Replay | None) -> Tensors:
    if replay is None:
        return {}
    at_start = {f"{name}/start/{n}": t for n, t in replay.at_start.items()}
    return {**at_start, **{f"{name}/last/{n}": t for n, t in replay.at_last.items()}}


def _replay(
    name: str, counts: Mapping[str, int], random: Mapping[str, Tensor]
) -> Replay | None:
    if not counts[name]:
        return None
    at_start = under(f"{name}/start/", random)
    return Replay(counts[name], at_start, under(f"{name}/last/", random))


def check_has_run(checkpoint: files.Checkpoint) -> None:
    """Refuse a checkpoint that a run can't go on from.

    Raises:
        ConfigError: It is of a model alone.
        DamagedCheckpointError: It isn't one that a run has written.
    """
    if "run" not in checkpoint.state:
        raise ConfigError(
            "The checkpoint holds a model, but not the place of a run: it was not "
            "saved while fit() ran. Load it with model.load(path)."
        )
    check_form(checkpoint, of_run)


def check_same_run(
    checkpoint: files.Checkpoint,
    training: Training,
    num_samples: int | None,
    settings: Mapping[str, str],
) -> None:
    """Refuse to go on with other settings than the checkpoint's.

    Args:
        checkpoint: From `Snapshot.take`.
        training: Of the run that is to go on.
        num_samples: There are in the data.
        settings: What else the run was told, in words.

    Raises:
        ConfigError: The factors of a call, the data or the settings are others.
    """
    saved, now = checkpoint.state["plan"], asdict(training.plan)
    odd = [
        f"{n} was {saved.get(n)} and is {now[n]}" for n in now if saved.get(n) != now[n]
    ]
    before = checkpoint.state["data"]["num_samples"]
    if before != num_samples:
        odd.append(f"samples were {before} and are {num_samples}")
    refuse([*odd, *check_settings(checkpoint.state.get("settings", {}), settings)])


def position_of(checkpoint: files.Checkpoint) -> Position:
    """Where in the data to go on."""
    number, calls = checkpoint.state["data"]["place"]
    return Position(int(number), int(calls))


def _without_arrays(value: Any, tensors: Tensors) -> Any:
    """Plain values, with arrays put into `tensors` and their names in their place."""
    if isinstance(value, (Tensor, np.ndarray)):
        name = str(len(tensors))
        tensors[name] = torch.as_tensor(value).detach().cpu().clone()
        return {TENSOR: name, "is_array": isinstance(value, np.ndarray)}
    if isinstance(value, dict):
        return {key: _without_arrays(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(one, tensors) for one in value]
    return value


def _with_arrays(checkpoint: files.Checkpoint, value: Any) -> Any:
    """The other way; names that nothing has are damage."""
    if isinstance(value, dict) and TENSOR in value:
        tensors = checkpoint.tensors.get("callbacks", {})
        fault = REFERENCE(value, "the state of a callback")
        if fault is None and value[TENSOR] not in tensors:
            fault = f"callbacks.safetensors lacks {value[TENSOR]}"
        if fault is not None:
            raise damaged(checkpoint, fault)
        tensor = tensors[value[TENSOR]]
        return tensor.numpy() if value["is_array"] else tensor
    if isinstance(value, dict):
        return {key: _with_arrays(checkpoint, one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_arrays(checkpoint, one) for one in value]
    return value
