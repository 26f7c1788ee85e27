# SPDX-License-Identifier: Apache-2.0
"""The whole state of a run, taken into a checkpoint and put back.

Weights, those of losses, optimiser, averages, schedules, callbacks, History, figures of
the epoch under way, the position in the data, and the random states of the device and
of this process.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Iterator, Mapping

import torch
from torch import Tensor

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
from .same_run import has_other_layout
from .saved_form import COUNTERS, check_form, in_words, of_run
from .shares import (
    GROUP,
    Share,
    added_up,
    buffers_of,
    digests_of,
    gathered,
    in_file,
    num_saved,
    share_of,
)
from .trained import (
    Tensors,
    TrainedState,
    check_weights,
    groups_of_module,
    set_groups,
)

_GROUPS, _LOSSES, _AVERAGE = ("model", "buffers"), "losses", "average"


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
        return RandomStates(
            self.training.executors,
            self.batches,
            self.validation,
            self.run.processes,
        )

    def take(self) -> files.Checkpoint:
        """Take a checkpoint of the state between two calls.

        Several processes take it together, and each gets the state of all.

        Returns:
            A checkpoint; its tensors are copies.

        Raises:
            UnsupportedError: A streamed metric is in the middle of an epoch.
            ProcessError: Another process has ended.
        """
        training, run = self.training, self.run
        training.executors.common.take_back()
        if run.is_epoch_done:
            self.batches.begin_next_pass()
        trained = self.trained.take()
        figures = None if run.is_epoch_done else training.figures.state_dict()
        losses = files.copied_tensors(self._tensors_of_losses())
        buffers: Tensors = {}
        if run.processes.are_several:
            buffers = self._buffers({**trained.tensors, _LOSSES: losses})
        own = Share(*self._random.take(), figures, digests_of(buffers))
        shares, others = gathered(run.processes, own, buffers)
        callbacks: Tensors = {}
        state = {
            **trained.state,
            "run": {
                **{name: getattr(run, name) for name in COUNTERS},
                "epoch": run.epoch + run.is_epoch_done,
                "stop_reason": run.stop_reason,
                **_validation_of(run),
            },
            "data": {
                "seed": self.batches.seed,
                "place": list(self.batches.position),
                "num_samples": self.batches.source.num_samples,
                "num_blocks": shares[0].num_blocks,
            },
            "plan": asdict(training.plan),
            "settings": dict(self.settings),
            "figures": added_up([share.figures for share in shares]),
            "callbacks": without_arrays(self.hooks.state_dict(), callbacks),
        }
        groups = {
            **trained.tensors,
            "callbacks": callbacks,
            "random": shares[0].random,
        }
        if losses:
            groups[_LOSSES] = losses
        if run.processes.are_several:
            state[GROUP], states = in_file(shares)
            groups[GROUP] = {**states, **others}
        state["tensors"] = in_words(groups)
        return files.Checkpoint(groups, state)

    def _tensors_of_losses(self) -> Tensors:
        """Tensors of losses, such as a weight that a callback anneals."""
        return dict([*self._losses.named_parameters(), *self._losses.named_buffers()])

    @property
    def _losses(self) -> torch.nn.Module:
        return torch.nn.ModuleList(self.training.figures.objective.modules)

    def _buffers(self, groups: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
        """Tensors of groups that each process changes for itself, as `"group/name"`.

        A device changes buffers of floats only.
        """
        of_module = dict(self.training.executors.module.named_buffers())
        names = {_LOSSES: dict(self._losses.named_buffers())}
        return {
            f"{group}/{name}": tensor
            for group, tensors in groups.items()
            if group in (*_GROUPS, _LOSSES, _AVERAGE)
            for name, tensor in tensors.items()
            if name in names.get(group, of_module) and tensor.is_floating_point()
        }

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
        for index in range(1, num_saved(checkpoint)):
            for group, own in self._groups().items():
                given = buffers_of(checkpoint, index, group)
                check_weights({n: t for n, t in own.items() if n in given}, given)
        self._random.check(checkpoint)

    def _groups(self) -> dict[str, Mapping[str, Tensor]]:
        of_module = groups_of_module(self.training.executors.module)
        average = self.training.average
        groups = {**of_module, _LOSSES: self._tensors_of_losses()}
        return groups if average is None else {**groups, _AVERAGE: average.averages}

    def put_back(self, checkpoint: files.Checkpoint) -> None:
        """Go on from a checkpoint, once `on_train_begin` was called.

        Weights and the optimiser's state were put back before: programs have them.

        Args:
            checkpoint: A checkpoint that `check` accepts, of a run with equal settings.

        Raises:
            ConfigError: The figures of the epoch under way are others.
            DamagedCheckpointError: The device can't take the random state.
        """
        state, figures = checkpoint.state, self._figures_in(checkpoint)
        training, run = self.training, self.run
        if figures is not None:
            training.figures.check_state(figures)
        self._random.put_back_device(
            checkpoint, is_other_layout=has_other_layout(checkpoint, training)
        )
        with torch.no_grad():
            for name, tensor in checkpoint.tensors.get(_LOSSES, {}).items():
                self._tensors_of_losses()[name].copy_(tensor)
            self._put_back_buffers(checkpoint)
        # Callbacks may look at the counters when they load their states.
        for name in (*COUNTERS, "stop_reason"):
            setattr(run, name, state["run"][name])
        run.validated = dict(state["run"].get("validated", {}))
        run.validated_calls = state["run"].get("validated_calls", 0)
        self.hooks.load_state_dict(callbacks_of(checkpoint))
        # on_train_begin may have set other rates than the run had.
        set_groups(training.optimization.optimizer, state["optimizer"]["groups"])
        training.optimization.load_state_dict(state["updates"])
        if figures is not None:
            training.figures.load_state_dict(figures)
        self._random.put_back_host(checkpoint)

    def _figures_in(self, checkpoint: files.Checkpoint) -> dict[str, Any] | None:
        """Figures of this process; among another number of them process 0 has all."""
        processes, figures = self.run.processes, checkpoint.state["figures"]
        if num_saved(checkpoint) == processes.count:
            return share_of(checkpoint, processes.index).figures
        if figures is None or processes.is_first:
            return dict(figures) if figures else None
        return {**figures, "sums": None, "extra": {}}

    def _put_back_buffers(self, checkpoint: files.Checkpoint) -> None:
        """Set buffers that this process had otherwise than process 0."""
        processes, executors = self.run.processes, self.training.executors
        if num_saved(checkpoint) != processes.count:
            return
        executors.fetch_weights()
        for group, own in self._groups().items():
            for name, tensor in buffers_of(checkpoint, processes.index, group).items():
                own[name].copy_(tensor)
        executors.send_weights()


def _validation_of(run: RunState) -> dict[str, Any]:
    """The last validation within the epoch under way, if there was one."""
    if run.is_epoch_done or not run.validated_calls:
        return {}
    return {"validated": dict(run.validated), "validated_calls": run.validated_calls}


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


def position_of(checkpoint: files.Checkpoint) -> Position:
    """The position in the data that a checkpoint has."""
    number, calls = checkpoint.state["data"]["place"]
    return Position(int(number), int(calls))


def calls_done(checkpoint: files.Checkpoint | None) -> int:
    """The calls that an interrupted run has made of its epoch; 0 for a new run."""
    return 0 if checkpoint is None else int(checkpoint.state["run"]["calls"])


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
