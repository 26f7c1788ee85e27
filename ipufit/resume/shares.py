# SPDX-License-Identifier: Apache-2.0
"""The part of a snapshot that each of several processes has for itself.

Sums of figures, random states, positions in streams, and buffers that differ. Process 0
has its part where a process without others has it, and the sums of all; the parts of
the others are in the group of tensors `processes`.
"""

from __future__ import annotations

import hashlib
from typing import Any, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit.distributed import Processes
from ipufit.engine import Sums

from .trained import Tensors, under

GROUP = "processes"
_RANDOM = "random"


class Share(NamedTuple):
    """The part of one process.

    Attributes:
        random: Random states by name.
        num_blocks: Blocks that each stream has given.
        figures: Figures of the epoch under way; None between epochs.
        digests: Digest of each buffer by name.
    """

    random: Tensors
    num_blocks: dict[str, int]
    figures: dict[str, Any] | None
    digests: dict[str, str]


def gathered(
    processes: Processes, own: Share, buffers: Mapping[str, Tensor]
) -> tuple[list[Share], Tensors]:
    """The parts of all processes, and the buffers that the others have otherwise.

    Args:
        processes: The processes of the run, which all call this.
        own: The part of this process.
        buffers: Its buffers, by the names of the digests.

    Returns:
        The parts in the order of processes; and tensors by names such as
        `"1/model/0.running_mean"`.
    """
    shares = processes.gathered(own)
    odd = [
        name
        for name, digest in own.digests.items()
        if any(share.digests[name] != digest for share in shares)
    ]
    others: Tensors = {}
    if odd:
        everyone = processes.gathered({name: buffers[name] for name in odd})
        for index, theirs in enumerate(everyone[1:], 1):
            others.update({f"{index}/{name}": one for name, one in theirs.items()})
    return shares, others


def digests_of(buffers: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of the bytes of each tensor, by name.

    Example:
        >>> one = digests_of({"mean": torch.zeros(2)})
        >>> one == digests_of({"mean": torch.zeros(2)})
        True
    """
    return {
        name: hashlib.sha256(
            one.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, one in buffers.items()
    }


def in_file(shares: Sequence[Share]) -> tuple[list[dict[str, Any]], Tensors]:
    """The parts of several processes as a checkpoint has them.

    Returns:
        Plain values of each process; and the random states of all but process 0.
    """
    plain = [
        {"num_blocks": share.num_blocks, "figures": share.figures} for share in shares
    ]
    tensors = {
        f"{index}/{_RANDOM}/{name}": state
        for index, share in enumerate(shares)
        if index
        for name, state in share.random.items()
    }
    return plain, tensors


def added_up(figures: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The figures of all processes: their sums added up; None between epochs.

    Example:
        >>> one = {"entries": {"loss": 1}, "sums": [2.0, 0.5], "extra": {}}
        >>> added_up([one, {**one, "sums": None}, one])["sums"]
        [4.0, 1.0]
    """
    given = [one for one in figures if one is not None]
    if len(given) < 2:
        return given[0] if given else None
    parts = [Sums(_as_vector(one["sums"]), one["extra"]) for one in given]
    total = Sums.joined(parts)
    return {
        **given[0],
        "sums": None if total.vector is None else total.vector.tolist(),
        "extra": {name: list(pair) for name, pair in total.extra.items()},
    }


def _as_vector(sums: Sequence[float] | None) -> Tensor | None:
    return None if sums is None else torch.tensor(sums, dtype=torch.float64)


def num_saved(checkpoint: files.Checkpoint) -> int:
    """The number of processes of the run that a checkpoint is of."""
    return max(1, len(checkpoint.state.get(GROUP, ())))


def share_of(checkpoint: files.Checkpoint, index: int) -> Share:
    """The part that a checkpoint has of a process.

    Args:
        checkpoint: A checkpoint of a run.
        index: Number of the process, below `num_saved`.
    """
    state, tensors = checkpoint.state, checkpoint.tensors
    plain = {"num_blocks": state["data"]["num_blocks"], "figures": state["figures"]}
    if state.get(GROUP):
        plain = state[GROUP][index]
    random = tensors.get("random", {})
    if index:
        random = under(f"{index}/{_RANDOM}/", tensors.get(GROUP, {}))
    return Share(dict(random), plain["num_blocks"], plain["figures"], {})


def buffers_of(checkpoint: files.Checkpoint, index: int, group: str) -> Tensors:
    """The buffers that a process had otherwise than process 0, by name.

    Args:
        checkpoint: A checkpoint of a run.
        index: Number of the process.
        group: Where they belong: `"model"`, `"buffers"` or `"losses"`.
    """
    return under(f"{index}/{group}/", checkpoint.tensors.get(GROUP, {}))
