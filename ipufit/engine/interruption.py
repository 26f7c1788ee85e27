# SPDX-License-Identifier: Apache-2.0
"""Early ends of a run, wrapped around the epochs and calls of the loop.

A callback asks for the end (`run.stop`), the user presses Ctrl-C, or the process is
evicted: a scheduler sends SIGTERM, and the run is saved to go on in another process.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any, Callable, Iterable, Iterator, Sequence, TypeVar

import torch

from ipufit.callbacks import CallbackList
from ipufit.data import HostRandomState, set_random_state
from ipufit.distributed import exchanges_off
from ipufit.state import EVICTED, RunState

from .training import Training

T = TypeVar("T")


class EvictedError(Exception):
    """The process was told to end: the epoch under way goes on in another one."""


@contextlib.contextmanager
def ended_in_order(
    training: Training, hooks: CallbackList, run: RunState
) -> Iterator[None]:
    """End the loop in this context in order, if it is interrupted.

    On Ctrl-C `on_train_end` hears the figures of the last complete epoch and the IPUs
    are free; then the interrupt goes on. On an eviction the loop ends, and no more.

    Args:
        training: The training of the loop, whose IPUs are freed.
        hooks: Callbacks of the run.
        run: State of the run.
    """
    try:
        with heard_eviction(run):
            yield
    except EvictedError:
        pass
    except KeyboardInterrupt:
        run.stop("interrupted")
        with exchanges_off():  # other processes are elsewhere
            hooks.on_train_end(dict(run.logs))
            training.executors.detach()
        raise


def until_stopped(
    items: Iterable[T], run: RunState, settle: Callable[[], None] = lambda: None
) -> Iterator[T]:
    """Give calls or epochs until the run is to stop, and save between them if asked.

    Args:
        items: The calls of an epoch, or epochs.
        run: State of the run.
        settle: Has what one process wants count for all.

    Raises:
        EvictedError: The process was told to end, and the run was saved.

    Example:
        >>> run = RunState()
        >>> for epoch in until_stopped(range(9), run):
        ...     if epoch == 2:
        ...         run.stop("seen enough")
        >>> epoch
        2
    """
    for item in items:
        yield item
        run.act()
        settle()
        run.heed_eviction()
        if run.stop_reason == EVICTED:
            raise EvictedError
        if run.is_ending:
            return


@contextlib.contextmanager
def undone_if_evicted(
    run: RunState, generators: Sequence[torch.Generator]
) -> Iterator[None]:
    """Restore the random states from before a validation, if it is evicted meanwhile.

    The process that goes on validates anew.

    Args:
        run: State of the run.
        generators: Further generators of torch that the training data draw from.

    Raises:
        EvictedError: The process was told to end.
    """
    before = HostRandomState(generators) if run.heeds_eviction else None
    yield
    if before is not None and run.is_evicted:
        set_random_state(before.tensors(), generators)
        run.heed_eviction()
        raise EvictedError


@contextlib.contextmanager
def heard_eviction(run: RunState) -> Iterator[None]:
    """Tell a run of SIGTERM instead of dying, if a callback saves then.

    Python hears signals in the main thread alone: in others nothing is done.

    Args:
        run: State of the run, which is told.

    Example:
        >>> import os
        >>> run = RunState()
        >>> run.on_eviction(lambda: None)
        >>> with heard_eviction(run):
        ...     os.kill(os.getpid(), signal.SIGTERM)
        >>> run.is_evicted
        True
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not run.heeds_eviction or not is_main:
        yield
        return

    def hear(_number: int, _frame: Any) -> None:
        run.tell_to_end()

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        # None is a handler that wasn't installed from Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
