# SPDX-License-Identifier: Apache-2.0
"""Choose the number of updates or micro-batches of a call.

Each call has a fixed cost: on IPUs a round trip between host and device. So larger
calls cost less per update. A training call ends wherever a callback or a check must
run, and an epoch consists of whole calls. So users see no difference.

The size of a call of `evaluate` or `predict` changes no number. It is limited by the
memory of inputs and outputs on the host, by the time of a call, and by the padding of
the last call, which is computed and discarded. Each other size is another program,
which takes minutes to compile on IPUs. So sizes come from a short list, four to each
doubling: 4, 5, 6, 7, then 8, 10, 12, 14, then 16, 20 and so on.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Callable, Iterator, Mapping, NamedTuple, Sequence

from ipufit.batching import BatchPlan
from ipufit.errors import ConfigError

MOST_CALL_BYTES = 64 * 2**20
"""Maximum host bytes of inputs and outputs of a call in one process."""

MOST_UPDATES = 64
"""Updates of the largest call: the cost of a call is small compared with theirs."""

MOST_WORK = 2**31
"""Largest product of weights and samples of a call in one process.

A dense network multiplies each weight three times with each sample, and does this work
in less than a second on one core. Larger updates gain next to nothing from sharing a
call, and bars, Ctrl-C and SIGTERM wait for the end of it."""

MOST_PASSES = 512
"""Passes of the largest call: the cost of a call is negligible compared with theirs."""

MOST_LOADED_PASSES = 16
"""Passes of the largest call of samples that are loaded one by one."""

MOST_UNKNOWN_PASSES = 4
"""Passes of the largest call if the number of samples, or outputs' size, is unknown."""

MOST_FORWARD_WORK = 3 * MOST_WORK
"""Largest product of weights and samples of a call in one process, for the same time:
an update multiplies each weight three times with each sample."""

_MOST_PADDING = 16
"""Passes of data for each pass of padding."""

_MOST_NEAREST = 2  # batch sizes on either side


class Choice(NamedTuple):
    """A number that ipufit has chosen, because the user left it open.

    Attributes:
        value: The number.
        reason: Why the number isn't larger, as a part of a sentence; "" for no reason.

    Example:
        >>> Choice(10, "an epoch has 10 updates")
        Choice(value=10, reason='an epoch has 10 updates')
    """

    value: int
    reason: str = ""


def chosen_device_iterations(
    multiples: Mapping[str, int], most: Mapping[str, int]
) -> Choice:
    """Choose the largest number of updates in a call that keeps all limits.

    Args:
        multiples: Numbers of updates after which a call must end, by their names. The
            chosen number divides each number.
        most: Maximum numbers of updates in a call, by the reasons for them, besides
            `MOST_UPDATES`.

    Returns:
        The number, 1 or more, and why the number isn't larger.

    Example:
        >>> epoch = {"the 600 updates of an epoch": 600}
        >>> chosen_device_iterations(epoch, {})
        Choice(value=60, reason='of the numbers that divide the 600 updates of an epo...
        >>> chosen_device_iterations(epoch, {"LogEach hears each update": 1})
        Choice(value=1, reason='LogEach hears each update')
        >>> chosen_device_iterations({**epoch, "validation_updates=50": 50}, {})
        Choice(value=50, reason='no larger number divides validation_updates=50')
    """
    most = {**most, f"a call has {MOST_UPDATES} updates at most": MOST_UPDATES}
    reason, bound = min(most.items(), key=lambda item: item[1])
    if not multiples:
        return Choice(bound, reason)
    common = functools.reduce(math.gcd, multiples.values())
    numbers = divisors(common)
    value = max(number for number in numbers if number <= bound)
    if value == bound:
        return Choice(value, reason)
    given = " and ".join(multiples)
    if value == common:
        own = [name for name, number in multiples.items() if number == common]
        return Choice(value, f"no larger number divides {own[0] if own else given}")
    larger = numbers[numbers.index(value) + 1]
    reason = f"of the numbers that divide {given} the next is {larger}, and {reason}"
    return Choice(value, reason)


