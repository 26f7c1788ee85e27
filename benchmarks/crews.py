# SPDX-License-Identifier: Apache-2.0
"""Crews: processes that stay, and do what they are asked to do together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Callable, Iterator

from .runs import ROOT

_LIMIT_SECONDS = 300.0  # of one answer
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")

Worker = Callable[..., Any]
"""Answers what a process is asked; made in it, after the process group."""


class CrewError(Exception):
    """What a process of a crew failed with, or that it has ended."""


class Crew:
    """Processes of one gloo group, which wait between questions without any work.

    Args:
        make_worker: A function of a module. Called in each process with its index and
            the number of processes, it returns what answers questions.
        count: Number of processes.
        threads: Threads of torch in each process.

    Raises:
        CrewError: From `ask`, if a process fails or ends.
    """

    def __init__(
        self, make_worker: Callable[[int, int], Worker], count: int, threads: int
    ) -> None:
        self.count = count
        self.threads = threads
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ipufit-crew-")
        self._pipes: list[Connection] = []
        self._processes = []
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, make_worker, index, count, threads, self._folder.name),
                daemon=True,
            )
            with _environment(threads):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, *question: Any) -> list[Any]:
        """Ask all processes the same, and wait for all.

        Returns:
            Their answers, in order.
        """
        try:
            for pipe in self._pipes:
                pipe.send(question)
            return self._answers()
        except (EOFError, OSError) as error:
            raise CrewError(f"A process of {self.count} has ended.") from error

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        pending = dict(zip(self._pipes, range(self.count)))
        while pending:
            ready = wait(list(pending), _LIMIT_SECONDS)
            if not ready:
                raise CrewError(f"No answer in {_LIMIT_SECONDS:.0f} s.")
            for pipe in ready:
                is_right, answer = pipe.recv()
                if not is_right:  # the others wait for it in vain
                    raise CrewError(answer)
                answers[pending.pop(pipe)] = answer
        return [answers[index] for index in range(self.count)]

    def dismiss(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


@contextlib.contextmanager
def _environment(threads: int) -> Iterator[None]:
    """Variables of a process that is started here, and of nothing else."""
    before = dict(os.environ)
    kept = {
        name: value
        for name, value in before.items()
        if not name.startswith(("IPUFIT_", "POPTORCH_", "POPDIST_"))
    }
    os.environ.clear()
    os.environ.update(kept, IPUFIT_BACKEND="emulator", PYTHONPATH=str(ROOT))
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    pipe: Connection,
    make_worker: Callable[[int, int], Worker],
    index: int,
    count: int,
    threads: int,
    folder: str,
) -> None:
    """Answer questions until the pipe is closed."""
    import torch
    from torch import distributed

    torch.set_num_threads(threads)
    worker = None
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        try:
            if worker is None:
                if count > 1:
                    store = Path(folder, "store").as_uri()
                    distributed.init_process_group(
                        "gloo", init_method=store, rank=index, world_size=count
                    )
                worker = make_worker(index, count)
            pipe.send((True, worker(*question)))
        except BaseException:  # noqa: BLE001 - whoever asked gets it
            pipe.send((False, traceback.format_exc()))
