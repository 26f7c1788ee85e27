# SPDX-License-Identifier: Apache-2.0
"""The forward passes of a call that evaluates or predicts, where they are left open.

Larger calls cost less: each has a price of its own, on IPUs a round trip between host
and device. They change no number. What limits them is the memory that inputs and
outputs of a call take on the host, the time that a call takes, and the padding of the
last call, which is computed and thrown away. Each other number of passes is another
program, and IPUs take minutes to compile one, so there are few numbers to choose from,
four to each doubling: 4, 5, 6, 7, then 8, 10, 12, 14, then 16, 20 and so on.
"""

from __future__ import annotations

from typing import Iterator, Sequence

from .choice import Choice
from .device_iterations import MOST_CALL_BYTES, MOST_WORK

MOST_PASSES = 512
"""Passes of the largest call: the price of a call is nothing beside so many."""

MOST_LOADED_PASSES = 16
"""Passes of the largest call of samples that are loaded one by one."""

MOST_UNKNOWN_PASSES = 4
"""Passes of the largest call if the number of samples, or outputs' size, is unknown."""

MOST_FORWARD_WORK = 3 * MOST_WORK
"""Largest product of weights and samples of a call in one process, for the same time:
an update multiplies each weight three times with each sample."""

_MOST_PADDING = 16
"""One pass of padding may come with so many others."""


def chosen_inference_iterations(
    passes: Sequence[int],
    bytes_per_pass: int | None,
    least: int = 1,
    most: int = MOST_PASSES,
    work_per_pass: int = 0,
) -> Choice:
    """Choose the passes of a call: the least ones times a number of three bits.

    They are as many as keep within four bounds: `MOST_CALL_BYTES`; `MOST_FORWARD_WORK`;
    `most`; and padding of a sixteenth of the passes beyond the padding that the least
    ones have too. The least ones are always allowed.

    Args:
        passes: Numbers of passes over data, each divided into calls by itself. Most
            data are gone through once. Single rows follow in calls of their own. One
            whose number isn't known is left out.
        bytes_per_pass: Bytes of a pass that one process holds: inputs, outputs and
            targets. None if unknown, which gives `MOST_UNKNOWN_PASSES` at most.
        least: Passes that each call must have, for the stages of a pipeline.
        most: Passes that a call may have.
        work_per_pass: Product of the weights and of the samples of a pass in one
            process.

    Returns:
        The number of passes, and what keeps it from being larger.

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
    """The least number times 1, 2, 3, ... 8, 10, 12, 14, 16, 20 and so on."""
    factor = 1
    while True:
        yield factor * least
        factor += 1 << max(0, factor.bit_length() - 3)


def _computed(passes: Sequence[int], per_call: int) -> int:
    """Passes that are computed, those over padding among them."""
    return sum(-(-number // per_call) * per_call for number in passes)
