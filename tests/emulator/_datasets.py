# SPDX-License-Identifier: Apache-2.0
"""What tests send to background processes: it must be importable there."""

import os
import time

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ipufit.emulator._utils import ICustomArgParser


class Pair:
    def __init__(self, left, right):
        self.left = left
        self.right = right


class PairParser(ICustomArgParser):
    def yieldTensors(self, struct):  # noqa: N802
        yield struct.left
        yield struct.right

    def reconstruct(self, original_structure, tensor_iterator):
        return type(original_structure)(next(tensor_iterator), next(tensor_iterator))


class Indices(Dataset):
    """Each element is its own index, as a 0-d tensor."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(int(index))


class IndexStream(IterableDataset):
    """The same without random access; workers share it if it is told so."""

    def __init__(self, size, *, is_shared=False):
        self.size = size
        self.is_shared = is_shared

    def __len__(self):
        return self.size

    def __iter__(self):
        worker = get_worker_info()
        indices = list(range(self.size))
        if worker is not None and self.is_shared:
            share = -(-self.size // worker.num_workers)
            indices = indices[worker.id * share : (worker.id + 1) * share]
        return (torch.tensor(index) for index in indices)


def keep_shares(worker_index):
    """A worker_init_fn for streams that share themselves."""


class Scripted:
    """An iterable that yields its steps, raising those that are exceptions.

    Later epochs yield `later_steps` if that is given.
    """

    def __init__(self, *steps, later_steps=None):
        self.steps = steps
        self.later_steps = steps if later_steps is None else later_steps

    def __iter__(self):
        steps, self.steps = self.steps, self.later_steps
        for step in steps:
            if isinstance(step, BaseException):
                raise step
            yield step


class Dying:
    """An iterable whose process dies after the first element."""

    def __iter__(self):
        yield torch.zeros(1)
        os._exit(3)


class Stuck:
    """An iterable that never comes to its second element, nor lets itself be stopped.

    Args:
        num_ignored: How many interrupts it ignores.
        path: A file that it makes when it is stuck.
    """

    def __init__(self, num_ignored, path):
        self.num_ignored = num_ignored
        self.path = path

    def __iter__(self):
        yield torch.zeros(1)
        num_interrupts = 0
        while True:
            try:
                self.path.touch()
                time.sleep(60)
            except KeyboardInterrupt:
                num_interrupts += 1
                if num_interrupts > self.num_ignored:
                    raise
