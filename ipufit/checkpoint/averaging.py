# SPDX-License-Identifier: Apache-2.0
"""The average of several checkpoints of a run."""

from __future__ import annotations

import fnmatch
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ipufit._files import file_errors
from ipufit.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigError,
    DamagedCheckpointError,
    DataError,
    MissingCheckpointError,
)
from ipufit.types import PathLike

from .directory import MAX_READS, read_group, read_manifest
from .format import MANIFEST, STATE, SUFFIX, SavedAt, names_that_differ, tied_names
from .store import missing_allowed, written_by_one
from .weights import load_weights, read_moment, save_weights

_Candidates = List[Tuple[Path, Optional[SavedAt]]]
_Damaged = Dict[Path, Exception]


def average_checkpoints(
    directory: PathLike,
    *,
    last: int | None = None,
    best: int | None = None,
    ema: float | None = None,
    mode: str | None = None,
    pattern: str = "*",
    save_to: PathLike | None = None,
) -> dict[str, Tensor]:
    """Average the weights of several checkpoints, buffers included.

    The checkpoints are those that `ModelCheckpoint`, `BackupAndRestore` and
    `CheckpointStore` wrote into one directory: whole ones, or files of weights. They
    are ordered by the updates that they tell, and those that tell none by the numbers
    in their names, so that 10 comes after 9. Damaged ones are left out, with a warning,
    and the next in order is taken in their place.

    Tensors of floats are averaged in float64 and keep their dtype, the statistics of
    batch norm among them; whole numbers and bools are those of the newest. One
    checkpoint at a time is in memory, with the sums in float64.

    Args:
        directory: The directory that the checkpoints are in.
        last: Number of the newest checkpoints to average. None, with `best` None, for
            all of them.
        best: Number of those with the best figure to average: that of
            `ModelCheckpoint(monitor=)`, which is written with each checkpoint.
        ema: None for the plain mean. From 0 to below 1 for an exponential moving
            average from the oldest to the newest: `ema * average + (1 - ema) * weights`
            after the weights of the first.
        mode: `"min"` or `"max"`, whichever of the figure is better, if the checkpoints
            don't say it.
        pattern: Names that count, such as `"epoch-*.safetensors"`.
        save_to: A path that ends in `.safetensors`, to write the average to as
            `model.save_weights` would. None to write none.

    Returns:
        A state dict, on the host, for `module.load_state_dict` or `model.set_weights`.
        It is empty under `ipufit compile`, if there are no checkpoints.

    Raises:
        ConfigError: An argument can't be used; or no checkpoint tells a figure; or they
            tell different ones; or the directory has both kinds of checkpoints.
        DataError: The checkpoints are of modules with other names, shapes or dtypes.
        MissingCheckpointError: There is none in the directory.
        DamagedCheckpointError: All that there are, are damaged.
        CheckpointError: A newer ipufit wrote one, or one can't be read.
        FileError: The average can't be written.

    Warns:
        CheckpointWarning: Some are damaged, or there are fewer than asked for.

    Example:
        >>> import tempfile, torch
        >>> from ipufit.checkpoint import save_weights
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for epoch in (8, 9, 10):
        ...         weights = {"w": torch.tensor([float(epoch)])}
        ...         save_weights(weights, f"{folder}/epoch-{epoch}.safetensors")
        ...     mean = average_checkpoints(folder, last=2)
        ...     moving = average_checkpoints(folder, ema=0.75)
        >>> mean["w"].item(), moving["w"].item()
        (9.5, 8.6875)
    """
    for name, number in (("last", last), ("best", best)):
        is_number = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_number and number > 0):
            raise ConfigError(
                f"{name}={number!r} is no number of checkpoints, 1 or more."
            )
    if last is not None and best is not None:
        raise ConfigError(
            f"last={last} and best={best} are two rules for which checkpoints are "
            "averaged: give one."
        )
    is_share = isinstance(ema, (int, float)) and not isinstance(ema, bool)
    if ema is not None and not (is_share and 0 <= ema < 1):
        raise ConfigError(f"ema={ema!r} must be from 0 to below 1, or None for a mean.")
    if mode not in ("min", "max", None):
        raise ConfigError(f'mode={mode!r} must be "min", "max" or None.')
    with missing_allowed():
        folder = Path(directory)
        damaged: _Damaged = {}
        for _ in range(MAX_READS):
            chosen = _candidates(folder, pattern, damaged)
            if last is not None:
                chosen = chosen[-last:]
            elif best is not None and chosen:
                chosen = _best(chosen, folder, best, mode)
            average = _average(chosen, ema, damaged)
            if average is not None:
                break
        else:
            raise CheckpointError(
                f"Checkpoints in {str(directory)!r} were deleted {MAX_READS} times "
                "before they were read: another process writes them faster than this "
                "one reads."
            )
        texts = " ".join(str(error) for error in damaged.values())
        if not chosen and damaged:
            raise DamagedCheckpointError(
                f"Every checkpoint in {str(directory)!r} is damaged. {texts}"
            )
        if not chosen:
            raise MissingCheckpointError(
                f"There is no checkpoint in {str(directory)!r} to average. Give the "
                "directory that ModelCheckpoint writes to, or another pattern=."
            )
        if damaged:
            them = "it" if len(damaged) == 1 else "them"
            text = f"{texts} The average leaves {them} out."
            warnings.warn(text, CheckpointWarning, stacklevel=2)
        wanted = last or best
        if wanted is not None and len(chosen) < wanted:
            warnings.warn(
                f"{wanted} checkpoints were asked for, and {len(chosen)} in "
                f"{str(directory)!r} can be averaged: the average is of these.",
                CheckpointWarning,
                stacklevel=2,
            )
        if save_to is not None:
            target, weights = save_to, average
            names = [path.name for path, _ in chosen]
            written_by_one(lambda: save_weights(weights, target, averaged=names))
        return average
    return {}


