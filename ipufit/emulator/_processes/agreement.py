# SPDX-License-Identifier: Apache-2.0
"""Begin a run alike in all processes: the same program, and the same weights."""

from __future__ import annotations

import hashlib
from typing import Mapping

import torch
from torch import Tensor

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._processes.processes import Processes
from ipufit.emulator.errors import createPoptorchError

_SHOWN = 3


def check_agreement(processes: Processes, facts: Mapping[str, object]) -> None:
    """Refuse processes that don't train the same program. It takes one message.

    Args:
        processes: The processes of this run.
        facts: Values that must be the same in all of them, by names for the error.
            They are compared by their `repr`.

    Raises:
        Error: A fact differs between this process and another; it is raised in all.
    """
    digests = [_digest(repr(fact)) for fact in facts.values()]
    everyone = torch.stack(processes.gather(torch.tensor(digests)))
    differs = (everyone != everyone[0]).any(dim=0).tolist()
    others = (everyone != everyone[0]).any(dim=1).nonzero().flatten().tolist()
    if others:
        names = [name for name, is_other in zip(facts, differs) if is_other]
        own = "; ".join(f"{name} {facts[name]}" for name in names)
        raise createPoptorchError(
            f"All processes must train the same program, but {' and '.join(names)} "
            f"of process {', '.join(map(str, others))} and of process 0 differ. In "
            f"process {processes.index}: {own[:500]}."
        )


def _digest(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


@torch.no_grad()
def broadcast_weights(processes: Processes, weights: Mapping[str, Tensor]) -> list[str]:
    """Give all processes the weights of process 0, in one message.

    Args:
        processes: The processes of this run.
        weights: By name; their shapes and types are the same in all processes.
            Only those that differ are written to.

    Returns:
        The names of the weights that were different here.
    """
    if not weights:
        return []
    own = {name: _as_bytes(weight) for name, weight in weights.items()}
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
        _warn(processes.index, _shortened(different))
    return different


def _as_bytes(tensor: Tensor) -> Tensor:
    as_bytes: Tensor = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return as_bytes


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _warn(index: int, names: str) -> None:
    logger.warning(
        "Process %d began with other weights than process 0 (%s), and goes on with "
        "those of process 0. On a pod it would train from its own, and the replicas "
        "would never agree: seed all processes alike (torch.manual_seed) before the "
        "model is made, or broadcast its weights.",
        index,
        names,
    )
