# SPDX-License-Identifier: Apache-2.0
"""Saves executors to files, and compiles them from files."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from ipufit.emulator._executor.executable import Executable
from ipufit.emulator._executor.executable_file import (
    ARGUMENTS,
    MODEL,
    ExecutableFile,
    Metadata,
    PathLike,
    describe,
    write_executable_file,
)
from ipufit.emulator._executor.lifecycle import Lifecycle
from ipufit.emulator._executor.model_state import ModelState
from ipufit.emulator._executor.optimizer_sync import OptimizerSync
from ipufit.emulator._executor.random_state import RandomState
from ipufit.emulator._executor.weights_to_host import WeightsToHost
from ipufit.emulator._ground.version import __version__
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._program.args import CallArguments
from ipufit.emulator._tracing.recording import named_weights
from ipufit.emulator.errors import createPoptorchError

logger = logging.getLogger("poptorch::python")

_DEFAULT_NAME = "model.poptorch"


class Saving:
    """Saves an executor to a file, and compiles from one."""

    def __init__(
        self,
        state: ModelState,
        lifecycle: Lifecycle,
        to_host: WeightsToHost,
        optimizer: OptimizerSync,
        random: RandomState,
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._to_host = to_host
        self._optimizer = optimizer
        self._random = random

    def save(
        self,
        filename: PathLike,
        export_model: bool = True,
        save_rng_state: bool = True,
    ) -> None:
        """Write the compiled model to a file.

        On a pod the file holds the executable, so that loading compiles nothing. The
        emulator has none: a file holds what to trace, and loading traces it again.

        Args:
            filename: Path of the file; its folders are created. If it is a folder that
                exists, the file is `model.poptorch` in it.
            export_model: Whether module, options and optimiser are pickled into the
                file too; `poptorch.load` needs them.
            save_rng_state: Whether the random state of the device is saved.

        Raises:
            Error: Not compiled, or no part of the model runs on an IPU.
            OSError: The file can't be written.

        Example:
            >>> import os, tempfile
            >>> from ipufit.emulator import inferenceModel, load
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> before = inference(torch.ones(4, 2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "linear.poptorch")
            ...     inference.save(path)
            ...     loaded = load(path)
            >>> torch.equal(loaded(torch.ones(4, 2)), before)
            True
        """
        executable = self._state.require_compiled()
        if not executable.program.runs_anything:
            raise createPoptorchError(
                "Nothing to export: no part of this model runs on an IPU."
            )
        rng_state = self._random.read()
        metadata = Metadata(
            poptorch_version=__version__,
            torch_version=torch.__version__,
            is_training=self._state.is_training,
            has_model=export_model,
            micro_batches=Layout.from_options(self._state.options).input_blocks,
            arguments=[describe(tensor) for tensor in executable.arguments.tensors()],
            weights=self._described_weights(),
            rng_state=rng_state if save_rng_state else None,
        )
        members: dict[str, Any] = {ARGUMENTS: _given_arguments(executable)}
        if export_model:
            members[MODEL] = self._model_to_save()
        write_executable_file(_prepare_path(filename), metadata, members)

    def loadExecutable(self, filename: PathLike) -> None:
        """Compile from a file, for the arguments it was compiled for.

        The weights are those of this executor's module. A compiled executor ignores
        the file with a warning, as `compile` does.

        The arguments in the file are pickled: load only files that you trust.

        Args:
            filename: File of `save` or `compileAndExport` of such a model.

        Raises:
            Error: The file is another one or broken, was written by another version of
                the emulator or for another model; or compiling fails.
            OSError: The file can't be read.

        Example:
            >>> import os, tempfile
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "linear.poptorch")
            ...     inference.compileAndExport(
            ...         path, torch.ones(4, 2), export_model=False
            ...     )
            ...     other = inferenceModel(torch.nn.Linear(2, 1))
            ...     other.loadExecutable(path)
            >>> other.isCompiled()
            True
        """
        if self._state.isCompiled():
            logger.warning(
                "Call to loadExecutable() ignored: the executable is already compiled"
            )
            return
        self.load(ExecutableFile(filename))

    def load(self, file: ExecutableFile) -> None:
        """Compile from a file for an executor that isn't compiled.

        Raises:
            Error: The file is of another version or model, or compiling fails.
        """
        metadata = file.metadata
        if metadata.poptorch_version != __version__:
            raise file.invalid(describe_versions(metadata))
        if metadata.is_training != self._state.is_training:
            kinds = {True: "training", False: "inference"}
            raise file.invalid(
                f"it was compiled for {kinds[metadata.is_training]}, and this model "
                f"is for {kinds[self._state.is_training]}"
            )
        weights = self._described_weights()
        if metadata.weights != weights:
            raise file.invalid(
                "it was compiled for a module with other parameters or buffers: "
                f"{_first_difference(metadata.weights, weights)}"
            )
        saved = CallArguments(*file.load(ARGUMENTS))
        # These options may take more micro-batches than those of the saved model.
        count = Layout.from_options(self._state.options).input_blocks
        self._lifecycle.compile_for(
            saved.with_tensors(
                torch.cat([rows] * count) if count > 1 else rows  # 0-d if count is 1
                for rows in saved.tensors()
            )
        )

    def _described_weights(self) -> dict[str, dict[str, Any]]:
        weights = named_weights(self._state.model)
        return {name: describe(weight) for name, weight in weights.items()}

    def _model_to_save(self) -> dict[str, Any]:
        self._to_host.copyWeightsToHostIfNeeded()
        self._optimizer.read()
        link = self._optimizer.link
        return {
            "options": self._state.options,
            "model": self._state.user_model,
            "optimizer": None if link is None else link.optimizer,
            "groupings": self._state.grouped_parameters.by_name(self._state.user_model),
        }


def _given_arguments(executable: Executable) -> tuple[Any, Any]:
    """Arguments of one micro-batch, in the types in which the caller gave them."""
    rows = executable.first_micro_batch
    pairs = zip(rows.tensors(), executable.arguments.tensors())
    given = rows.with_tensors(row.to(like.dtype) for row, like in pairs)
    return given.args, given.kwargs


def describe_versions(metadata: Metadata) -> str:
    """Say for an error which versions don't match."""
    return (
        f"it was written by version {metadata.poptorch_version}, and this is version "
        f"{__version__}"
    )


def _prepare_path(filename: PathLike) -> str:
    path = os.fspath(filename)
    if os.path.isdir(path):
        inside = os.path.join(path, _DEFAULT_NAME)
        logger.warning("%s is a folder: the model is saved to %s.", path, inside)
        return inside
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    return path


def _first_difference(expected: dict[str, Any], got: dict[str, Any]) -> str:
    for name in {**expected, **got}:
        if expected.get(name) != got.get(name):
            return (
                f"{name} is {expected.get(name, 'missing')} there and "
                f"{got.get(name, 'missing')} here"
            )
    return "they come in another order"
