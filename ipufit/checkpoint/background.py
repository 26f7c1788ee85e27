# SPDX-License-Identifier: Apache-2.0
"""Writes files in a thread, while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Callable

from ipufit.distributed import processes

from .one_writer import written_by_one


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
        self._under_way: tuple[Future[Any] | None, Callable[[Any], None]] | None = None

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
            self._under_way = None, then
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ipufit-checkpoint")
        waiting = [take()]
        # The job is popped, so that its copy is freed before `then` is called.
        self._under_way = self._thread.submit(lambda: waiting.pop()()), then

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
        if self._under_way is not None:
            future, then = self._under_way
            if future is not None:
                wait([future])  # if this is interrupted, close() will wait again
            self._under_way = None
            then(hear(lambda: None if future is None else future.result()))
