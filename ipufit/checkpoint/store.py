# SPDX-License-Identifier: Apache-2.0
"""Keeps a directory of checkpoints: finds the latest and the best, deletes the others.

Names are for people. Checkpoints are ordered by when they were written, which a number
in each manifest tells. A run that goes on from an older checkpoint writes newer ones,
even if others have more updates.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import warnings
from pathlib import Path
from typing import Any, Callable, Sequence

from ipufit.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigError,
    DamagedCheckpointError,
    MissingCheckpointError,
)
from ipufit.types import PathLike

from . import directory
from .format import Checkpoint, read_checkpoint, write_checkpoint
from .listing import NAME, Entry, always_deleted, listed, quoted
from .manifest import Record
from .moment import Moment
from .one_writer import written_by_one
from .reading import MAX_READS

_LEFTOVER = re.compile(rf"\.{NAME.pattern}\.[0-9a-f]{{8}}\.(partial|trash)")


class CheckpointStore:
    """Keeps the checkpoints of one run in one directory.

    Other files in the directory are left alone, and so is a checkpoint to which
    somebody has added a file. One process writes. If a run has several, this is the
    first, and all of them must call `save`; others may read.

    Args:
        directory: Path of the directory, made when the first checkpoint is saved.
        keep_last: Number of the newest checkpoints to keep; None keeps all. Damaged
            ones don't count.
        keep_best: 1 to keep the checkpoint with the best metric as well.
        mode: "min" or "max": which metric is best. None if that isn't known yet; then
            `keep_best` keeps all checkpoints that have a metric. May be set later.

    Raises:
        ConfigError: An argument has a value that isn't allowed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = CheckpointStore(folder, keep_last=2)
        ...     for update in (10, 20, 30):
        ...         path = store.save(Checkpoint(), epoch=0, update=update)
        ...     [path.name for path in store.all()]
        ['update-00000020', 'update-00000030']
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        keep_last: int | None = None,
        keep_best: int | None = None,
        mode: str | None = "min",
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ConfigError(
                f"keep_last={keep_last} would keep no checkpoint: give 1 or more, or "
                "None to keep all."
            )
        if keep_best not in (None, 1):
            raise ConfigError(f"keep_best={keep_best!r} must be None or 1.")
        if mode not in ("min", "max", None):
            raise ConfigError(f'mode={mode!r} must be "min", "max" or None.')
        self.directory = Path(os.path.realpath(directory))
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.mode = mode
        self._lock = threading.Lock()
        self._known_damaged: set[Path] = set()

    def save(
        self,
        checkpoint: Checkpoint,
        *,
        epoch: int,
        update: int,
        metric: float | None = None,
        monitor: str | None = None,
    ) -> Path:
        """Write a checkpoint; once it is durable, delete those that needn't be kept.

        Args:
            checkpoint: The checkpoint to write.
            epoch: Number of complete epochs.
            update: Number of weight updates.
            metric: The figure that the best is chosen by; NaN is never best.
            monitor: Name of that figure.

        Returns:
            The checkpoint's directory.

        Raises:
            UnsupportedError: A value or tensor can't be written.
            CheckpointError: The checkpoint couldn't be written; no other was deleted.

        Warns:
            CheckpointWarning: An old checkpoint couldn't be deleted.
        """
        return written_by_one(
            lambda: self.save_here(
                checkpoint,
                epoch=epoch,
                update=update,
                metric=metric,
                monitor=monitor,
            )
        )

    def save_here(
        self,
        checkpoint: Checkpoint,
        *,
        epoch: int,
        update: int,
        metric: float | None = None,
        monitor: str | None = None,
    ) -> Path:
        """Write a checkpoint in this process, as `save` does in one for all.

        It exchanges nothing, so that a thread may call it.
        """
        with self._lock:
            self._clean()
            entries = listed(self.directory).entries
            record = Record(
                sequence=1 + max((e.record.sequence for e in entries), default=0),
                epoch=int(epoch),
                update=int(update),
                metric=None if metric is None else float(metric),
            )
            path = self._free_path(record.update)
            moment = Moment(record.update, monitor, record.metric, self.mode)
            write_checkpoint(path, checkpoint, record=record, moment=moment)
            self._known_damaged.discard(path)
            self._rotate()
            return path

    def all(self) -> list[Path]:
        """The checkpoints whose manifests and sizes are right, oldest first.

        Raises:
            CheckpointError: A newer ipufit wrote a checkpoint, or one can't be read.
        """
        return [entry.path for entry in self._sound()]

    def latest(self) -> Path | None:
        """The newest checkpoint whose manifest and sizes are right, if there is one.

        Checksums aren't compared: `load_latest` does.

        Raises:
            CheckpointError: A newer ipufit wrote a checkpoint, or one can't be read.
        """
        sound = self._sound()
        return sound[-1].path if sound else None

    def best(self) -> Path | None:
        """The checkpoint with the best metric, the oldest of equals, if any has one.

        Raises:
            ConfigError: Several checkpoints have a metric, and `mode` is None.
            CheckpointError: A newer ipufit wrote a checkpoint, or one can't be read.
        """
        best = self._best_of(self._sound())
        if len(best) > 1:
            raise ConfigError(
                f"Which of the checkpoints in {str(self.directory)!r} is best depends "
                'on whether more or less is better: set mode="min" or mode="max".'
            )
        return best[0].path if best else None

    def load_latest(self) -> tuple[Path, Checkpoint] | None:
        """Load the newest checkpoint that is whole.

        Returns:
            The checkpoint and its directory; None if the store has no checkpoint.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
            CheckpointError: A newer ipufit wrote a checkpoint, or one can't be read.

        Warns:
            CheckpointWarning: Damaged checkpoints were skipped; says which, and why.
        """
        return load_newest([self], stacklevel=3)

    def clear(self) -> None:
        """Delete all checkpoints, and the directory if nothing else is in it.

        One process deletes them. If a run has several, all must call this.
        """
        written_by_one(self._clear)

    def _clear(self) -> str:
        with self._lock:
            self._clean()
            listing = listed(self.directory)
            for path in (*(entry.path for entry in listing.entries), *listing.damaged):
                if not directory.strangers(path):
                    _try(directory.remove, path)
            with contextlib.suppress(OSError):  # somebody's files are in it
                self.directory.rmdir()
        return str(self.directory)

    def _sound(self) -> list[Entry]:
        """The checkpoints that aren't known to be damaged, oldest first."""
        listing = listed(self.directory)
        listing.require_readable()
        return self._without_damaged(listing.entries)

    def _without_damaged(self, entries: list[Entry]) -> list[Entry]:
        return [entry for entry in entries if entry.path not in self._known_damaged]

    def _best_of(self, entries: list[Entry]) -> list[Entry]:
        """The best checkpoint; all that have a metric if `mode` is None."""
        rated = [
            (entry.record.metric, entry)
            for entry in entries
            if entry.record.metric is not None and not math.isnan(entry.record.metric)
        ]
        if self.mode is None or not rated:
            return [entry for _, entry in rated]
        better = min if self.mode == "min" else max
        return [better(rated, key=lambda item: item[0])[1]]  # the oldest of equals

    def _free_path(self, update: int) -> Path:
        path = self.directory / f"update-{update:08d}"
        count = 1
        while os.path.lexists(path):
            count += 1
            path = self.directory / f"update-{update:08d}-{count}"
        return path

    def _clean(self) -> None:
        """Delete the files that killed processes left half-written or half-deleted."""
        if not self.directory.is_dir():
            return
        for name in sorted(os.listdir(self.directory)):
            if _LEFTOVER.fullmatch(name):
                _try(directory.delete, self.directory / name)

    def _rotate(self) -> None:
        if self.keep_last is None:
            return
        entries = listed(self.directory).entries
        sound = self._without_damaged(entries)
        best = self._best_of(sound) if self.keep_best else []
        oldest = sound[-self.keep_last :][0]  # the one just written, at least
        for entry in entries[: entries.index(oldest)]:
            if entry not in best and not directory.strangers(entry.path):
                _try(directory.remove, entry.path)


