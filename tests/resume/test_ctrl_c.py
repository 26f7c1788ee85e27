# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any place of a run: what it leaves is of whole updates, and counted."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import ipufit
from ipufit import (
    BackupAndRestore,
    Callback,
    CSVLogger,
    IPUModel,
    ModelCheckpoint,
    Optimizer,
    SwapEMAWeights,
    poptorch,
)
from ipufit.checkpoint import CheckpointStore
from ipufit.metrics import StreamedMetric
from tests.reference import Recorded, samples

pytestmark = pytest.mark.usefixtures("unsynced")

PACKAGE = str(Path(ipufit.__file__).parent)
X, Y = samples(24)


def network():
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4)
    return torch.nn.Sequential(*layers)


def compiled(**settings):
    model = IPUModel(network())
    given = {"optimizer": Optimizer("sgd", 0.1, momentum=0.9), **settings}
    model.compile(loss="cross_entropy", **given)
    return model


def fit(model, *callbacks, x=X, y=Y, **more):
    given = {"batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False, **more}
    return model.fit(x, y, callbacks=[*callbacks], **given)


def state_of(model):
    """All tensors that training changes, by group and name."""
    groups = model.checkpoint().tensors
    kept = "model", "optimizer", "average"
    return {(g, n): t for g in kept for n, t in groups.get(g, {}).items()}


# At any line -----------------------------------------------------------------------


def plain(folder):
    model = compiled(metrics=["accuracy"])
    return model, lambda *callbacks: fit(model, *callbacks, epochs=2)


def averaged(folder):
    optimizer = Optimizer("adam", 0.1, ema_momentum=0.9)
    model = compiled(optimizer=optimizer, lr_schedule="cosine")
    data = {"x": Recorded(X, Y), "y": None, "validation_data": (X, Y), "epochs": 2}
    swap = SwapEMAWeights(swap_on_epoch=True)
    return model, lambda *callbacks: fit(model, swap, *callbacks, **data)


def saved(folder):
    model = compiled()
    keepers = [
        ModelCheckpoint(folder / "kept", "loss", keep=1),
        BackupAndRestore(folder / "backup", save_freq=1),
        CSVLogger(folder / "log.csv"),
    ]
    return model, lambda *callbacks: fit(model, *keepers, *callbacks, epochs=2)


class Lines:
    """A trace function that counts lines of the package, and sends signals at one."""

    def __init__(self, interrupted=0, signals=(signal.SIGINT,)):
        self.interrupted, self.count, self.place = interrupted, 0, ""
        self.signals = signals

    def __call__(self, frame, event, argument):
        is_own = frame.f_code.co_filename.startswith(PACKAGE)
        return self.in_function if is_own else None

    def in_function(self, frame, event, argument):
        self.count += event == "line"
        if event == "line" and self.count == self.interrupted:
            code = frame.f_code
            self.place = f"{code.co_filename}:{frame.f_lineno}, {code.co_name}"
            sys.settrace(None)
            for number in self.signals:
                signal.raise_signal(number)
        return self.in_function

    def call(self, function):
        """Call a function under this trace; return whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


@functools.lru_cache(maxsize=None)
def uninterrupted(make):
    """The states by the number of updates, and the lines to the first and the last."""
    weights = {("model", name): t for name, t in network().state_dict().items()}
    after, counts = {0: [weights]}, []

    class Look(Callback):
        def on_train_batch_end(self, batch, logs):
            after[self.model.num_updates] = [state_of(self.model)]

    class Count(Callback):
        def on_train_batch_end(self, batch, logs):
            counts.append(lines.count)

    with tempfile.TemporaryDirectory() as folder:
        model, run = make(Path(folder, "look"))
        run(Look())
        after[model.num_updates].append(state_of(model))  # averages are the weights
        lines = Lines()  # fewer than before: what was read of classes is kept
        lines.call(lambda: make(Path(folder, "first"))[1](Count()))
        whole = Lines()
        whole.call(make(Path(folder, "count"))[1])
    return after, counts[0], whole.count


def is_same(state, other):
    return all(torch.equal(state[name], tensor) for name, tensor in other.items())


def num_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("make", [plain, averaged, saved])
def test_what_is_left_is_of_whole_updates_and_counted(tmp_path, make):
    after, first, num_lines = uninterrupted(make)
    numbers, seen = random.Random(0), set()
    for number in range(8):  # most lines compile: half of the signals come later
        begin = first if number % 2 else num_lines // 20
        lines = Lines(numbers.randrange(begin, num_lines))
        folder = tmp_path / str(number)
        model, run = make(folder)
        files = num_files()
        assert lines.call(run)
        assert num_files() <= files, lines.place
        assert not [*folder.rglob(".*")], lines.place  # half-written, half-deleted
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        updates, left = model.num_updates, state_of(model)
        assert any(is_same(left, state) for state in after[updates]), lines.place
        seen.add(updates)
        fit(model, epochs=1)
        assert model.num_updates == updates + 3
    assert len(seen) > 1


@pytest.mark.filterwarnings("ignore:Exception ignored in.*__del__")
def test_a_directory_is_released_whichever_line_is_interrupted(tmp_path, request):
    heard = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: heard.append(number))
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    store = CheckpointStore(tmp_path / "kept")

    def hold():
        with store.held():
            pass

    hold()
    whole, files = Lines(), num_files()
    whole.call(hold)
    for number in range(1, whole.count, 5):
        lines = Lines(number, (signal.SIGHUP, signal.SIGINT))
        lines.call(hold)
        assert heard == [signal.SIGHUP], lines.place
        heard.clear()
        assert num_files() == files, lines.place
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert whole.count > 100


# At every hook, and in the data ------------------------------------------------------


def interrupt(number=signal.SIGINT):
    signal.raise_signal(number)


class Interrupting(Callback):
    """Interrupts in a hook of the second epoch."""

    def __init__(self, hook):
        setattr(self, hook, self.act)

    def act(self, *_):
        if self.run.epoch == 1:
            interrupt()


class InterruptingData(Recorded):
    def __getitem__(self, index):
        if len(self.asked) == 30:
            interrupt()
        return super().__getitem__(index)


class InterruptingMetric(StreamedMetric):
    """Interrupts in its updates with these numbers, and counts those that end."""

    def __init__(self, *updates, number=signal.SIGINT):
        super().__init__("ended")
        self.updates, self.number = updates, number
        InterruptingMetric.begun = InterruptingMetric.ended = 0  # of its copies, too

    def update(self, outputs, targets, weights=None):
        InterruptingMetric.begun += 1
        for _ in range(self.updates.count(self.begun)):
            interrupt(self.number)
        InterruptingMetric.ended += 1

    def result(self):
        return float(self.ended)

    def reset(self):
        pass


def assert_is_of_plain_torch(model):
    """Compare with a loop of torch that makes as many updates."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for update in range(model.num_updates):
        rows = slice(8 * (update % 3), 8 * (update % 3) + 8)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(X[rows]), Y[rows]).backward()
        optimizer.step()
    torch.testing.assert_close(model.module.state_dict(), module.state_dict())


