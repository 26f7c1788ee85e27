# SPDX-License-Identifier: Apache-2.0
"""Writing while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Callable


class BackgroundWriter:
    """Writes one thing at a time, in a thread; none is lost.

    While one is written, asking for the next waits, and takes its copy then: there is
    one copy in memory, not as many as the disk is slower than training. A process that
    ends in order waits for the thread.

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
        self._under_way: tuple[Future[Any], Callable[[Any], None]] | None = None

    def write(
        self, take: Callable[[], Callable[[], Any]], then: Callable[[Any], None]
    ) -> None:
        """Have something written, when what was asked for before is.

        Args:
            take: Called in this thread when nothing is being written any more. It
                returns the job, which is called in the other thread: what that writes
                must be a copy that doesn't change.
            then: Gets what the job returned; called in this thread, by a later method.

        Raises:
            Exception: What the job before has raised.
        """
        self.wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ipufit-checkpoint")
        waiting = [take()]
        # Popped, so that the copy is gone before anybody hears that it was written.
        self._under_way = self._thread.submit(lambda: waiting.pop()()), then

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            Exception: What the job has raised.
        """
        if self._under_way is not None:
            future, then = self._under_way
            wait([future])  # an interrupt leaves it under way, for close() to tell of
            self._under_way = None
            then(future.result())

    def close(self) -> None:
        """Wait, and end the thread; writing again begins another.

        Raises:
            Exception: What the job has raised.
        """
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
