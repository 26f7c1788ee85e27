# SPDX-License-Identifier: Apache-2.0
"""The files that `PoplarExecutor.save` writes, and that are loaded again.

PopTorch's files hold executables. There are none here: compiling is tracing, which
runs the module's Python, so a file holds what a trace needs, and loading traces again.

A file is a ZIP archive, uncompressed, of

- `metadata.json`, which can be read without running anything.
- `arguments.pt`: the arguments of one micro-batch, by `torch.save`.
- `model.pt`, unless it was left out: options, module and optimiser, by `torch.save`.

The last two are pickles: reading them can run any code that whoever wrote the file
put there.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import zipfile
from typing import Any, Mapping, Union

import torch
from torch import Tensor

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._ground.switches import __version__
from ipufit.emulator.errors import Error, createPoptorchError

PathLike = Union[str, "os.PathLike[str]"]

ARGUMENTS = "arguments.pt"
MODEL = "model.pt"
_METADATA = "metadata.json"
_FORMAT = {
    "format": "ipufit.emulator executable",
    "format_version": 3,  # with each move of a class that is pickled
}
_KEYS = {
    "poptorch_version",  # only this version of the emulator reads the file
    "torch_version",
    "is_training",
    "has_model",  # whether there is a `model.pt`
    "micro_batches",  # of one call
    "arguments",  # shape and dtype of each tensor of one call
    "weights",  # shape and dtype of each parameter and buffer, by name
    "rng_state",  # None if it wasn't saved
}
_DEFAULT_NAME = "model.poptorch"


def describe(tensor: Tensor) -> dict[str, Any]:
    """Describe a tensor for metadata.

    Example:
        >>> describe(torch.zeros(2, 3))
        {'shape': [2, 3], 'dtype': 'torch.float32'}
    """
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}


def write_executable(
    filename: PathLike, metadata: Mapping[str, Any], members: Mapping[str, Any]
) -> None:
    """Write a file of a compiled model, whole or not at all.

    Args:
        filename: An existing file is replaced at the end. Missing folders are made. If
            it is a folder, the file is `model.poptorch` in it.
        metadata: Values of `_KEYS`; those of the versions and `has_model` are added.
        members: Objects to pickle, by the names of their members.

    Raises:
        OSError: The file can't be written.
    """
    path = os.fspath(filename)
    if os.path.isdir(path):
        inside = os.path.join(path, _DEFAULT_NAME)
        logger.warning("%s is a folder: the model is saved to %s.", path, inside)
        path = inside
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    values = {
        **_FORMAT,
        "poptorch_version": __version__,
        "torch_version": torch.__version__,
        "has_model": MODEL in members,
        **metadata,
    }
    # A name that nobody can guess, and a file that is new: a link is never followed.
    partial = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr(_METADATA, json.dumps(values))
                for member, value in members.items():
                    with archive.open(member, "w", force_zip64=True) as stream:
                        torch.save(value, stream)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


class ExecutableFile:
    """A file that `write_executable` wrote, with its metadata read.

    Attributes:
        contents: The metadata, a JSON document.
        metadata: The values of `_KEYS`.

    Raises:
        Error: The file is another one, or broken.
        OSError: It can't be read.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        self.contents = self._read(_METADATA)
        try:
            self.metadata = json.loads(self.contents)
        except ValueError as error:
            raise self.invalid(str(error)) from error
        versions = {}
        if isinstance(self.metadata, dict):
            versions = {key: self.metadata.pop(key, None) for key in _FORMAT}
        if versions.get("format") != _FORMAT["format"]:
            raise self.invalid("it isn't a file of the emulator")
        if versions != _FORMAT:
            raise self.invalid(
                f"its format has version {versions['format_version']}, and this is "
                f"version {_FORMAT['format_version']}: compile the model anew"
            )
        if self.metadata.keys() != _KEYS:
            names = sorted(self.metadata.keys() ^ _KEYS)
            raise self.invalid(f"its metadata differ in {', '.join(names)}")

    def invalid(self, reason: str) -> Error:
        """Return the error that says why the file can't be used."""
        return createPoptorchError(f"Invalid file {self.path}: {reason}.")

    @property
    def other_version(self) -> str:
        """Name the other version of the emulator that wrote the file, or ""."""
        version = self.metadata["poptorch_version"]
        if version == __version__:
            return ""
        return f"it was written by version {version}, and this is version {__version__}"

    def check(self, weights: Mapping[str, Tensor], *, is_training: bool) -> None:
        """Refuse a file of another version, kind of model, or set of weights.

        Raises:
            Error: The file is one.
        """
        if self.other_version:
            raise self.invalid(self.other_version)
        there = self.metadata["is_training"]
        if there != is_training:
            kinds = {True: "training", False: "inference"}
            raise self.invalid(
                f"it was compiled for {kinds[there]}, and this model is for "
                f"{kinds[is_training]}"
            )
        saved = self.metadata["weights"]
        own = {name: describe(weight) for name, weight in weights.items()}
        for name in {**saved, **own}:
            one, other = saved.get(name, "missing"), own.get(name, "missing")
            if one != other:
                raise self.invalid(
                    "it was compiled for a module with other parameters or buffers: "
                    f"{name} is {one} there and {other} here"
                )

    def load(self, member: str) -> Any:
        """Unpickle a member of the file; only for files that are trusted.

        Raises:
            Error: The member is missing or broken.
        """
        return torch.load(
            io.BytesIO(self._read(member)), map_location="cpu", weights_only=False
        )

    def _read(self, member: str) -> bytes:
        with open(self.path, "rb") as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    return archive.read(member)
            except Exception as error:
                reason = f"it isn't a file of the emulator, or is broken ({error})"
                raise self.invalid(reason) from error


def importPoptorchMetadataFromFile(filename: PathLike) -> bytes:
    """Read the metadata of a saved executor; nothing is unpickled.

    Args:
        filename: File of `PoplarExecutor.save` or `compileAndExport`.

    Returns:
        A JSON document: versions, the kind of model, shapes of arguments and weights.
        In PopTorch it is a pickle.

    Raises:
        Error: The file is another one, or broken.
        OSError: The file can't be read.

    Example:
        >>> import json, os, tempfile
        >>> from ipufit.emulator import inferenceModel
        >>> inference = inferenceModel(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "linear.poptorch")
        ...     inference.compileAndExport(path, torch.ones(4, 2))
        ...     metadata = json.loads(importPoptorchMetadataFromFile(path))
        >>> metadata["arguments"]
        [{'shape': [4, 2], 'dtype': 'torch.float32'}]
    """
    return ExecutableFile(filename).contents
