# SPDX-License-Identifier: Apache-2.0
"""`BackgroundWriter`: one at a time, in order, nothing lost."""

from __future__ import annotations

import threading
import weakref
from functools import partial

import pytest

from ipufit.checkpoint import BackgroundWriter


def test_all_are_written_in_order_and_one_at_a_time():
    writer, under_way, finished = BackgroundWriter(), [], []

    def job(number):
        under_way.append(number)
        assert len(under_way) == 1
        assert threading.current_thread() is not threading.main_thread()
        under_way.clear()
        return number

    def then(number):
        assert threading.current_thread() is threading.main_thread()
        finished.append(number)

    for number in range(20):
        writer.write(lambda number=number: partial(job, number), then)
    writer.close()
    assert finished == list(range(20))


def test_a_failure_is_raised_once_and_the_next_is_written():
    writer, finished = BackgroundWriter(), []

    def fail():
        raise OSError("the disk is full")

    writer.write(lambda: fail, finished.append)
    with pytest.raises(OSError, match="disk is full"):
        writer.write(lambda: lambda: 1, finished.append)
    writer.write(lambda: lambda: 2, finished.append)
    writer.close()
    assert finished == [2]


def test_there_is_one_copy_at_a_time():
    class Copy:
        pass

    def take():
        assert [copy for copy in copies if copy() is not None] == []
        copy = Copy()
        copies.append(weakref.ref(copy))
        return partial(job, copy)

    def job(copy):
        event.wait(0.01)  # long enough for an early copy to be seen

    writer, copies, event = BackgroundWriter(), [], threading.Event()
    for _ in range(5):
        writer.write(take, lambda _: None)
    writer.close()
    assert len(copies) == 5


def test_an_interrupt_while_it_waits_loses_no_failure(monkeypatch):
    def fail():
        raise OSError("the disk is full")

    def interrupted(futures):
        raise KeyboardInterrupt

    writer = BackgroundWriter()
    writer.write(lambda: fail, lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr("ipufit.checkpoint.store.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
    with pytest.raises(OSError, match="disk is full"):
        writer.close()
