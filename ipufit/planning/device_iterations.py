# SPDX-License-Identifier: Apache-2.0
"""The weight updates of a training call, where they are left open.

Larger calls cost less: each has a price of its own, on IPUs a round trip between host
and device. But what happens between two calls could not happen within one. So a call is
only as large as changes nothing that a user can see: it ends wherever something has to
happen, and an epoch is whole calls.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, Sequence

from .choice import Choice
from .divisors import divisors

MOST_CALL_BYTES = 64 * 2**20
"""Bytes on the host that inputs and outputs of a call may take in one process."""

MOST_UPDATES = 64
"""Updates of the largest call: the price of a call is little beside so many."""

MOST_WORK = 2**31
"""Largest product of weights and samples of a call in one process.

A dense network multiplies each weight three times with each sample: with so many that
takes less than a second on one core. Larger updates gain next to nothing from sharing a
call, and bars, Ctrl-C and SIGTERM wait for the end of it."""


class Limit(NamedTuple):
    """A number of updates that a call has to keep to, and the reason.

    Attributes:
        updates: The number, 1 or more.
        reason: Name of the number if it is to be divided, such as "the 600 updates of
            an epoch"; a sentence without an end if it is a largest number.
    """

    updates: int
    reason: str


def chosen_device_iterations(
    multiples: Sequence[Limit], most: Sequence[Limit]
) -> Choice:
    """Choose the updates of a call: the largest number that keeps to all limits.

    Args:
        multiples: Numbers of updates after which calls have to end, such as those of
            an epoch: the chosen number divides each of them.
        most: Numbers of updates that a call may have at most, `MOST_UPDATES` besides.

    Returns:
        The number, 1 or more, and what keeps it from being larger.

    Example:
        >>> epoch = Limit(600, "the 600 updates of an epoch")
        >>> chosen_device_iterations([epoch], [])
        Choice(value=60, reason='of the numbers that divide the 600 updates of an epo...
        >>> chosen_device_iterations([epoch], [Limit(1, "LogEach hears each update")])
        Choice(value=1, reason='LogEach hears each update')
        >>> chosen_device_iterations([epoch, Limit(50, "validation_updates=50")], [])
        Choice(value=50, reason='no larger number divides validation_updates=50')
    """
    enough = Limit(MOST_UPDATES, f"a call has {MOST_UPDATES} updates at most")
    bound = min((*most, enough), key=lambda limit: limit.updates)
    if not multiples:
        return Choice(*bound)
    common = functools.reduce(math.gcd, (limit.updates for limit in multiples))
    numbers = divisors(common)
    value = max(n for n in numbers if n <= bound.updates)
    given = " and ".join(limit.reason for limit in multiples)
    if value == bound.updates:
        return Choice(value, bound.reason)
    if value == common:
        own = [limit.reason for limit in multiples if limit.updates == common]
        return Choice(value, f"no larger number divides {own[0] if own else given}")
    larger = numbers[numbers.index(value) + 1]
    return Choice(
        value,
        f"of the numbers that divide {given} the next is {larger}, and {bound.reason}",
    )
