# SPDX-License-Identifier: Apache-2.0
"""Begin, nest, pause and end the runs of a model."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

from ipufit._signals import uninterrupted
from ipufit.callbacks import CallbackList, History, ProgressDisplay, make_progress
from ipufit.callbacks.base import CallbackLike
from ipufit.distributed import Processes, exchanges_off
from ipufit.engine.program import Executors
from ipufit.errors import ConfigError, do_all
from ipufit.optimizers import Optimization
from ipufit.resume.savers import RunSaver
from ipufit.state import RunState
from ipufit.types import Verbose


class Runs:
    """The runs of a model: a callback of one may begin another.

    Args:
        executors: The programs of the model.
        processes: The processes of all runs.

    Attributes:
        fit: State of the innermost `fit` under way, or else of the last one.
        saver: Saves the innermost `fit` under way; None if there is none, or its
            program isn't prepared yet.
    """

    def __init__(self, executors: Executors, processes: Processes) -> None:
        self._executors, self._processes = executors, processes
        self._hooks: list[CallbackList] = []  # paused ones, then from outer to inner
        self._no_run = self.fit = RunState()
        self.saver: RunSaver | None = None

    @property
    def innermost(self) -> RunState:
        """The newest run under way, such as an evaluation in a callback of `fit`."""
        return self._hooks[-1].run if self._hooks else self._no_run

    @property
    def are_under_way(self) -> bool:
        """Whether a run is under way that isn't paused."""
        return bool(self._hooks) and not self.innermost.is_paused

    def refuse_other_thread(self) -> None:
        """Refuse a run while another thread runs the model."""
        thread = self._hooks[-1].run.thread if self._hooks else None
        if thread not in (None, threading.get_ident()):
            raise ConfigError(
                "Another thread is in fit, evaluate or predict of this model, which "
                "has one program on its IPUs at a time. Call this from a callback of "
                "that run, or use a copy of the model: copy.deepcopy(model)."
            )

    @contextlib.contextmanager
    def running(
        self,
        model: Any,
        run: RunState,
        callbacks: CallbackLike,
        verbose: Verbose,
        history: History | None = None,
    ) -> Iterator[tuple[CallbackList, ProgressDisplay]]:
        """Begin a run with hooks in Keras's order, and download the weights at its end.

        After an error the IPUs are released, too, because the user may never do so.

        Args:
            model: The model, for callbacks.
            run: State of the run.
            callbacks: The user's callbacks; a display among them replaces ipufit's, as
                in Keras.
            verbose: As for `fit`.
            history: History of a `fit`, whose hooks are called after the user's.

        Yields:
            All callbacks, and the display among them.

        Raises:
            ConfigError: The config is offline, or another thread runs the model.

        Warns:
            CopiedModuleWarning: The user's module has changed, but a copy of it runs.
        """
        model._require_ipus()
        model._counterparts.warn_of_changes()
        users = CallbackList(callbacks).callbacks
        run.processes, run.thread = self._processes, threading.get_ident()
        verbose = verbose if run.processes.is_first else 0
        default_display = make_progress(verbose)
        displays = [c for c in users if isinstance(c, ProgressDisplay)]
        last = [default_display] if verbose and not displays else []
        hooks = CallbackList([users, [] if history is None else history, last])
        hooks.set_model(model)
        hooks.set_run(run)
        default_display.set_run(run)  # a silent one isn't among the hooks
        self._hooks.append(hooks)
        uninterrupted.remember_signals()
        is_failing = False
        try:
            is_shown = displays and run.processes.is_first
            yield hooks, displays[0] if is_shown else default_display
        except GeneratorExit:  # somebody doesn't want the rest of a stream
            raise
        except BaseException:
            is_failing = True
            with exchanges_off():  # other processes are elsewhere
                do_all([self._executors.detach], is_failing=True)
            raise
        finally:
            self._hooks.remove(hooks)
            if self.are_under_way:
                uninterrupted.remember_signals()
            else:
                uninterrupted.forget_signals()
            with exchanges_off() if is_failing else contextlib.nullcontext():
                do_all(
                    [
                        lambda: hooks.end(self._hooks, is_failing=is_failing),
                        self._executors.fetch_weights,
                    ],
                    is_failing=is_failing,
                )
        run.act()  # for what was asked for in on_train_end: all has ended well

    @contextlib.contextmanager
    def paused(self, hooks: CallbackList) -> Iterator[None]:
        """Pause a run for other code, which may run the model."""
        self._hooks.remove(hooks)
        hooks.give_back(self._hooks)
        self._hooks.insert(0, hooks)
        hooks.run.is_paused = True
        uninterrupted.forget_signals()
        try:
            yield
        finally:
            uninterrupted.remember_signals()
            hooks.run.is_paused = False
            self._hooks.remove(hooks)
            self._hooks.append(hooks)
            hooks.give_back([hooks])

    @contextlib.contextmanager
    def fitting(
        self, model: Any, run: RunState, optimization: Optimization
    ) -> Iterator[None]:
        """Make a run the present `fit`; an outer `fit` continues after it."""
        outer, saver, history = self.fit, self.saver, model.history
        self.fit = run
        if saver is None:
            yield
            return
        try:
            with optimization.paused():
                yield
        finally:
            self.fit, self.saver, model.history = outer, saver, history
            if run.told_by is not None:
                outer.stop(run.told_by, is_eviction=True)
