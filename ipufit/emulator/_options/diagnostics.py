# SPDX-License-Identifier: Apache-2.0
"""Setters of `Options` for logs, names and profiles."""

from __future__ import annotations

import os
from typing import TypeVar

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._options.state import OptionsState

_OptionsT = TypeVar("_OptionsT", bound="DiagnosticOptions")

_NO_LIMIT = 2**64 - 1


class DiagnosticOptions(OptionsState):
    """Setters for what is logged and measured."""

    def logDir(self: _OptionsT, log_dir: str) -> _OptionsT:
        """Choose the directory that logs are written to.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().logDir("logs").log_dir
            'logs'
        """
        return self._store(log_dir=log_dir)

    def maxRepeatLogs(self: _OptionsT, max_lines: int | None) -> _OptionsT:
        """Limit how often the same line is logged.

        Args:
            max_lines: None for no limit, stored as 2**64 - 1.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().maxRepeatLogs(2).max_repeat_logs
            2
        """
        return self._store(
            max_repeat_logs=_NO_LIMIT if max_lines is None else max_lines
        )

    def modelName(self: _OptionsT, name: str) -> _OptionsT:
        """Name the model in profiles; by default "training" or "inference".

        Raises:
            AssertionError: If a second name has another type than the first.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().modelName("net").model_name
            'net'
        """
        return self._store(model_name=name)

    def enableProfiling(self: _OptionsT, profile_dir: str | None = None) -> _OptionsT:
        """Have Poplar write profiles to a directory, by default the working one.

        The engine options for it are added to those already set.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().enableProfiling("profile")
            >>> options._Popart.options["engineOptions"]["autoReport.directory"]
            'profile'
        """
        engine_options = {
            "debug.allowOutOfMemory": "true",
            "autoReport.directory": profile_dir or ".",
            "autoReport.all": "true",
        }
        environment = os.environ.get("POPLAR_ENGINE_OPTIONS", "")
        overridden = [name for name in engine_options if name in environment]
        if overridden:
            logger.warning(
                "POPLAR_ENGINE_OPTIONS overrides what enableProfiling sets: %s.",
                ", ".join(overridden),
            )
        earlier = self._popart.options.get("engineOptions", {})
        self._popart.setEngineOptions({**earlier, **engine_options})
        return self

    def logCycleCount(self: _OptionsT, log_cycle_count: bool) -> _OptionsT:
        """Choose whether to count the cycles of each call, on hardware only.

        `PoplarExecutor.cycleCount` returns the last count.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().logCycleCount(True)
        """
        self._popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def showCompilationProgressBar(self: _OptionsT, show: bool = True) -> _OptionsT:
        """Choose whether compiling shows a progress bar.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().showCompilationProgressBar(False)
        """
        self._show_compilation_progress_bar = show
        return self

    def sourceLocationExcludes(self: _OptionsT, excludes: list[str]) -> _OptionsT:
        """Replace the paths that the search for an operation's source line skips.

        Args:
            excludes: Parts of paths.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().sourceLocationExcludes(["site-packages/torch"])
        """
        self._source_location_excludes = excludes
        return self

    def appendToLocationExcludes(self: _OptionsT, *excludes: str) -> _OptionsT:
        """Add paths that the search for an operation's source line skips.

        Args:
            excludes: Parts of paths.

        Raises:
            AttributeError: If the options are frozen. As in PopTorch, the paths
                are added nevertheless.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().appendToLocationExcludes("my_layers")
        """
        self._source_location_excludes.extend(excludes)
        self.checkIsFrozen()
        return self

    def disableModuleNamescope(self: _OptionsT) -> _OptionsT:
        """Leave the modules' names out of those of operations.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().disableModuleNamescope()
        """
        self._module_namescope_enabled = False
        return self
