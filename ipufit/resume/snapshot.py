# SPDX-License-Identifier: Apache-2.0
"""The whole state of a run, taken into a checkpoint and put back.

Weights, those of losses, optimiser, averages, schedules, callbacks, History, figures of
the epoch under way, the position in the data, and the random states of the device and
of this process.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Iterator, Mapping

import torch

from ipufit import checkpoint as files
from ipufit.callbacks import CallbackList, ProgressDisplay
from ipufit.data import (
    Position,
    Source,
    TrainingBatches,
)
from ipufit.engine import Training
from ipufit.errors import ConfigError
from ipufit.state import RunState

from .callback_states import callbacks_of, without_arrays
from .random_states import RandomStates
from .saved_form import COUNTERS, check_form, in_words, of_run
from .settings import check_settings
from .trained import Tensors, TrainedState, check_weights, set_groups

_LOSSES = "losses"


@dataclass(frozen=True)
class Snapshot:
    """Everything that holds a part of the state of a run.

    Attributes:
        batches: The data, and the position in it.
        hooks: The callbacks.
        run: Counters of the run.
        validation: The data to validate on; None for no validation.
        settings: Settings that a resumed run must have too, in words.
    """

    training: Training
    batches: TrainingBatches
    hooks: CallbackList
    run: RunState
    validation: Source | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def trained(self) -> TrainedState:
        """The part of the state that belongs to the model."""
        training = self.training
        return TrainedState(training.executors, training.optimization, training.average)

    @property
    def _random(self) -> RandomStates:
        return RandomStates(self.training.executors, self.batches, self.validation)

    def take(self) -> files.Checkpoint:
        """Take a checkpoint of the state between two calls.

        Returns:
            A checkpoint; its tensors are copies.

        Raises:
            UnsupportedError: A streamed metric is in the middle of an epoch.
        """
        training, run = self.training, self.run
        if run.is_epoch_done:
            self.batches.begin_next_pass()
        trained = self.trained.take()
        random, num_blocks = self._random.take()
        callbacks: Tensors = {}
        state = {
            **trained.state,
            "run": {
                **{name: getattr(run, name) for name in COUNTERS},
                "epoch": run.epoch + run.is_epoch_done,
                "stop_reason": run.stop_reason,
            },
            "data": {
                "seed": self.batches.seed,
                "place": list(self.batches.position),
                "num_samples": self.batches.source.num_samples,
                "num_blocks": num_blocks,
            },
            "plan": asdict(training.plan),
            "settings": dict(self.settings),
            "figures": None if run.is_epoch_done else training.figures.state_dict(),
            "callbacks": without_arrays(self.hooks.state_dict(), callbacks),
        }
        groups = {**trained.tensors, "callbacks": callbacks, "random": random}
        losses = self._tensors_of_losses()
        if losses:
            groups[_LOSSES] = files.copied_tensors(losses)
        state["tensors"] = in_words(groups)
        return files.Checkpoint(groups, state)

    def _tensors_of_losses(self) -> Tensors:
        """Tensors of losses, such as a weight that a callback anneals."""
        modules = torch.nn.ModuleList(self.training.figures.objective.modules)
        return dict([*modules.named_parameters(), *modules.named_buffers()])

    def check(self, checkpoint: files.Checkpoint) -> None:
        """Refuse a checkpoint that can't be put back, before any of it is put back.

        Args:
            checkpoint: A checkpoint that `check_has_run` accepts.

        Raises:
            DamagedCheckpointError: No run has written it.
            ConfigError: It is of another model, or the callbacks are others.
        """
        self.trained.check(checkpoint)
        self.hooks.check_state(callbacks_of(checkpoint))
        if _LOSSES in checkpoint.tensors:
            check_weights(self._tensors_of_losses(), checkpoint.tensors[_LOSSES])
        self._random.check(checkpoint)

    def put_back(self, checkpoint: files.Checkpoint) -> None:
        """Go on from a checkpoint, once `on_train_begin` was called.

        Weights and the optimiser's state were put back before: programs have them.

        Args:
            checkpoint: A checkpoint that `check` accepts, of a run with equal settings.

        Raises:
            ConfigError: The figures of the epoch under way are others.
            DamagedCheckpointError: The device can't take the random state.
        """
        state = checkpoint.state
        training, run = self.training, self.run
        if state["figures"] is not None:
            training.figures.check_state(state["figures"])
        self._random.put_back_device(checkpoint)
        with torch.no_grad():
            for name, tensor in checkpoint.tensors.get(_LOSSES, {}).items():
                self._tensors_of_losses()[name].copy_(tensor)
        # Callbacks may look at the counters when they load their states.
        for name in (*COUNTERS, "stop_reason"):
            setattr(run, name, state["run"][name])
        self.hooks.load_state_dict(callbacks_of(checkpoint))
        # on_train_begin may have set other rates than the run had.
        set_groups(training.optimization.optimizer, state["optimizer"]["groups"])
        training.optimization.load_state_dict(state["updates"])
        if state["figures"] is not None:
            training.figures.load_state_dict(state["figures"])
        self._random.put_back_host(checkpoint)


def check_has_run(checkpoint: files.Checkpoint) -> None:
    """Refuse a checkpoint that a run can't go on from.

    Raises:
        ConfigError: The checkpoint is of a model alone.
        DamagedCheckpointError: No run has written it.
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
        training: Training of the run that is to go on.
        num_samples: Number of samples in the data; None if unknown.
        settings: Further settings of the run, in words.

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
    odd += check_settings(checkpoint.state.get("settings", {}), settings)
    if odd:
        raise ConfigError(
            f"The run can't be resumed exactly: {'; '.join(odd)}. Use the settings and "
            "data that it began with; or, to train on from what was learnt, "
            "model.load(path) and fit() without resume."
        )


def position_of(checkpoint: files.Checkpoint) -> Position:
    """The position in the data that a checkpoint has."""
    number, calls = checkpoint.state["data"]["place"]
    return Position(int(number), int(calls))


def epochs_to_go(
    epochs: Mapping[int, bool],
    snapshot: Snapshot,
    checkpoint: files.Checkpoint | None,
    display: ProgressDisplay,
) -> Iterator[tuple[int, bool]]:
    """Give the epochs that a run has to go; of a resumed run, only those left.

    The state of the interrupted run is put back when the first is asked for. Inside an
    epoch `on_epoch_begin` isn't called again, except for the display.

    Args:
        epochs: Epochs of the whole run, and whether each is validated.
        snapshot: Holds the state of the run that goes on.
        checkpoint: Checkpoint of the interrupted run; None for a new run.
        display: Shows the epoch under way.
    """
    run = snapshot.run
    if checkpoint is not None:
        snapshot.put_back(checkpoint)
        if run.calls:
            display.on_epoch_begin(run.epoch, {})
        if run.is_stopping:
            return
    for epoch, is_validated in epochs.items():
        if checkpoint is None or epoch >= run.epoch:
            yield epoch, is_validated