def load_newest(
    stores: Sequence[CheckpointStore], *, stacklevel: int = 2
) -> tuple[Path, Checkpoint] | None:
    """Load the newest whole checkpoint of a run whose checkpoints are in some stores.

    Each store offers the checkpoint that was written last, or the one before if that is
    damaged. Of these the one with most updates is loaded; of equals, the first store's.

    Args:
        stores: The stores, at least one.
        stacklevel: Frame that a warning points at; 2 is the caller.

    Returns:
        The checkpoint and its directory; None if the stores have no checkpoint.

    Raises:
        DamagedCheckpointError: All checkpoints are damaged.
        CheckpointError: A newer ipufit wrote a checkpoint, or one can't be read.

    Warns:
        CheckpointWarning: Damaged checkpoints were skipped; says which, and why.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stores = [CheckpointStore(f"{folder}/{name}") for name in "ab"]
        ...     for store, update in zip(stores, (10, 20)):
        ...         path = store.save(Checkpoint(), epoch=0, update=update)
        ...     load_newest(stores)[0].name
        'update-00000020'
    """
    for _ in range(MAX_READS):
        with contextlib.suppress(MissingCheckpointError):  # deleted since it was listed
            return _load_newest(stores, stacklevel + 1)
    raise always_deleted(store.directory for store in stores)


def _load_newest(
    stores: Sequence[CheckpointStore], stacklevel: int
) -> tuple[Path, Checkpoint] | None:
    to_try: list[list[Entry]] = []
    damaged: dict[Path, CheckpointError] = {}
    for store in stores:
        listing = listed(store.directory)
        listing.require_readable()
        damaged.update(listing.damaged)
        to_try.append(listing.entries)
    while any(to_try):
        newest = max(filter(None, to_try), key=lambda entries: _progress(entries[-1]))
        entry = newest.pop()
        try:
            checkpoint = read_checkpoint(entry.path)
        except DamagedCheckpointError as error:
            damaged[entry.path] = error
            continue
        for store in stores:
            store._known_damaged = set(damaged)
        if damaged:
            warnings.warn(
                f"{_texts(damaged)} Loaded {str(entry.path)!r} instead, of epoch "
                f"{entry.record.epoch} and update {entry.record.update}.",
                CheckpointWarning,
                stacklevel,
            )
        return entry.path, checkpoint
    if damaged:
        raise DamagedCheckpointError(
            f"Every checkpoint in {quoted(store.directory for store in stores)} is "
            f"damaged. To start anew, give another directory. {_texts(damaged)}"
        )
    return None


def _progress(entry: Entry) -> tuple[int, int]:
    return entry.record.update, entry.record.epoch


def _texts(errors: dict[Path, CheckpointError]) -> str:
    return " ".join(map(str, errors.values()))


def _try(delete: Callable[[Path], Any], path: Path) -> None:
    try:
        delete(path)
    except OSError as error:
        warnings.warn(
            f"{str(path)!r} isn't needed and couldn't be deleted: {error.strerror}.",
            CheckpointWarning,
            stacklevel=4,
        )
