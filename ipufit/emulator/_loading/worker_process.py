# SPDX-License-Identifier: Apache-2.0
"""The consumer's end of the process behind `AsynchronousDataAccessor`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing import reduction
from typing import Any

from ipufit.emulator._loading.accessor_worker import (
    Failed,
    Reply,
    Request,
    Started,
    Stop,
    WorkerSetup,
    run_worker,
)
from ipufit.emulator._loading.ring_buffer import RingBuffer
from ipufit.emulator.enums import SharingStrategy
from ipufit.emulator.errors import createPoptorchError

_START_METHODS = {
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
}
_LIVENESS_PERIOD_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0


class WorkerProcess:
    """A process that reads a dataset ahead; it starts at once.

    Attributes:
        process: The process, from `multiprocessing`.
        connection: The consumer's end of the pipe.
    """

    def __init__(self, setup: WorkerSetup, strategy: SharingStrategy) -> None:
        context: Any = multiprocessing.get_context(_START_METHODS[strategy])
        self._owner = os.getpid()
        self._num_slots = setup.num_slots
        self.connection, theirs = context.Pipe()
        inherited = self.connection if strategy == SharingStrategy.Fork else None
        self.process = context.Process(
            target=run_worker, args=(theirs, inherited, setup)
        )
        try:
            self.process.start()
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()

    def send(self, request: Request) -> None:
        """Send a request; if the process is gone, `receive` tells."""
        with contextlib.suppress(ConnectionError):
            self.connection.send(request)

    def receive(self) -> Reply:
        """Wait for the next reply of the process; `Failed` if it has ended."""
        try:
            while not self.connection.poll(_LIVENESS_PERIOD_SECONDS):
                # Its children can keep the pipe open after its death.
                if not self.process.is_alive() and not self.connection.poll(0):
                    break
            else:
                reply: Reply = self.connection.recv()
                return reply
        except (EOFError, ConnectionError):
            pass
        return Failed()

    def receive_start(self) -> tuple[Started, RingBuffer]:
        """Wait for the first reply, and map the slots that the process has made.

        Raises:
            Error: The process couldn't read the first element.
        """
        reply = self.receive()
        if not isinstance(reply, Started):
            raise createPoptorchError(
                "AsynchronousDataAccessor worker thread failed to start: its process "
                f"could not read the first element of the dataset. {self.cause()} If "
                "it could not even start: scripts need an `if __name__ == '__main__'` "
                "guard, and datasets must be importable from there unless they are "
                "forked."
            )
        file_descriptor = reduction.recv_handle(self.connection)
        try:
            return reply, RingBuffer(file_descriptor, reply.specs, self._num_slots)
        finally:
            os.close(file_descriptor)

    def cause(self) -> str:
        """Point to the message of a process that failed: only it knows the cause.

        PopTorch does the same (`python/_dataloader.py`).
        """
        self.process.join(_LIVENESS_PERIOD_SECONDS)  # it prints, then ends
        return (
            "Look above for what it printed to its stderr (exit code "
            f"{self.process.exitcode})."
        )

    @property
    def is_inherited(self) -> bool:
        """Whether this is a copy in a forked process, which must not end the worker."""
        return self._owner != os.getpid()

    def end(self) -> None:
        """Ask the process to end; interrupt it and kill it if it doesn't."""
        self.send(Stop())
        self.connection.close()
        self.process.join(_PATIENCE_SECONDS)
        for insist in (self._interrupt, self.process.terminate):
            if self.process.is_alive():
                insist()
                self.process.join(_PATIENCE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()

    def _interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)
