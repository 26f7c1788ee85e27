# SPDX-License-Identifier: Apache-2.0
"""Writes in one process for all, in a thread, or not at all."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Callable, Iterator, TypeVar

from ipufit import _env
from ipufit.distributed import processes
from ipufit.errors import (
    CheckpointError,
    ConfigError,
    MissingCheckpointError,
    UnsupportedError,
)

T = TypeVar("T")

_ALIKE = {"ConfigError": ConfigError, "UnsupportedError": UnsupportedError}
"""Errors that others raise as they are: callers catch them."""


def written_by_one(write: Callable[[], T]) -> T:
    """Have process 0 write something, and wait for it in the other processes.

    Each process of a run must call this. A process without others writes by itself.

    Args:
        write: Writes, and returns something that can be pickled, such as the path;
            called in process 0 alone.

    Returns:
        The result of process 0, in every process, once it is written.

    Raises:
        Exception: `write` has raised it; in process 0.
        CheckpointError: `write` has raised an error with this text and `errno`; in the
            other processes. A ConfigError or an UnsupportedError is one there, too.
        ProcessError: Another process has ended.

    Example:
        >>> written_by_one(lambda: "run/update-00000010")
        'run/update-00000010'
    """
    everyone = processes()
    if not everyone.are_several:
        return write()
    if everyone.is_first:
        try:
            result = write()
        except Exception as error:
            errno = getattr(error, "errno", None)
            everyone.first((None, type(error).__name__, str(error), errno))
            raise
        everyone.first((result, None, "", None))
        return result
    heard: Any = everyone.first((None, None, "", None))
    result, kind, text, errno = heard
    if kind in _ALIKE:
        raise _ALIKE[kind](text)
    if kind is not None:
        failure = CheckpointError(text)
        failure.errno = errno
        raise failure
    return result


class BackgroundWriter:
    """Runs one writing job at a time in a thread, and loses none.

    A job that is asked for while another runs waits, and takes its copy only then. So
    there is one copy in memory, however slow the disk is. A process that ends normally
    waits for the thread.

    Of several processes the first writes. All of them must call `write` and `wait`, in
    which they exchange how the last job went; the thread exchanges nothing.

    Example:
        >>> writer, written = BackgroundWriter(), []
        >>> writer.write(lambda: lambda: "run-001", then=written.append)
        >>> writer.wait()
        >>> written
        ['run-001']
        >>> writer.close()
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        # Where another process writes there is no future.
        self._last: tuple[Future[Any] | None, Callable[[Any], None]] | None = None

    def write(
        self, take: Callable[[], Callable[[], Any]], then: Callable[[Any], None]
    ) -> None:
        """Wait for the last job, then start the next one.

        Args:
            take: Called in this thread when no job runs any more. It returns the next
                job, which is called in the other thread. So whatever the job writes
                must be a copy that doesn't change.
            then: Gets the result of the job. It is called in this thread, by the next
                call of a method.

        Raises:
            Exception: The last job has raised it.
        """
        self.wait()
        if not processes().is_first:
            take()  # which may need all processes
            self._last = None, then
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ipufit-checkpoint")
        waiting = [take()]
        # The job is popped, so that its copy is freed before `then` is called.
        self._last = self._thread.submit(lambda: waiting.pop()()), then

    def wait(self) -> None:
        """Wait until the job has ended.

        Raises:
            Exception: The job has raised it.
        """
        self._end_job(written_by_one)

    def close(self) -> None:
        """Wait until the job has ended, and end the thread; a new job starts another.

        Other processes hear nothing of it: they may have failed, or this one.

        Raises:
            Exception: The job has raised it.
        """
        try:
            self._end_job(lambda result: result())
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def _end_job(self, hear: Callable[[Callable[[], Any]], Any]) -> None:
        if self._last is not None:
            future, then = self._last
            if future is not None:
                wait([future])  # if this is interrupted, close() will wait again
            self._last = None
            then(hear(lambda: None if future is None else future.result()))


@contextlib.contextmanager
def missing_allowed() -> Iterator[None]:
    """Go on after a checkpoint that isn't there, if programs are only compiled.

    Nothing is saved then, so a script that trains, saves and loads would end there, and
    its later programs wouldn't be compiled. What is missing is said.

    Raises:
        MissingCheckpointError: Programs are run.

    Example:
        >>> with missing_allowed():
        ...     raise MissingCheckpointError("There is none.")
        Traceback (most recent call last):
        ipufit.errors.MissingCheckpointError: There is none.
    """
    try:
        yield
    except MissingCheckpointError as error:
        if _env.compile_only() is None:
            raise
        sys.stderr.write(
            f"ipufit: {error} Weights stay as they are, because nothing is saved where "
            "programs are only compiled.\n"
        )
