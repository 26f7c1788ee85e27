# SPDX-License-Identifier: Apache-2.0
"""A number that was left open, and why it was chosen."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """A number that the user left open and ipufit has chosen.

    Attributes:
        value: The number.
        reason: Why it isn't larger, as a part of a sentence; empty if there is nothing
            to say.

    Example:
        >>> Choice(10, "an epoch has 10 updates")
        Choice(value=10, reason='an epoch has 10 updates')
    """

    value: int
    reason: str = ""
