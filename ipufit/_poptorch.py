# SPDX-License-Identifier: Apache-2.0
"""The seam: the only module that decides which PopTorch there is.

The installed PopTorch if there is one, else `ipufit.emulator`, which keeps the same
contract; `IPUFIT_BACKEND` can insist on either. A PopTorch that is installed but
broken raises its own error: nobody who asked for IPUs is emulated silently.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

from . import _env
from .errors import ConfigError, UnsupportedError

logger = logging.getLogger("ipufit")

if TYPE_CHECKING:
    import ipufit.emulator as poptorch
else:
    _wanted = _env.backend()
    if _wanted == "emulator":
        import ipufit.emulator as poptorch

        logger.info("Running on ipufit.emulator, as IPUFIT_BACKEND asks.")
    else:
        try:
            import poptorch  # noqa: TID251 - the one module that may

            logger.info("Running on PopTorch %s.", poptorch.__version__)
        except ModuleNotFoundError as error:
            if _wanted == "poptorch" or error.name != "poptorch":
                raise
            import ipufit.emulator as poptorch

            logger.warning(
                "PopTorch is not installed: running on ipufit.emulator, on this "
                "machine's processor. Set IPUFIT_BACKEND=emulator to choose it, or "
                "IPUFIT_BACKEND=poptorch to insist on IPUs."
            )


@functools.lru_cache(maxsize=None)
def popdist() -> Any:
    """PopDist, initialised: that of the SDK beside PopTorch, or the emulated one.

    It is imported for processes that PopRun has started, and not before.

    Raises:
        ConfigError: PopTorch is installed without PopDist.
    """
    if poptorch.__name__ == "poptorch":
        try:
            importlib.import_module("popdist.poptorch")  # no attribute before
        except ModuleNotFoundError as error:
            if error.name not in ("popdist", "popdist.poptorch"):
                raise
            raise ConfigError(
                "PopRun has started this process (POPDIST_* variables are set), and "
                "PopDist isn't installed beside PopTorch: install the popdist wheel of "
                "the Poplar SDK, or unset the variables."
            ) from error
        module = importlib.import_module("popdist")
    else:
        module = importlib.import_module("ipufit.emulator._popdist")
    module.init()
    return module


def survey() -> Any:
    """The emulator's `survey`: what PopTorch refuses in a program, all at once.

    It is the emulator's by nature: PopTorch ends a trace at the first refusal, and
    compiles for minutes what it doesn't refuse. A program has the functions of the back
    end that its process has chosen, so where that is PopTorch it can't be surveyed.

    Raises:
        UnsupportedError: This process runs on PopTorch itself.
    """
    if poptorch.__name__ == "poptorch":
        raise UnsupportedError(
            "A model is checked by the emulator's rules, and this process runs on "
            "PopTorch: run `ipufit check script.py`, which starts one of its own, or "
            "set IPUFIT_BACKEND=emulator for this one."
        )
    return importlib.import_module("ipufit.emulator._executor.survey").survey


def emulate_everywhere() -> None:
    """Have `import poptorch` find the emulator too, in this process and its children.

    A command that surveys a script does so, because the script may import PopTorch
    itself, whose functions the emulator wouldn't see.
    """
    importlib.import_module("ipufit.emulator").install()


__all__ = ["emulate_everywhere", "popdist", "poptorch", "survey"]
