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


def passes_in_steps(stages, micro_batches):
    """What each IPU computes in each step, where a step is a forward or a backward.

    In each cycle all IPUs do their forward passes, and then all do their backward
    passes. A step in which no IPU has anything to do isn't taken.

    Returns:
        A list of steps, each with the (micro-batch, "F" or "B") of each IPU, or None.
    """
    inputs = [list(range(micro_batches)), *([] for _ in range(stages - 1))]
    gradients = [[] for _ in range(stages)]
    steps = []
    while any(inputs) or any(gradients):
        for queues, letter, to in ((inputs, "F", 1), (gradients, "B", -1)):
            step = [(queue.pop(0), letter) if queue else None for queue in queues]
            if any(step):
                steps.append(step)
            for ipu, done in enumerate(step):
                if done is None:
                    continue
                if letter == "F" and ipu == stages - 1:  # its backward comes at once
                    gradients[ipu].append(done[0])
                elif 0 <= ipu + to < stages:
                    queues[ipu + to].append(done[0])
    return steps
