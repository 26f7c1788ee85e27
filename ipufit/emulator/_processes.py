# SPDX-License-Identifier: Apache-2.0
"""The processes that train one model: a gloo group, and the data they exchange."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import hashlib
import os
import sys
import time
from typing import Any, Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ._logging import logger
from ._switches import TIMEOUT_VARIABLE, process_timeout
from .errors import createPoptorchError

_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class Processes:
    """The processes of a run, which exchange tensors by gloo.

    Each method is called in all processes, in the same order. It raises `Error` if
    another process has ended, or didn't come in time.

    Args:
        index: The index of this process.
        count: The number of processes.
        group: A gloo group of all of them; None for the default group. A reference to
            that would keep its threads alive beyond the interpreter, which then aborts.
    """

    def __init__(self, index: int, count: int, group: Any) -> None:
        self.index = index
        self.count = count
        self._group = group
        self._exchanged: tuple[Any, ...] = ()
        self._names: list[str] | None = None  # of weights that have gradients

    def broadcast(self, tensor: Tensor) -> None:
        """Replace a tensor by the tensor of process 0."""
        self._wait("broadcast tensors", dist.broadcast, tensor, 0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, of one shape and type."""
        # gloo's `all_gather` and `all_reduce` take two to four times as long.
        sent = torch.stack([tensor] * self.count)
        received = torch.empty_like(sent)
        self._wait("exchange tensors", dist.all_to_all_single, received, sent)
        return list(received)

    def wait(self) -> None:
        """Wait until all processes call this."""
        self._wait("meet", dist.barrier)

    def add_up(self, gradients: dict[str, Tensor | None], divisor: float = 1) -> None:
        """Replace the gradients of an update by their sums over the processes.

        Each process gets the gradients of all others, and adds them in the order of
        the processes. The first update decides which weights have gradients: a program
        always computes the same ones.

        Args:
            gradients: Gradients by the name of the weight; None stays None.
            divisor: Divides the sums.

        Raises:
            Error: Other weights have gradients than in the first update, or another
                process has ended.
        """
        present = {n: g for n, g in sorted(gradients.items()) if g is not None}
        if self._names is None:
            check_agreement(self, {"the weights that have gradients": list(present)})
            self._names = list(present)
        elif list(present) != self._names:
            others = sorted(present.keys() ^ set(self._names))
            raise createPoptorchError(
                "Several processes train, and some weights had a gradient in one "
                f"update but not in another: {', '.join(others)}. A stand-in for a "
                "custom operation must give the same inputs a gradient each time."
            )
        for dtype in {gradient.dtype: None for gradient in present.values()}:
            own = {n: g for n, g in present.items() if g.dtype is dtype}
            message = torch.cat([gradient.reshape(-1) for gradient in own.values()])
            total = functools.reduce(torch.add, self.gather(message))
            if divisor != 1:
                total.div_(float(divisor))
            parts = torch.split(total, [gradient.numel() for gradient in own.values()])
            for (name, gradient), part in zip(own.items(), parts):
                gradients[name] = part.view(gradient.shape)

    def _wait(self, purpose: str, exchange: Callable[..., Any], *args: Any) -> None:
        started = time.monotonic()
        try:
            exchange(*args, group=self._group)
        except RuntimeError as error:
            seconds = time.monotonic() - started
            raise createPoptorchError(
                f"Process {self.index} of {self.count} waited {seconds:.1f} s for the "
                f"others to {purpose}, in vain: another process of this run has ended, "
                "or didn't come. Its own error is the first in the output. If it only "
                f"takes longer, raise {TIMEOUT_VARIABLE} (seconds). torch.distributed "
                f"says: {_first_line(error)}"
            ) from error
        # gloo's threads release a tensor some time after an exchange, and must not be
        # the last to hold it.
        self._exchanged = *self._exchanged[-1:], args


