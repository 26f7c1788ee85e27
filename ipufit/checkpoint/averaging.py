# SPDX-License-Identifier: Apache-2.0
"""The average of several checkpoints of a run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigError,
    DamagedCheckpointError,
    DataError,
    MissingCheckpointError,
)
from ipufit.types import PathLike

from .candidates import Candidate, candidates_in, chosen_of
from .one_writer import written_by_one
from .reading import MAX_READS
from .tensors import names_that_differ, tied_names
from .unwritten import missing_allowed
from .weights import save_weights


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
    _check(last=last, best=best, ema=ema, mode=mode)
    with missing_allowed():
        return _averaged(directory, last, best, ema, mode, pattern, save_to)
    return {}


def _averaged(
    directory: PathLike,
    last: int | None,
    best: int | None,
    ema: float | None,
    mode: str | None,
    pattern: str,
    save_to: PathLike | None,
) -> dict[str, Tensor]:
    damaged: dict[Path, Exception] = {}
    for _ in range(MAX_READS):
        candidates = candidates_in(Path(directory), pattern, damaged)
        chosen = chosen_of(candidates, directory, last=last, best=best, mode=mode)
        average = _Average(ema)
        if all(_taken_in(one, average, damaged) for one in chosen):
            break
    else:
        raise CheckpointError(
            f"Checkpoints in {str(directory)!r} were deleted {MAX_READS} times before "
            "they were read: another process writes them faster than this one reads."
        )
    _check_and_warn(directory, chosen, damaged, last or best)
    result = average.result()
    if save_to is not None:
        names = [one.path.name for one in chosen]
        target: PathLike = save_to
        written_by_one(lambda: save_weights(result, target, averaged=names))
    return result


class _Average:
    """The sums of the weights that were taken in, in float64, one after the other."""

    def __init__(self, ema: float | None) -> None:
        self._ema = ema
        self._count = 0
        self._sums: dict[str, Tensor] = {}
        self._first: Path | None = None
        self._forms: dict[str, Tensor] = {}  # of the newest, without values
        self._kept: dict[str, Tensor] = {}
        self._tied: list[list[str]] = []

    def add(self, path: Path, weights: dict[str, Tensor]) -> None:
        """Take in the next weights; the oldest come first."""
        if self._first is None:
            self._first = path
        else:
            self._check_alike(path, weights)
        for name, tensor in weights.items():
            if not _is_averaged(tensor):
                continue
            wide = tensor.to(_wide(tensor.dtype), copy=True)
            if not self._count:
                self._sums[name] = wide
            elif self._ema is None:
                self._sums[name] += wide
            else:  # equal values stay as they are, infinities of a mask too
                average = self._sums[name]
                is_equal = average == wide
                average.lerp_(wide, 1.0 - self._ema)
                torch.where(is_equal, wide, average, out=average)
        self._forms = {
            n: torch.empty_like(t, device="meta") for n, t in weights.items()
        }
        self._kept = {n: t for n, t in weights.items() if not _is_averaged(t)}
        self._tied = tied_names(weights)
        self._count += 1

    def result(self) -> dict[str, Tensor]:
        """The average, in the dtypes of the weights; tied names share a tensor."""
        found: dict[str, Tensor] = {}
        count = self._count if self._ema is None else 1
        for name, form in self._forms.items():
            if name in self._kept:
                found[name] = self._kept[name]
            else:
                found[name] = self._sums.pop(name).div_(count).to(form.dtype)
        for first, *others in self._tied:
            for name in others:
                if torch.equal(found[first], found[name]):
                    found[name] = found[first]
        return found

    def _check_alike(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        odd = names_that_differ(self._forms, weights, "shape", "dtype")
        if odd:
            shown = ", ".join(odd[:8]) + (", ..." if len(odd) > 8 else "")
            raise DataError(
                f"{str(path)!r} has the weights of another module than "
                f"{str(self._first)!r}: {shown} are only in one of the two, or have "
                "other shapes or dtypes. Name those of one module by pattern=."
            )


def _taken_in(
    one: Candidate, average: _Average, damaged: dict[Path, Exception]
) -> bool:
    """Read a checkpoint and add it to the average, if it is there and whole.

    Args:
        one: The checkpoint.
        average: The sums so far.
        damaged: Errors by path, to which that of a damaged checkpoint is added.

    Returns:
        Whether it was added.
    """
    try:
        weights = one.read()
    except MissingCheckpointError:  # deleted since it was listed
        return False
    except (DamagedCheckpointError, DataError) as error:
        damaged[one.path] = error
        return False
    average.add(one.path, weights)
    return True


def _is_averaged(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _check(*, last: Any, best: Any, ema: Any, mode: Any) -> None:
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


def _check_and_warn(
    directory: PathLike,
    chosen: Sequence[Candidate],
    damaged: Mapping[Path, Exception],
    wanted: int | None,
) -> None:
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
        warnings.warn(
            f"{texts} The average leaves it out."
            if len(damaged) == 1
            else f"{texts} The average leaves them out.",
            CheckpointWarning,
            stacklevel=4,
        )
    if wanted is not None and len(chosen) < wanted:
        warnings.warn(
            f"{wanted} checkpoints were asked for, and {len(chosen)} in "
            f"{str(directory)!r} can be averaged: the average is of these.",
            CheckpointWarning,
            stacklevel=4,
        )
