# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and weights in files."""

from __future__ import annotations

from .averaging import average_checkpoints
from .directory import load_checkpoint, read_manifest, write_checkpoint
from .format import (
    MANIFEST,
    Checkpoint,
    Manifest,
    SavedAt,
    belongs,
    copied_tensors,
    names_that_differ,
)
from .store import (
    BackgroundWriter,
    CheckpointStore,
    load_newest,
    missing_allowed,
    written_by_one,
)
from .weights import load_weights, save_weights

__all__ = [
    "MANIFEST",
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointStore",
    "Manifest",
    "SavedAt",
    "average_checkpoints",
    "belongs",
    "copied_tensors",
    "load_checkpoint",
    "load_newest",
    "load_weights",
    "missing_allowed",
    "names_that_differ",
    "read_manifest",
    "save_weights",
    "write_checkpoint",
    "written_by_one",
]
