# SPDX-License-Identifier: Apache-2.0
"""Save and load weights in one file, and average those of several checkpoints.

The file is in the format of safetensors, under the user's names of parameters. A state
dict of torch can be read, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
import zipfile
from functools import partial
from pathlib import Path
from typing import (
    IO,
    Any,
    Dict,
    Iterable,
    Iterator,
    Mapping,
    Optional,
    Sequence,
)

import torch
from torch import Tensor

from ipufit._arguments import check_choice, check_integer, check_number
from ipufit._files import as_path, file_errors, open_regular, replace_file
from ipufit.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigError,
    DataError,
    MissingCheckpointError,
    warn,
)
from ipufit.types import PathLike

from .directory import (
    MANIFEST,
    MOMENT_KEY,
    STATE,
    SUFFIX,
    TORCH_SUFFIXES,
    SavedAt,
    best_saved,
    differences,
    dump_json,
    dump_tensors,
    load_json,
    load_tensors,
    moment_of,
    read_group,
    read_header,
    read_manifest,
    tied_names,
    what_loads,
)
from .store import written_by_one

_AVERAGED_KEY = "ipufit.averaged"
_ZIP = b"PK\x03\x04"
_IS_DIRECTORY = 0x10


def save_weights(
    weights: Mapping[str, Tensor],
    path: PathLike,
    *,
    moment: SavedAt | None = None,
    averaged: Sequence[str] | None = None,
) -> None:
    """Write weights to a file; if that fails, keep the old file whole.

    The file is written beside its target, synced and then renamed. Tied weights are
    written under each of their names.

    Args:
        weights: Tensors by name.
        path: Path that ends in `.safetensors`; a missing folder is made.
        moment: Update, epoch and metric of the weights, for `average_checkpoints`.
        averaged: If the weights are an average, the names of its checkpoints:
            `average_checkpoints` then leaves this file out.

    Raises:
        ConfigError: The path has another suffix.
        UnsupportedError: A tensor is sparse, or of a dtype that safetensors lacks.
        FileError: The file can't be written; `errno` says why (the disk may be full).

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_weights({"w": torch.ones(2)}, f"{folder}/a.safetensors")
        ...     load_weights(f"{folder}/a.safetensors")["w"]
        tensor([1., 1.])
    """
    target = as_path(path)
    _check_suffix(target)
    more: dict[str, str] = {}
    if moment is not None:
        more[MOMENT_KEY] = dump_json(moment.plain(), name="moment").decode("ascii")
    if averaged is not None:
        more[_AVERAGED_KEY] = json.dumps(list(averaged))
    parts = dump_tensors(weights, "weights", more)
    with file_errors("can't be written", target):
        replace_file(target, parts)


def load_weights(path: PathLike) -> dict[str, Tensor]:
    """Read weights from a safetensors file, or from a state dict of torch.

    Args:
        path: Path that ends in `.safetensors`; or in `.pt`, `.pth` or `.bin` for a file
            of `torch.save(module.state_dict(), path)`. Such a file is read with
            `weights_only=True`, which makes no objects but tensors.

    Returns:
        Tensors by name, on the CPU.

    Raises:
        ConfigError: The path has another suffix.
        DataError: The file is damaged, or holds something else than tensors by name.
        MissingCheckpointError: The file doesn't exist.
        FileError: The file can't be read.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"w": torch.ones(2)}, f"{folder}/a.pt")
        ...     load_weights(f"{folder}/a.pt")["w"]
        tensor([1., 1.])
    """
    target = as_path(path)
    if target.suffix not in (SUFFIX, *TORCH_SUFFIXES):
        with file_errors("can't be read", target):
            way = what_loads(target) if target.exists() else ""
        if way:
            raise ConfigError(way)
    _check_suffix(target, TORCH_SUFFIXES)
    with _opened(target) as file:
        if target.suffix == SUFFIX:
            return load_tensors(file, read_header(file))
        return _state_dict(target, file)


def read_moment(path: Path) -> tuple[SavedAt | None, bool]:
    """Read the moment of a file of weights, and whether the weights are an average.

    Raises:
        DataError: The file is damaged.
        MissingCheckpointError: The file doesn't exist.
        FileError: The file can't be read.
    """
    with _opened(path) as file:
        metadata = read_header(file).metadata
        plain = load_json(metadata.get(MOMENT_KEY, "null").encode("utf-8", "replace"))
        moment = None if plain is None else moment_of(plain)
        return moment, _AVERAGED_KEY in metadata


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with file_errors("can't be read", path):
        if not path.exists():
            raise MissingCheckpointError(
                f"There is no file {str(path)!r} to load. Check the path."
            )
        try:
            with open_regular(path) as file:
                yield file
        except DataError:
            raise
        except (ValueError, CheckpointError) as error:
            raise DataError(
                f"{str(path)!r} isn't a whole safetensors file ({error}). Use another "
                "copy."
            ) from error


def _state_dict(path: Path, file: IO[bytes]) -> dict[str, Tensor]:
    """Read a file of `torch.save(module.state_dict(), path)`.

    Damaged files are refused, and so are two formats that aren't safe to load before
    torch 2.6: the format from before torch 1.6, and TorchScript (CVE-2025-32434). torch
    doesn't check the checksums of a zip file, so they are checked here.
    """
    is_whole = is_script = False
    if file.read(len(_ZIP)) == _ZIP:
        with contextlib.suppress(Exception), zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            is_script = any(Path(m.filename).name == "constants.pkl" for m in members)
            is_plain = all(
                member.compress_type == zipfile.ZIP_STORED  # as torch writes
                and member.compress_size == member.file_size
                and not member.external_attr & _IS_DIRECTORY  # torch reads no bytes
                for member in members
            )
            size = os.fstat(file.fileno()).st_size  # more if members overlap
            is_plain = is_plain and sum(m.file_size for m in members) < size
            is_whole = is_plain and archive.testzip() is None
    if is_script:
        raise DataError(
            f"{str(path)!r} is TorchScript, which is a program. Save its weights alone "
            "with torch.save(module.state_dict(), path)."
        )
    if not is_whole:
        raise DataError(
            f"{str(path)!r} is damaged, isn't a file of torch.save(), or is of the "
            "format before torch 1.6. Use another copy, or save it again with a newer "
            "torch: torch.save(module.state_dict(), path)."
        )
    file.seek(0)
    try:
        with warnings.catch_warnings():  # torch 2.0 warns of its TypedStorage
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # errors of any class, which advise to unpickle
        raise DataError(
            f"{str(path)!r} is damaged, or holds more than tensors, which is never "
            "unpickled. Use another copy, or save it again with "
            "torch.save(module.state_dict(), path)."
        ) from error
    if not isinstance(content, Mapping):
        raise DataError(
            f"{str(path)!r} holds a {type(content).__name__}, not a state dict."
        )
    odd = [
        name
        for name, value in content.items()
        if not isinstance(name, str) or not isinstance(value, Tensor)
    ]
    if odd:
        inner = [name for name in odd if _is_state_dict(content[name])]
        way = "Save the state dict alone."
        if inner:
            way = (
                f"The state dict is its {inner[0]!r}: model.set_weights(torch.load("
                f"{str(path)!r}, weights_only=True)[{inner[0]!r}])."
            )
        raise DataError(
            f"{str(path)!r} isn't a state dict: {', '.join(map(repr, odd[:5]))} "
            f"{'is no tensor' if len(odd) == 1 else 'are no tensors'}. {way}"
        )
    weights = {name: value.detach() for name, value in content.items()}
    for name, value in weights.items():
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise DataError(
                f"{str(path)!r} has {name} as a sparse, quantized or meta tensor: "
                "weights are dense ones."
            )
    return weights


def _is_state_dict(value: Any) -> bool:
    is_filled = isinstance(value, Mapping) and bool(value)
    return is_filled and all(isinstance(leaf, Tensor) for leaf in value.values())


def _check_suffix(target: Path, others: Sequence[str] = ()) -> None:
    """Check that a path ends in `.safetensors` or one of `others`."""
    if target.suffix not in (SUFFIX, *others):
        name = (target / "model" if target.is_dir() else target).with_suffix(SUFFIX)
        raise ConfigError(
            f"Weights are kept in safetensors files, and {str(target)!r} doesn't end "
            f"in {SUFFIX}: name it {str(name)!r}."
        )


_Moments = Dict[Path, Optional[SavedAt]]


def average_checkpoints(
    paths: PathLike | Iterable[PathLike],
    *,
    last: int | None = None,
    best: int | None = None,
    ema: float | None = None,
    mode: str | None = None,
    save_to: PathLike | None = None,
) -> dict[str, Tensor]:
    """Average the weights of several checkpoints, buffers included.

    The checkpoints are those that `ModelCheckpoint`, `BackupAndRestore` and
    `CheckpointStore` write: whole checkpoints, or files of weights. They are ordered by
    their numbers of updates; without such numbers, by the numbers in their names, so
    that 10 comes after 9.

    Floating-point tensors are averaged in float64 and keep their dtype, the statistics
    of batch norm included; integers and bools are those of the newest. One checkpoint
    at a time is in memory, with the sums in float64.

    Args:
        paths: The directory of the checkpoints; or the paths of checkpoints, such as
            `Path("run").glob("epoch-*.safetensors")`.
        last: Number of the newest checkpoints to average. None, with `best` None, for
            all of them.
        best: Number of the checkpoints with the best metric to average. The metric is
            that of `ModelCheckpoint(monitor=)`, which each checkpoint contains.
        ema: None for the plain mean. From 0 to below 1 for an exponential moving
            average from the oldest to the newest: `ema * average + (1 - ema) * weights`
            after the weights of the first.
        mode: Whether `"min"` or `"max"` of the metric is better, if the checkpoints
            don't contain it.
        save_to: A path that ends in `.safetensors`, to write the average to as
            `model.save_weights` would. None to write no file.

    Returns:
        A state dict, on the host, for `module.load_state_dict` or `model.set_weights`.

    Raises:
        ConfigError: An argument can't be used; no checkpoint contains a metric; the
            checkpoints contain different metrics; or the directory has both kinds of
            checkpoints.
        DataError: The checkpoints are of modules with other names, shapes or dtypes; or
            a file of weights is damaged.
        MissingCheckpointError: The directory has no checkpoint, or a path has no
            checkpoint.
        DamagedCheckpointError: A checkpoint is damaged.
        CheckpointError: A newer ipufit wrote a checkpoint, or a file can't be read.
        FileError: The average can't be written.

    Warns:
        CheckpointWarning: There are fewer checkpoints than `last` or `best`.

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
        if number is not None:
            check_integer(name, number, least=1)
    if last is not None and best is not None:
        raise ConfigError(f"last={last} and best={best}: use one of them.")
    if ema is not None:
        check_number("ema", ema, least=0, below=1)
    check_choice("mode", mode, ("min", "max", None))
    if save_to is not None:
        _check_suffix(as_path(save_to, "save_to"))
    if isinstance(paths, (str, os.PathLike)):
        listed = _checkpoints_in(as_path(paths, "paths"))
    else:
        listed = [as_path(path, "paths") for path in paths]
    if not listed:
        raise MissingCheckpointError(
            "There is no checkpoint to average. Give the directory that "
            "ModelCheckpoint writes to, or the paths of checkpoints."
        )
    moments = {
        path: read_manifest(path).moment if path.is_dir() else read_moment(path)[0]
        for path in listed
    }
    chosen = sorted(moments, key=partial(_order, moments))
    if last is not None:
        chosen = chosen[-last:]
    elif best is not None:
        chosen = _best(chosen, moments, best, mode)
    wanted = last or best or 0
    if len(chosen) < wanted:
        warn(
            f"{wanted} checkpoints were asked for, and {len(chosen)} can be averaged: "
            "the average is of these.",
            CheckpointWarning,
        )
    average = _average(chosen, ema)
    if save_to is not None:
        target, names = save_to, [path.name for path in chosen]
        written_by_one(lambda: save_weights(average, target, averaged=names))
    return average


