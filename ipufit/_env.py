# SPDX-License-Identifier: Apache-2.0
"""The environment variables that ipufit reads.

| Variable | Values | Effect |
|---|---|---|
| `IPUFIT_BACKEND` | `auto`, `poptorch`, `emulator` | which PopTorch runs the models |
| `POPTORCH_WAIT_FOR_IPU` | PopTorch's own | no attempt to hold two programs at once |

`ipufit.emulator` stands alone and reads its own (`IPUFIT_EMULATOR_IPUS`).
"""

from __future__ import annotations

import os

from .errors import ConfigError

BACKENDS = ("auto", "poptorch", "emulator")


def backend() -> str:
    """The PopTorch that was asked for.

    Returns:
        One of `BACKENDS`.

    Raises:
        ConfigError: `IPUFIT_BACKEND` is none of them.

    Example:
        >>> backend() in BACKENDS
        True
    """
    value = os.environ.get("IPUFIT_BACKEND", "auto") or "auto"
    if value not in BACKENDS:
        raise ConfigError(
            f"IPUFIT_BACKEND={value!r} is not a backend: set it to one of "
            f"{', '.join(BACKENDS)}, or unset it."
        )
    return value


def waits_for_ipus() -> bool:
    """Whether PopTorch waits for busy IPUs instead of raising.

    Example:
        >>> waits_for_ipus()
        False
    """
    return os.environ.get("POPTORCH_WAIT_FOR_IPU", "0") not in ("", "0")
