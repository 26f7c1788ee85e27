# SPDX-License-Identifier: Apache-2.0
"""Several processes that train together: their indices, and their exchanges.

On IPUs, PopRun starts the processes, and replicas exchange gradients inside the
compiled program. On other machines torchrun starts them, and the emulator sums
gradients over processes. Metrics, data and checkpoints are exchanged by
torch.distributed in both cases.

    from ipufit import distributed

    info = distributed.get_process_info()
    print(f"process {info.index} of {info.count}")
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Iterator, Sequence, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from . import _env
from .errors import ConfigError, ProcessError, warn

__all__ = [
    "ALONE",
    "ProcessInfo",
    "Processes",
    "configure",
    "exchanges_off",
    "get_process_info",
    "has_group",
    "processes",
]

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessInfo:
    """The index of a process in a run, and the number of processes.

    Attributes:
        index: Index of this process, from 0.
        count: Number of processes.
        local_index: Index of this process among those on its host.
        launcher: `"poprun"`, `"torchrun"`, `"mpirun"` or `"srun"`; `"group"` for a
            process group that the script made; `"config"` for `IPUConfig(process_id=)`;
            `""` for a process without a launcher.
        replicas: Number of replicas of this process; None if the config decides.

    Example:
        >>> ProcessInfo(index=1, count=4, replicas=2).total_replicas
        8
    """

    index: int = 0
    count: int = 1
    local_index: int = 0
    launcher: str = ""
    replicas: int | None = None

    @property
    def total_replicas(self) -> int | None:
        """Number of replicas in all processes; None if the config decides."""
        return None if self.replicas is None else self.replicas * self.count

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which prints and writes files for all."""
        return self.index == 0


ALONE = ProcessInfo()
"""A process that runs alone."""

# This process -------------------------------------------------------------------------

_configured: ProcessInfo | None = None


def configure(info: ProcessInfo | None) -> None:
    """Set the index of this process, in place of the launcher's.

    Args:
        info: The process; None to use the launcher's again.
    """
    global _configured
    _configured = info
    _tell_children(info)


def get_process_info() -> ProcessInfo:
    """Return the index of this process, and the number of processes.

    Call it in the `__iter__` of a dataset that divides its samples, as
    `torch.utils.data.get_worker_info()` for the worker. The index comes from
    `IPUConfig(process_id=, num_processes=)`, else from PopRun's variables, a process
    group of torch.distributed, or the variables of torchrun, Open MPI or SLURM.

    Returns:
        The process; `ProcessInfo(index=0, count=1)` for a single process.

    Raises:
        ConfigError: Some of a launcher's variables are missing or contradict each
            other.

    Example:
        >>> info = get_process_info()
        >>> samples = range(10)
        >>> list(samples)[info.index :: info.count] == list(samples)
        True
    """
    if _configured is not None:
        return _configured
    is_child = multiprocessing.parent_process() is not None
    if is_child and not has_group():
        # Not used if a launcher has started this process since.
        told = _env.process_of_parent()
        if told is not None and told[2] == _launched_in_words():
            return ProcessInfo(told[0], told[1], told[0], "config")
    info = _launched()
    if info.launcher == "torchrun" and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_once
    if has_group() and not info.launcher:
        info = ProcessInfo(dist.get_rank(), dist.get_world_size(), launcher="group")
        _tell_children(info)
    elif not is_child:
        _tell_children(None)  # clears the value of another script or an ended group
    return info


def _print_once(kind: type[Any], error: BaseException, trace: Any) -> None:
    """Print the error that ends this process, unless another has printed the same.

    The processes that torchrun starts on a host have folders in a common one. The first
    that can make a file with the name of the error prints.
    """
    lines = traceback.format_exception(kind, error, trace)
    name = f"ipufit-{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
    of_process = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    # torchrun ends the others as soon as a process has failed, silent or not.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with contextlib.suppress(OSError, ValueError):  # another torchrun, a full disk
            try:
                Path(of_process).parent.with_name(name).touch(exist_ok=False)
            except FileExistsError:
                return
        sys.__excepthook__(kind, error, trace)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def warn_in_first_process(text: str, category: type[Warning]) -> None:
    """Warn in the first process only, of what all processes see alike."""
    if get_process_info().is_first:
        warn(text, category)


