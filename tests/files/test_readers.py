# SPDX-License-Identifier: Apache-2.0
"""Who reads a checkpoint while another process replaces it gets one of the two."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time

import pytest

from ipufit.checkpoint import (
    CheckpointStore,
    load_checkpoint,
    load_newest,
    read_manifest,
    write_checkpoint,
)
from ipufit.checkpoint.directory import MAX_READS
from ipufit.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingCheckpointError,
)
from tests.files.samples import number_of, sample

pytestmark = pytest.mark.usefixtures("unsynced")

STARTS = 100
GENERATIONS = 30
SECONDS = 60
READS = ("open", "readv", "listdir", "lstat", "scandir", "stat", "fstat")
WRITES = ("mkdir", "open", "replace", "unlink", "rmdir")


@contextlib.contextmanager
def before_steps(monkeypatch, happens, names=READS):
    """Call `happens(number)` before each step that this thread takes in the system."""
    me, is_inside, taken = threading.get_ident(), [], []

    def wrapped(original):
        def step(*arguments, **keywords):
            if threading.get_ident() == me and not is_inside:
                is_inside.append(True)
                try:
                    happens(len(taken))
                finally:
                    is_inside.clear()
                taken.append(original)
            return original(*arguments, **keywords)

        return step

    with monkeypatch.context() as patches:
        for name in names:
            patches.setattr(os, name, wrapped(getattr(os, name)))
        yield taken


class StopAndGo(threading.Thread):
    """A writer that stops before one of its steps, until it may go on."""

    def __init__(self, monkeypatch, target, number, stop_at):
        super().__init__()
        self.arguments = monkeypatch, target, number, stop_at
        self.has_stopped, self.may_go_on = threading.Event(), threading.Event()
        self.num_steps = None

    def run(self):
        monkeypatch, target, number, stop_at = self.arguments

        def stop(step):
            if step == stop_at:
                self.has_stopped.set()
                self.may_go_on.wait()

        with before_steps(monkeypatch, stop, WRITES) as taken:
            write_checkpoint(target, sample(number))
        self.num_steps = len(taken)
        self.has_stopped.set()

    def begin(self):
        self.start()
        self.has_stopped.wait()

    def end(self):
        self.may_go_on.set()
        self.join()


@pytest.mark.parametrize("pause", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_reader_between_any_two_steps_of_a_writer(tmp_path, monkeypatch, pause):
    target, number, tried, stop_at, is_over = tmp_path / "saved", 0, set(), 0, False
    write_checkpoint(target, sample(number))
    while not is_over:  # every step of the writer to stop before
        begin_at, has_begun = 0, True
        while has_begun:  # and every step of the reader to begin it before
            writer = StopAndGo(monkeypatch, target, number + 1, stop_at)

            def meanwhile(step, writer=writer, begin_at=begin_at):
                if step == begin_at:
                    writer.begin()
                elif step == begin_at + pause:
                    writer.end()

            with before_steps(monkeypatch, meanwhile) as taken:
                seen = number_of(load_checkpoint(target))
            has_begun = len(taken) > begin_at
            if has_begun:
                writer.end()
                number += 1
                assert seen in (number - 1, number)
                tried.add((stop_at, begin_at, seen == number))
                is_over = writer.num_steps <= stop_at
            begin_at += 1
        stop_at += 1
    assert len(tried) > 150
    assert {is_new for _, _, is_new in tried} == {False, True}


def test_a_reader_that_is_never_fast_enough_is_told_so(tmp_path, monkeypatch):
    target, written = tmp_path / "saved", []

    def write(step):
        written.append(step)
        write_checkpoint(target, sample(len(written)))

    write(0)
    with before_steps(monkeypatch, write, ["open"]), pytest.raises(
        CheckpointError, match="replaced 100 times"
    ) as caught:
        load_checkpoint(target)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert MAX_READS <= len(written) <= 5 * MAX_READS


@pytest.mark.parametrize("read", [load_checkpoint, read_manifest])
def test_what_is_deleted_meanwhile_is_missing_and_not_damaged(
    tmp_path, monkeypatch, read
):
    store = CheckpointStore(tmp_path / "store")
    missing = 0
    for begin_at in range(20):
        path = store.save(sample(begin_at), epoch=0, update=begin_at)

        def clear(step, begin_at=begin_at):
            if step == begin_at:
                store.clear()

        with before_steps(monkeypatch, clear) as taken:
            try:
                read(path)
            except MissingCheckpointError as error:
                missing += str(path) in str(error)
        if len(taken) <= begin_at:
            break
    assert missing > 3


@pytest.mark.parametrize("read", ["all", "latest", "best", "load_latest"])
def test_a_directory_that_is_deleted_meanwhile_has_no_checkpoint(
    tmp_path, monkeypatch, read
):
    store, number = CheckpointStore(tmp_path / "store"), 0
    found, has_begun = [], True
    while has_begun:
        path = store.save(sample(number), epoch=0, update=number, metric=1.0)

        def clear(step, begin_at=number):
            if step == begin_at:
                store.clear()

        with before_steps(monkeypatch, clear) as taken:
            found.append(getattr(store, read)())
        has_begun = len(taken) > number
        number += 1
    assert not any(found[:3])
    assert str(path) in str(found[-1])


def of_store(path):
    return load_newest([CheckpointStore(path)])[1]


@pytest.mark.parametrize(
    ("kind", "load"), [("path", load_checkpoint), ("store", of_store)]
)
def test_a_reader_beside_a_writer_in_another_process(tmp_path, kind, load):
    target = tmp_path / kind
    store = CheckpointStore(target, keep_last=1)

    def write(number):
        if kind == "store":
            store.save(sample(number), epoch=0, update=number)
        else:
            write_checkpoint(target, sample(number))

    write(0)
    numbers, until = [], time.monotonic() + SECONDS
    writer = os.fork()
    if writer == 0:
        try:
            for number in itertools.count(1):
                write(number)
        finally:
            os._exit(1)
    try:
        while len(numbers) < STARTS or len(set(numbers)) < GENERATIONS:
            assert time.monotonic() < until, "the writer is too slow"
            numbers.append(number_of(load(target)))
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert numbers == sorted(numbers)
