# SPDX-License-Identifier: Apache-2.0
"""The profile of a run that isn't recorded, and the methods that all profiles have."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ContextManager, Iterable, TypeVar

from ipufit.callbacks import CallbackList
from ipufit.engine import Evaluation, Training
from ipufit.resume import Snapshot
from ipufit.state import RunState

if TYPE_CHECKING:
    from ipufit.profiling import Timeline

_Items = TypeVar("_Items", bound=Iterable[Any])


class NoProfile:
    """The profile that nobody has asked for: nothing is recorded, nothing is paid."""

    timelines: tuple[Timeline, ...] = ()

    def around(self, run: RunState) -> ContextManager[None]:
        """Record a run, and write its files in the end, while the context is open.

        Args:
            run: State of the run.
        """
        return contextlib.nullcontext()

    def training(self, training: Training, snapshot: Snapshot) -> ContextManager[None]:
        """Record the parts of a training, while the context is open."""
        return contextlib.nullcontext()

    def evaluation(self, evaluation: Evaluation | None) -> ContextManager[None]:
        """Record the parts of an evaluation, if there is one."""
        return contextlib.nullcontext()

    def hooks(self, hooks: CallbackList) -> None:
        """Record the hooks of callbacks, from `set_run` on."""

    def data(self, items: _Items) -> _Items:
        """Record the waits for the items of an iterable."""
        return items


NO_PROFILE = NoProfile()
