# SPDX-License-Identifier: Apache-2.0
"""Names of weights and buffers, as PopTorch has them and as users do."""

from __future__ import annotations

MODULE = "module."
"""Prefix of the names of the user's weights in the module that is traced."""


def user_name(name: str) -> str:
    """The user's name for a weight or buffer of the module that is traced.

    Example:
        >>> user_name("module.layer.weight"), user_name("losses.0.beta")
        ('layer.weight', 'losses.0.beta')
    """
    return name[len(MODULE) :] if name.startswith(MODULE) else name
