# SPDX-License-Identifier: Apache-2.0
"""A run whose time is recorded, part by part."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Iterator, Sequence

from ipufit._failures import do_all
from ipufit._poptorch import device_heard_by
from ipufit.callbacks import CallbackList
from ipufit.engine import Evaluation, Training
from ipufit.engine.profiled import (
    actions_recorded,
    evaluation_recorded,
    executors_recorded,
    training_recorded,
)
from ipufit.engine.profiled_modules import NamedModules
from ipufit.profiling import Recorder, TimedItems, facts_of, timed_methods
from ipufit.resume import Snapshot
from ipufit.state import RunState

from .no_profile import NoProfile
from .parts import Model

_SNAPSHOT = {"put_back": ("go on from checkpoint", "checkpoints")}
_HOOKS = {"end": ("close callbacks", "callbacks")}


class Profile(NoProfile):
    """The profile of a run: the recordings that it goes into.

    Args:
        model: The model.
        task: "fit", "evaluate" or "predict".
        given: Recorders of callbacks, which say themselves when they record.
        around: Profile of the run in one of whose callbacks this run was made.
    """

    def __init__(
        self, model: Model, task: str, given: Sequence[Recorder], around: NoProfile
    ) -> None:
        self._model = model
        self._own: Recorder | None = None
        directory = model.config.profile_dir
        if directory is not None and not around.timelines:
            self._own = Recorder(directory, is_whole=True)
            self._own.start(task)
            self._preparing = self._own.timeline.begin("prepare", "prepare")
        new = [*([] if self._own is None else [self._own]), *given]
        self._around = around
        known = {id(timeline) for timeline in around.timelines}
        self._new = [one.timeline for one in new if id(one.timeline) not in known]
        self.timelines = (*around.timelines, *self._new)

    @contextlib.contextmanager
    def around(self, run: RunState) -> Iterator[None]:
        """Record a run, and write its files in the end, while the context is open."""
        model, own = self._model, self._own
        if own is not None:
            own.make_directory()
            own.timeline.end(self._preparing)
        model._runs.profile = self
        outcome: dict[str, Any] = {}
        try:
            with contextlib.ExitStack() as stack:
                for timeline in self._new:
                    heard = NamedModules(timeline, model.module)
                    stack.enter_context(device_heard_by(heard))
                    stack.enter_context(executors_recorded(timeline, model._executors))
                for timeline in self.timelines:
                    stack.enter_context(actions_recorded(timeline, run))
                yield
        except GeneratorExit:  # somebody doesn't want the rest of a stream
            raise
        except BaseException as error:
            outcome["ended by"] = type(error).__name__
            raise
        finally:
            model._runs.profile = self._around
            if own is not None:
                do_all([partial(self._write, own, outcome)], is_failing=bool(outcome))

    def _write(self, own: Recorder, outcome: dict[str, Any]) -> None:
        processes, facts = self._model.processes, facts_of(self._model)
        own.stop(processes.index, processes.count, facts, **outcome)

    @contextlib.contextmanager
    def training(self, training: Training, snapshot: Snapshot) -> Iterator[None]:
        """Record the parts of a training, while the context is open."""
        with contextlib.ExitStack() as stack:
            for timeline in self.timelines:
                stack.enter_context(training_recorded(timeline, training))
                stack.enter_context(timed_methods(timeline, snapshot, _SNAPSHOT))
            yield

    @contextlib.contextmanager
    def evaluation(self, evaluation: Evaluation | None) -> Iterator[None]:
        """Record the parts of an evaluation, if there is one."""
        with contextlib.ExitStack() as stack:
            if evaluation is not None:
                for timeline in self.timelines:
                    stack.enter_context(evaluation_recorded(timeline, evaluation))
            yield

    def hooks(self, hooks: CallbackList) -> None:
        """Record the hooks of callbacks, from `set_run` on."""
        for timeline in self.timelines:
            hooks.record(timeline)

    def data(self, items: Any) -> Any:
        """Record the waits for the items of an iterable."""
        for timeline in self.timelines:
            items = TimedItems(timeline, items, "batch", "host data")
        return items