def _checkpoints_in(directory: Path) -> list[Path]:
    """List the whole checkpoints of a directory, or its files of weights."""
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "isn't there"
        raise MissingCheckpointError(
            f"{str(directory)!r} {what}: give the directory of the checkpoints."
        )
    if (directory / MANIFEST).exists():
        raise ConfigError(
            f"{str(directory)!r} is one checkpoint: give the directory that it is in."
        )
    with file_errors("can't be read", directory):
        plain = [
            path
            for path in sorted(directory.iterdir())
            if not path.name.startswith(".") and not path.is_symlink()
        ]
        whole = [p for p in plain if (p / MANIFEST).exists() or (p / STATE).exists()]
        files = [path for path in plain if path.suffix == SUFFIX and path.is_file()]
    weights = [path for path in files if not read_moment(path)[1]]
    if whole and weights:
        raise ConfigError(
            f"{str(directory)!r} has whole checkpoints, such as {whole[0].name!r}, and "
            f"files of weights, such as {weights[0].name!r}. Give the paths of one "
            f'kind: Path({str(directory)!r}).glob("*{SUFFIX}").'
        )
    return whole or weights


def _order(moments: _Moments, path: Path) -> list[Any]:
    """Return the sort key: a store's number and updates, or numbers in the name."""
    parts = re.split(r"([0-9]+)", path.name)
    name = [int(part) if part.isdecimal() else part for part in parts]
    moment = moments[path]
    if moment is None or None in moments.values():
        return name
    return [*moment.order, name]


