# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and weights in files.

A module is imported when one of its names is first used, so that runs without files
import none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipufit._lazy import imported_at_first_use

if TYPE_CHECKING:
    from .averaging import average_checkpoints
    from .background import BackgroundWriter
    from .directory import MANIFEST, belongs
    from .format import (
        Checkpoint,
        load_checkpoint,
        read_checkpoint,
        read_manifest,
        verify_checkpoint,
        write_checkpoint,
    )
    from .manifest import Manifest, Record
    from .moment import Moment
    from .one_writer import written_by_one
    from .store import CheckpointStore, load_newest
    from .tensors import copied_tensors, names_that_differ
    from .unwritten import missing_allowed
    from .weights import load_weights, save_weights

__all__ = [
    "MANIFEST",
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointStore",
    "Manifest",
    "Moment",
    "Record",
    "average_checkpoints",
    "belongs",
    "copied_tensors",
    "load_checkpoint",
    "load_newest",
    "load_weights",
    "missing_allowed",
    "names_that_differ",
    "read_checkpoint",
    "read_manifest",
    "save_weights",
    "verify_checkpoint",
    "write_checkpoint",
    "written_by_one",
]

_HOMES = {
    "averaging": ("average_checkpoints",),
    "background": ("BackgroundWriter",),
    "directory": ("MANIFEST", "belongs"),
    "format": (
        "Checkpoint",
        "load_checkpoint",
        "read_checkpoint",
        "read_manifest",
        "verify_checkpoint",
        "write_checkpoint",
    ),
    "manifest": ("Manifest", "Record"),
    "moment": ("Moment",),
    "one_writer": ("written_by_one",),
    "store": ("CheckpointStore", "load_newest"),
    "tensors": ("copied_tensors", "names_that_differ"),
    "unwritten": ("missing_allowed",),
    "weights": ("load_weights", "save_weights"),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = imported_at_first_use(__name__, _HOMES)