def processes() -> Processes:
    """Return the processes of the run, for exchanges between them."""
    return Processes(get_process_info())


def _tell_children(info: ProcessInfo | None) -> None:
    """Set the variable that tells spawned data workers the index of this process."""
    if info is None:
        os.environ.pop(_env.PROCESS, None)
    else:
        text = f"{info.index}/{info.count}:{_launched_in_words()}"
        os.environ[_env.PROCESS] = text


def _launched_in_words() -> str:
    """Describe the launcher's index and count; `?` if its variables contradict."""
    try:
        info = _launched()
    except ConfigError:
        return "?"
    return f"{info.index}/{info.count}"


# Exchanges ----------------------------------------------------------------------------

_FIRST = 0
_SMALL = 2**20  # bytes

_recent: deque[Tensor] = deque(maxlen=64)
"""Small tensors that were exchanged last.

A thread of gloo releases a tensor some time after the exchange is done. Without
another reference, the thread frees the tensor, for which it needs the interpreter's
lock. But torch 2.0 holds that lock while it waits for the thread to end a group.
"""

_is_off = False


@contextlib.contextmanager
def exchanges_off() -> Iterator[None]:
    """Let every exchange inside the context fail at once.

    A process whose run has failed is no longer at the same exchange as the others,
    which would take its values for those of another exchange.

    Example:
        >>> with exchanges_off():
        ...     Processes(ProcessInfo(0, 2)).barrier()
        Traceback (most recent call last):
        ipufit.errors.ProcessError: The run of process 0 of 2 has failed or was ...
    """
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


