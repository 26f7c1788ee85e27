# SPDX-License-Identifier: Apache-2.0
"""Lets one process write while the others wait, and tells all how it went."""

from __future__ import annotations

import json
from typing import Any, Callable

import torch
from torch import distributed

from ipufit.errors import CheckpointError


def num_processes() -> int:
    """The number of processes in torch.distributed's default group; 1 without a group.

    Example:
        >>> num_processes()
        1
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def written_by_one(write: Callable[[], str]) -> str:
    """Have process 0 write something, and wait for it in the other processes.

    Each process of torch.distributed's default group must call this. Without a group
    the process writes by itself.

    Args:
        write: Writes, and returns the path; called in process 0 alone.

    Returns:
        The path, in every process, once it is written.

    Raises:
        Exception: `write` has raised it; in process 0.
        CheckpointError: `write` has raised an error with this text and `errno`; in the
            other processes.

    Example:
        >>> written_by_one(lambda: "run/update-00000010")
        'run/update-00000010'
    """
    if num_processes() == 1:
        return write()
    if distributed.get_rank() != 0:
        outcome = json.loads(_from_first(b"").decode())
        if "error" in outcome:
            error = CheckpointError(outcome["error"])
            error.errno = outcome["errno"]
            raise error
        return str(outcome["path"])
    try:
        path = write()
    except Exception as error:
        failure = {"error": str(error), "errno": getattr(error, "errno", None)}
        _from_first(json.dumps(failure).encode())
        raise
    _from_first(json.dumps({"path": path}).encode())
    return path


def _from_first(message: bytes) -> bytes:
    """Send the message of process 0 to all; those of other processes are ignored."""
    device = "cpu"
    if distributed.get_backend() == "nccl":
        device = "cuda"
    size = torch.tensor([len(message)], device=device)
    _broadcast(size)
    content = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if message:
        content.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    _broadcast(content)
    return bytes(content.cpu().numpy())


def _broadcast(tensor: Any) -> None:
    distributed.broadcast(tensor, src=0)  # type: ignore[no-untyped-call,unused-ignore]
