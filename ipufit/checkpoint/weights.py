# SPDX-License-Identifier: Apache-2.0
"""Weights in one safetensors file, under the user's own parameter names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Mapping, Union

from safetensors import SafetensorError  # type: ignore[attr-defined,unused-ignore]
from safetensors.torch import load_file
from torch import Tensor

from ipufit.errors import ConfigError, DataError

from .atomic import replace_file
from .tensors import check_tensors, tensor_parts

PathLike = Union[str, "os.PathLike[str]"]
SUFFIX = ".safetensors"


def save_weights(weights: Mapping[str, Tensor], path: PathLike) -> None:
    """Write weights to a file, or leave the old file whole.

    It is written beside its target, synced and then renamed. Tied weights are written
    under each of their names.

    Args:
        weights: Tensors by name.
        path: Ends in `.safetensors`; its folder is made if it isn't there.

    Raises:
        ConfigError: The path ends in something else.
        UnsupportedError: A tensor is sparse, or of a dtype that safetensors lacks.
        OSError: It can't be written.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_weights({"w": torch.ones(2)}, f"{folder}/a.safetensors")
        ...     load_weights(f"{folder}/a.safetensors")["w"]
        tensor([1., 1.])
    """
    target = _checked(path)
    check_tensors(weights, "weights")
    replace_file(target, tensor_parts(weights))


def load_weights(path: PathLike) -> dict[str, Tensor]:
    """Read what `save_weights` wrote, or any other safetensors file.

    Args:
        path: Ends in `.safetensors`.

    Returns:
        Tensors by name.

    Raises:
        ConfigError: The path ends in something else.
        DataError: The file is damaged.
        FileNotFoundError: There is none.
    """
    target = _checked(path)
    if not target.exists():
        raise FileNotFoundError(f"There is no file {str(target)!r} to load.")
    try:
        weights: dict[str, Tensor] = load_file(str(target))
    except SafetensorError as error:
        raise DataError(
            f"{str(target)!r} is no whole safetensors file ({error}). Use another copy."
        ) from error
    return weights


def _checked(path: PathLike) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{path!r} is no path: give a str or a pathlib.Path.")
    target = Path(path)
    if target.suffix != SUFFIX:
        raise ConfigError(
            f"Weights are kept in safetensors files, and {str(path)!r} doesn't end in "
            f"{SUFFIX}: name it {str(target.with_suffix(SUFFIX))!r}."
        )
    return target
