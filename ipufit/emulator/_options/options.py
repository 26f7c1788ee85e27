# SPDX-License-Identifier: Apache-2.0
"""`Options`: how a model is compiled and run.

Its setters are in `execution`, `device` and `diagnostics`, by subject.
"""

from __future__ import annotations

import copy
import os
from typing import Any, TypeVar

from ipufit.emulator._ground.checks import require
from ipufit.emulator._options.device import DeviceOptions
from ipufit.emulator._options.diagnostics import DiagnosticOptions
from ipufit.emulator._options.execution import ExecutionOptions
from ipufit.emulator._options.from_text import apply_config_file, apply_json

_OptionsT = TypeVar("_OptionsT", bound="Options")


class Options(ExecutionOptions, DeviceOptions, DiagnosticOptions):
    """Options for how a model is compiled and run (PopTorch user guide, "Options").

    Setters return the options, so that calls can be chained. Most of them raise
    `AssertionError` for an argument of another type than annotated. A data loader or
    a model freezes the options it is given: then setters raise `AttributeError`, and
    `clone` returns options that can be changed.

    New options read the environment: `POPTORCH_CACHE_DIR` (see
    `enableExecutableCaching`), `POPTORCH_DEFAULT_OPTIONS` (see `from_json`) and
    Open MPI's variables (see `Distributed`).

    Raises:
        json.JSONDecodeError: If `POPTORCH_DEFAULT_OPTIONS` is set, but not JSON.
        ValueError: If one of Open MPI's variables isn't an integer.

    Example:
        >>> from ipufit.emulator import Options, OutputMode
        >>> options = Options().deviceIterations(10).outputMode(OutputMode.All)
        >>> options.Training.gradientAccumulation(8).gradient_accumulation
        8
        >>> options.device_iterations
        10
    """

    def __init__(self) -> None:
        super().__init__()
        cache_dir = os.environ.get("POPTORCH_CACHE_DIR")
        if cache_dir:
            self.enableExecutableCaching(cache_dir)
        self.from_json(os.environ.get("POPTORCH_DEFAULT_OPTIONS", "{}"))

    def from_json(self: _OptionsT, string: str) -> _OptionsT:
        """Call the setters that a JSON object names.

        Args:
            string: Maps dotted names of setters to arguments. A list holds several
                arguments; `"OutputMode.All"`, outside a list, becomes the member.

        Raises:
            json.JSONDecodeError: If `string` isn't JSON.
            AttributeError: If there is no such setter.
            TypeError: If a name is that of a value instead of a setter.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().from_json(
            ...     '{"outputMode": "OutputMode.All", "deviceIterations": 3}'
            ... )
            >>> options.device_iterations
            3
        """
        apply_json(self, string)
        return self

    def loadFromFile(self: _OptionsT, filepath: str) -> _OptionsT:
        r"""Call the setters that a file lists, one per line.

        The file is executed as Python: use only files you trust.

        Args:
            filepath: Path of a file with lines such as `deviceIterations(5)` or
                `outputMode(poptorch.OutputMode.All)`. Lines that are blank or start
                with `#` are skipped.

        Raises:
            ConfigFileError: If a line isn't valid Python.
            FileNotFoundError: If there is no such file.

        Example:
            >>> import os, tempfile
            >>> from ipufit.emulator import Options
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "run.cfg")
            ...     with open(path, "w") as file:
            ...         _ = file.write("# short run\ndeviceIterations(5)\n")
            ...     Options().loadFromFile(path).device_iterations
            5
        """
        apply_config_file(self, filepath)
        return self

    def toDict(self) -> dict[str, Any]:
        """Merge all settings into those that the backend is given.

        Returns:
            Values by name: of the strategy, `_Popart`, these options and their
            sections, in this order. `_Popart` overrides the strategy.

        Raises:
            AssertionError: If the output mode is still `Default`, or a name
                occurs twice.

        Example:
            >>> from ipufit.emulator import Options, OutputMode
            >>> Options().outputMode(OutputMode.Final).toDict()["execution_mode"]
            0
        """
        require(
            not self.defaultOutputMode(),
            "An output mode must be picked first: outputMode(OutputMode.All).",
        )
        merged = {**self._execution_strategy.backendOptions(), **self._popart.options}
        for part in (self, self._training, self._distributed, self._tensor_locations):
            part.update(merged)
        if self._show_compilation_progress_bar:
            merged["compilation_progress_bar_fn"] = self._progress_bar
        return merged

    def clone(self: _OptionsT) -> _OptionsT:
        """Copy the options, strategy and sections included, into unfrozen ones.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().replicationFactor(2)
            >>> options.clone().replicationFactor(4).replication_factor
            4
            >>> options.replication_factor
            2
        """
        return copy.deepcopy(self)