@pytest.mark.parametrize(
    "hook",
    [
        *("on_epoch_begin", "on_epoch_end"),
        *("on_train_batch_begin", "on_train_batch_end"),
        *("on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end"),
    ],
)
def test_an_interrupt_in_a_hook(hook):
    model = compiled()
    with pytest.raises(KeyboardInterrupt):
        fit(model, Interrupting(hook), validation_data=(X, Y))
    assert 3 <= model.num_updates <= 6
    assert_is_of_plain_torch(model)


def test_an_interrupt_in_the_data():
    model = compiled()
    with pytest.raises(KeyboardInterrupt):
        fit(model, x=InterruptingData(X, Y), y=None)
    assert model.num_updates > 0
    assert_is_of_plain_torch(model)


def test_an_interrupt_in_a_call_is_raised_after_it():
    metric = InterruptingMetric(4)
    model = compiled(metrics=[metric])
    with pytest.raises(KeyboardInterrupt):
        fit(model)
    assert model.num_updates == metric.ended == 4
    assert_is_of_plain_torch(model)
    assert len(model.history.epoch) == 1


def test_a_second_interrupt_does_not_wait():
    metric = InterruptingMetric(4, 4)
    model = compiled(metrics=[metric])
    with pytest.raises(KeyboardInterrupt):
        fit(model)
    assert metric.ended == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_train_on_batch_counts_too():
    model = compiled(metrics=[InterruptingMetric(2)])
    model.train_on_batch(X[:8], Y[:8])
    with pytest.raises(KeyboardInterrupt):
        model.train_on_batch(X[8:16], Y[8:16])
    model.train_on_batch(X[16:], Y[16:])
    assert model.num_updates == 3
    assert_is_of_plain_torch(model)


