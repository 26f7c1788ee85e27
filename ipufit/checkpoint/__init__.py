# SPDX-License-Identifier: Apache-2.0
"""Files that a run leaves behind."""

from __future__ import annotations

from .background import BackgroundWriter
from .format import (
    Checkpoint,
    read_checkpoint,
    read_manifest,
    verify_checkpoint,
    write_checkpoint,
)
from .format import read_checkpoint as load_checkpoint
from .manifest import Manifest, Record
from .one_writer import num_processes, written_by_one
from .store import CheckpointStore, load_newest
from .tensors import copied_tensors
from .weights import load_weights, save_weights

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointStore",
    "Manifest",
    "Record",
    "copied_tensors",
    "load_checkpoint",
    "load_newest",
    "load_weights",
    "num_processes",
    "read_checkpoint",
    "read_manifest",
    "save_weights",
    "verify_checkpoint",
    "write_checkpoint",
    "written_by_one",
]
