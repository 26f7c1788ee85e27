# SPDX-License-Identifier: Apache-2.0
"""Records runs, and writes two files of each: a Chrome trace and a page."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, Callable, Mapping

from ipufit._files import file_errors

from .chrome_trace import chrome_trace, events_of
from .page import Rows, page
from .timeline import Timeline

TRACE, PAGE = ".trace.json", ".html"


class Recorder:
    """Records one run after the other into files of a directory.

    The files of a run are `fit-001.trace.json` and `fit-001.html`, with the next number
    that isn't taken. Those of process 1 of several are `fit-001.process-1.trace.json`
    and so on. They are written when the recording ends, each under another name first:
    a process that is killed leaves no half of a file.

    Args:
        directory: Directory of the files, which is made.
        clock: Returns the time in seconds, from any origin.
        is_whole: Whether whole runs are recorded. They last longer for what is made of
            many spans, which is a span too.

    Attributes:
        timeline: Timeline of the run under way, or else of the last one.
        paths: The files that were written last: the trace, then the page.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        clock: Callable[[], float] = time.perf_counter,
        *,
        is_whole: bool = False,
    ) -> None:
        self._is_whole = is_whole
        self.directory = Path(directory)
        self._clock = clock
        self._task = ""
        self.timeline = Timeline(clock)
        self.paths: tuple[Path, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether a run is recorded."""
        return self.timeline.is_on

    def make_directory(self) -> None:
        """Make the directory, so that a run that can't be written fails early.

        Raises:
            FileError: The directory can't be made.
        """
        with file_errors("can't be made for profiles", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)

    def start(self, task: str) -> None:
        """Begin to record a run; the timeline of the last one is forgotten.

        Args:
            task: "fit", "evaluate" or "predict".
        """
        self._task = task
        # One object for all runs: those who record into it keep it.
        self.timeline.forget()
        self.timeline.start(task)

    def drop(self) -> None:
        """Forget the recording under way and the one before it; files stay."""
        self.timeline.forget()
        self.paths = ()

    def stop(
        self, index: int, count: int, facts: Mapping[str, Any], **details: Any
    ) -> None:
        """End the recording, and write its files; nothing if none is under way.

        Args:
            index: Index of this process among those of the run.
            count: Number of processes.
            facts: Further facts about the run.
            **details: Facts for the span of the run.

        Raises:
            FileError: The files can't be written.
        """
        if not self.is_on:
            return
        timeline, rows = self.timeline, Rows()
        timeline.end_inner()
        writing = timeline.begin("write profile", "profile") if self._is_whole else None
        spans = list(timeline.spans)
        events = events_of(spans, os.getpid())
        rows.add(spans)
        timeline.end(writing)
        timeline.stop(**details)
        late = timeline.spans[len(spans) :]
        events = [*events_of(late[::-1], os.getpid()), *events]
        rows.add(late)
        label = f"ipufit process {index} of {count}"
        about = {"run": self._task, "process": index, "processes": count, **facts}
        trace = chrome_trace(timeline, os.getpid(), label, about, events)
        suffix = f".process-{index}" if count > 1 else ""
        self.make_directory()
        with file_errors("can't be written", self.directory):
            target = _written(self.directory, self._task, suffix + TRACE, trace)
            name = target.name[: -len(TRACE)]
            beside = target.with_name(name + PAGE)
            partial = _beside(beside, page(name, label, timeline, about, rows))
            os.replace(partial, beside)
        self.paths = target, beside


def _beside(target: Path, text: str) -> Path:
    """Write a text under a name that nobody looks for, beside its target."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return partial


def _written(directory: Path, task: str, suffix: str, text: str) -> Path:
    """Write a file under the next number that isn't taken, whoever else takes some."""
    partial, number = _beside(directory / f"{task}{suffix}", text), 0
    try:
        while True:
            number += 1
            target = directory / f"{task}-{number:03}{suffix}"
            with contextlib.suppress(FileExistsError):
                target.touch(exist_ok=False)  # the name is ours
                os.replace(partial, target)
                return target
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