class Processes:
    """Exchanges values between the processes of a run.

    Every process must call the same methods in the same order. With a single process
    each method returns at once, and no process group is made.

    Args:
        info: This process.

    Attributes:
        are_several: Whether there is more than one process.

    Raises:
        ProcessError: From every method, if another process has ended or doesn't join
            the exchange in time.

    Example:
        >>> alone = Processes()
        >>> alone.summed(torch.tensor([1.0, 2.0])), alone.gathered("a")
        (tensor([1., 2.]), ['a'])
    """

    def __init__(self, info: ProcessInfo = ALONE) -> None:
        self.info = info
        self.are_several = info.count > 1

    @property
    def index(self) -> int:
        """Index of this process, from 0."""
        return self.info.index

    @property
    def count(self) -> int:
        """Number of processes."""
        return self.info.count

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which prints and writes files for all."""
        return self.info.is_first

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes of tensors of one shape and dtype."""
        if not self.are_several:
            return tensor
        total: Tensor = tensor.detach().clone()
        what = f"a sum of {total.numel()} numbers of {total.dtype}"
        with self._exchange(what) as (group, _):
            dist.all_reduce(_kept(total), group=group)
        return total

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of process 0 into tensors of all processes, in one message.

        Tensors are sent as bytes, because gloo doesn't know every dtype.
        """
        if not self.are_several or not tensors:
            return
        flat: list[Any] = [tensor.detach().reshape(-1) for tensor in tensors]
        vectors = [vector.contiguous().view(torch.uint8) for vector in flat]
        joined = _kept(torch.cat(vectors))
        with self._exchange("tensors of process 0") as (group, _):
            dist.broadcast(joined, _FIRST, group=group)
        if self.is_first:
            return
        parts: Any = torch.split(joined, [len(vector) for vector in vectors])
        for tensor, part in zip(tensors, parts):
            # Copied, because numbers must be aligned in memory.
            tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def first(self, value: T) -> T:
        """Return the value of process 0; the values of other processes are ignored.

        Args:
            value: Anything that can be pickled.
        """
        sent: Any = value if self.is_first else None
        received = self.gathered(sent, "a value of process 0")[_FIRST]
        return value if self.is_first else received

    def gathered(self, value: T, what: str = "values of all processes") -> list[T]:
        """Return the values of all processes, in their order.

        Args:
            value: Anything that can be pickled.
            what: Name of the values, for messages.
        """
        if not self.are_several:
            return [value]
        pickled = bytearray(pickle.dumps(value))
        content = _kept(torch.frombuffer(pickled, dtype=torch.uint8))
        with self._exchange(what, content.numel()) as (group, sizes):
            contents = _all_gather(group, content, sizes)
        return [pickle.loads(content.numpy().tobytes()) for content in contents]

    def barrier(self) -> None:
        """Wait until all processes call this."""
        if self.are_several:
            with self._exchange("all processes"):
                pass

    def require_same(self, method: str, **arguments: object) -> None:
        """Check that all processes call the same method with the same arguments.

        Args:
            method: Name of the method.
            **arguments: Arguments that must be equal in all processes.

        Raises:
            ProcessError: The calls differ. The message has the calls of all processes.
        """
        if self.are_several:
            words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            with self._exchange(f"{method}({words})"):
                pass

    @contextlib.contextmanager
    def _exchange(self, what: str, size: int = 0) -> Iterator[tuple[Any, list[int]]]:
        """Enter an exchange with all processes, which must enter the same one.

        Args:
            what: Name of the value, or the method that begins.
            size: Number of bytes that this process sends.

        Yields:
            The process group, and the sizes of all processes.
        """
        if _is_off:
            raise ProcessError(
                f"The run of process {self.index} of {self.count} has failed or was "
                f"interrupted: it doesn't wait for {what}, because others are "
                "elsewhere. Nothing can be saved by all processes now."
            )
        group = _find_group(self.info)
        try:
            text = what.encode()
            header = torch.tensor([zlib.crc32(text), len(text), size])
            headers = [_kept(torch.empty_like(header)) for _ in range(self.count)]
            dist.all_gather(headers, _kept(header), group=group)
            sums, lengths, sizes = zip(*(header.tolist() for header in headers))
            if len(set(sums)) > 1:
                texts = _all_gather(group, torch.tensor(list(text)), lengths)
                calls = [bytes(values.tolist()).decode() for values in texts]
                who = {c: [i for i, d in enumerate(calls) if d == c] for c in calls}
                raise ProcessError(
                    "The processes don't do the same: "
                    + "; ".join(f"process {i} is at {c}" for c, (i, *_) in who.items())
                    + ". All must call the same methods of a model in the same order, "
                    "with the same data, arguments and callbacks: move them out of an "
                    "`if` on the number of the process."
                )
            yield group, list(sizes)
        except ProcessError:
            raise
        except RuntimeError as error:
            first_line = str(error).strip().split("\n")[0]
            raise ProcessError(
                f"Process {self.index} of {self.count} waited for {what}, and another "
                "process has ended, or didn't come in time. If one has failed, its own "
                "error is the first of the output. All processes must call the same "
                "methods of a model (no `if` on the number of the process around "
                "fit, evaluate or predict); IPUFIT_PROCESS_TIMEOUT sets how many "
                f"seconds they wait. ({first_line})"
            ) from error


def _kept(tensor: Tensor) -> Any:
    """Return the tensor, and keep a reference for a while if it is small."""
    if tensor.numel() * tensor.element_size() <= _SMALL:
        _recent.append(tensor)
    return tensor


def _all_gather(group: Any, vector: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return the vectors of all processes, whose lengths are `sizes`."""
    padded = _kept(vector.new_zeros(max(sizes)))
    padded[: vector.numel()] = vector
    vectors = [_kept(torch.zeros_like(padded)) for _ in sizes]
    dist.all_gather(vectors, padded, group=group)
    return [vector[:size] for vector, size in zip(vectors, sizes)]


# The group for exchanges: torch.distributed's, with gloo ------------------------------
#
# A group that the script has made is used, and never ended. Otherwise a group is made
# at the first exchange.

_gloo_beside: dict[int, Any] = {}
"""The id of a default group of another kind -> the gloo group of its processes."""


