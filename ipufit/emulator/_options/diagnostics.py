# SPDX-License-Identifier: Apache-2.0
"""The setters of `Options` about logs, names and profiles."""

from __future__ import annotations

import logging
import os
from typing import TypeVar

from ipufit.emulator._options.state import OptionsState

logger = logging.getLogger("poptorch::python")

_OptionsT = TypeVar("_OptionsT", bound="DiagnosticOptions")

_NO_LIMIT = 2**64 - 1


class DiagnosticOptions(OptionsState):
    """Setters for what is logged and measured."""

    def logDir(self: _OptionsT, log_dir: str) -> _OptionsT:
        """Choose where logs are written.

        Args:
            log_dir: A directory.

        Returns:
            The options.

        Raises:
            AssertionError: If it isn't a str.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().logDir("logs").log_dir
            'logs'
        """
        self.set(log_dir=log_dir)
        return self

    def maxRepeatLogs(self: _OptionsT, max_lines: int | None) -> _OptionsT:
        """Limit how often the same line is logged.

        Args:
            max_lines: How often; None for no limit, stored as 2**64 - 1.

        Returns:
            The options.

        Raises:
            AssertionError: If it is neither an int nor None.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().maxRepeatLogs(2).max_repeat_logs
            2
        """
        self.set(max_repeat_logs=_NO_LIMIT if max_lines is None else max_lines)
        return self

    def modelName(self: _OptionsT, name: str) -> _OptionsT:
        """Name the model in profiles; by default "training" or "inference".

        Args:
            name: The name.

        Returns:
            The options.

        Raises:
            AssertionError: If a later call's type differs from the first's.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().modelName("net").model_name
            'net'
        """
        self.createOrSet(model_name=name)
        return self

    def enableProfiling(self: _OptionsT, profile_dir: str | None = None) -> _OptionsT:
        """Write Poplar profiles.

        The engine options needed are added to those already set.

        Args:
            profile_dir: Where to; the working directory by default.

        Returns:
            The options.

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
        """Count the cycles of each call, on hardware only.

        `PoplarExecutor.cycleCount` gives the last count.

        Args:
            log_cycle_count: Whether to.

        Returns:
            The options.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().logCycleCount(True)
        """
        self._popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def showCompilationProgressBar(self: _OptionsT, show: bool = True) -> _OptionsT:
        """Show how far compiling is.

        Args:
            show: Whether to.

        Returns:
            The options.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().showCompilationProgressBar(False)
        """
        self._show_compilation_progress_bar = show
        return self

    def sourceLocationExcludes(self: _OptionsT, excludes: list[str]) -> _OptionsT:
        """Choose the paths that are skipped when an operation's line is looked up.

        Args:
            excludes: Parts of paths; they replace the present ones.

        Returns:
            The options.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().sourceLocationExcludes(["site-packages/torch"])
        """
        self._source_location_excludes = excludes
        return self

    def appendToLocationExcludes(self: _OptionsT, *excludes: str) -> _OptionsT:
        """Skip more paths when an operation's line is looked up.

        Args:
            excludes: Parts of paths.

        Returns:
            The options.

        Raises:
            AttributeError: If the options are frozen; as in PopTorch, the
                paths are added nevertheless.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().appendToLocationExcludes("my_layers")
        """
        self._source_location_excludes.extend(excludes)
        self.checkIsFrozen()
        return self

    def disableModuleNamescope(self: _OptionsT) -> _OptionsT:
        """Don't put the modules' names into those of operations.

        Returns:
            The options.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().disableModuleNamescope()
        """
        self._module_namescope_enabled = False
        return self
