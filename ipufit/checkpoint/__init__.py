# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and weights in files."""

from __future__ import annotations

from .directory import (
    MANIFEST,
    Checkpoint,
    SavedAt,
    are_equal,
    belongs,
    copied_tensors,
    differences,
    load_checkpoint,
    names_that_differ,
    read_manifest,
    refuse_name_of_file,
    what_loads,
    write_checkpoint,
)
from .store import (
    CheckpointStore,
    load_newest,
    written_by_one,
)
from .weights import average_checkpoints, load_weights, save_weights

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "CheckpointStore",
    "SavedAt",
    "are_equal",
    "average_checkpoints",
    "belongs",
    "copied_tensors",
    "differences",
    "load_checkpoint",
    "load_newest",
    "load_weights",
    "names_that_differ",
    "read_manifest",
    "refuse_name_of_file",
    "save_weights",
    "what_loads",
    "write_checkpoint",
    "written_by_one",
]
