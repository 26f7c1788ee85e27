# SPDX-License-Identifier: Apache-2.0
"""Several processes in one: threads that take turns, each with its random states.

A thread runs until it exchanges something, and goes on when all others have come there.
Whoever waits for one that has ended gets an error, so that nothing hangs.
"""

from __future__ import annotations

import random
import threading

import numpy as np
import torch

from ipufit.data.random_state import HostRandomState
from ipufit.distributed import Processes, ProcessInfo
from ipufit.errors import ProcessError


class World:
    def __init__(self, count):
        self.count = count
        self.num_exchanges = 0
        self._sent = [[] for _ in range(count)]
        self._has_ended = [False] * count
        self._turn = 0
        self._changed = threading.Condition()

    def exchange(self, index, value):
        """The values of all processes."""
        self._sent[index].append(value)
        number = len(self._sent[index])
        before = HostRandomState()
        with self._changed:
            self._pass_on(index)
            while not self._is_turn_of(index, number):
                self._changed.wait()
        before.put_back()
        self.num_exchanges = max(self.num_exchanges, number)
        return [sent[number - 1] for sent in self._sent]

    def _is_turn_of(self, index, number):
        if self._turn != index:
            return False
        if all(len(sent) >= number for sent in self._sent):
            return True
        for other, sent in enumerate(self._sent):
            if len(sent) < number and self._has_ended[other]:
                raise ProcessError(f"Process {other} has ended.")
        self._pass_on(index)
        return False

    def _pass_on(self, index):
        for step in range(1, self.count + 1):
            self._turn = (index + step) % self.count
            if not self._has_ended[self._turn]:
                break
        self._changed.notify_all()

    def run(self, index, function, results):
        with self._changed:
            while self._turn != index:
                self._changed.wait()
        random.seed(index)
        np.random.seed(index)
        torch.default_generator.manual_seed(index)
        try:
            results[index] = function(OneOfSeveral(self, index))
        except BaseException as error:  # noqa: BLE001 - `together` raises it
            results[index] = error
        with self._changed:
            self._has_ended[index] = True
            self._pass_on(index)


class OneOfSeveral(Processes):
    """A process of a `World`."""

    def __init__(self, world, index):
        super().__init__(ProcessInfo(index, world.count))
        self.world = world

    def summed(self, tensor):
        return torch.stack(self.gathered(tensor.clone())).sum(dim=0)

    def broadcast(self, tensors):
        for tensor, first in zip(tensors, self.first([t.clone() for t in tensors])):
            tensor.copy_(first)

    def first(self, value):
        return self.gathered(value)[0]

    def gathered(self, value):
        if self.count == 1:
            return [value]
        return self.world.exchange(self.index, value)


def together(count, function):
    """What a function gives in each of several processes.

    Args:
        count: Number of processes.
        function: Takes a `Processes`.

    Raises:
        BaseException: The error of the first process that has failed by itself.
    """
    before = HostRandomState()
    world, results = World(count), [None] * count
    threads = [
        threading.Thread(target=world.run, args=(index, function, results))
        for index in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before.put_back()
    errors = [result for result in results if isinstance(result, BaseException)]
    errors.sort(key=lambda error: isinstance(error, ProcessError))
    if errors:
        raise errors[0]
    return results
