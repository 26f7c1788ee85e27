# SPDX-License-Identifier: Apache-2.0
"""Reading ahead in a background process."""

import gc
import os
import signal
import tempfile
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from ipufit.emulator import (
    AsynchronousDataAccessor,
    DataLoader,
    DataLoaderMode,
    Error,
    Options,
    SharingStrategy,
    registerCustomArgParser,
)
from tests.emulator._datasets import (
    Dying,
    Pair,
    PairParser,
    Scripted,
    Stuck,
)
from tests.interpreters import run_python

pytestmark = pytest.mark.floor

Point = namedtuple("Point", ["x", "y"])
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


SERVED = [one for one in SharingStrategy if one != SharingStrategy.Fork]
"""Their processes import torch anew, where other tests haven't begun a server."""


@pytest.fixture
def start():
    """Makes accessors that are terminated after the test, forked unless told."""
    accessors = []

    def make(dataset, *args, sharing_strategy=SharingStrategy.Fork, **kwargs):
        accessor = AsynchronousDataAccessor(
            dataset, *args, sharing_strategy=sharing_strategy, **kwargs
        )
        accessors.append(accessor)
        return accessor

    yield make
    for accessor in accessors:
        accessor.terminate()


def steps(*numbers):
    return [torch.tensor([float(number)]) for number in numbers]


def read(iterable):
    """All elements, copied before the next one is requested."""
    return [element.tolist() for element in iterable]


def drain(accessor, num_expected):
    """How many slots are ready before anything is taken; breaks the accessor.

    It waits long for those that are expected, and a little for more.
    """
    num_ready = 0
    while accessor._connection.poll(60 if num_ready < num_expected else 0.2):
        accessor._connection.recv()
        num_ready += 1
    return num_ready


@pytest.mark.parametrize(
    "strategy",
    [
        SharingStrategy.Fork,
        *(pytest.param(one, marks=pytest.mark.slow) for one in SERVED),
    ],
    ids=lambda strategy: strategy.name,
)
def test_every_sharing_strategy_gives_the_same_data(start, strategy):
    dataset = TensorDataset(torch.arange(6).view(3, 2))
    accessor = start(dataset, sharing_strategy=strategy)
    for _ in range(2):
        assert [x.tolist() for (x,) in accessor] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("buffer_size", [1, 2, 5])
@pytest.mark.parametrize("load_indefinitely", [True, False])
def test_each_epoch_ends_and_can_be_followed_by_another(
    start, buffer_size, load_indefinitely
):
    accessor = start(steps(*range(4)), buffer_size, load_indefinitely=load_indefinitely)
    for _ in range(3):
        assert read(accessor) == [[0.0], [1.0], [2.0], [3.0]]


def test_an_element_is_valid_until_the_next_is_requested(start):
    accessor = start(steps(*range(8)), 2)
    first = next(accessor)
    second = next(accessor)
    time.sleep(0.2)  # the process could write now
    assert second.item() == 1.0
    third = next(accessor)
    assert third.data_ptr() == first.data_ptr()
    assert third.item() == 2.0


def test_elements_can_be_read_after_the_end(start):
    accessor = start(steps(5))
    element = next(accessor)
    accessor.terminate()
    del accessor
    gc.collect()
    assert element.item() == 5.0


@pytest.mark.parametrize("buffer_size", [1, 2, 3])
def test_iter_within_an_epoch_starts_again(start, buffer_size):
    accessor = start(steps(*range(6)), buffer_size)
    first = iter(accessor)
    assert [next(first).item() for _ in range(3)] == [0.0, 1.0, 2.0]
    second = iter(accessor)
    assert second is first
    assert next(second).item() == 0.0
    assert next(first).item() == 1.0
    assert read(accessor) == [[float(number)] for number in range(6)]


def test_the_ring_is_filled_early_only_if_asked_to(start):
    assert drain(start(steps(*range(9)), 4), 1) == 1
    assert drain(start(steps(*range(9)), 4, early_preload=True), 4) == 4


def test_the_next_epoch_is_read_ahead_only_if_asked_to(start):
    def num_read_ahead(load_indefinitely, num_expected):
        accessor = start(steps(1, 2), load_indefinitely=load_indefinitely)
        assert len(read(accessor)) == 2
        return drain(accessor, num_expected)

    assert num_read_ahead(True, 1) > 0
    assert num_read_ahead(False, 0) == 0


# Elements --------------------------------------------------------------------


def test_tuples_and_lists_come_back_as_lists(start):
    for element in ((torch.ones(1), torch.ones(2)), [torch.ones(3)]):
        (got,) = start([element])
        assert type(got) is list
        assert [x.shape for x in got] == [x.shape for x in element]
    (got,) = start([Point(torch.ones(1), torch.ones(2))])
    assert type(got) is list


def test_dicts_keep_the_keys_of_the_first_element(start):
    one, two = steps(1, 2)
    accessor = start([{"x": one, "y": two}, {"y": two, "x": one}])
    for element in accessor:
        assert list(element) == ["x", "y"]
        assert (element["x"].item(), element["y"].item()) == (1.0, 2.0)


