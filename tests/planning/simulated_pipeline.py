# SPDX-License-Identifier: Apache-2.0
"""A pipeline as an event simulation, which knows nothing but dependencies."""

from __future__ import annotations


def simulated(stages, micro_batches, *, trains):
    """Start times of each task: (micro-batch, slot) -> cycle.

    A task is one micro-batch in one slot, and takes a cycle. It waits for the same
    micro-batch in the slot before, and for the slot, which is free for one task at a
    time. The slots of training are made from what they compute: forward of each stage,
    then backward of each, where the last forward and its backward are one.
    """
    slots = [("forward", stage) for stage in range(stages)]
    if trains:
        slots += [("backward", stage) for stage in reversed(range(stages - 1))]
    started = {}
    free_at = dict.fromkeys(slots, 0)
    waiting = {(number, 0): 0 for number in range(micro_batches)}
    while waiting:
        # The task that can begin first; micro-batches go in order.
        task = min(waiting, key=lambda t: (max(waiting[t], free_at[slots[t[1]]]), t))
        number, place = task
        at = max(waiting.pop(task), free_at[slots[place]])
        started[task] = at
        free_at[slots[place]] = at + 1
        if place + 1 < len(slots):
            waiting[number, place + 1] = at + 1
    return slots, started
