# SPDX-License-Identifier: Apache-2.0
"""Keeps a directory of checkpoints: finds the latest and the best, deletes the others.

Names are for people. Checkpoints are ordered by when they were written, which a number
in each manifest tells. A run that goes on from an older checkpoint writes newer ones,
even if others have more updates.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterable, NamedTuple, Sequence

from ipufit.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigError,
    DamagedCheckpointError,
    MissingCheckpointError,
)
from ipufit.types import PathLike

from .directory import (
    MAX_READS,
    delete,
    foreign_files,
    load_checkpoint,
    read_manifest,
    remove,
    write_checkpoint,
)
from .format import Checkpoint, Moment
from .writing import written_by_one

_NAME = re.compile(r"update-[0-9]{8,}(-[0-9]+)?")
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]{{8}}\.(partial|trash)")


class _Entry(NamedTuple):
    path: Path
    moment: Moment

    @property
    def sequence(self) -> int:
        return self.moment.sequence or 0


class _Listing(NamedTuple):
    """The checkpoints of a store.

    Attributes:
        entries: Checkpoints whose manifests and sizes are right, oldest first.
        damaged: Errors of damaged checkpoints, by path.
        refused: Errors of checkpoints that a newer version wrote, or can't be read.
    """

    entries: list[_Entry]
    damaged: dict[Path, CheckpointError]
    refused: list[CheckpointError]


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
        moment = Moment(int(update), monitor, metric, epoch=int(epoch))
        return written_by_one(lambda: self.save_here(checkpoint, moment))

    def save_here(self, checkpoint: Checkpoint, moment: Moment) -> Path:
        """Write a checkpoint in this process, as `save` does in one for all.

        It exchanges nothing, so that a thread may call it.
        """
        with self._lock:
            self._delete_leftovers()
            entries = self._listed().entries
            path = self.directory / f"update-{moment.update:08d}"
            for number in itertools.count(2):
                if not os.path.lexists(path):
                    break
                path = self.directory / f"update-{moment.update:08d}-{number}"
            moment = replace(
                moment,
                value=None if moment.value is None else float(moment.value),
                mode=self.mode,
                sequence=1 + max((entry.sequence for entry in entries), default=0),
            )
            write_checkpoint(path, checkpoint, moment=moment)
            self._known_damaged.discard(path)
            if self.keep_last is not None:
                entries = self._listed().entries
                sound = self._without_damaged(entries)
                kept = self._best_of(sound) if self.keep_best else []
                oldest = sound[-self.keep_last :][0]  # the one just written, at least
                for entry in entries[: entries.index(oldest)]:
                    if entry not in kept and not foreign_files(entry.path):
                        _try(remove, entry.path)
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

    def _clear(self) -> None:
        with self._lock:
            self._delete_leftovers()
            listing = self._listed()
            for path in (*(entry.path for entry in listing.entries), *listing.damaged):
                if not foreign_files(path):
                    _try(remove, path)
            with contextlib.suppress(OSError):  # somebody's files are in it
                self.directory.rmdir()

    def _sound(self) -> list[_Entry]:
        """List the checkpoints that aren't known to be damaged, oldest first."""
        listing = self._listed()
        for error in listing.refused:
            raise error
        return self._without_damaged(listing.entries)

    def _without_damaged(self, entries: list[_Entry]) -> list[_Entry]:
        return [entry for entry in entries if entry.path not in self._known_damaged]

    def _best_of(self, entries: list[_Entry]) -> list[_Entry]:
        """The best checkpoint; all that have a metric if `mode` is None."""
        rated = [
            (value, entry)
            for entry in entries
            for value in [entry.moment.value]
            if value is not None and not math.isnan(value)
        ]
        if self.mode is None or not rated:
            return [entry for _, entry in rated]
        better = min if self.mode == "min" else max
        return [better(rated, key=lambda item: item[0])[1]]  # the oldest of equals

    def _delete_leftovers(self) -> None:
        """Delete the files that killed processes left half-written or half-deleted."""
        if self.directory.is_dir():
            for name in sorted(os.listdir(self.directory)):
                if _LEFTOVER.fullmatch(name):
                    _try(delete, self.directory / name)

    def _listed(self) -> _Listing:
        """List the checkpoints, while another process may write and delete some.

        Raises:
            CheckpointError: Checkpoints are always deleted before they are read.
        """
        for _ in range(MAX_READS):
            listing, is_stale, names = _Listing([], {}, []), False, []
            if self.directory.is_dir():
                with os.scandir(self.directory) as found:
                    names = [
                        one.name for one in found if one.is_dir(follow_symlinks=False)
                    ]
            for name in sorted(filter(_NAME.fullmatch, names)):
                path = self.directory / name
                try:
                    moment = read_manifest(path).moment
                except MissingCheckpointError:
                    is_stale = True
                except DamagedCheckpointError as error:
                    listing.damaged[path] = error
                except CheckpointError as error:
                    listing.refused.append(error)
                else:
                    if moment is not None and moment.sequence is not None:
                        listing.entries.append(_Entry(path, moment))
            if listing.entries or not is_stale:
                listing.entries.sort(
                    key=lambda e: (e.sequence, e.moment.update, e.path.name)
                )
                return listing
        raise _always_deleted([self])


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
    raise _always_deleted(stores)


def _load_newest(
    stores: Sequence[CheckpointStore], stacklevel: int
) -> tuple[Path, Checkpoint] | None:
    to_try: list[list[_Entry]] = []
    damaged: dict[Path, CheckpointError] = {}
    for store in stores:
        listing = store._listed()
        for error in listing.refused:
            raise error
        damaged.update(listing.damaged)
        to_try.append(listing.entries)
    while any(to_try):
        entries = max(filter(None, to_try), key=lambda entries: _progress(entries[-1]))
        path, moment = entries.pop()
        try:
            checkpoint = load_checkpoint(path)
        except DamagedCheckpointError as error:
            damaged[path] = error
            continue
        for store in stores:
            store._known_damaged = set(damaged)
        if damaged:
            warnings.warn(
                f"{_texts(damaged)} Loaded {str(path)!r} instead, of epoch "
                f"{moment.epoch} and update {moment.update}.",
                CheckpointWarning,
                stacklevel,
            )
        return path, checkpoint
    if damaged:
        raise DamagedCheckpointError(
            f"Every checkpoint in {_quoted(stores)} is damaged. To start anew, give "
            f"another directory. {_texts(damaged)}"
        )
    return None


def _progress(entry: _Entry) -> tuple[int, int]:
    return entry.moment.update, entry.moment.epoch


def _texts(errors: dict[Path, CheckpointError]) -> str:
    return " ".join(map(str, errors.values()))


def _quoted(stores: Iterable[CheckpointStore]) -> str:
    return " and ".join(repr(str(store.directory)) for store in stores)


def _always_deleted(stores: Iterable[CheckpointStore]) -> CheckpointError:
    return CheckpointError(
        f"Checkpoints in {_quoted(stores)} were deleted {MAX_READS} times before they "
        "were read: another process writes them faster than this one reads. Keep more "
        "of them (keep_last), or save less often."
    )


def _try(delete: Callable[[Path], Any], path: Path) -> None:
    try:
        delete(path)
    except OSError as error:
        warnings.warn(
            f"{str(path)!r} isn't needed and couldn't be deleted: {error.strerror}.",
            CheckpointWarning,
            stacklevel=4,
        )
