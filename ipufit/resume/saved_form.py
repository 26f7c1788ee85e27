# SPDX-License-Identifier: Apache-2.0
"""What the checkpoints of models and runs look like, checked before any is used.

Checksums tell that a file is what was written, not that it is a model's state. Only
what holds for every model is said here; what depends on one is compared with it.
"""

from __future__ import annotations

from typing import Any, Mapping

from torch import Tensor

from ipufit import checkpoint as files
from ipufit._kinds import (
    Kind,
    anything,
    count,
    dict_of,
    fields,
    flag,
    list_of,
    number,
    optional,
    text,
    whole,
)
from ipufit.errors import DamagedCheckpointError

TENSOR = "$tensor"
"""The key that stands for an array in a callback's state."""

LEARNT = fields(
    {
        "optimizer": fields(
            {
                "class": text,
                "groups": list_of(dict_of(anything)),
                "loss_scaling": number,
            }
        ),
        "updates": fields({"num_updates": count, "rates": dict_of(anything)}),
        "average": optional(fields({"num_updates": count})),
        "tensors": dict_of(dict_of(text)),
    }
)
"""Of a model: `config` and `versions` are for people."""

_FIGURES = fields(
    {
        "entries": dict_of(count),
        "sums": optional(list_of(number)),
        "extra": dict_of(list_of(number, 2)),
    }
)


def _figures(value: Any, where: str) -> str | None:
    """As many sums as the figures have."""
    fault = _FIGURES(value, where)
    if fault is not None or value["sums"] is None:
        return fault
    length = 1 + sum(value["entries"].values())
    return list_of(number, length)(value["sums"], f"{where}.sums")


_RUN = fields(
    {
        "run": fields(
            {
                "epoch": count,
                "calls": count,
                "updates": count,
                "samples": count,
                "stop_reason": optional(text),
            }
        ),
        "data": fields(
            {
                "seed": whole,
                "place": list_of(count, 2),
                "num_samples": optional(count),
                "num_blocks": fields({"pass": count, "validation": count}),
            }
        ),
        "plan": dict_of(count),
        "settings": dict_of(text),
        "figures": optional(_figures),
        "callbacks": dict_of(dict_of(anything)),
    }
)
"""Of a run, besides what its model has learnt."""


def of_run(value: Any, where: str) -> str | None:
    """Of a run, besides what its model has learnt."""
    fault = _RUN(value, where)
    if fault is not None or not value["run"]["calls"]:
        return fault
    if value["figures"] is None or value["figures"]["sums"] is None:
        return f"{where}.figures has none in the middle of an epoch"
    return None


REFERENCE = fields({TENSOR: text, "is_array": flag}, is_closed=True)


def check_form(checkpoint: files.Checkpoint, kind: Kind) -> None:
    """Refuse a state of another form.

    Args:
        checkpoint: As it was read.
        kind: `LEARNT` or `of_run`, or what holds for one model.

    Raises:
        DamagedCheckpointError: It isn't a model's; says what is wrong.
    """
    fault = kind(checkpoint.state, "state")
    if fault is not None:
        raise damaged(checkpoint, fault)


def check_tensors(checkpoint: files.Checkpoint) -> None:
    """Refuse other tensors than the state names.

    Args:
        checkpoint: That is `LEARNT`.

    Raises:
        DamagedCheckpointError: One is missing, or has another dtype or shape.
    """
    saved, given = checkpoint.state["tensors"], in_words(checkpoint.tensors)
    for group in sorted({*saved, *given}):
        before, now = saved.get(group, {}), given.get(group, {})
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                there, was = now.get(name, "missing"), before.get(name, "missing")
                raise damaged(
                    checkpoint,
                    f"{name} of {group} is {there}, and was {was} when it was saved",
                )


def damaged(checkpoint: files.Checkpoint, fault: str) -> DamagedCheckpointError:
    """The error of a checkpoint that is no model's.

    Args:
        checkpoint: As it was read.
        fault: What is wrong.
    """
    name = "The checkpoint" if checkpoint.path is None else repr(str(checkpoint.path))
    return DamagedCheckpointError(
        f"{name} isn't one that a model has written: {fault}. Use another one."
    )


def in_words(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, str]]:
    """The dtype and shape of each tensor of each group.

    Example:
        >>> import torch
        >>> in_words({"model": {"w": torch.zeros(2, 3)}})
        {'model': {'w': 'float32 [2, 3]'}}
    """
    return {
        group: {
            name: f"{str(one.dtype)[len('torch.') :]} {list(one.shape)}"
            for name, one in named.items()
        }
        for group, named in tensors.items()
    }
