# SPDX-License-Identifier: Apache-2.0
"""A directory of checkpoints: which is the latest, which the best, which to delete.

Names are for people. The order is that in which they were written, a number in each
manifest: whoever goes back to an older checkpoint and trains on from there gets a newer
one, though its update comes before others'.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import warnings
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

from ipufit.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigError,
    DamagedCheckpointError,
    MissingCheckpointError,
)
from ipufit.types import PathLike

from . import directory
from .format import Checkpoint, read_checkpoint, read_manifest, write_checkpoint
from .manifest import Record
from .one_writer import written_by_one
from .reading import MAX_READS

_NAME = re.compile(r"update-[0-9]{8,}(-[0-9]+)?")
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]{{8}}\.(partial|trash)")


class _Entry(NamedTuple):
    path: Path
    record: Record

    @property
    def order(self) -> tuple[int, int, str]:
        return (self.record.sequence, self.record.update, self.path.name)


class _Listing(NamedTuple):
    entries: list[_Entry]  # oldest first
    damaged: dict[Path, CheckpointError]
    refused: dict[Path, CheckpointError]  # of a newer version, or unreadable


class CheckpointStore:
    """Keeps the checkpoints of one run in one directory.

    What is in the directory and isn't the store's is left alone, and so is a checkpoint
    into whose directory somebody put a file. One process writes: the first, if there
    are several of torch.distributed, which all have to call `save`; others may read.

    Args:
        directory: Made when the first checkpoint is saved.
        keep_last: How many of the newest are kept; None keeps all. Damaged ones don't
            count.
        keep_best: 1 keeps the one with the best metric as well.
        mode: Whether "min" or "max" is best; None if that isn't known yet, and then
            `keep_best` keeps all that have a metric. It may be set later.

    Raises:
        ConfigError: An argument is none of these.

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
    ) -> Path:
        """Write a checkpoint; once it is durable, delete those that needn't be kept.

        Args:
            checkpoint: What to write.
            epoch: Where training is: complete epochs,
            update: and weight updates.
            metric: What the best is chosen by, if it is known; NaN is never best.

        Returns:
            Where it is.

        Raises:
            UnsupportedError: Something in it can't be written.
            CheckpointError: It couldn't be written; the others are as they were.

        Warns:
            CheckpointWarning: One couldn't be deleted.
        """
        return Path(
            written_by_one(lambda: str(self._save(checkpoint, epoch, update, metric)))
        )

    def _save(
        self, checkpoint: Checkpoint, epoch: int, update: int, metric: float | None
    ) -> Path:
        with self._lock:
            self._clean()
            records = [entry.record for entry in self._list().entries]
            record = Record(
                sequence=1 + max((record.sequence for record in records), default=0),
                epoch=int(epoch),
                update=int(update),
                metric=None if metric is None else float(metric),
            )
            path = self._free_path(record.update)
            write_checkpoint(path, checkpoint, record=record)
            self._known_damaged.discard(path)
            self._rotate()
            return path

    def all(self) -> list[Path]:
        """The checkpoints whose manifests and sizes are right, oldest first.

        Raises:
            CheckpointError: A newer ipufit wrote one, or one can't be read.
        """
        return [entry.path for entry in self._sound()]

    def latest(self) -> Path | None:
        """The newest checkpoint whose manifest and sizes are right, if there is one.

        To be sure of the rest, load it: `load_latest`.

        Raises:
            CheckpointError: A newer ipufit wrote one, or one can't be read.
        """
        sound = self._sound()
        return sound[-1].path if sound else None

    def best(self) -> Path | None:
        """The checkpoint with the best metric, the first of equals, if any has one.

        Raises:
            ConfigError: Several have one, and `mode` is None.
            CheckpointError: A newer ipufit wrote one, or one can't be read.
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
            Where it is, and what it holds; None if the store has none at all.

        Raises:
            DamagedCheckpointError: There are some, and all are damaged.
            CheckpointError: A newer ipufit wrote one, or one can't be read.

        Warns:
            CheckpointWarning: Damaged ones were passed over; says which, and why.
        """
        return load_newest([self], stacklevel=3)

    def clear(self) -> None:
        """Delete all checkpoints, and the directory if nothing else is in it.

        One process does; of several of torch.distributed all have to call this.
        """
        written_by_one(self._clear)

    def _clear(self) -> str:
        with self._lock:
            self._clean()
            listing = self._list()
            for path in (*(entry.path for entry in listing.entries), *listing.damaged):
                if not directory.strangers(path):
                    _try(directory.remove, path)
            with contextlib.suppress(OSError):  # somebody's files are in it
                self.directory.rmdir()
        return str(self.directory)

    def _list(self) -> _Listing:
        """What there is now; another process may write and delete meanwhile."""
        for _ in range(MAX_READS):
            listing, is_stale = self._look()
            if listing.entries or not is_stale:
                return listing
        raise _too_slow([self])

    def _look(self) -> tuple[_Listing, bool]:
        """What there is, and whether some of it was deleted since it was listed."""
        listing, is_stale = _Listing([], {}, {}), False
        if not self.directory.is_dir():
            return listing, False
        with os.scandir(self.directory) as found:
            names = [one.name for one in found if one.is_dir(follow_symlinks=False)]
        for name in sorted(filter(_NAME.fullmatch, names)):
            path = self.directory / name
            try:
                record = read_manifest(path).record
            except MissingCheckpointError:
                is_stale = True
            except DamagedCheckpointError as error:
                listing.damaged[path] = error
            except CheckpointError as error:
                listing.refused[path] = error
            else:
                if record is not None:  # else another than a store wrote it
                    listing.entries.append(_Entry(path, record))
        listing.entries.sort(key=lambda entry: entry.order)
        return listing, is_stale

    def _sound(self) -> list[_Entry]:
        listing = self._list()
        _raise_first(listing.refused)
        return [
            entry for entry in listing.entries if entry.path not in self._known_damaged
        ]

    def _best_of(self, entries: list[_Entry]) -> list[_Entry]:
        """The best; all that may be it, while nobody knows which way is better."""
        rated = [
            (entry.record.metric, entry)
            for entry in entries
            if entry.record.metric is not None and not math.isnan(entry.record.metric)
        ]
        if self.mode is None or not rated:
            return [entry for _, entry in rated]
        better = min if self.mode == "min" else max
        return [better(rated, key=lambda item: item[0])[1]]  # the first of equals

    def _free_path(self, update: int) -> Path:
        path = self.directory / f"update-{update:08d}"
        count = 1
        while os.path.lexists(path):
            count += 1
            path = self.directory / f"update-{update:08d}-{count}"
        return path

    def _clean(self) -> None:
        """Delete what killed processes left."""
        if not self.directory.is_dir():
            return
        for name in sorted(os.listdir(self.directory)):
            if _LEFTOVER.fullmatch(name):
                _try(directory.delete, self.directory / name)

    def _rotate(self) -> None:
        if self.keep_last is None:
            return
        entries = self._list().entries
        sound = [entry for entry in entries if entry.path not in self._known_damaged]
        best = self._best_of(sound) if self.keep_best else []
        oldest = sound[-self.keep_last :][0]  # the one just written, at least
        for entry in entries[: entries.index(oldest)]:
            if entry not in best and not directory.strangers(entry.path):
                _try(directory.remove, entry.path)


