# SPDX-License-Identifier: Apache-2.0
"""The files that `PoplarExecutor.save` writes.

PopTorch's files hold machine code. There is none here: compiling is tracing, which
runs the module's Python, so a file holds what a trace needs, and loading traces again.

A file is a ZIP archive, uncompressed, of

- `metadata.json`, which can be read without running anything. Its keys are those of
  `Metadata`.
- `arguments.pt`: the arguments of one micro-batch, by `torch.save`.
- `model.pt`, unless it was left out: options, module and optimiser, by `torch.save`.

The last two are pickles: reading them can run any code that whoever wrote the file
put there.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import lzma
import os
import zipfile
import zlib
from dataclasses import dataclass
from typing import IO, Any, Dict, Mapping, Union

import torch

from ipufit.emulator._ground.version import __version__
from ipufit.emulator.errors import Error, createPoptorchError

logger = logging.getLogger("poptorch::python")

PathLike = Union[str, "os.PathLike[str]"]
TensorDescription = Dict[str, Any]

ARGUMENTS = "arguments.pt"
MODEL = "model.pt"
_METADATA = "metadata.json"
_DEFAULT_NAME = "model.poptorch"
_FORMAT = "ipufit.emulator executable"
_FORMAT_VERSION = 2  # with each move of a class that is pickled

# What `zipfile` raises for files that are no archives, broken ones (it seeks where they
# point to), and ones with features that we never write. It checks the sum of what it
# reads, so nothing broken is unpickled.
_BROKEN = (
    zipfile.BadZipFile,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    ValueError,
    # A flipped bit may say that members are compressed, which they never are.
    lzma.LZMAError,
    zlib.error,
)


@dataclass(frozen=True)
class Metadata:
    """The contents of `metadata.json`.

    Attributes:
        poptorch_version: Version of the emulator that wrote the file, the only one
            that reads it.
        torch_version: Version of torch that wrote the file.
        is_training: Whether the program trains.
        has_model: Whether options, module and optimiser are in the file.
        micro_batches: Number of micro-batches in one call.
        arguments: Shape and dtype of each tensor of one call.
        weights: Shape and dtype of each parameter and buffer.
        rng_state: The random state, or None.
    """

    poptorch_version: str
    torch_version: str
    is_training: bool
    has_model: bool
    micro_batches: int
    arguments: list[TensorDescription]
    weights: dict[str, TensorDescription]
    rng_state: list[int] | None

    def to_json(self) -> bytes:
        """Encode the metadata."""
        values = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            **dataclasses.asdict(self),
        }
        return json.dumps(values).encode("utf-8")

    @classmethod
    def from_json(cls, contents: bytes) -> Metadata:
        """Decode what `to_json` has encoded.

        Raises:
            ValueError: `contents` is something else, or of another format version.
        """
        values = json.loads(contents)
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise ValueError("it isn't a file of the emulator")
        version = values.pop("format_version", None)
        if version != _FORMAT_VERSION:
            raise ValueError(
                f"its format has version {version}, and this is version "
                f"{_FORMAT_VERSION}: compile the model anew"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        if values.keys() != names:
            raise ValueError(
                f"its metadata differ in {', '.join(sorted(values.keys() ^ names))}"
            )
        return cls(**values)


def describe(tensor: torch.Tensor) -> TensorDescription:
    """Describe a tensor for metadata.

    Example:
        >>> describe(torch.zeros(2, 3))
        {'shape': [2, 3], 'dtype': 'torch.float32'}
    """
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}


class ExecutableFile:
    """A file that `write_executable_file` has written.

    Raises:
        Error: The file is another one, or broken.
        OSError: It can't be read.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        contents = self._read(_METADATA)
        try:
            self.metadata = Metadata.from_json(contents)
        except ValueError as error:
            raise self.invalid(str(error)) from error

    def load(self, member: str) -> Any:
        """Unpickle a member: only of files that you trust.

        Raises:
            Error: The member is missing or broken.
        """
        return torch.load(
            io.BytesIO(self._read(member)),
            map_location="cpu",
            weights_only=False,
        )

    def invalid(self, reason: str) -> Error:
        """Make the error that says why the file can't be used."""
        return createPoptorchError(f"Invalid file {self.path}: {reason}.")

    def _read(self, member: str) -> bytes:
        with open(self.path, "rb") as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    return archive.read(member)
            except _BROKEN as error:
                reason = f"it isn't a file of the emulator, or is broken ({error})"
                raise self.invalid(reason) from error


def write_executable_file(
    filename: PathLike, metadata: Metadata, members: Mapping[str, Any]
) -> None:
    """Write a file, whole or not at all.

    Args:
        filename: An existing file is replaced at the end; in an existing folder the
            file is `model.poptorch`.
        metadata: Contents of `metadata.json`.
        members: Objects to pickle, by the names of their members.

    Raises:
        OSError: The file can't be written.
    """
    path = _prepare_path(filename)
    folder, name = os.path.split(os.path.abspath(path))
    partial = os.path.join(folder, f".{name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            _write_archive(file, metadata, members)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


def _write_archive(
    file: IO[bytes], metadata: Metadata, members: Mapping[str, Any]
) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_METADATA, metadata.to_json())
        for member, value in members.items():
            with archive.open(member, "w", force_zip64=True) as stream:
                torch.save(value, stream)


def _prepare_path(filename: PathLike) -> str:
    path = os.fspath(filename)
    if os.path.isdir(path):
        inside = os.path.join(path, _DEFAULT_NAME)
        logger.warning("%s is a folder: the model is saved to %s.", path, inside)
        return inside
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    return path


def describe_versions(metadata: Metadata) -> str:
    """Say for an error which versions don't match."""
    return (
        f"it was written by version {metadata.poptorch_version}, and this is version "
        f"{__version__}"
    )


def first_difference(expected: dict[str, Any], got: dict[str, Any]) -> str:
    for name in {**expected, **got}:
        if expected.get(name) != got.get(name):
            return (
                f"{name} is {expected.get(name, 'missing')} there and "
                f"{got.get(name, 'missing')} here"
            )
    return "they come in another order"
