# SPDX-License-Identifier: Apache-2.0
"""Lists the checkpoints that a directory holds."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, NamedTuple

from ipufit.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingCheckpointError,
)

from .format import read_manifest
from .manifest import Record
from .reading import MAX_READS

NAME = re.compile(r"update-[0-9]{8,}(-[0-9]+)?")
"""Names of the checkpoints of a store."""


class Entry(NamedTuple):
    """A checkpoint of a store."""

    path: Path
    record: Record

    @property
    def order(self) -> tuple[int, int, str]:
        """Key by which the checkpoints of a store are sorted, oldest first."""
        return (self.record.sequence, self.record.update, self.path.name)


@dataclass
class Listing:
    """The checkpoints of a store.

    Attributes:
        entries: Checkpoints whose manifests and sizes are right, oldest first.
        damaged: Errors of damaged checkpoints, by path.
        refused: Errors of those that a newer version wrote, or that can't be read.
        is_stale: Whether a checkpoint was deleted while they were listed.
    """

    entries: list[Entry] = field(default_factory=list)
    damaged: dict[Path, CheckpointError] = field(default_factory=dict)
    refused: dict[Path, CheckpointError] = field(default_factory=dict)
    is_stale: bool = False

    def require_readable(self) -> None:
        """Raise the error of the first checkpoint that was refused, if there is one."""
        for error in self.refused.values():
            raise error


def listed(directory: Path) -> Listing:
    """List the checkpoints, while another process may write and delete some.

    Args:
        directory: The directory of a store; needn't exist.

    Raises:
        CheckpointError: Checkpoints are always deleted before they are read.
    """
    for _ in range(MAX_READS):
        listing = _listed_once(directory)
        if listing.entries or not listing.is_stale:
            return listing
    raise always_deleted([directory])


def _listed_once(directory: Path) -> Listing:
    listing = Listing()
    if not directory.is_dir():
        return listing
    with os.scandir(directory) as found:
        names = [one.name for one in found if one.is_dir(follow_symlinks=False)]
    for path in (directory / name for name in sorted(filter(NAME.fullmatch, names))):
        try:
            record = read_manifest(path).record
        except MissingCheckpointError:
            listing.is_stale = True
        except DamagedCheckpointError as error:
            listing.damaged[path] = error
        except CheckpointError as error:
            listing.refused[path] = error
        else:
            if record is not None:  # otherwise no store wrote it
                listing.entries.append(Entry(path, record))
    listing.entries.sort(key=lambda entry: entry.order)
    return listing


def always_deleted(directories: Iterable[Path]) -> CheckpointError:
    """The error of a reader that is too slow for another process."""
    return CheckpointError(
        f"Checkpoints in {quoted(directories)} were deleted {MAX_READS} times before "
        "they were read: another process writes them faster than this one reads. Keep "
        "more of them (keep_last), or save less often."
    )


def quoted(paths: Iterable[Path]) -> str:
    """Paths for error messages.

    Example:
        >>> quoted([Path("a"), Path("b")])
        "'a' and 'b'"
    """
    return " and ".join(repr(str(path)) for path in paths)