def _best(
    paths: Sequence[Path], moments: _Moments, count: int, mode: str | None
) -> list[Path]:
    """Choose the checkpoints with the best metric, in their order."""
    saved = [(path, at) for path in paths for at in [moments[path]] if at is not None]
    rated = [moment for _, moment in best_saved(saved, None, count)]
    if not rated:
        raise ConfigError(
            f"None of the {len(paths)} checkpoints contains a metric, by which to "
            f"choose best={count}. ModelCheckpoint(monitor=...) writes it, if it is in "
            "the logs when it saves. Give last= instead."
        )
    monitors = sorted({moment.monitor for moment in rated if moment.monitor})
    if len(monitors) > 1:
        raise ConfigError(
            f"The checkpoints contain different metrics: {', '.join(monitors)}. Give "
            "the paths of those with one metric."
        )
    modes = {moment.mode for moment in rated if moment.mode}
    if mode is None and len(modes) == 1:
        mode = modes.pop()
    if mode is None:
        raise ConfigError(
            "The checkpoints don't say whether more or less of their metric is better: "
            'give mode="min" or mode="max".'
        )
    best = {path for path, _ in best_saved(saved, mode, count)}
    return [path for path in paths if path in best]


def _average(paths: Sequence[Path], ema: float | None) -> dict[str, Tensor]:
    """Read checkpoints, oldest first, and average them; tied names share a tensor."""
    sums: dict[str, Tensor] = {}
    forms: dict[str, Tensor] = {}
    for path in paths:
        weights = read_group(path, "model") if path.is_dir() else load_weights(path)
        if not weights:
            raise DataError(f"{str(path)!r} holds no weights.")
        forms = forms or {name: tensor.to("meta") for name, tensor in weights.items()}
        of = "the first", "the second"
        odd = differences(forms, weights, "shape", "dtype", of=of)
        if odd:
            raise DataError(
                f"{str(paths[0])!r} and {str(path)!r} have the weights of different "
                f"modules: {odd}. Give the paths of those of one module."
            )
        for name, tensor in weights.items():
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            is_complex = tensor.is_complex()
            wide = tensor.to(torch.complex128 if is_complex else torch.float64)
            if name not in sums:
                sums[name] = wide.clone()
            elif ema is None:
                sums[name] += wide
            else:  # equal values stay, such as the infinities of a mask
                moving = torch.lerp(sums[name], wide, 1.0 - ema)
                sums[name] = torch.where(sums[name] == wide, wide, moving)
    count = len(paths) if ema is None else 1
    average = {
        name: sums.pop(name).div_(count).to(last.dtype) if name in sums else last
        for name, last in weights.items()
    }
    for first, *others in tied_names(weights):
        for name in others:
            if torch.equal(average[first], average[name]):
                average[name] = average[first]
    return average