def has_group() -> bool:
    """Return whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def _find_group(info: ProcessInfo) -> Any:
    if not has_group():
        try:
            _make_group(info)
        except (RuntimeError, OSError) as error:
            raise ProcessError(
                f"Process {info.index} of {info.count} couldn't reach the others. If "
                "one of them has failed, its own error is the first of the output; "
                f"{_env.PROCESS_TIMEOUT} sets how many seconds they wait. ({error})"
            ) from error
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (info.index, info.count):
        raise ConfigError(
            f"torch.distributed's process group says that this is process {rank} of "
            f"{size}, and {info.launcher} says that it is {info.index} of "
            f"{info.count}. Make the group with all processes, or leave that to ipufit."
        )
    whole = dist.group.WORLD
    if dist.get_backend() == "gloo":
        return whole
    if id(whole) not in _gloo_beside:
        new_group: Any = dist.new_group
        timeout = timedelta(seconds=_env.process_timeout())
        _gloo_beside[id(whole)] = new_group(backend="gloo", timeout=timeout)
    return _gloo_beside[id(whole)]


def _make_group(info: ProcessInfo) -> None:
    seconds = _env.process_timeout()
    timeout, end = timedelta(seconds=seconds), time.monotonic() + seconds
    host, port = _address(info)
    # torchrun's agent may hold the store, even if another launcher is in use.
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = info.index == 0 and not has_agent
    torch_distributed: Any = dist
    outcome: Future[Any] = Future()

    def connect() -> None:
        try:
            # Process 0 waits for the others when the group is made, not here.
            store = torch_distributed.TCPStore(
                host, port, info.count, is_master, timeout, wait_for_workers=False
            )
            outcome.set_result(store)
        except (RuntimeError, OSError, ValueError) as error:
            outcome.set_exception(error)

    # torch tries twice, and would wait forever for another service at the port.
    threading.Thread(target=connect, daemon=True).start()
    try:
        store = outcome.result(timeout.total_seconds())
    except TimeoutError:
        raise OSError(f"nothing of process 0 answers at {host}:{port}") from None
    if has_agent:
        # torchrun keeps its store when it restarts processes, and newer torch would
        # read the addresses of ended processes from it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = torch_distributed.PrefixStore(f"ipufit/{attempt}", store)
    # torch would restart its timeout, and not name the missing process.
    here = [f"ipufit is here: {index}" for index in range(info.count)]
    store.set(here[info.index], "")
    for index, key in enumerate(here):
        try:
            store.wait([key], timedelta(seconds=max(0.01, end - time.monotonic())))
        except RuntimeError as error:
            raise OSError(f"no sign of process {index}: {error}") from error
    dist.init_process_group(
        "gloo",
        store=store,
        rank=info.index,
        world_size=info.count,
        timeout=timeout,
    )
    atexit.register(_end_group)


def _end_group() -> None:
    """End the group that was made here: gloo's threads must not outlive Python."""
    if has_group():
        dist.destroy_process_group()


def _address(info: ProcessInfo) -> tuple[str, int]:
    """Return the host and the port of process 0.

    `MASTER_ADDR` and `MASTER_PORT` are used if set. Otherwise the host is this host if
    all processes of Open MPI are here, or the first host of SLURM's step. The port is
    torch's 29500, or derived from the number of SLURM's job.
    """
    host = port = None
    if info.launcher in ("poprun", "mpirun"):
        is_here = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(info.count)
        host, port = "127.0.0.1" if is_here else None, "29500"
    elif info.launcher == "srun":
        # node[03-05,9],other: the first is node03.
        nodes = os.environ.get("SLURM_STEP_NODELIST", "")
        found = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
        host = None if found is None else found[1] + (found[2] or "")
        job = os.environ.get("SLURM_JOB_ID", "")
        port = str(15000 + int(job) % 10000) if job.isdigit() else None
    host = os.environ.get("MASTER_ADDR") or host
    port = os.environ.get("MASTER_PORT") or port
    if host is None or port is None:
        places = {"MASTER_ADDR": host, "MASTER_PORT": port}
        missing = " and ".join(name for name in places if places[name] is None)
        raise ConfigError(
            f"{info.count} processes must exchange values, and the address of process "
            f"0 is unknown: set {missing} in each of them, to the host of "
            "process 0 and a free port there; or start them with `ipufit launch` or "
            "torchrun, which do so."
        )
    if not port.isdigit():
        raise ConfigError(f"MASTER_PORT={port!r} must be the number of a port.")
    return host, int(port)


