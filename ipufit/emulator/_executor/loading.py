# SPDX-License-Identifier: Apache-2.0
"""Loads executors, or their metadata only, from files."""

from __future__ import annotations

from typing import Any, Callable

from ipufit.emulator._executor.executable_file import MODEL, ExecutableFile, PathLike
from ipufit.emulator._executor.executor import PoplarExecutor
from ipufit.emulator._executor.models import inferenceModel, trainingModel
from ipufit.emulator._executor.saving import describe_versions
from ipufit.emulator._ground.checks import require
from ipufit.emulator._ground.version import __version__
from ipufit.emulator._options.options import Options
from ipufit.emulator.enums import ConnectionType


def load(
    filename: PathLike, edit_opts_fn: Callable[[Options], Any] | None = None
) -> PoplarExecutor:
    """Restore an executor that was saved with its model.

    It is compiled, and attached unless the options say `OnDemand`; an offline target
    becomes a device. Weights, optimiser and random state are those of the file. An
    executor from a file is linked to no other: an inference model doesn't follow a
    training model that was loaded beside it.

    The file is unpickled, as by `torch.load`, and that can run any code: load only
    files that you trust. `importPoptorchMetadataFromFile` unpickles nothing.

    Args:
        filename: File of `PoplarExecutor.save` or `compileAndExport`.
        edit_opts_fn: Called with the options, to change them. The model is traced
            again, so all changes count here; on a pod only run-time options do.

    Raises:
        AssertionError: The file was written by another version of the emulator, or
            with `export_model=False`.
        Error: The file is another one or broken, or compiling fails.
        OSError: The file can't be read.

    Example:
        >>> import os, tempfile, torch
        >>> inference = inferenceModel(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "linear.poptorch")
        ...     inference.compileAndExport(path, torch.ones(4, 2))
        ...     loaded = load(path, lambda options: options.useIpuId(7))
        >>> loaded.options.ipu_id, loaded.isAttachedToDevice()
        (7, True)
    """
    file = ExecutableFile(filename)
    metadata = file.metadata
    require(
        metadata.poptorch_version == __version__,
        f"Invalid file {file.path}: {describe_versions(metadata)}.",
    )
    require(
        metadata.has_model,
        f"{file.path} was written with export_model=False. Wrap the module with "
        "trainingModel or inferenceModel, and call loadExecutable of that.",
    )
    saved = file.load(MODEL)
    options = saved["options"]
    options._unfreeze()
    options.deleteIfExists("ipu_version")
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    if metadata.is_training:
        executor = trainingModel(saved["model"], options, saved["optimizer"])
    else:
        executor = inferenceModel(saved["model"], options)
    executor._state.grouped_parameters.add_by_name(executor.model, saved["groupings"])
    executor._saving.load(file)
    if metadata.rng_state is not None:
        executor.rng_state = metadata.rng_state
    return executor


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
        >>> import json, os, tempfile, torch
        >>> inference = inferenceModel(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "linear.poptorch")
        ...     inference.compileAndExport(path, torch.ones(4, 2))
        ...     metadata = json.loads(importPoptorchMetadataFromFile(path))
        >>> metadata["arguments"]
        [{'shape': [4, 2], 'dtype': 'torch.float32'}]
    """
    return ExecutableFile(filename).metadata.to_json()