def join_processes(index: int, count: int) -> Processes:
    """Join the other processes of a run.

    If the script has made the default group of torch.distributed, it is used, else it
    is made here. If it has another backend than gloo, a subgroup is made.

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
    is_gloo = dist.get_backend() == "gloo"
    return Processes(index, count, None if is_gloo else _gloo_beside(dist.group.WORLD))


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
        timeout = datetime.timedelta(seconds=process_timeout())
        dist.init_process_group("gloo", timeout=timeout, rank=index, world_size=count)
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
    Up to torch 2.0, ending the group holds the lock and waits for that thread.
    """
    if dist.is_initialized():
        time.sleep(0.02)
        dist.destroy_process_group()


@functools.lru_cache(maxsize=1)
def _gloo_beside(world: Any) -> Any:
    """Return the gloo group of the processes of a default group of another kind."""
    timeout = datetime.timedelta(seconds=process_timeout())
    return dist.new_group(timeout=timeout, backend="gloo")  # type: ignore[no-untyped-call,unused-ignore]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def guard_forks() -> None:
    """Make every later fork of this process wait for gloo's threads, if there are any.

    A thread of gloo frees its part of a tensor a moment after an exchange. For that it
    registers with the interpreter, under a lock. A process that is forked just then
    inherits the locked lock, and before Python 3.12 waits for it for ever
    (https://github.com/python/cpython/issues/112275).

    Call it once: its hook can't be removed.
    """

    def let_threads_finish() -> None:
        if dist.is_available() and dist.is_initialized():
            time.sleep(0.005)
            sys._current_frames()  # takes the lock, and so waits until it is free

    if sys.version_info < (3, 12) and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=let_threads_finish)


def check_agreement(processes: Processes, facts: Mapping[str, object]) -> None:
    """Refuse processes that train different programs, by one message.

    Args:
        processes: The processes of this run.
        facts: Values that must be the same in all of them, by names for the error.
            They are compared by their `repr`.

    Raises:
        Error: A fact differs between this process and another; it is raised in all.
    """
    texts = [repr(fact).encode() for fact in facts.values()]
    digests = torch.tensor([list(hashlib.sha256(text).digest()) for text in texts])
    everyone = torch.stack(processes.gather(digests))
    differs = (everyone != everyone[0]).any(dim=2)  # [processes, facts]
    others = [index for index, is_other in enumerate(differs.any(dim=1)) if is_other]
    if others:
        names = [n for n, is_other in zip(facts, differs.any(dim=0)) if is_other]
        own = "; ".join(f"{name} {facts[name]}" for name in names)
        raise createPoptorchError(
            f"All processes must train the same program, but {' and '.join(names)} "
            f"of process {', '.join(map(str, others))} and of process 0 differ. In "
            f"process {processes.index}: {own[:500]}."
        )


@torch.no_grad()
def broadcast_weights(processes: Processes, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights of process 0 to all processes, in one message.

    Args:
        processes: The processes of this run.
        weights: Weights by name, of equal shapes and types in all processes. Only those
            that differ are written to.
    """
    if not weights:
        return
    own = {
        name: weight.detach().contiguous().view(-1).view(torch.uint8)
        for name, weight in weights.items()
    }
    joined = torch.cat(list(own.values()))
    processes.broadcast(joined)
    parts = torch.split(joined, [part.numel() for part in own.values()])
    different = []
    for (name, part), received in zip(own.items(), parts):
        if not torch.equal(part, received):
            weight = weights[name]
            # A copy: a part of the message may begin anywhere, a number may not.
            weight.copy_(received.clone().view(weight.dtype).view(weight.shape))
            different.append(name)
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        logger.warning(
            "Process %d began with other weights than process 0 (%s), and goes on with "
            "those of process 0. On a pod it would train from its own, and the "
            "replicas would never agree: seed all processes alike (torch.manual_seed) "
            "before the model is made, or broadcast its weights.",
            processes.index,
            ", ".join(different[:3]) + more,
        )


@contextlib.contextmanager
def common_random(processes: Processes) -> Iterator[None]:
    """Let all processes draw the same random numbers inside a context.

    Process 0 draws the seed, so its own random state decides it. Afterwards each
    process continues with its own numbers.
    """
    seed = torch.randint(2**62, ())
    processes.broadcast(seed)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(int(seed))
        yield
