# SPDX-License-Identifier: Apache-2.0
"""The frame of a run: callbacks around it, and IPUs and weights given back after it."""

from __future__ import annotations

import contextlib
from typing import Iterator

from ipufit._failures import do_all
from ipufit.callbacks import CallbackList, History, ProgressDisplay, make_progress
from ipufit.callbacks.base import CallbackLike
from ipufit.distributed import exchanges_off
from ipufit.state import RunState
from ipufit.types import Verbose

from .evaluating import require_ipus
from .parts import Model


@contextlib.contextmanager
def under_way(
    model: Model,
    run: RunState,
    callbacks: CallbackLike,
    verbose: Verbose,
    history: History | None = None,
) -> Iterator[tuple[CallbackList, ProgressDisplay]]:
    """Begin a run with hooks in Keras's order, and bring the weights back at its end.

    After an error the IPUs are free too: nobody may come back to free them.

    Args:
        run: State of the run.
        callbacks: The user's; a display among them shows instead of ours, as in Keras.
        verbose: As for `fit`.
        history: History of a `fit`, whose hooks come after those of the user.

    Yields:
        All callbacks, and the display among them.

    Raises:
        ConfigError: The config is offline.

    Warns:
        CopiedModuleWarning: The module that was given has changed, and isn't what runs.
    """
    require_ipus(model)
    model._counterparts.warn_of_changes()
    given = CallbackList(callbacks).callbacks
    run.processes = model.processes
    own_display = make_progress(verbose if run.processes.is_first else 0)
    displays = [one for one in given if isinstance(one, ProgressDisplay)]
    last = [] if displays else [own_display]
    hooks = CallbackList([given, [] if history is None else history, last])
    hooks.set_model(model)
    hooks.set_run(run)
    runs = model._runs
    outer_run, outer_hooks = runs.innermost, runs.hooks
    runs.innermost, runs.hooks = run, hooks
    if history is not None:
        runs.fit = run
    is_failing = False
    try:
        is_shown = displays and run.processes.is_first
        yield hooks, displays[0] if is_shown else own_display
    except GeneratorExit:  # somebody doesn't want the rest of a stream
        raise
    except BaseException:
        is_failing = True
        with exchanges_off():  # other processes are elsewhere
            do_all([model._executors.detach], is_failing=True)
        raise
    finally:
        runs.innermost, runs.hooks = outer_run, outer_hooks
        with exchanges_off() if is_failing else contextlib.nullcontext():
            do_all(
                [
                    lambda: hooks.end(outer_hooks, is_failing=is_failing),
                    model._executors.fetch_weights,
                ],
                is_failing=is_failing,
            )
    run.act()  # for what was asked for in on_train_end: all has ended well