# Variables of launchers ---------------------------------------------------------------

_TOTAL = "POPDIST_NUM_TOTAL_REPLICAS"
_LOCAL = "POPDIST_NUM_LOCAL_REPLICAS"
_OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
_UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
_LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"
_MPI = "OMPI_COMM_WORLD"


def _launched() -> ProcessInfo:
    """Read the index of this process from its launcher's variables.

    The first launcher that has set a variable is used: PopRun starts processes with
    Open MPI, and torchrun often runs inside of SLURM. A batch script of SLURM has
    `SLURM_PROCID=0` too: only `SLURM_STEP_NUM_TASKS` shows that srun has started this
    process.
    """
    _env.check_numbers()
    if _require_all("PopRun", _TOTAL, _LOCAL, _OFFSET):
        return _launched_by_poprun()
    launchers = [
        ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("mpirun", f"{_MPI}_RANK", f"{_MPI}_SIZE", f"{_MPI}_LOCAL_RANK"),
    ]
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
        launchers.append(("srun", *names))
    for launcher, index_name, count_name, local_name in launchers:
        if _require_all(launcher, index_name, count_name):
            count = _number(count_name, least=1)
            index = _number(index_name, below=count, limit=count_name)
            local = _number(local_name) if local_name in os.environ else index
            return ProcessInfo(index, count, local, launcher, _replicas_of_each(count))
    return ALONE


def _launched_by_poprun() -> ProcessInfo:
    total = _number(_TOTAL, least=1)
    local = _number(_LOCAL, least=1)
    offset = _number(_OFFSET, below=total, limit=_TOTAL)
    is_uniform = os.environ.get(_UNIFORM, "1") != "0"
    if total % local or offset % local or not is_uniform:
        raise ConfigError(
            f"PopRun gives this process {local} of {total} replicas, from number "
            f"{offset} on, so that not all processes have the same number. Choose "
            "--num-replicas as a multiple of --num-instances."
        )
    index = offset // local
    here = _number(_LOCAL_INSTANCE) if _LOCAL_INSTANCE in os.environ else index
    return ProcessInfo(index, total // local, here, "poprun", local)


def _require_all(launcher: str, *names: str) -> bool:
    """Return whether all variables are set; refuse if only some are."""
    there = [name for name in names if name in os.environ]
    missing = [name for name in names if name not in os.environ]
    if there and missing:
        raise ConfigError(
            f"{launcher}'s variable {', '.join(there)} is set, and "
            f"{', '.join(missing)} is missing: start all processes with a launcher "
            f"(`ipufit launch`), or unset {', '.join(there)}."
        )
    return bool(there)


def _number(
    name: str, *, least: int = 0, below: int | None = None, limit: str = ""
) -> int:
    text = os.environ[name]
    value = _env.whole_number(text)
    if value is None or value < least:
        raise ConfigError(f"{name}={text!r} is not a whole number of {least} or more.")
    if below is not None and value >= below:
        raise ConfigError(
            f"{name}={value} doesn't fit {limit}={below}: it counts from 0, so that "
            f"{below - 1} is the last."
        )
    return value


def _replicas_of_each(count: int) -> int | None:
    """Return the replicas of one process, from the total of `ipufit launch`."""
    total = _env.total_replicas()
    if total is None:
        return None
    if total % count:
        raise ConfigError(
            f"{_env.REPLICAS}={total} replicas can't be shared equally by {count} "
            f"processes. Use a multiple of {count}."
        )
    return total // count
