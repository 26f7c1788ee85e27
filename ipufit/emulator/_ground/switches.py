# SPDX-License-Identifier: Apache-2.0
"""Environment variables that turn something on, or off."""

from __future__ import annotations

import os

from ipufit.emulator.errors import createPoptorchError

STRICT_VARIABLE = "IPUFIT_EMULATOR_STRICT"
FOLD_VARIABLE = "IPUFIT_EMULATOR_FOLD"
FOLD_MIB_VARIABLE = "IPUFIT_EMULATOR_FOLD_MIB"
_TRAINING_FOLD_MIB, _INFERENCE_FOLD_MIB = 16, 8  # larger passes leave the caches
CHANNELS_LAST_VARIABLE = "IPUFIT_EMULATOR_CHANNELS_LAST"
COMPILE_VARIABLE = "IPUFIT_EMULATOR_COMPILE"
COMPILE_MODES = ("eager", "compiled")


def is_on(variable: str, *, default: bool = False) -> bool:
    """Whether an environment variable is an integer other than 0.

    Args:
        variable: Its name.
        default: What counts if it isn't set, or is empty.

    Returns:
        Whether it is on.

    Raises:
        Error: It is no integer.

    Example:
        >>> import os
        >>> os.environ["POPTORCH_IPU_MODEL"] = "1"
        >>> is_on("POPTORCH_IPU_MODEL")
        True
        >>> del os.environ["POPTORCH_IPU_MODEL"]
        >>> is_on("POPTORCH_IPU_MODEL")
        False
    """
    text = os.environ.get(variable, "").strip() or str(int(default))
    try:
        return int(text) != 0
    except ValueError:
        raise createPoptorchError(
            f"{variable}={text!r} is no integer: set it to 1 or 0, or unset it."
        ) from None


def folds() -> bool | None:
    """Whether `IPUFIT_EMULATOR_FOLD` has micro-batches run in one pass.

    Returns:
        True: wherever that is the same maths; False: nowhere; None, if it isn't set:
        where it pays.

    Raises:
        Error: It is no integer.

    Example:
        >>> folds() is None
        True
    """
    if not os.environ.get(FOLD_VARIABLE, "").strip():
        return None
    return is_on(FOLD_VARIABLE)


def fold_bytes(*, is_training: bool) -> int:
    """Memory that the values of one pass of folded micro-batches may take.

    `IPUFIT_EMULATOR_FOLD_MIB` says so in mebibytes; if it isn't set, 16 in training,
    whose values are all kept for the backward pass, and 8 in inference.

    Raises:
        Error: It is no number.

    Example:
        >>> fold_bytes(is_training=True) // 2**20
        16
    """
    default = _TRAINING_FOLD_MIB if is_training else _INFERENCE_FOLD_MIB
    text = os.environ.get(FOLD_MIB_VARIABLE, "").strip() or str(default)
    try:
        return int(abs(float(text)) * 2**20)
    except (ValueError, OverflowError):
        raise createPoptorchError(
            f"{FOLD_MIB_VARIABLE}={text!r} is no number of mebibytes: set it to one, "
            "or unset it."
        ) from None


def compiles() -> bool:
    """Whether `IPUFIT_EMULATOR_COMPILE` asks for machine code.

    Returns:
        True for `compiled`; False for `eager`, or if it isn't set.

    Raises:
        Error: It is neither.

    Example:
        >>> compiles()
        False
    """
    text = os.environ.get(COMPILE_VARIABLE, "").strip() or "eager"
    if text not in COMPILE_MODES:
        raise createPoptorchError(
            f"{COMPILE_VARIABLE}={text!r} is neither `eager` nor `compiled`: set it to "
            "one of these, or unset it."
        )
    return text == "compiled"


def is_strict() -> bool:
    """Whether `IPUFIT_EMULATOR_STRICT` asks for strict mode.

    Raises:
        Error: It is no integer.

    Example:
        >>> is_strict()
        False
    """
    return is_on(STRICT_VARIABLE)


def uses_channels_last() -> bool:
    """Whether convolutional programs may run in channels_last.

    They may unless `IPUFIT_EMULATOR_CHANNELS_LAST` is 0.

    Raises:
        Error: It is no integer.

    Example:
        >>> uses_channels_last()
        True
    """
    return is_on(CHANNELS_LAST_VARIABLE, default=True)
