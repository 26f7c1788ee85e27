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
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from safetensors import (  # type: ignore[attr-defined,unused-ignore]
    SafetensorError,
    safe_open,
)
from safetensors.torch import load_file
from torch import Tensor

from ipufit._files import file_errors
from ipufit.errors import ConfigError, DataError, MissingCheckpointError
from ipufit.types import PathLike

from .atomic import replace_file
from .moment import AVERAGED_KEY, Moment
from .tensors import check_tensors, tensor_parts

SUFFIX = ".safetensors"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_ZIP = b"PK\x03\x04"
_IS_DIRECTORY = 0x10


def save_weights(
    weights: Mapping[str, Tensor],
    path: PathLike,
    *,
    moment: Moment | None = None,
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
    check_tensors(weights, "weights")
    more = {} if moment is None else moment.metadata()
    if averaged is not None:
        more[AVERAGED_KEY] = json.dumps(list(averaged))
    with file_errors("can't be written", target):
        replace_file(target, tensor_parts(weights, more))


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
    with file_errors("can't be read", target):
        if not target.exists():
            raise MissingCheckpointError(
                f"There is no file {str(target)!r} to load. Check the path."
            )
        with target.open("rb"):  # raises an OSError, which torch would put in words
            pass
        is_torchs = target.suffix in TORCH_SUFFIXES
        return _state_dict(target) if is_torchs else _of_safetensors(target)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, without its tensors.

    Raises:
        DataError: The file is damaged.
        MissingCheckpointError: There is no file.
        FileError: The file can't be read.
    """
    opened: Any = safe_open  # which has no types
    with file_errors("can't be read", path):
        if not path.exists():
            raise MissingCheckpointError(f"There is no file {str(path)!r} any more.")
        with path.open("rb"):  # raises an OSError, which safetensors would put in words
            pass
        try:
            with opened(str(path), framework="pt") as file:
                return dict(file.metadata() or {})
        except SafetensorError as error:
            raise _no_whole_file(path, error) from error


def _of_safetensors(target: Path) -> dict[str, Tensor]:
    try:
        weights: dict[str, Tensor] = load_file(str(target))
    except SafetensorError as error:
        raise _no_whole_file(target, error) from error
    return weights


def _no_whole_file(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{str(path)!r} is no whole safetensors file ({error}). Use another copy."
    )


def _state_dict(path: Path) -> dict[str, Tensor]:
    _check_is_zip_of_torch(path)
    try:
        with warnings.catch_warnings():  # torch 2.0 warns of its own TypedStorage
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")
            found: Any = torch.load(str(path), map_location="cpu", weights_only=True)
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


def _check_is_zip_of_torch(path: Path) -> None:
    """Refuse damaged files, and formats that aren't safe to load before torch 2.6.

    Those formats are the one from before torch 1.6, and TorchScript (CVE-2025-32434).
    torch doesn't look at the checksums of a zip file, so we do.
    """
    is_whole = is_script = False
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    if is_zip:
        with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
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
