# SPDX-License-Identifier: Apache-2.0
"""The form of checkpoints of models and runs, checked before any is used.

Checksums show that a file is as it was written, not that it holds a model's state. The
form here is that of every model; the rest is compared with the model at hand.
"""

from __future__ import annotations

import dataclasses
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
from ipufit.batching import BatchPlan
from ipufit.errors import DamagedCheckpointError

COUNTERS = "epoch", "calls", "updates", "samples"
"""The numbers that a run counts."""

TENSOR = "$tensor"
"""The key that stands for an array in a callback's state."""

_GROUPS = list_of(dict_of(anything))

TRAINED_STATE = fields(
    {
        "optimizer": fields({"class": text, "groups": _GROUPS, "loss_scaling": number}),
        "updates": fields({"num_updates": count, "rates": dict_of(anything)}),
        "average": optional(fields({"num_updates": count})),
        "tensors": dict_of(dict_of(text)),
    }
)
"""The kind of the state of a model; `config` and `versions` are for people."""

_FIGURES = fields(
    {
        "entries": dict_of(count),
        "sums": optional(list_of(number)),
        "extra": dict_of(list_of(number, 2)),
    }
)


def _figures(value: Any, where: str) -> str | None:
    """The kind of figures, with as many sums as they have."""
    fault = _FIGURES(value, where)
    if fault is not None or value["sums"] is None:
        return fault
    length = 1 + sum(value["entries"].values())
    return list_of(number, length)(value["sums"], f"{where}.sums")


_VALIDATED = fields({"validated": dict_of(number), "validated_calls": count})
_STREAMS = fields({"pass": count, "validation": count})
_PROCESSES = list_of(fields({"num_blocks": _STREAMS, "figures": optional(_figures)}))
_FACTORS = [field.name for field in dataclasses.fields(BatchPlan)]
_RUN = fields(
    {
        "run": fields(
            {**dict.fromkeys(COUNTERS, count), "stop_reason": optional(text)}
        ),
        "data": fields(
            {
                "seed": whole,
                "place": list_of(count, 2),
                "num_samples": optional(count),
                "num_blocks": _STREAMS,
            }
        ),
        "plan": fields(dict.fromkeys(_FACTORS, count)),
        "settings": dict_of(text),
        "figures": optional(_figures),
        "callbacks": dict_of(dict_of(anything)),
    }
)
"""The kind of the state of a run, as far as it doesn't depend on the run."""


def of_run(value: Any, where: str) -> str | None:
    """The kind of the state of a run, besides the trained state of its model."""
    fault = _RUN(value, where)
    if fault is not None:
        return fault
    validated = {"validated": {}, "validated_calls": 0, **value["run"]}
    fault = _VALIDATED(validated, f"{where}.run")
    if fault is not None:
        return fault
    processes = value.get("processes", [])
    fault = _PROCESSES(processes, f"{where}.processes")
    if fault is not None:
        return fault
    if max(1, len(processes)) != value["plan"]["processes"]:
        return f"{where}.processes has {len(processes)} of those in {where}.plan"
    if not value["run"]["calls"]:
        return None
    if value["figures"] is None or value["figures"]["sums"] is None:
        return f"{where}.figures has none in the middle of an epoch"
    if any(one["figures"] is None for one in processes):
        return f"{where}.processes has no figures in the middle of an epoch"
    return None


REFERENCE = fields({TENSOR: text, "is_array": flag}, is_closed=True)


def check_form(checkpoint: files.Checkpoint, kind: Kind) -> None:
    """Refuse a checkpoint whose state is of another kind.

    Args:
        checkpoint: As it was read.
        kind: `TRAINED_STATE` or `of_run`, or the kind of one model's state.

    Raises:
        DamagedCheckpointError: The state is of another kind.
    """
    fault = kind(checkpoint.state, "state")
    if fault is not None:
        raise damaged(checkpoint, fault)


def check_tensors(checkpoint: files.Checkpoint) -> None:
    """Refuse other tensors than the state names.

    Args:
        checkpoint: A checkpoint whose state is a `TRAINED_STATE`.

    Raises:
        DamagedCheckpointError: A tensor is missing, or has another dtype or shape.
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
    """The error to raise for a checkpoint that no model has written.

    Args:
        checkpoint: As it was read.
        fault: The fault, as half a sentence.
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