@pytest.mark.parametrize(
    "strategy",
    [
        SharingStrategy.Fork,
        pytest.param(SharingStrategy.ForkServer, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_custom_types_are_rebuilt_by_their_parser(start, strategy):
    registerCustomArgParser(Pair, PairParser())
    try:
        pairs = [Pair(*steps(number, -number)) for number in range(3)]
        accessor = start(pairs, sharing_strategy=strategy)
        got = [(pair.left.item(), pair.right.item()) for pair in accessor]
    finally:
        registerCustomArgParser(Pair, None)
    assert got == [(0.0, 0.0), (1.0, -1.0), (2.0, -2.0)]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
)
def test_every_type_of_number_is_carried(start, dtype):
    element = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    (got,) = [taken.clone() for taken in start([element])]
    assert got.dtype == dtype
    assert torch.equal(got, element)


def test_later_elements_are_cast_and_broadcast_into_the_first(start):
    accessor = start([torch.zeros(2, dtype=torch.int64), torch.tensor([3.9])])
    assert read(accessor) == [[0, 0], [3, 3]]


@pytest.mark.parametrize("later", [(torch.ones(1),), (torch.ones(1), None)])
def test_an_element_with_another_structure_is_refused(start, later, capfd):
    accessor = start([(torch.ones(1), torch.ones(1)), later])
    next(accessor)
    with pytest.raises(AssertionError, match="An error occurred in the data fetcher"):
        next(accessor)
    assert "differs: tuple" in capfd.readouterr().err


# Rebatching ------------------------------------------------------------------


def rows(*lengths):
    data = torch.arange(float(sum(lengths)))
    return list(data.split(list(lengths)))


def test_rows_are_collected_across_elements(start):
    accessor = start(rows(2, 3, 1, 2), 2, rebatched_size=4)
    for _ in range(2):
        assert read(accessor) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_remaining_rows_are_kept_if_the_dataset_says_so(start):
    dataset = Scripted(*rows(1, 1, 1, 1, 1))
    dataset.rebatched_drop_last = False
    accessor = start(dataset, rebatched_size=2)
    for _ in range(2):
        assert read(accessor) == [[0, 1], [2, 3], [4]]


# Length ----------------------------------------------------------------------


def test_the_length_when_rebatching_counts_rows(start):
    loader = DataLoader(Options(), TensorDataset(torch.arange(10)), batch_size=3)
    assert len(start(loader, rebatched_size=4)) == 2
    with pytest.raises(AttributeError, match="batch_size"):
        len(start(rows(1, 1), rebatched_size=2))


# What is refused -------------------------------------------------------------


def test_a_loader_in_another_mode_is_refused():
    loader = DataLoader(
        Options(),
        TensorDataset(torch.arange(4)),
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": SharingStrategy.Fork},
    )
    with pytest.raises(Error, match=r"DataLoaderMode\.Sync"):
        AsynchronousDataAccessor(loader)
    loader.terminate()


def test_a_loader_that_keeps_a_smaller_batch_must_be_rebatched(start):
    dataset = TensorDataset(torch.arange(5))
    with pytest.raises(AssertionError, match="drop_last=True, or a rebatched_size"):
        AsynchronousDataAccessor(DataLoader(Options(), dataset, 2, drop_last=False))
    # PopTorch drops what remains all the same.
    loader = DataLoader(Options(), dataset, 2, drop_last=False)
    got = [x.tolist() for (x,) in start(loader, rebatched_size=2)]
    assert got == [[0, 1], [2, 3]]


# Failures --------------------------------------------------------------------


FIRST = {
    "empty": ([], "The dataset is empty"),
    "raising": (Scripted(ValueError("unreadable file")), "ValueError: unreadable file"),
    "no iterable": (3, "TypeError: 'int' object is not iterable"),
    "a number": ([3], "a flat list, tuple or dict of tensors"),
    "text": ([("text", torch.ones(1))], "got tuple"),
    "nested": ([[[torch.ones(1)]]], "a flat list, tuple or dict of tensors"),
    "no tensor in a dict": ([{"x": 1}], "a flat list, tuple or dict of tensors"),
    "too long": ([torch.ones(5)], "at most rebatched_size = 4"),
    "0-d": ([torch.tensor(1)], "at most rebatched_size = 4"),
    "unequal": ([(torch.ones(2), torch.ones(3))], "at most rebatched_size = 4"),
}
"""A dataset whose first element is refused, and why."""


@pytest.mark.parametrize("name", FIRST)
def test_a_failure_with_the_first_element_is_an_error(name, capfd):
    """The process prints the cause (PopTorch, `tests/dataloader_test.py`)."""
    dataset, details = FIRST[name]
    size = {"rebatched_size": 4} if "rebatched" in details else {}
    with pytest.raises(Error, match="worker thread failed to start") as caught:
        AsynchronousDataAccessor(dataset, sharing_strategy=SharingStrategy.Fork, **size)
    assert details not in caught.value.message
    assert details in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rebatched_size": 1}, "greater than 1"), ({"buffer_size": 0}, "be positive")],
)
def test_a_ring_has_slots_and_rebatching_rows(settings, message):
    with pytest.raises(AssertionError, match=message):
        AsynchronousDataAccessor(steps(1), **settings)


def test_a_later_failure_is_printed_by_the_process(start, capfd):
    accessor = start(
        Scripted(*steps(1, 2), ValueError("broken image")),
        sharing_strategy=SharingStrategy.Fork,
    )
    assert [next(accessor).item() for _ in range(2)] == [1.0, 2.0]
    for _ in range(2):
        with pytest.raises(
            AssertionError, match="An error occurred in the data fetcher"
        ) as caught:
            next(accessor)
        assert "broken image" not in str(caught.value)
    printed = capfd.readouterr().err
    assert printed.count("ValueError: broken image") == 1
    assert "in __iter__" in printed


class SlowError(Exception):
    """Takes longer to print than a process on an idle machine needs to end."""

    def __str__(self):
        time.sleep(1.5)
        return "slowly said"


def test_an_error_has_been_printed_when_the_accessor_raises(capfd):
    with pytest.raises(Error, match=r"failed to start.*exit code 1\)"):
        AsynchronousDataAccessor(
            Scripted(SlowError()), sharing_strategy=SharingStrategy.Fork
        )
    assert "slowly said" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ForkServer", "SharedMemory"])
def test_processes_of_each_kind_print_what_ended_them(strategy, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import ipufit.emulator as poptorch\n"
        "class Broken:\n"
        "    def __iter__(self):\n"
        "        raise ValueError('broken image')\n"
        "if __name__ == '__main__':\n"
        f"    strategy = poptorch.SharingStrategy.{strategy}\n"
        "    poptorch.AsynchronousDataAccessor(Broken(), sharing_strategy=strategy)\n",
        encoding="utf-8",
    )
    printed = run_python(script, env=ENVIRONMENT).stderr
    assert "ValueError: broken image" in printed
    assert printed.index("broken image") < printed.index("failed to start")


def test_a_process_that_dies_is_noticed(start):
    accessor = start(Dying())
    next(accessor)
    with pytest.raises(AssertionError, match="exit code 3"):
        next(accessor)


def test_a_dataset_that_cannot_be_pickled_is_an_error(start):
    # The class is a member of a function: pickle finds it in no module.
    class Local:
        pass

    with pytest.raises((AttributeError, TypeError), match=r"[Pp]ickle"):
        start([Local()], sharing_strategy=SharingStrategy.FileSystem)


# The end ---------------------------------------------------------------------


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_terminating_ends_the_process_and_leaves_nothing(start, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others write into /tmp
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    accessor = start(steps(*range(5)))
    next(accessor)
    pid = accessor._process.pid
    accessor.terminate()
    accessor.terminate()
    assert not is_running(pid)
    # A test before may have left something that has gone meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= files
    assert threading.active_count() <= threads
    assert os.listdir(tmp_path) == []
    with pytest.raises(AssertionError, match="was terminated"):
        iter(accessor)
    with pytest.raises(AssertionError, match="was terminated"):
        next(accessor)


def test_a_forked_process_does_not_end_the_one_of_its_parent(start):
    first = start(steps(1, 2, 3))
    start([torch.ones(1)]).terminate()  # its process inherits `first` and drops it
    assert read(first) == [[1.0], [2.0], [3.0]]


@pytest.fixture
def _heeded_interrupts():
    """A shell makes what it runs in the background ignore them, and so its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeded_interrupts")
@pytest.mark.parametrize(
    ("num_ignored", "patience", "signal_number"),
    # Long only where it reacts: that takes time on a busy machine.
    [(0, [0.1, 60, 60], 0), (9, [0.1, 0.1, 60], signal.SIGTERM)],
)
def test_a_process_that_does_not_react_is_made_to(
    start, monkeypatch, tmp_path, num_ignored, patience, signal_number
):
    stuck = tmp_path / "stuck"
    accessor = start(Stuck(num_ignored, stuck))
    next(accessor)  # so that it goes on to the second element
    deadline = time.monotonic() + 60
    while not stuck.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    exit_codes, waits = [], iter(patience)
    process = accessor._process
    join, close = process.join, process.close
    monkeypatch.setattr(process, "join", lambda *_: join(next(waits, None)))
    monkeypatch.setattr(
        process, "close", lambda: (exit_codes.append(process.exitcode), close())
    )
    accessor.terminate()
    assert exit_codes == [-signal_number]


SCRIPT = """
import torch, sys
from ipufit.emulator import AsynchronousDataAccessor, SharingStrategy
if __name__ == "__main__":
    accessor = AsynchronousDataAccessor(
        [torch.ones(1)], sharing_strategy=SharingStrategy.Fork
    )
    print(accessor._process.pid, flush=True)
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [
        ("raise SystemExit(4)", 4),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
    ids=["exited", "killed"],
)
def test_no_process_outlives_the_script(tmp_path, ending, exit_code):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending))
    ended = run_python(script, env=ENVIRONMENT)
    assert ended.returncode == exit_code
    deadline = time.monotonic() + 60
    while is_running(int(ended.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(ended.stdout))
