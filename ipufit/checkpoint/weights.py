# SPDX-License-Identifier: Apache-2.0
"""Saves and loads weights in one file, under the user's own parameter names.

The file is in the format of safetensors. A state dict of torch can be read, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
import zipfile
from io import BufferedReader
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ipufit._files import file_errors
from ipufit.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingCheckpointError,
)
from ipufit.types import PathLike

from .directory import replace_file
from .format import (
    MOMENT_KEY,
    SUFFIX,
    SavedAt,
    dump_json,
    dump_tensors,
    load_json,
    load_tensors,
    moment_of,
    open_tensors,
)

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
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
    """Write weights to a file, or leave the old file whole.

    The file is written beside its target, synced and then renamed. Tied weights are
    written under each of their names.

    Args:
        weights: Tensors by name.
        path: Ends in `.safetensors`; its folder is made if there is none.
        moment: When in a run they are saved and the figure they have then, for
            `average_checkpoints`.
        averaged: Names of the checkpoints whose average the weights are, if they are
            one: `average_checkpoints` leaves them out then.

    Raises:
        ConfigError: The path ends in something else.
        UnsupportedError: A tensor is sparse, or of a dtype that safetensors lacks.
        FileError: The file can't be written; `errno` says why (the disk may be full).

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_weights({"w": torch.ones(2)}, f"{folder}/a.safetensors")
        ...     load_weights(f"{folder}/a.safetensors")["w"]
        tensor([1., 1.])
    """
    target = _checked(path)
    more = {}
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
        path: Ends in `.safetensors`; or in `.pt`, `.pth` or `.bin` if it was written
            by `torch.save(module.state_dict(), path)`. That is read with
            `weights_only=True`, which makes no objects but tensors.

    Returns:
        Tensors by name, on the CPU.

    Raises:
        ConfigError: The path ends in something else.
        DataError: The file is damaged, or holds something else than tensors by name.
        MissingCheckpointError: There is no file.
        FileError: The file can't be read.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"w": torch.ones(2)}, f"{folder}/a.pt")
        ...     load_weights(f"{folder}/a.pt")["w"]
        tensor([1., 1.])
    """
    target = _checked(path, TORCH_SUFFIXES)
    with _opened(target) as file:
        if target.suffix == SUFFIX:
            return load_tensors(file.fileno())
        return _state_dict(target, file)


def read_moment(path: Path) -> tuple[SavedAt | None, bool]:
    """Read when weights were saved, if a file says so, and whether it is an average.

    Raises:
        DataError: The file is damaged.
        MissingCheckpointError: There is no file.
        FileError: The file can't be read.
    """
    with _opened(path) as file, open_tensors(file.fileno()) as opened:
        metadata = opened.metadata() or {}
        given = load_json(metadata.get(MOMENT_KEY, "null").encode("utf-8", "replace"))
        moment = None if given is None else moment_of(given)
        return moment, _AVERAGED_KEY in metadata


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    with file_errors("can't be read", path):
        if not path.exists():
            raise MissingCheckpointError(
                f"There is no file {str(path)!r} to load. Check the path."
            )
        try:
            with path.open("rb") as file:
                yield file
        except DataError:
            raise
        except (ValueError, CheckpointError) as error:
            raise DataError(
                f"{str(path)!r} is no whole safetensors file ({error}). Use another "
                "copy."
            ) from error


def _state_dict(path: Path, file: BufferedReader) -> dict[str, Tensor]:
    """Read what `torch.save(module.state_dict(), path)` has written.

    Damaged files, and formats that aren't safe to load before torch 2.6, are refused:
    that from before torch 1.6, and TorchScript (CVE-2025-32434). torch doesn't look at
    the checksums of a zip file, so we do.
    """
    is_whole = is_script = False
    if file.read(len(_ZIP)) == _ZIP:
        with contextlib.suppress(Exception), zipfile.ZipFile(file) as archive:
            is_script = any(Path(n).name == "constants.pkl" for n in archive.namelist())
            is_whole = archive.testzip() is None and all(
                one.compress_type == zipfile.ZIP_STORED  # as torch writes
                and one.compress_size == one.file_size
                and not one.external_attr & _IS_DIRECTORY  # torch reads no bytes of it
                for one in archive.infolist()
            )
    if is_script:
        raise DataError(
            f"{str(path)!r} is TorchScript, which is a program. Save its weights alone "
            "with torch.save(module.state_dict(), path)."
        )
    if not is_whole:
        raise DataError(
            f"{str(path)!r} is damaged, or no file of torch.save(), or of its format "
            "before torch 1.6. Use another copy, or save it again with a newer torch: "
            "torch.save(module.state_dict(), path)."
        )
    file.seek(0)
    try:
        with warnings.catch_warnings():  # torch 2.0 warns of its own TypedStorage
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")
            found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of any kind, with the advice to unpickle
        raise DataError(
            f"{str(path)!r} is damaged, or holds more than tensors, which is never "
            "unpickled. Use another copy, or save it again with "
            "torch.save(module.state_dict(), path)."
        ) from error
    if not isinstance(found, Mapping):
        raise DataError(
            f"{str(path)!r} holds a {type(found).__name__}, not a state dict."
        )
    odd = [
        name
        for name, value in found.items()
        if not isinstance(name, str) or not isinstance(value, Tensor)
    ]
    if odd:
        raise DataError(
            f"{str(path)!r} is no state dict: {', '.join(map(repr, odd[:5]))} "
            f"{'is no tensor' if len(odd) == 1 else 'are no tensors'}. If one of these "
            "is the state dict, save that alone."
        )
    weights = {name: value.detach() for name, value in found.items()}
    for name, value in weights.items():
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise DataError(
                f"{str(path)!r} has {name} as a sparse, quantized or meta tensor: "
                "weights are dense ones."
            )
    return weights


def _checked(path: PathLike, others: Sequence[str] = ()) -> Path:
    """The path, which must end in `.safetensors` or one of the other suffixes."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{path!r} is no path: give a str or a pathlib.Path.")
    target = Path(path)
    if target.suffix not in (SUFFIX, *others):
        raise ConfigError(
            f"Weights are kept in safetensors files, and {str(path)!r} doesn't end in "
            f"{SUFFIX}: name it {str(target.with_suffix(SUFFIX))!r}."
        )
    return target