def _candidates(directory: Path, pattern: str, damaged: _Damaged) -> _Candidates:
    """List the checkpoints or files of weights in a directory, oldest first.

    Args:
        damaged: Errors of checkpoints known to be damaged, which are left out. More
            that are found so are added.
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
    whole: _Candidates = []
    weights: _Candidates = []
    for entry in sorted(entries, key=lambda one: one.name):
        path = directory / entry.name
        if not fnmatch.fnmatchcase(entry.name, pattern) or path in damaged:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                if (path / MANIFEST).exists() or (path / STATE).exists():
                    whole.append((path, read_manifest(path).moment))
            elif path.suffix == SUFFIX and entry.is_file(follow_symlinks=False):
                moment, is_average = read_moment(path)
                if not is_average:
                    weights.append((path, moment))
        except MissingCheckpointError:  # deleted since it was listed
            pass
        except (DamagedCheckpointError, DataError) as error:
            damaged[path] = error
    if whole and weights:
        raise ConfigError(
            f"{str(directory)!r} has whole checkpoints, such as "
            f"{whole[0][0].name!r}, and files of weights, such as "
            f"{weights[0][0].name!r}, perhaps of the same updates. Say which to "
            f'average: pattern="*{SUFFIX}", or that of the others.'
        )
    candidates = whole or weights
    moments = [moment for _, moment in candidates if moment is not None]
    are_of_store = all(moment.sequence is not None for moment in moments)

    def order(candidate: tuple[Path, SavedAt | None]) -> list[Any]:
        """Sort by what all of them tell: a store's numbers, updates, or their names."""
        path, moment = candidate
        parts = re.split(r"([0-9]+)", path.name)  # numbers by their size
        name = [int(part) if part.isdecimal() else part for part in parts]
        if moment is None or len(moments) < len(candidates):
            return name
        return [moment.sequence if are_of_store else 0, moment.update, name]

    return sorted(candidates, key=order)