def chosen_inference_iterations(
    passes: Sequence[int],
    bytes_per_pass: int | None,
    least: int = 1,
    most: int = MOST_PASSES,
    work_per_pass: int = 0,
) -> Choice:
    """Choose the micro-batches of a call: `least` times 1, 2, 3, ... 8, 10, 12, 14, 16.

    The number is as large as four bounds allow: `MOST_CALL_BYTES`; `MOST_FORWARD_WORK`;
    `most`; and padding of a sixteenth of the passes, beyond the padding that calls of
    `least` passes have. `least` is always allowed.

    Args:
        passes: Number of micro-batches in each pass over data. Most data take one pass;
            single remaining rows run in calls of their own. A pass of unknown length is
            left out.
        bytes_per_pass: Bytes of inputs, outputs and targets of a micro-batch in one
            process; None if unknown, which limits the choice to `MOST_UNKNOWN_PASSES`.
        least: Micro-batches that each call must have, for the stages of a pipeline.
        most: Micro-batches that a call may have.
        work_per_pass: Number of weights times the samples of a micro-batch in one
            process.

    Returns:
        The number, and why the number isn't larger.

    Example:
        >>> chosen_inference_iterations([500], bytes_per_pass=2_500)
        Choice(value=512, reason='one call takes all 500')
        >>> chosen_inference_iterations([80], bytes_per_pass=2_500)
        Choice(value=80, reason='one call takes all 80')
        >>> chosen_inference_iterations([81], bytes_per_pass=2_500)
        Choice(value=28, reason='32 would pad 81 passes to 96')
        >>> chosen_inference_iterations([80], bytes_per_pass=10_000_000)
        Choice(value=6, reason='7 would take 66 MiB of host memory, beyond 64')
    """
    if bytes_per_pass is None:
        most = min(most, MOST_UNKNOWN_PASSES)
    held = bytes_per_pass or 0
    largest = max(passes, default=most)
    values: list[int] = []
    reason = ""
    for value in _numbers(least):
        if values and value > most:
            reason = f"calls of such data have {most} passes at most"
        elif values and value * held > MOST_CALL_BYTES:
            reason = (
                f"{value} would take {value * held >> 20} MiB of host memory, beyond "
                f"{MOST_CALL_BYTES >> 20}"
            )
        elif values and value * work_per_pass > MOST_FORWARD_WORK:
            reason = f"calls of {value} would take long with so many weights"
        else:
            values.append(value)
        if reason or value >= largest:
            break
    limit = _computed(passes, least) + sum(passes) // _MOST_PADDING
    padded = {value: _computed(passes, value) for value in values}
    at = max(i for i, value in enumerate(values) if padded[value] <= limit)
    if at + 1 < len(values):
        larger = values[at + 1]
        reason = f"{larger} would pad {sum(passes)} passes to {padded[larger]}"
    elif not reason:
        reason = f"one call takes all {largest}"
    return Choice(values[at], reason)


def _numbers(least: int) -> Iterator[int]:
    """Yield the least number times 1, 2, 3, ... 8, 10, 12, 14, 16, 20 and so on."""
    factor = 1
    while True:
        yield factor * least
        factor += 1 << max(0, factor.bit_length() - 3)


def _computed(passes: Sequence[int], per_call: int) -> int:
    """Return the number of micro-batches that are computed, padding included."""
    return sum(-(-number // per_call) * per_call for number in passes)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in ascending order.

    The search goes up to the square root: an epoch may have billions of samples.

    Args:
        number: 1 or more.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest_batch_sizes(
    num_samples: int, batch: BatchPlan, derive: Callable[[int], BatchPlan]
) -> tuple[int, ...]:
    """Find the batch sizes near the plan's that divide an epoch into whole calls.

    Args:
        num_samples: Samples of an epoch.
        batch: The plan with the present batch size.
        derive: Returns the plan of another batch size, or raises a `ConfigError`.

    Returns:
        Up to two smaller and two larger sizes, none below half or above twice the
        present one, in ascending order; empty if the present one divides the epoch.

    Example:
        >>> nearest_batch_sizes(100, BatchPlan(16), BatchPlan)
        (10, 20, 25)
    """
    per_update, rest = divmod(num_samples, batch.device_iterations)
    if rest or not num_samples % (batch.batch_size * batch.device_iterations):
        return ()
    size_now = batch.batch_size
    sizes = [n for n in divisors(per_update) if size_now <= 2 * n <= 4 * size_now]
    smaller = [size for size in reversed(sizes) if size < size_now]
    larger = [size for size in sizes if size > size_now]

    def has_plan(size: int) -> bool:
        try:
            derive(size)
        except ConfigError:
            return False
        return True

    found = [
        size
        for side in (smaller, larger)
        for size in itertools.islice(filter(has_plan, side), _MOST_NEAREST)
    ]
    return tuple(sorted(found))
