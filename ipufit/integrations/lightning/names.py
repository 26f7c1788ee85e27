# SPDX-License-Identifier: Apache-2.0
"""Names of figures: those that a module logs, and those in History."""

from __future__ import annotations

import re

_VALIDATION = re.compile(r"(?:val|valid|validation)[_/]")


def own_name(name: str) -> str:
    """The name of a validation's figure, without what says that it is one.

    ipufit puts `val_` in front of the names of a validation itself.

    Args:
        name: The name that `validation_step` logs it under.

    Example:
        >>> own_name("val_loss"), own_name("valid/acc"), own_name("acc")
        ('loss', 'acc', 'acc')
    """
    match = _VALIDATION.match(name)
    return name[match.end() :] if match and match.end() < len(name) else name


def figure_name(name: str) -> str:
    """The name in History of a figure that a module calls by another name.

    Example:
        >>> figure_name("val/loss"), figure_name("val_loss"), figure_name("train_loss")
        ('val_loss', 'val_loss', 'train_loss')
    """
    own = own_name(name)
    return name if own == name else f"val_{own}"