def load_newest(
    stores: Sequence[CheckpointStore], *, stacklevel: int = 2
) -> tuple[Path, Checkpoint] | None:
    """Load a whole checkpoint of one run that several stores keep checkpoints of.

    Of each store the one that was written last counts, or the one before if that is
    damaged; of these it is the one after most updates, the first of equals.

    Args:
        stores: One is enough.
        stacklevel: Whom a warning is about; 2 is the caller.

    Returns:
        Where it is, and what it holds; None if there is none at all.

    Raises:
        DamagedCheckpointError: There are some, and all are damaged.
        CheckpointError: A newer ipufit wrote one, or one can't be read.

    Warns:
        CheckpointWarning: Damaged ones were passed over; says which, and why.

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
    raise _too_slow(stores)


def _load_newest(
    stores: Sequence[CheckpointStore], stacklevel: int
) -> tuple[Path, Checkpoint] | None:
    listings = [store._list() for store in stores]
    damaged: dict[Path, str] = {}
    for listing in listings:
        _raise_first(listing.refused)
        damaged.update((path, str(error)) for path, error in listing.damaged.items())
    to_try = [list(listing.entries) for listing in listings]
    while any(to_try):
        entry = max(filter(None, to_try), key=lambda entries: _place(entries[-1])).pop()
        try:
            checkpoint = read_checkpoint(entry.path)
        except DamagedCheckpointError as error:
            damaged[entry.path] = str(error)
            continue
        for store in stores:
            store._known_damaged = set(damaged)
        if damaged:
            warnings.warn(_passed_over(damaged, entry), CheckpointWarning, stacklevel)
        return entry.path, checkpoint
    if damaged:
        places = " and ".join(repr(str(store.directory)) for store in stores)
        raise DamagedCheckpointError(
            f"Every checkpoint in {places} is damaged. To start anew, give another "
            f"directory. {' '.join(damaged.values())}"
        )
    return None


def _too_slow(stores: Sequence[CheckpointStore]) -> CheckpointError:
    places = " and ".join(repr(str(store.directory)) for store in stores)
    return CheckpointError(
        f"Checkpoints in {places} were deleted {MAX_READS} times before they were "
        "read: another process writes them faster than this one reads. Keep more of "
        "them (keep_last), or save less often."
    )


def _place(entry: _Entry) -> tuple[int, int]:
    return entry.record.update, entry.record.epoch


def _try(delete: Callable[[Path], Any], path: Path) -> None:
    try:
        delete(path)
    except OSError as error:
        warnings.warn(
            f"{str(path)!r} isn't needed and couldn't be deleted: {error.strerror}.",
            CheckpointWarning,
            stacklevel=4,
        )


def _raise_first(refused: dict[Path, CheckpointError]) -> None:
    for error in refused.values():
        raise error


def _passed_over(damaged: dict[Path, str], entry: _Entry) -> str:
    return (
        f"{' '.join(damaged.values())} Loaded {str(entry.path)!r} instead, of epoch "
        f"{entry.record.epoch} and update {entry.record.update}."
    )
