# SPDX-License-Identifier: Apache-2.0
"""The names of precisions: types of activations and of weights."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import torch

from ipufit.errors import ConfigError

_BITS = {"16": torch.float16, "32": torch.float32}
_SHORT = {"float16": "16.16", "float32": "32.32"}
PRECISIONS = (*_SHORT, "16.16", "16.32", "32.32")
"""Values of `precision`."""


class Precision(NamedTuple):
    """The types that a program computes in.

    Attributes:
        activations: Type of inputs, and of all that is computed from them.
        weights: Type in which weights are kept and updated.
    """

    activations: torch.dtype
    weights: torch.dtype

    @property
    def word(self) -> str:
        """The name that checkpoints have: the same for two names of one precision.

        Example:
            >>> precision_of("16.16").word, precision_of("16.32").word
            ('float16', '16.32')
        """
        if self.activations == self.weights:
            return str(self.weights).rpartition(".")[2]
        return "16.32"

    @property
    def is_half(self) -> bool:
        """Whether activations are float16."""
        return self.activations == torch.float16


def precision_of(word: str) -> Precision:
    """Spell a precision out.

    Args:
        word: `"16.16"`, `"16.32"` or `"32.32"`: bits of activations, then of weights.
            `"float16"` is `"16.16"`, and `"float32"` is `"32.32"`.

    Example:
        >>> precision_of("16.32")
        Precision(activations=torch.float16, weights=torch.float32)
    """
    activations, weights = _SHORT.get(word, word).split(".")
    return Precision(_BITS[activations], _BITS[weights])


def check_precision(word: str, float32_modules: str | Sequence[str] | None) -> None:
    """Refuse modules in float32 where everything is.

    Args:
        word: A name of a precision.
        float32_modules: Names of submodules, or None.

    Raises:
        ConfigError: There are such modules, and the precision is float32.

    Example:
        >>> check_precision("16.16", "norm")
    """
    if float32_modules is not None and not precision_of(word).is_half:
        raise ConfigError(
            f"float32_modules={float32_modules!r}, and with precision={word!r} "
            "everything is float32: give precision='16.16' or '16.32', or leave "
            "float32_modules out."
        )
