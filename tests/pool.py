# SPDX-License-Identifier: Apache-2.0
"""Processes that stay, for tests of what several processes do together.

`pool.run(function, *args)` calls a function of a module in each of two processes, which
are joined by a gloo group of torch.distributed, and returns the results in order:

    def total(number):
        value = torch.tensor(number + dist.get_rank())
        dist.all_reduce(value)
        return value.item()

    def test_totals(pool):
        assert pool.run(total, 3) == [7, 7]

The processes are forks of the server that starts data workers, which has imported torch
already. They start when they are first used, and serve all tests of the session. Each
run has a group of its own, over a file: no port is taken.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from tests import modes

TIMEOUT_SECONDS = 120.0
GRACE_SECONDS = 10.0


# Gloo fails now and then to connect processes that have just ended another group, on
# a busy machine: one of them gets this, and the others wait for it.
NOT_CONNECTED = "connectFullMesh failed"
TRIES_TO_CONNECT = 3


def printed_lines(text):
    """Lines that processes printed, without those in which Gloo says how it connects.

    Some releases of torch have Gloo print them to stdout, 2.8 among them.
    """
    return [line for line in text.splitlines() if not line.startswith("[Gloo]")]


class _NotConnectedError(Exception):
    pass


class RemoteError(Exception):
    """The traceback of an error in another process; the cause of what is raised."""

    def __str__(self):
        return f"\n{self.args[0]}"


class ProcessPool:
    """Processes that run functions together.

    Args:
        folder: For the files by which they find one another.
        active_modes: The emulator's modes (`tests/modes.py`) in all processes.
    """

    def __init__(self, folder, active_modes=()):
        self._folder = Path(folder)
        self._modes = list(active_modes)
        # Each would say that executables aren't cached.
        self._environment = {**os.environ, "POPTORCH_LOG_LEVEL": "ERR"}
        self._workers = []
        self._runs = 0

    def run(
        self,
        function,
        *args,
        count=2,
        timeout=TIMEOUT_SECONDS,
        environment=(),
        **kwargs,
    ):
        """Call a function in each of several processes, and return what it gave them.

        Args:
            function: Of a module, so that it can be found by its name there.
            args: Its arguments, alike in all processes.
            count: The number of processes.
            timeout: Seconds for all of it. Then the processes are killed.
            environment: Variables of the environment while it runs.
            kwargs: Its keyword arguments.

        Raises:
            Exception: The first error that a process raised, with a note of the others.
            TimeoutError: Some processes haven't come back.
        """
        job = function, args, kwargs, dict(environment)
        for _ in range(TRIES_TO_CONNECT - 1):
            try:
                answers = self._answers(job, count, timeout)
                break
            except _NotConnectedError:
                self.close()  # the others wait for those that failed
        else:
            answers = self._answers(job, count, timeout)
        errors = [answer for answer in answers if not answer[1]]
        if errors:
            _raise(errors)
        return [value for _, _, value in sorted(answers, key=lambda answer: answer[0])]

    def _answers(self, job, count, timeout):
        if any(worker.process.exitcode is not None for worker in self._workers):
            self.close()  # somebody has ended one of them
        while len(self._workers) < count:
            self._workers.append(_Worker.started(self._environment, self._modes))
        self._runs += 1
        store = str(self._folder / f"store-{self._runs}")
        group = (store, count, max(1.0, timeout - GRACE_SECONDS))
        for index, worker in enumerate(self._workers[:count]):
            _send(worker.connection, (*job, group, index))
        return self._collect(self._workers[:count], timeout)

    def _collect(self, workers, timeout):
        """Answers `(index, is_result, value)` in the order in which they came."""
        deadline = time.monotonic() + timeout
        waiting = {worker.connection: i for i, worker in enumerate(workers)}
        answers = []
        has_ended = False
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(waiting.values())
                self.close()
                raise TimeoutError(f"no answer of {missing} in {timeout} s: {answers}")
            for connection in ready:
                index = waiting.pop(connection)
                try:
                    answers.append((index, *_receive(connection)))
                    if not answers[-1][1] and NOT_CONNECTED in str(answers[-1][2][0]):
                        raise _NotConnectedError
                except EOFError:
                    has_ended = True
                    error = RuntimeError(f"process {index} has ended")
                    answers.append((index, False, (error, "", time.monotonic())))
        if has_ended:
            self.close()
        return answers

    def close(self):
        """End all processes; the next run starts others."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()
        self._workers = []


def _raise(errors):
    errors = sorted(errors, key=lambda answer: answer[2][2])  # time of the error
    index, _, (error, text, _) = errors[0]
    others = "".join(
        f"\nprocess {other} raised {type(value).__name__}: {value}"
        for other, _, (value, _, _) in errors[1:]
    )
    raise error from RemoteError(f"process {index}:\n{text}{others}")


class _Worker:
    def __init__(self, process, connection):
        self.process = process
        self.connection = connection

    @classmethod
    def started(cls, environment, active_modes):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("forkserver").Process(
            target=serve, args=(theirs, environment, active_modes)
        )
        process.start()
        theirs.close()
        # It outlives the test that starts it, and is nothing that a test has left.
        multiprocessing.process._children.discard(process)
        return cls(process, ours)


def _send(connection, value):
    # With its own pickler a connection would pass tensors as handles of memory.
    connection.send_bytes(pickle.dumps(value))


def _receive(connection):
    return pickle.loads(connection.recv_bytes())


def serve(connection, environment, active_modes):
    """Run what comes, until nothing can come any more."""
    os.environ.clear()
    os.environ.update(environment)
    modes.enter(active_modes)
    torch.set_num_threads(1)
    # Data workers of this process are forks of its own server: it imports torch once.
    multiprocessing.set_forkserver_preload(["ipufit.emulator._dataloader"])
    while True:
        try:
            job = _receive(connection)
        except EOFError:
            return
        answer = _run(*job)
        try:
            _send(connection, answer)
        except Exception as error:  # noqa: BLE001 - a result that can't be pickled
            _send(connection, (False, (TypeError(repr(error)), "", time.monotonic())))


def _run(function, args, kwargs, environment, group, index):
    store, count, seconds = group
    before = dict(os.environ)
    os.environ.update(environment)
    # Beyond the group's own time, and before the pool kills this process.
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS / 2)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store),
            rank=index,
            world_size=count,
            timeout=timedelta(seconds=seconds),
        )
        torch.manual_seed(0)
        return True, function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - raised where the test runs
        raised, text = time.monotonic(), traceback.format_exc()
        # While a frame holds the group, it isn't closed, and the others wait.
        _forget_frames(error)
        return False, (error, text, raised)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            # A thread of the group may have to free a tensor, for which it needs the
            # interpreter's lock. Up to torch 2.0 destroying the group waits for that
            # thread and holds the lock.
            time.sleep(0.02)
            dist.destroy_process_group()
        gc.collect()  # here, and not in a process that a loader forks later
        gc.freeze()  # what is left are modules, which needn't be looked at again
        os.environ.clear()
        os.environ.update(before)


def _forget_frames(error):
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def make_pool(active_modes):
    """Make a pool for a fixture, and close it at the end."""
    folder = tempfile.mkdtemp(prefix="ipufit-processes-")
    pool = ProcessPool(folder, active_modes)
    try:
        yield pool
    finally:
        pool.close()
        shutil.rmtree(folder, ignore_errors=True)
