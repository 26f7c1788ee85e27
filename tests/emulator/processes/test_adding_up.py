# SPDX-License-Identifier: Apache-2.0
"""Each way to add up over processes gives the sum, the same bits in all of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit.emulator import _processes
from tests.strategies import examples

SECONDS = 60


class Together:
    """Threads in the place of processes."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count)
        self.tensors = [None] * count


class OneOfThreads:
    """What one of them sees."""

    def __init__(self, index, together):
        self.index, self.count = index, len(together.tensors)
        self._together = together

    def swap(self, received, sent):
        everyone = self._put(sent.clone())
        received.copy_(torch.stack([rows[self.index] for rows in everyone]))
        self._together.barrier.wait(SECONDS)

    def add_up(self, tensor):
        everyone = self._put(tensor.clone())
        tensor.copy_(torch.stack(everyone).sum(dim=0))
        self._together.barrier.wait(SECONDS)

    def _put(self, value):
        self._together.tensors[self.index] = value
        self._together.barrier.wait(SECONDS)
        return list(self._together.tensors)


def added_up(tensors):
    """The sums in all processes."""
    together = Together(len(tensors))
    sums = [[tensor.clone()] for tensor in tensors]
    with ThreadPoolExecutor(len(tensors)) as pool:
        started = []
        for index, values in enumerate(sums):
            process: Any = OneOfThreads(index, together)
            message = _processes._Message(process, [0], values)
            started.append(pool.submit(message.add_up, values, 1))
        for one in started:
            one.result(SECONDS)
    return [values[0] for values in sums]


@settings(max_examples=examples(60))
@given(
    count=st.integers(2, 5),
    size=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_sums_have_the_same_bits_in_all_processes(count, size, dtype, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_processes, "_WHOLE_BYTES", 128)
        generator = torch.Generator().manual_seed(seed)
        tensors = torch.randn(count, size, generator=generator).to(dtype)
        sums = added_up(list(tensors))
    for each in sums[1:]:
        assert torch.equal(each, sums[0])
    expected = tensors.double().sum(dim=0)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(
        sums[0].double(), expected, atol=tolerance, rtol=tolerance
    )