def _best(
    candidates: _Candidates, directory: Path, count: int, mode: str | None
) -> _Candidates:
    """Choose the candidates with the best figure, oldest first."""
    rated = [
        (moment.value, index)
        for index, (_, moment) in enumerate(candidates)
        if moment is not None
        if moment.value is not None and not math.isnan(moment.value)
    ]
    if not rated:
        raise ConfigError(
            f"None of the {len(candidates)} checkpoints in {str(directory)!r} tells a "
            f"figure, so best={count} can't be told. ModelCheckpoint(monitor=...) "
            "writes it, if it is in the logs when it saves. Give last= instead."
        )
    moments = [moment for _, index in rated for moment in candidates[index][1:]]
    monitors = sorted({one.monitor for one in moments if one and one.monitor})
    if len(monitors) > 1:
        raise ConfigError(
            f"The checkpoints in {str(directory)!r} are rated by different figures: "
            f"{', '.join(monitors)}. Name those of one by pattern=."
        )
    modes = {one.mode for one in moments if one and one.mode}
    if mode is None and len(modes) == 1:
        mode = modes.pop()
    if mode is None:
        what = f" of {monitors[0]}" if monitors else ""
        raise ConfigError(
            f"The checkpoints in {str(directory)!r} don't say whether more or less"
            f'{what} is better: give mode="min" or mode="max".'
        )
    sign = 1 if mode == "min" else -1
    rated.sort(key=lambda one: sign * one[0])  # the oldest of equals first
    return [candidates[index] for index in sorted(index for _, index in rated[:count])]


def _average(
    chosen: _Candidates, ema: float | None, damaged: _Damaged
) -> dict[str, Tensor] | None:
    """Read checkpoints, the oldest first, and average them.

    Args:
        damaged: Errors by path, to which that of a damaged checkpoint is added.

    Returns:
        The average, in the dtypes of the weights; tied names share a tensor. None if
        one of the checkpoints is damaged, or gone.
    """
    sums: dict[str, Tensor] = {}
    newest: dict[str, Tensor] = {}
    tied: list[list[str]] = []
    for path, _ in chosen:
        try:
            if path.suffix == SUFFIX:
                weights = load_weights(path)
            else:
                weights = read_group(path, "model")
                if not weights:
                    raise DataError(f"Checkpoint {str(path)!r} holds no weights.")
        except MissingCheckpointError:  # deleted since it was listed
            return None
        except (DamagedCheckpointError, DataError) as error:
            damaged[path] = error
            return None
        odd = names_that_differ(newest, weights, "shape", "dtype")
        if odd and path != chosen[0][0]:
            shown = ", ".join(odd[:8]) + (", ..." if len(odd) > 8 else "")
            raise DataError(
                f"{str(path)!r} has the weights of another module than "
                f"{str(chosen[0][0])!r}: {shown} are only in one of the two, or have "
                "other shapes or dtypes. Name those of one module by pattern=."
            )
        tied = tied_names(weights)
        newest = _add(weights, sums, ema)
        del weights  # one checkpoint at a time is in memory
    count = len(chosen) if ema is None else 1
    average = {
        name: sums.pop(name).div_(count).to(form.dtype) if name in sums else form
        for name, form in newest.items()
    }
    for first, *others in tied:
        for name in others:
            if torch.equal(average[first], average[name]):
                average[name] = average[first]
    return average


def _add(
    weights: dict[str, Tensor], sums: dict[str, Tensor], ema: float | None
) -> dict[str, Tensor]:
    """Add floats in float64; return the other tensors, and floats without values."""
    newest = {}
    for name, tensor in weights.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            newest[name] = tensor
            continue
        newest[name] = torch.empty_like(tensor, device="meta")
        dtype = torch.complex128 if tensor.is_complex() else torch.float64
        wide = tensor.to(dtype, copy=True)
        if name not in sums:
            sums[name] = wide
        elif ema is None:
            sums[name] += wide
        else:  # equal values stay as they are, infinities of a mask too
            average = sums[name]
            is_equal = average == wide
            average.lerp_(wide, 1.0 - ema)
            torch.where(is_equal, wide, average, out=average)
    return newest
