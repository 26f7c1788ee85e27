# SPDX-License-Identifier: Apache-2.0
"""PopTorch's cache of executables, and its rules."""

from __future__ import annotations

import functools
import os

from ipufit.emulator._ground.checks import require
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._options.options import Options


def check_executable_cache(options: Options) -> None:
    """Say if caching is on, since nothing is cached, and check a shared folder.

    PopTorch saves compiled code, and of several processes lets one compile first.
    Here compiling is tracing, which runs the module's Python in each process.

    Raises:
        AssertionError: Several processes share a folder that can't be written to.

    Example:
        >>> check_executable_cache(Options().enableExecutableCaching("cache"))
    """
    popart = options._Popart.options
    folder = popart.get("cachePath") if popart.get("enableEngineCaching") else None
    if folder is not None:
        _say_that_nothing_is_cached()
    if options.Distributed.numProcesses == 1:
        return
    if folder is None:
        if options.Distributed.processId == 0:  # PopTorch says so in each process
            logger.warning(
                "Options.enableExecutableCaching isn't set: on a pod each of the %d "
                "processes would compile the model for itself.",
                options.Distributed.numProcesses,
            )
        return
    require(
        _is_writable(str(folder)),
        f"The cache of executables, {folder}, can't be written to: several processes "
        "share it, so Options.enableExecutableCaching needs a folder that they can "
        "write to.",
    )


@functools.lru_cache(maxsize=None)
def _say_that_nothing_is_cached() -> None:
    logger.info(
        "Executable caching is on, but there are no executables: the emulator traces "
        "every model anew and writes nothing into the cache."
    )


def _is_writable(folder: str) -> bool:
    """Whether files can be made in a folder, or the folder itself."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK)
