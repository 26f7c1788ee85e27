# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints, and whether two are the same."""

from __future__ import annotations

import torch

from ipufit.checkpoint import Checkpoint


def sample(number=0):
    """A checkpoint in which everything says its number."""
    weight = torch.full((2, 3), float(number))
    return Checkpoint(
        {
            "model": {"body.weight": weight, "head.weight": weight},
            "optimizer": {"step": torch.tensor(number), "m": torch.zeros(0, 2)},
        },
        {"update": number, "loss": [float("nan"), 0.1], "seed": 2**80, "none": None},
    )


def number_of(checkpoint):
    """The number of an intact sample; fails on a mixture of two."""
    number = checkpoint.state["update"]
    assert same(checkpoint, sample(number))
    return number


def same(one, other):
    """Whether two checkpoints have the same values, dtypes and shapes."""
    if repr(one.state) != repr(other.state):  # NaN has a repr that equals itself
        return False
    return one.tensors.keys() == other.tensors.keys() and all(
        same_tensors(tensors, other.tensors[group])
        for group, tensors in one.tensors.items()
    )


def same_tensors(one, other):
    return one.keys() == other.keys() and all(
        (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        and as_bytes(tensor) == as_bytes(other[name])
        for name, tensor in one.items()
    )


def as_bytes(tensor):
    """The values as bytes, so that NaN equals NaN."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def names(directory):
    """What is in a directory, hidden things too."""
    return sorted(path.name for path in directory.iterdir())
