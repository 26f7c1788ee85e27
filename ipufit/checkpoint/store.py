# SPDX-License-Identifier: Apache-2.0
"""A directory of checkpoints: find the latest and the best, and delete the others.

Names of checkpoints are for people. Their order is that of a number in each manifest,
which counts writes. A run that continues from an older checkpoint writes newer
checkpoints, even if others have more updates.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Sequence, TypeVar

from ipufit._arguments import (
    check_choice,
    check_instance,
    check_integer,
    check_number,
    is_number,
)
from ipufit._files import as_path, delete_leftovers, open_folder
from ipufit._signals import uninterrupted
from ipufit.distributed import processes
from ipufit.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsupportedError,
    warn,
)
from ipufit.types import PathLike

from .directory import (
    MAX_READS,
    Checkpoint,
    Saved,
    SavedAt,
    best_saved,
    delete_checkpoint,
    delete_files,
    load_checkpoint,
    read_manifest,
    refuse_name_of_file,
    write_at,
)
from .lock import LOCK, DirectoryLock

T = TypeVar("T")
_Checkpoints = List[Saved]

_ALIKE = {"ConfigError": ConfigError, "UnsupportedError": UnsupportedError}
"""Errors whose class is kept in other processes, because callers catch them."""
_NAME = re.compile(r"update-[0-9]{8,}(-[0-9]+)?")


def written_by_one(write: Callable[[], T]) -> T:
    """Run a write in process 0, while all other processes wait.

    Each process of a run must call this. A single process writes by itself.

    Args:
        write: Function that writes, and returns a value that can be pickled, such as
            the path. Called in process 0 only.

    Returns:
        The result of process 0, in every process, once `write` has returned.

    Raises:
        Exception: In process 0, the error of `write`.
        CheckpointError: In the other processes, an error of the same text and `errno`.
            A ConfigError or an UnsupportedError keeps its class.
        ProcessError: Another process has ended.

    Example:
        >>> written_by_one(lambda: "run/update-00000010")
        'run/update-00000010'
    """
    everyone = processes()
    write = uninterrupted(write)  # so that Ctrl-C leaves no half-written checkpoint
    if not everyone.are_several:
        return write()
    if everyone.is_first:
        try:
            result = write()
        except Exception as error:
            errno = getattr(error, "errno", None)
            everyone.first((None, type(error).__name__, str(error), errno))
            raise
        everyone.first((result, None, "", None))
        return result
    heard: Any = everyone.first((None, None, "", None))
    result, kind, text, errno = heard
    if kind in _ALIKE:
        raise _ALIKE[kind](text)
    if kind is not None:
        failure = CheckpointError(text)
        failure.errno = errno
        raise failure
    return result


class CheckpointStore:
    """Keeps the checkpoints of one run in one directory.

    Other files in the directory are left alone, and so is a checkpoint with a foreign
    file in it. One process writes: in a run with several processes, process 0, and all
    of them must call `save`. Other programs may read.

    Args:
        directory: Path of the directory, made when the first checkpoint is saved.
        keep_last: Number of the newest checkpoints to keep, without damaged ones; None
            keeps all.
        keep_best: 1 to keep the checkpoint with the best metric as well, unless one
            of the newest is as good.
        mode: Whether "min" or "max" of the metric is better. None if unknown; then
            `keep_best` keeps all checkpoints with a metric. The attribute may be set
            later.

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

    _lock = threading.Lock()  # of all stores: a copy has the same directory

    def __init__(
        self,
        directory: PathLike,
        *,
        keep_last: int | None = None,
        keep_best: int | None = None,
        mode: str | None = "min",
    ) -> None:
        if keep_last is not None:
            check_integer("keep_last", keep_last, least=1)
        check_choice("keep_best", keep_best, (None, 1))
        check_choice("mode", mode, ("min", "max", None))
        self.directory = Path(os.path.realpath(as_path(directory, "directory")))
        refuse_name_of_file(self.directory)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.mode = mode
        self._is_held = False
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
        """Write a checkpoint durably, then delete checkpoints that aren't kept.

        Args:
            checkpoint: The checkpoint to write.
            epoch: Number of complete epochs.
            update: Number of weight updates.
            metric: Value of the metric that decides which is best; NaN is never best.
            monitor: Name of that metric.

        Returns:
            The checkpoint's directory.

        Raises:
            UnsupportedError: A value or tensor can't be written.
            CheckpointError: The checkpoint couldn't be written; no other was deleted.

        Warns:
            CheckpointWarning: An old checkpoint couldn't be deleted.
        """
        check_instance("checkpoint", checkpoint, Checkpoint)
        for name, count in (("epoch", epoch), ("update", update)):
            check_number(name, count, least=0, is_whole=True, allows_numpy=True)
        is_nan = is_number(metric, allows_numpy=True) and metric != metric
        if metric is not None and not is_nan:
            check_number("metric", metric, is_finite=False, allows_numpy=True)
        if monitor is not None:
            check_instance("monitor", monitor, str)
        moment = SavedAt(int(update), monitor, metric, epoch=int(epoch))
        return written_by_one(lambda: self._save_here(checkpoint, moment))

    def _save_here(self, checkpoint: Checkpoint, moment: SavedAt) -> Path:
        """Write a checkpoint in this process, without the other processes."""
        with self._lock:
            self._delete_leftovers()
            before = self._listed({}, is_strict=False)
            path = self.directory / f"update-{moment.update:08d}"
            for number in itertools.count(2):
                if not os.path.lexists(path):
                    break
                path = self.directory / f"update-{moment.update:08d}-{number}"
            moment = replace(
                moment,
                value=None if moment.value is None else float(moment.value),
                mode=self.mode,
                sequence=1 + max((at.sequence or 0 for _, at in before), default=0),
            )
            write_at(path, checkpoint, moment)
            self._known_damaged.discard(path)
            if self.keep_last is not None:
                self._delete_superfluous(self.keep_last)
            return path

    def _delete_superfluous(self, keep_last: int) -> None:
        listed = self._listed({}, is_strict=False)
        sound = self._without_damaged(listed)
        # A run that goes on from an earlier checkpoint saves the same updates again.
        newest = {at.update: (path, at) for path, at in sound}
        kept = sorted(newest.values(), key=_order)[-keep_last:]
        # The checkpoint just written, unless another process has deleted it.
        oldest = listed.index(kept[0]) if kept else 0
        best = best_saved(sound, self.mode, 1) if self.keep_best else []
        values = [at.value for _, at in kept]
        kept += [(path, at) for path, at in best if at.value not in values]
        self._delete(
            checkpoint[0].name
            for index, checkpoint in enumerate(listed)
            if (index < oldest or checkpoint in sound) and checkpoint not in kept
        )

    def all(self) -> list[Path]:
        """Return the checkpoints with an intact manifest and sizes, oldest first.

        Raises:
            CheckpointError: A newer ipufit wrote a checkpoint, or a file can't be read.
        """
        return [path for path, _ in self._sound()]

    def latest(self) -> Path | None:
        """Return the newest checkpoint with an intact manifest and sizes, or None.

        Checksums aren't compared: `load_latest` does.

        Raises:
            CheckpointError: A newer ipufit wrote a checkpoint, or a file can't be read.
        """
        sound = self._sound()
        return sound[-1][0] if sound else None

    def best(self) -> Path | None:
        """Return the checkpoint with the best metric, the oldest of equals, or None.

        Raises:
            ConfigError: Several checkpoints have a metric, and `mode` is None.
            CheckpointError: A newer ipufit wrote a checkpoint, or a file can't be read.
        """
        best = best_saved(self._sound(), self.mode, 1)
        if len(best) > 1:
            raise ConfigError(
                f"Which of the checkpoints in {str(self.directory)!r} is best depends "
                'on whether more or less is better: set mode="min" or mode="max".'
            )
        return best[0][0] if best else None

    def load_latest(self) -> tuple[Path, Checkpoint] | None:
        """Load the newest intact checkpoint.

        Returns:
            The checkpoint and its directory; None if the store has no checkpoint.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
            CheckpointError: A newer ipufit wrote a checkpoint, or a file can't be read.

        Warns:
            CheckpointWarning: Damaged checkpoints were skipped. The message has their
                paths and faults.
        """
        return load_newest([self])

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs out of the directory, which is made.

        If a run has several processes, all of them must call this. A file system
        without locks, or a folder that can't be written, keeps nobody out.

        Raises:
            ConfigError: Another run has the directory. The message has its process.
        """
        if self._is_held:  # by an outer run
            yield
            return
        locks: list[DirectoryLock] = []

        def hold() -> None:
            # `save` will report what is wrong with the folder.
            with contextlib.suppress(ImportError, OSError):
                locks.append(DirectoryLock(self.directory))

        try:
            try:
                written_by_one(hold)
                self._is_held = True
                yield
            finally:
                self._is_held = False
                for lock in locks:
                    lock.release()
        finally:  # Ctrl-C may have come before each of these lines
            self._is_held = False
            for lock in locks:
                lock.release()

    def clear(self) -> None:
        """Delete all checkpoints, and the directory if nothing else is in it.

        One process deletes them. If a run has several, all must call this.
        """
        written_by_one(self._clear)

    def _clear(self) -> None:
        with self._lock:
            self._delete_leftovers()
            damaged: dict[Path, CheckpointError] = {}
            listed = self._listed(damaged, is_strict=False)
            paths = *(path for path, _ in listed), *damaged
            self._delete(path.name for path in paths)
            with contextlib.suppress(OSError):  # other files are in it
                (self.directory / LOCK).unlink(missing_ok=True)
                self.directory.rmdir()

    def _sound(self) -> _Checkpoints:
        """List the checkpoints without those found damaged so far, oldest first."""
        return self._without_damaged(self._listed({}))

    def _without_damaged(self, listed: _Checkpoints) -> _Checkpoints:
        return [(path, at) for path, at in listed if path not in self._known_damaged]

    def _delete_leftovers(self) -> None:
        """Delete half-written and half-deleted files of killed processes."""
        if self.directory.is_dir():
            with open_folder(self.directory) as folder:
                delete = partial(self._delete_or_warn, delete_files)
                delete_leftovers(folder, _NAME.pattern, "partial|trash", delete)

    def _delete(self, names: Iterable[str]) -> None:
        """Delete checkpoints by their names."""
        if self.directory.is_dir():
            with open_folder(self.directory) as folder:
                for name in names:
                    self._delete_or_warn(delete_checkpoint, folder, name)

    def _delete_or_warn(
        self, delete: Callable[[int, str], None], folder: int, name: str
    ) -> None:
        try:
            delete(folder, name)
        except FileNotFoundError:  # another process was faster
            pass
        except OSError as error:
            warn(
                f"{str(self.directory / name)!r} isn't needed and couldn't be "
                f"deleted: {error.strerror}.",
                CheckpointWarning,
            )

    def _listed(
        self, damaged: dict[Path, CheckpointError], *, is_strict: bool = True
    ) -> _Checkpoints:
        """List the checkpoints with an intact manifest and sizes, oldest first.

        Another process may write and delete checkpoints meanwhile.

        Args:
            damaged: Dict to which the errors of damaged checkpoints are added.
            is_strict: Whether to raise for a checkpoint that a newer version wrote, or
                that can't be read. Otherwise it is left out.
        """
        for _ in range(MAX_READS):
            listed: _Checkpoints = []
            names: list[str] = []
            is_stale = False
            unless_gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
            with unless_gone, os.scandir(self.directory) as entries:
                names = [entry.name for entry in entries if entry.is_dir()]
            for name in sorted(filter(_NAME.fullmatch, names)):
                path = self.directory / name
                try:
                    moment = read_manifest(path).moment
                    is_ours = moment is not None and moment.sequence is not None
                    if is_ours and path.is_symlink():
                        raise CheckpointError(
                            f"Checkpoint {str(path)!r} is a symbolic link, and a store "
                            "takes only real directories. Put the directory itself "
                            "there, or resume from its path."
                        )
                except MissingCheckpointError:
                    is_stale = True
                except DamagedCheckpointError as error:
                    damaged[path] = error
                except CheckpointError:
                    if is_strict:
                        raise
                else:
                    if moment is not None and is_ours:
                        listed.append((path, moment))
            if listed or not is_stale:
                return sorted(listed, key=_order)
        raise _always_deleted([self])


def load_newest(
    stores: Sequence[CheckpointStore],
) -> tuple[Path, Checkpoint] | None:
    """Load the newest intact checkpoint of a run from several stores.

    Among the last intact checkpoints of each store, the checkpoint with most updates is
    loaded; of equals, the first store's.

    Args:
        stores: The stores, at least one.

    Returns:
        The checkpoint and its directory; None if the stores have no checkpoint.

    Raises:
        DamagedCheckpointError: All checkpoints are damaged.
        CheckpointError: A newer ipufit wrote a checkpoint, or a file can't be read.

    Warns:
        CheckpointWarning: Damaged checkpoints were skipped. The message has their paths
            and faults.

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
        damaged: dict[Path, CheckpointError] = {}
        to_try = [store._listed(damaged) for store in stores]
        try:
            while any(to_try):
                newest = max(filter(None, to_try), key=_progress)
                path, moment = newest.pop()
                try:
                    checkpoint = load_checkpoint(path)
                except DamagedCheckpointError as error:
                    damaged[path] = error
                    continue
                for store in stores:
                    store._known_damaged = set(damaged)
                if damaged:
                    warn(
                        f"{_texts(damaged)} Loaded {str(path)!r} instead, of epoch "
                        f"{moment.epoch} and update {moment.update}.",
                        CheckpointWarning,
                    )
                return path, checkpoint
        except MissingCheckpointError:  # deleted since it was listed
            continue
        if not damaged:
            return None
        raise DamagedCheckpointError(
            f"Every checkpoint in {_quoted(stores)} is damaged. To start anew, give "
            f"another directory. {_texts(damaged)}"
        )
    raise _always_deleted(stores)


def _order(checkpoint: Saved) -> tuple[int, int, str]:
    path, moment = checkpoint
    return (*moment.order, path.name)


def _progress(listed: _Checkpoints) -> tuple[int, int]:
    _, moment = listed[-1]
    return moment.update, moment.epoch


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
