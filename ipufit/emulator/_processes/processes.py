# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, joined by a gloo group of torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import time
from typing import Any, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ipufit.emulator._ground.switches import TIMEOUT_VARIABLE, process_timeout
from ipufit.emulator.errors import createPoptorchError

_BACKEND = "gloo"
_SECONDS_TO_FREE = 0.02
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class Processes:
    """The processes of a run. Each method is called by all of them, in one order.

    Args:
        index: The index of this process.
        count: The number of processes.
        group: A gloo group of all of them; None for the default group. To hold that
            would keep its threads alive beyond the interpreter, which aborts then.
    """

    def __init__(self, index: int, count: int, group: Any) -> None:
        self.index = index
        self.count = count
        self._group = group

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the processes, the same bits in each.

        Raises:
            Error: Another process has ended, or didn't come in time.
        """
        with self._waiting("add up tensors"):
            dist.all_reduce(tensor, group=self._group)

    def swap(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
    ) -> None:
        """Send a part of a tensor to each process, and receive one from each.

        Args:
            received: 1-d; is written to.
            sent: 1-d.
            received_sizes: The number of elements from each process, in order.
            sent_sizes: The number of elements for each process, in order.

        Raises:
            Error: Another process has ended, or didn't come in time.
        """
        with self._waiting("add up tensors"):
            dist.all_to_all_single(
                received, sent, received_sizes, sent_sizes, group=self._group
            )

    def broadcast(self, tensor: Tensor) -> None:
        """Replace a tensor by that of process 0.

        Raises:
            Error: Another process has ended, or didn't come in time.
        """
        with self._waiting("broadcast tensors"):
            dist.broadcast(tensor, src=0, group=self._group)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """List a tensor of one shape and type as each process has it.

        Raises:
            Error: Another process has ended, or didn't come in time.
        """
        tensors = [torch.empty_like(tensor) for _ in range(self.count)]
        with self._waiting("gather tensors"):
            dist.all_gather(tensors, tensor, group=self._group)
        return tensors

    def wait(self) -> None:
        """Wait until all processes have come here.

        Raises:
            Error: Another process has ended, or didn't come in time.
        """
        with self._waiting("meet"):
            dist.barrier(group=self._group)  # type: ignore[no-untyped-call,unused-ignore]

    @contextlib.contextmanager
    def _waiting(self, purpose: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            seconds = time.monotonic() - started
            raise createPoptorchError(
                f"Process {self.index} of {self.count} waited {seconds:.1f} s for the "
                f"others to {purpose}, in vain: another process of this run has ended, "
                "or didn't come. Its own error is the first in the output. If it only "
                f"takes longer, raise {TIMEOUT_VARIABLE} (seconds). torch.distributed "
                f"says: {_first_line(error)}"
            ) from error


def join_processes(index: int, count: int) -> Processes:
    """Join the other processes of a run.

    The default group of torch.distributed is used if the script has made it, or else
    made here. It stays as it is: a group of another backend than gloo gets a subgroup.

    Args:
        index: `Options.Distributed.processId`.
        count: `Options.Distributed.numProcesses`.

    Raises:
        Error: The default group has another size or rank, there are no variables by
            which processes find one another, or the others didn't come in time.
    """
    if not dist.is_available():
        raise createPoptorchError(
            f"Options.Distributed says there are {count} processes, but this torch "
            f"({torch.__version__}) was built without torch.distributed."
        )
    if not dist.is_initialized():
        _make_default_group(index, count)
    size, rank = dist.get_world_size(), dist.get_rank()
    if (size, rank) != (count, index):
        raise createPoptorchError(
            f"Options.Distributed says that this is process {index} of {count}, but in "
            f"the group of torch.distributed it is process {rank} of {size}. Call "
            f"Options.Distributed.configureProcessId({rank}, {size})."
        )
    return Processes(index, count, _gloo_group())


def _make_default_group(index: int, count: int) -> None:
    if not 0 <= index < count:
        raise createPoptorchError(
            f"Options.Distributed.configureProcessId({index}, {count}): of {count} "
            f"processes the first has the index 0 and the last {count - 1}."
        )
    missing = [name for name in _ADDRESS if not os.environ.get(name)]
    if missing:
        raise createPoptorchError(
            f"Options.Distributed says that this is process {index} of {count}. They "
            f"find one another by {' and '.join(_ADDRESS)}; missing: "
            f"{', '.join(missing)}. Start them by `python -m "
            f"ipufit.emulator --processes {count}` or `torchrun`, set both to the host "
            "of process 0 and a free port of it, or call "
            "torch.distributed.init_process_group before."
        )
    started = time.monotonic()
    try:
        dist.init_process_group(
            _BACKEND, rank=index, world_size=count, timeout=_timeout()
        )
    except (RuntimeError, ValueError) as error:
        address = ":".join(os.environ[name] for name in _ADDRESS)
        raise createPoptorchError(
            f"Process {index} of {count} couldn't join the others by way of {address} "
            f"(MASTER_ADDR, MASTER_PORT) in {time.monotonic() - started:.1f} s. If "
            "another process has ended, its own error is the first in the output. If "
            f"it only takes longer to come, raise {TIMEOUT_VARIABLE} (seconds). "
            f"torch.distributed says: {_first_line(error)}"
        ) from error
    atexit.register(_end)


def _end() -> None:
    """End the group that was made here: its threads must not outlive the interpreter.

    A thread may have to free a tensor first, for which it needs the interpreter's lock.
    Up to torch 2.0 ending the group waits for that thread and holds the lock.
    """
    if dist.is_initialized():
        time.sleep(_SECONDS_TO_FREE)
        dist.destroy_process_group()


_SUBGROUPS: dict[str, tuple[Any, Any]] = {}
"""The gloo subgroup made last, and the default group that it is of."""


def _gloo_group() -> Any:
    if dist.get_backend() == _BACKEND:
        return None
    world = dist.group.WORLD
    of, subgroup = _SUBGROUPS.get(_BACKEND, (None, None))
    if of is not world:
        subgroup = dist.new_group(  # type: ignore[no-untyped-call,unused-ignore]
            backend=_BACKEND, timeout=_timeout()
        )
        _SUBGROUPS[_BACKEND] = world, subgroup
    return subgroup


def _timeout() -> datetime.timedelta:
    return datetime.timedelta(seconds=process_timeout())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
