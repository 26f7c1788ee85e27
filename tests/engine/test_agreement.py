# SPDX-License-Identifier: Apache-2.0
"""Processes agree at few calls, and at each one if a callback hears calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit.callbacks import Callback, CallbackList
from ipufit.distributed import Processes, ProcessInfo
from ipufit.engine.processes import ProcessSync
from ipufit.state import RunState


class Twins(Processes):
    """Two processes that say the same; what the second decides alone doesn't count."""

    def __init__(self):
        super().__init__(ProcessInfo(0, 2))
        self.exchanges = 0

    def summed(self, tensor):
        self.exchanges += 1
        digest = 5
        return torch.cat([tensor[:digest], 2 * tensor[digest:]])

    def gathered(self, value):
        return [value, value]


class Heard(Callback):
    def on_train_batch_end(self, batch, logs):
        pass


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def exchanges(num_calls, seconds_per_call, *callbacks):
    """The numbers of exchanges after each call, and the run."""
    processes, clock = Twins(), Clock()
    run = RunState(processes=processes)
    hooks = CallbackList(list(callbacks))
    hooks.set_run(run)
    agreement = ProcessSync(processes, hooks, run, "on_train_batch_end", clock=clock)
    counts = []
    for _ in range(num_calls):
        clock.now += seconds_per_call
        agreement.sync()
        counts.append(processes.exchanges)
    return counts, run


def test_exchanges_are_a_tenth_of_a_second_apart():
    counts, _ = exchanges(2000, 0.001)
    assert counts[-1] - counts[999] == pytest.approx(10, abs=1)


def test_a_callback_that_hears_calls_has_each_of_them_settled():
    counts, _ = exchanges(500, 1e-6, Heard())
    assert counts == list(range(1, 501))


@given(seconds=st.floats(0, 1, allow_nan=False))
def test_no_pace_of_calls_puts_the_next_exchange_out_of_reach(seconds):
    counts, _ = exchanges(5000, seconds)
    assert counts[-1] > counts[-2001]


def test_a_wish_of_one_process_counts_once_it_was_exchanged():
    processes = Twins()
    run = RunState(processes=processes)
    hooks = CallbackList([])
    hooks.set_run(run)
    agreement = ProcessSync(processes, hooks, run, "on_train_batch_end")
    run.stop("seen enough")
    assert run.is_stopping
    assert not run.is_ending
    agreement.sync_now()
    assert run.is_ending
    run.tell_to_end()
    assert not run.is_evicted
    agreement.sync_now()
    assert run.is_evicted
    assert processes.exchanges == 2