def test_an_interrupt_in_a_batch_of_a_hook_is_counted():
    model = compiled(metrics=[InterruptingMetric(2)])

    class Inner(Callback):
        def on_train_batch_end(self, batch, logs):
            model.train_on_batch(X[8:16], Y[8:16])

    with pytest.raises(KeyboardInterrupt):
        fit(model, Inner())
    assert model.num_updates == 2
    assert_is_of_plain_torch(model)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_handler_of_the_user_is_called_after_the_call_and_stays(number):
    def end(*_):
        raise TimeoutError

    metric = InterruptingMetric(4, number=number)
    model = compiled(metrics=[metric])
    before = signal.signal(number, end)
    try:
        with pytest.raises(TimeoutError):
            fit(model)
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)
    assert model.num_updates == metric.ended == 4
    assert_is_of_plain_torch(model)


def test_a_handler_that_a_hook_sets_waits_from_the_next_epoch_on():
    def end(*_):
        raise TimeoutError

    class Set(Callback):
        def on_epoch_begin(self, epoch, logs):
            signal.signal(signal.SIGALRM, end)

    metric = InterruptingMetric(4, number=signal.SIGALRM)
    model = compiled(metrics=[metric])
    before = signal.getsignal(signal.SIGALRM)
    try:
        with pytest.raises(TimeoutError):
            fit(model, Set())
    finally:
        signal.signal(signal.SIGALRM, before)
    assert model.num_updates == metric.ended == 4
    assert_is_of_plain_torch(model)


def test_a_run_in_another_thread_holds_up_no_signal():
    seen = set()

    class Look(InterruptingMetric):
        def update(self, outputs, targets, weights=None):
            seen.add(signal.getsignal(signal.SIGINT))

    model = compiled(metrics=[Look()])
    thread = threading.Thread(target=fit, args=(model,))
    thread.start()
    thread.join()
    assert seen == {signal.default_int_handler}
    assert model.num_updates == 9


# PopTorch's own model ----------------------------------------------------------------


class WithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, y):
        out = self.network(x)
        return out, torch.nn.functional.cross_entropy(out, y)


def training_model():
    module = WithLoss()
    optimizer = poptorch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    options = poptorch.Options().deviceIterations(3)
    executor = poptorch.trainingModel(module, options, optimizer)
    executor.compile(X, Y)
    return executor


def weights_of(executor):
    executor.copyWeightsToHostIfNeeded()
    state = executor.model.state_dict().items()
    return {name: torch.as_tensor(tensor).clone() for name, tensor in state}


def test_a_call_of_a_training_model_is_whole():
    executor = training_model()
    after = [weights_of(executor)]
    for _ in range(2):
        executor(X, Y)
        after.append(weights_of(executor))
    lines = Lines()
    lines.call(lambda: training_model()(X, Y))
    numbers, seen = random.Random(0), set()
    for _ in range(12):
        executor = training_model()
        interrupted = Lines(numbers.randrange(1, lines.count))
        interrupted.call(lambda: [executor(X, Y) for _ in range(2)])  # noqa: B023
        left = weights_of(executor)
        same = [is_same(left, state) for state in after]
        assert any(same), interrupted.place
        seen.add(same.index(True))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(seen) > 1


class Raising(torch.nn.Linear):
    """Raises a signal where it is called, such as while it is compiled."""

    num_raised = 0

    def forward(self, x):
        Raising.num_raised += 1
        signal.raise_signal(signal.SIGUSR2)
        return super().forward(x)


def test_an_event_loop_hears_of_a_signal_once():
    counts = []

    async def predict():
        heard = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, heard.append, 1)
        raised = ipufit.IPUModel(Raising(2, 1)).predict(torch.zeros(4, 2), verbose=0)
        await asyncio.sleep(0.05)
        counts.append((len(raised), len(heard)))

    asyncio.run(predict())
    assert counts == [(4, Raising.num_raised)]
    assert Raising.num_raised
