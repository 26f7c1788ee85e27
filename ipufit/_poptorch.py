# SPDX-License-Identifier: Apache-2.0
"""Choose between PopTorch and the emulator; no other module does.

It takes the installed PopTorch if there is one, else `ipufit.emulator`, which keeps the
same contract; `IPUFIT_BACKEND` can insist on either. ipufit never silently emulates a
script that needs IPUs: a broken PopTorch raises its error, and a host with IPUs but
without PopTorch is refused.
"""

from __future__ import annotations

import functools
import importlib
import logging
import platform
import sys
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

            if poptorch.__spec__ is not None and poptorch.__spec__.origin is None:
                # A folder of this name on the path, without an `__init__.py`.
                raise ModuleNotFoundError("it is a folder only", name="poptorch")
            logger.info("Running on PopTorch %s.", poptorch.__version__)
        except ModuleNotFoundError as error:
            if error.name != "poptorch":
                raise
            signs = _env.signs_of_ipus()
            if signs or _wanted == "poptorch":
                reason = (
                    "IPUFIT_BACKEND=poptorch asks for PopTorch"
                    if _wanted == "poptorch"
                    else f"This host has IPUs ({', '.join(signs)})"
                )
                raise ConfigError(
                    f"{reason}, but the Python that runs here has none "
                    f"({platform.python_version()}, {sys.executable}). "
                    f"{_env.poptorch_install_hint()}. To run on this machine's "
                    "processor, set IPUFIT_BACKEND=emulator."
                ) from None
            import ipufit.emulator as poptorch

            if _env.is_first_process():
                logger.warning(
                    "Running on this host, on ipufit's emulator of PopTorch. "
                    "See `ipufit doctor`."
                )


@functools.lru_cache(maxsize=None)
def popdist() -> Any:
    """Return PopDist, initialized: the SDK's beside PopTorch, or the emulated one.

    PopDist is imported only in processes that PopRun has started.

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


def custom_parser(value: object) -> Any:
    """Return PopTorch's custom parser (`registerCustomArgParser`) for a value, or None.

    PopTorch has no public function for it; the emulator has the same private one.
    """
    if poptorch.__name__ == "poptorch":
        utils = importlib.import_module("poptorch._utils")
    else:
        utils = importlib.import_module("ipufit.emulator._utils")
    return utils.getCustomParser(value)


def survey() -> Any:
    """Return the emulator's `survey`, which finds all refusals of a program at once.

    PopTorch has no such function: PopTorch ends a trace at the first refusal, and
    compiles for minutes if there is no refusal. A traced program calls the functions of
    the backend that its process has chosen, so a process that runs on PopTorch can't
    survey it.

    Raises:
        UnsupportedError: This process runs on PopTorch itself.
    """
    if poptorch.__name__ == "poptorch":
        raise UnsupportedError(
            "A model is checked by the emulator's rules, and this process runs on "
            "PopTorch: run `ipufit check script.py`, which starts one of its own, or "
            "set IPUFIT_BACKEND=emulator for this one."
        )
    return importlib.import_module("ipufit.emulator.core.survey").survey


operator_rules = functools.partial(
    importlib.import_module, "ipufit.emulator.core.rules"
)
"""Returns the emulator's rules of operators: a table, whichever backend runs."""


def emulate_everywhere() -> None:
    """Make `import poptorch` find the emulator, in this process and its children.

    A command that surveys a script needs it: the script may import PopTorch itself,
    whose functions the emulator wouldn't see.
    """
    importlib.import_module("ipufit.emulator").install(force=True)


__all__ = ["emulate_everywhere", "operator_rules", "popdist", "poptorch", "survey"]
