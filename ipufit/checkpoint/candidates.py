# SPDX-License-Identifier: Apache-2.0
"""The checkpoints and files of weights in a directory, in the order of training."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import torch
from torch import Tensor

from ipufit._files import file_errors
from ipufit.errors import (
    ConfigError,
    DamagedCheckpointError,
    DataError,
    MissingCheckpointError,
)
from ipufit.types import PathLike

from .directory import MANIFEST, STATE, SUFFIX
from .format import read_group, read_manifest
from .json_values import parse_json
from .manifest import Record
from .moment import AVERAGED_KEY, Moment, moment_in
from .tensors import TIED_KEY
from .weights import load_weights, read_metadata


@dataclass(frozen=True)
class Candidate:
    """A checkpoint or a file of weights.

    Attributes:
        path: Its directory, or the file.
        moment: When in a run it was saved; None if it doesn't say so.
        record: The numbers of its store; None if no store wrote it.
    """

    path: Path
    moment: Moment | None
    record: Record | None = None

    @property
    def value(self) -> float | None:
        """The figure that it was saved with; None if there is none, or NaN."""
        value = None if self.moment is None else self.moment.value
        if value is None and self.record is not None:
            value = self.record.metric
        return None if value is None or math.isnan(value) else value

    def read(self) -> dict[str, Tensor]:
        """Read its weights.

        Raises:
            MissingCheckpointError: It isn't there any more.
            DamagedCheckpointError: It is damaged.
            DataError: It is damaged, or holds no weights.
            FileError: It can't be read.
        """
        if self.path.suffix == SUFFIX:
            tied = read_metadata(self.path).get(TIED_KEY, "[]")
            return _with_tied(load_weights(self.path), tied)
        weights = read_group(self.path, "model")
        if not weights:
            raise DataError(f"Checkpoint {str(self.path)!r} holds no weights.")
        return weights


def candidates_in(
    directory: Path, pattern: str, damaged: dict[Path, Exception]
) -> list[Candidate]:
    """List what a directory has, oldest first.

    Args:
        directory: The directory.
        pattern: Names that count, with `*` and `?`.
        damaged: Errors of checkpoints known to be damaged, which are left out. More
            that are found so are added.

    Raises:
        ConfigError: It is a checkpoint itself, or has both kinds.
        MissingCheckpointError: There is no such directory.
        CheckpointError: A newer ipufit wrote a checkpoint, or one can't be read.
    """
    if not directory.is_dir():
        raise MissingCheckpointError(
            f"There is no directory {str(directory)!r} of checkpoints. Check the path."
        )
    if (directory / MANIFEST).exists():
        raise ConfigError(
            f"{str(directory)!r} is one checkpoint: give the directory that it is in."
        )
    with file_errors("can't be read", directory), os.scandir(directory) as found:
        entries = [one for one in found if not one.name.startswith(".")]
    whole: list[Candidate] = []
    weights: list[Candidate] = []
    for entry in sorted(entries, key=lambda one: one.name):
        path = directory / entry.name
        if not fnmatch.fnmatchcase(entry.name, pattern) or path in damaged:
            continue
        if entry.is_dir(follow_symlinks=False):
            _note(whole, path, _whole, damaged)
        elif path.suffix == SUFFIX and entry.is_file(follow_symlinks=False):
            _note(weights, path, _of_weights, damaged)
    if whole and weights:
        raise ConfigError(
            f"{str(directory)!r} has whole checkpoints, such as "
            f"{whole[0].path.name!r}, and files of weights, such as "
            f"{weights[0].path.name!r}, perhaps of the same updates. Say which to "
            f'average: pattern="*{SUFFIX}", or that of the others.'
        )
    return _in_order(whole or weights)


def chosen_of(
    candidates: Sequence[Candidate],
    directory: PathLike,
    *,
    last: int | None,
    best: int | None,
    mode: str | None,
) -> list[Candidate]:
    """Choose the checkpoints to average, oldest first.

    Args:
        candidates: All that there are, oldest first.
        directory: Directory that messages name.
        last: Number of the newest, if these are to be chosen.
        best: Number of the best, if these are.
        mode: "min" or "max", whichever figure is better; None to ask the checkpoints.

    Raises:
        ConfigError: The best can't be told.
    """
    if best is None:
        return list(candidates if last is None else candidates[-last:])
    if not candidates:
        return []
    rated = [one for one in candidates if one.value is not None]
    if not rated:
        raise ConfigError(
            f"None of the {len(candidates)} checkpoints in {str(directory)!r} tells a "
            f"figure, so best={best} can't be told. ModelCheckpoint(monitor=...) "
            "writes it, if it is in the logs when it saves. Give last= instead."
        )
    sign = 1.0 if _direction(rated, directory, mode) == "min" else -1.0
    order = sorted(range(len(rated)), key=lambda index: _key(rated[index], sign))
    return [rated[index] for index in sorted(order[:best])]


def _key(one: Candidate, sign: float) -> float:
    return sign * (one.value or 0.0)


def _direction(
    rated: Sequence[Candidate], directory: PathLike, mode: str | None
) -> str:
    moments = [one.moment for one in rated if one.moment is not None]
    monitors = sorted({str(one.monitor) for one in moments if one.monitor})
    if len(monitors) > 1:
        raise ConfigError(
            f"The checkpoints in {str(directory)!r} are rated by different figures: "
            f"{', '.join(monitors)}. Name those of one by pattern=."
        )
    modes = {one.mode for one in moments if one.mode}
    if mode is None and len(modes) == 1:
        return str(modes.pop())
    if mode is None:
        what = f" of {monitors[0]}" if monitors else ""
        raise ConfigError(
            f"The checkpoints in {str(directory)!r} don't say whether more or less"
            f'{what} is better: give mode="min" or mode="max".'
        )
    return mode


def _note(
    found: list[Candidate],
    path: Path,
    read: Callable[[Path], Candidate | None],
    damaged: dict[Path, Exception],
) -> None:
    try:
        candidate = read(path)
    except MissingCheckpointError:  # deleted since it was listed
        return
    except (DamagedCheckpointError, DataError) as error:
        damaged[path] = error
        return
    if candidate is not None:
        found.append(candidate)


def _whole(path: Path) -> Candidate | None:
    """The checkpoint of a directory; None if nothing in it is of a checkpoint."""
    if not (path / MANIFEST).exists() and not (path / STATE).exists():
        return None
    manifest = read_manifest(path)
    return Candidate(path, manifest.moment, manifest.record)


def _of_weights(path: Path) -> Candidate | None:
    """The file of weights; None if it is itself an average of others."""
    metadata = read_metadata(path)
    if AVERAGED_KEY in metadata:
        return None
    try:
        return Candidate(path, moment_in(metadata))
    except ValueError as error:
        raise DataError(f"{str(path)!r} is damaged: {error}.") from error


def _with_tied(weights: dict[str, Tensor], text: str) -> dict[str, Tensor]:
    """Let names that metadata call tied share a tensor, if they are equal."""
    try:
        groups = parse_json(text.encode("utf-8", "replace"))
    except ValueError:
        return weights
    for group in groups if isinstance(groups, list) else []:
        names = [n for n in group if n in weights] if isinstance(group, list) else []
        for name in names[1:]:
            if torch.equal(weights[names[0]], weights[name]):
                weights[name] = weights[names[0]]
    return weights


def _in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort by what all of them tell: a store's numbers, updates, or their names."""
    given = list(candidates)
    if all(one.record is not None for one in given):
        return sorted(given, key=_by_record)
    if all(one.moment is not None for one in given):
        return sorted(given, key=_by_update)
    return sorted(given, key=lambda one: _by_name(one.path.name))


def _by_record(one: Candidate) -> tuple[Any, ...]:
    record = one.record
    assert record is not None  # noqa: S101 - all of them have one
    return (record.sequence, record.update, _by_name(one.path.name))


def _by_update(one: Candidate) -> tuple[Any, ...]:
    moment = one.moment
    assert moment is not None  # noqa: S101 - all of them have one
    return (moment.update, _by_name(one.path.name))


def _by_name(name: str) -> list[Any]:
    """Key that sorts the numbers in names by their size.

    Example:
        >>> sorted(["b10", "b9", "a11"], key=_by_name)
        ['a11', 'b9', 'b10']
    """
    return [
        int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)
    ]
