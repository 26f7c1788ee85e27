# SPDX-License-Identifier: Apache-2.0
"""Runs that are cut short, go on by themselves, or can't."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit import (
    BackupAndRestore,
    EarlyStopping,
    ModelCheckpoint,
    Optimizer,
    SwapEMAWeights,
    load_checkpoint,
)
from ipufit.errors import CheckpointWarning, ConfigError
from ipufit.state import RunState
from tests import reference
from tests.data.stateful import StatefulLoader
from tests.interpreters import run_python
from tests.reference import Recorded, samples
from tests.resume import test_resume
from tests.resume.test_resume import (
    COUNT,
    Augmented,
    Scenario,
    Watcher,
    assert_same,
    network,
    result_of,
    seeded,
    unbroken,
)

pytestmark = [
    pytest.mark.usefixtures("unsynced"),
    pytest.mark.filterwarnings(
        "ignore::ipufit.errors.DroppedRowsWarning", "ignore:.*last call have padding"
    ),
]


class FaultError(Exception):
    """What happens to a run."""


class Breaker(ipufit.Callback):
    """Has something happen once, after so many updates."""

    is_saved = False

    def __init__(self, update, what):
        self.update = update
        self.what = what

    def on_train_batch_end(self, batch, logs):
        if self.run.updates == self.update:
            self.what()


def fail():
    raise FaultError


def interrupt():
    raise KeyboardInterrupt


def evict():
    os.kill(os.getpid(), signal.SIGTERM)


def attempt(scenario, folder, *breakers, **backup):
    """One start of a script that backs up, in a process of its own."""
    seeded(len(breakers) + 2)
    model, callbacks, watcher = scenario.model(), scenario.callbacks(), Watcher()
    backup = BackupAndRestore(folder, **{"save_freq": 1, **backup})
    history = scenario.fit(model, [*callbacks, backup, *breakers, watcher])
    return result_of(model, history, callbacks), watcher.seen


# Every way to end, and to go on -----------------------------------------------------


class InValidation(ipufit.Callback):
    """Tells the process to end in the validation with a number, counted from 0.

    At its first call, after which no other comes, or where it begins.
    """

    is_saved = False

    def __init__(self, number, epochs=None, *, where="call"):
        self.number, self.epochs, self.where = number, epochs, where

    def on_test_begin(self, logs):
        self.number -= 1
        if self.where == "begin" and self.number == -1:
            evict()

    def on_test_batch_end(self, batch, logs):
        if self.where == "call":
            assert self.run.told_by is None
            if self.number == -1 and batch == 0:
                evict()


def shuffled():
    rows = TensorDataset(*samples(13, seed=3))
    return DataLoader(rows, 4, shuffle=True, drop_last=True)


def of_noise(**fitted):
    return Scenario(
        data=lambda: {"x": Augmented(), "validation_data": Augmented(16)},
        fitted={"validation_batch_size": 4, **fitted},
    )


def of_sets(**fitted):
    def data():
        sets = {"in": shuffled(), "out": shuffled()}
        return {**dict(zip("xy", samples(COUNT))), "validation_data": sets}

    return Scenario(data=data, fitted=fitted)


def of_a_stream(*, is_same):
    def data():
        loader = shuffled()
        return {
            "x": loader,
            "validation_data": loader if is_same else samples(8, seed=4),
        }

    return Scenario(data=data, fitted={"validation_updates": 2})


def of_streams():
    def data():
        x, y = samples(200, seed=3)
        sets = {
            "generator": (pair for pair in zip(x.split(5), y.split(5))),
            "loader": StatefulLoader(*samples(20, seed=4), 4),
        }
        return {**dict(zip("xy", samples(COUNT))), "validation_data": sets}

    return Scenario(data=data, fitted={"validation_updates": 2, "validation_steps": 2})


SMALL = Scenario(
    callbacks=lambda: [EarlyStopping("loss", patience=9, restore_best_weights=True)],
    optimizer=lambda module: Optimizer("adam", 0.05, ema_momentum=0.9),
)
WITHIN = {"validation_updates": 2}
SCENARIOS = {
    "small": SMALL,
    "noise": of_noise(),
    "noise in steps": of_noise(steps_per_epoch=4),
    "noise within epochs": of_noise(**WITHIN),
    "sets": of_sets(),
    "sets within epochs": of_sets(**WITHIN),
    "a stream": of_a_stream(is_same=False),
    "the same stream": of_a_stream(is_same=True),
    "streams to validate on": of_streams(),
}
SAVERS = {
    "each update": lambda: BackupAndRestore("run", save_freq=1),
    "each epoch": lambda: BackupAndRestore("run"),
    "the last": lambda: ModelCheckpoint("run", keep=2),
    "one": lambda: ModelCheckpoint("run"),
}
ERRORS = {fail: FaultError, interrupt: KeyboardInterrupt}


def at(*updates, what):
    return lambda: [Breaker(update, what) for update in updates]


def in_sets(*numbers):
    return lambda: [InValidation(number, where="begin") for number in numbers]


ENDED = [
    *(("small", "each update", at(update, what=fail)) for update in (2, 6, 7, 18)),
    *(("small", "each update", at(n, what=interrupt)) for n in (5, 12, 17)),
    # Keras forgets the epoch at the second one.
    ("small", "each update", at(8, 10, 11, what=fail)),
    *(("small", "each epoch", at(update, what=evict)) for update in (1, 6, 9, 18)),
    *(("small", "the last", at(update, what=evict)) for update in (3, 6, 10)),
    ("small", "one", at(3, what=evict)),
    ("noise", "each epoch", lambda: [InValidation(0, epochs=0)]),
    ("noise", "each epoch", lambda: [InValidation(1, epochs=1)]),
    ("noise in steps", "each epoch", lambda: [InValidation(1, epochs=1)]),
    # The first epoch has several.
    ("noise within epochs", "each epoch", lambda: [InValidation(0, epochs=0)]),
    *(
        pytest.param(
            *(scenario, "each epoch", in_sets(number)),
            marks=() if number in every_day else pytest.mark.slow,
        )
        for scenario, every_day in (("sets", (1, 4)), ("sets within epochs", (0, 2)))
        for number in (0, 1, 2, 4)
    ),
    # Before a batch of training was drawn again.
    ("a stream", "each epoch", in_sets(2, 0, 0)),
    ("the same stream", "each epoch", in_sets(2, 0, 0)),
    ("streams to validate on", "each epoch", in_sets(4, 1, 2)),
]


@functools.lru_cache(maxsize=None)
def whole(name):
    """What a run leaves that nothing ends, and what its hooks were told."""
    return unbroken(SCENARIOS[name])


def calls_of(seen):
    return [entry for entry in seen if entry[0] == "call"]


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.filterwarnings("ignore:The data ran out")
@pytest.mark.parametrize(("name", "saver", "make"), ENDED)
def test_a_run_that_ends_in_any_way_goes_on_as_if_it_had_not(name, saver, make):
    scenario, (expected, seen) = SCENARIOS[name], whole(name)
    handler, done = signal.getsignal(signal.SIGTERM), 0
    for number, end in enumerate([*make(), None]):
        seeded(number + 1)
        model, callbacks, watcher = scenario.model(), scenario.callbacks(), Watcher()
        saves, more = SAVERS[saver](), [] if end is None else [end]
        how = {"resume": "run" if saver == "one" else "auto"} if number else {}
        error = ERRORS.get(getattr(end, "what", None))
        with pytest.raises(error) if error else contextlib.nullcontext():
            history = scenario.fit(model, [*callbacks, saves, *more, watcher], **how)
        assert signal.getsignal(signal.SIGTERM) is handler
        calls = calls_of(watcher.seen)
        # Hooks that fail lose their own call, which wasn't saved.
        assert [entry[2] for entry in calls[:1]] in ([], [done + 1])
        done = calls[-1][2] if calls else done
        if getattr(end, "what", None) is evict:
            assert done == end.update
        if getattr(end, "epochs", None) is not None:
            assert history.epoch == list(range(end.epochs))
        assert Path("run").exists() == (end is not None or saver in ("the last", "one"))
    assert_same(result_of(model, history, callbacks), expected)
    assert repr(calls) == repr(calls_of(seen)[len(calls_of(seen)) - len(calls) :])


def test_after_a_resumed_run_a_plain_fit_trains_all_its_epochs(tmp_path):
    # In Keras it trains none.
    model = SMALL.model()
    backup = BackupAndRestore(tmp_path / "run", save_freq=1)
    with pytest.raises(FaultError):
        SMALL.fit(model, [backup, Breaker(8, fail)])
    again = SMALL.model()
    assert SMALL.fit(again, [backup]).epoch == [0, 1, 2]
    history = SMALL.fit(again, epochs=2)
    assert history.epoch == [0, 1]
    assert len(history.history["loss"]) == 2


def test_a_complete_run_that_is_resumed_trains_no_further_unless_it_is_longer(tmp_path):
    scenario = Scenario()
    expected, _ = unbroken(scenario)
    seeded(1)
    keep = {"delete_checkpoint": False, "save_freq": "epoch"}
    short = BackupAndRestore(tmp_path / "short", **keep)
    scenario.fit(scenario.model(), [short], epochs=2)
    assert_same(attempt(scenario, tmp_path / "short", **keep)[0], expected)
    model = scenario.model()
    backup = BackupAndRestore(tmp_path / "run", delete_checkpoint=False)
    history = scenario.fit(model, [backup])
    again, watcher = scenario.model(), Watcher()
    backup = BackupAndRestore(tmp_path / "run", delete_checkpoint=False)
    repeated = scenario.fit(again, [backup, watcher])
    assert watcher.seen == []
    assert repeated.history == history.history
    reference.assert_same_weights(again.module, model.module, rtol=0, atol=0)


def test_a_run_that_stopped_early_does_not_train_on(tmp_path):
    scenario = Scenario(
        callbacks=lambda: [
            EarlyStopping("loss", patience=1, min_delta=9.0, restore_best_weights=True)
        ]
    )
    model = scenario.model()
    backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
    history = scenario.fit(model, [*scenario.callbacks(), backup])
    assert history.epoch == [0, 1]
    result, seen = attempt(scenario, tmp_path, delete_checkpoint=False)
    assert seen == []
    assert result.epochs == [0, 1]
    assert result.history == history.history
    again = scenario.model()
    backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
    scenario.fit(again, [*scenario.callbacks(), backup])
    reference.assert_same_weights(again.module, model.module, rtol=0, atol=0)


# What isn't loaded --------------------------------------------------------------


def test_samples_that_were_trained_on_are_not_loaded_again(tmp_path):
    x, y = samples(COUNT)

    def fit(*callbacks):
        data = Recorded(x, y)
        model = reference.compiled(seed=1, optimizer="adam")
        model.fit(data, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
        return data.asked[-2 * COUNT :], data.asked

    whole, _ = fit()
    backup = BackupAndRestore(tmp_path / "run", save_freq=1)
    with pytest.raises(FaultError):
        fit(backup, Breaker(9, fail))
    _, asked = fit(backup)
    rest = whole[8 * 4 :]
    assert asked[-len(rest) :] == rest
    assert set(asked[: -len(rest)]) <= {0}  # looked at once to see what a sample is
    assert len(asked) < len(rest) + 4


# What is refused ---------------------------------------------------------------


def saved(tmp_path, scenario=None):
    scenario = scenario or Scenario()
    backup = BackupAndRestore(tmp_path / "run", save_freq=1, delete_checkpoint=False)
    with pytest.raises(FaultError):
        scenario.fit(
            scenario.model(), [*scenario.callbacks(), backup, Breaker(9, fail)]
        )
    return backup.store


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The folder of a run that was ended."""
    return saved(tmp_path_factory.mktemp("kept")).directory


class Wider(torch.nn.Sequential):
    def __init__(self):
        super().__init__(
            torch.nn.Linear(3, 6),
            torch.nn.Tanh(),
            torch.nn.Identity(),
            torch.nn.Linear(6, 4),
        )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Scenario(fitted={"batch_size": 8}), "batch_size was 4 and is 8"),
        (Scenario(config={"device_iterations": 2}), "device_iterations was 1 and is 2"),
        (
            Scenario(data=lambda: dict(zip("xy", samples(20)))),
            "samples were 24 and are 20",
        ),
        (Scenario(optimizer=lambda module: "sgd"), "optimizer was Adam and is SGD"),
        (
            Scenario(optimizer=lambda module: Optimizer("adam", ema_momentum=0.9)),
            "ema_momentum was None and is 0.9",
        ),
        (Scenario(module=Wider), r"0\.weight"),
        (Scenario(compiled={"lr_schedule": "cosine"}), "schedule"),
        (
            Scenario(callbacks=lambda: [EarlyStopping("loss")]),
            r"EarlyStopping\(loss\) .*new",
        ),
        (
            Scenario(
                optimizer=lambda module: torch.optim.Adam(
                    [
                        {"params": module[0].parameters()},
                        {"params": module[3].parameters()},
                    ]
                )
            ),
            r"lr was \[0.05\] and is \[0.001, 0.001\]",
        ),
    ],
)
def test_another_run_is_refused(kept, other, said):
    files = {path: path.read_bytes() for path in kept.rglob("*.*") if path.is_file()}
    backup = BackupAndRestore(kept, delete_checkpoint=False)
    with pytest.raises(ConfigError, match=said):
        other.fit(other.model(), [*other.callbacks(), backup])
    assert len(files) > 3
    assert all(path.read_bytes() == before for path, before in files.items())


def test_a_run_goes_on_whatever_was_refused(kept):
    scenario = Scenario()
    backup = BackupAndRestore(kept, delete_checkpoint=False)  # others need it
    history = scenario.fit(scenario.model(), [backup])
    assert history.epoch == [0, 1, 2]


def test_resuming_automatically_needs_a_callback_that_saves(tmp_path):
    scenario = Scenario()
    with pytest.raises(ConfigError, match="BackupAndRestore"):
        scenario.fit(scenario.model(), resume="auto")
    each = ModelCheckpoint(tmp_path / "each-{epoch}")
    with pytest.raises(ConfigError, match=r"directory of its own.*or pass the path"):
        scenario.fit(scenario.model(), [each], resume="auto")
    with pytest.raises(ConfigError, match="no checkpoint"):
        scenario.fit(scenario.model(), resume=tmp_path)
    fitted = scenario.model()
    scenario.fit(fitted)
    for model in (scenario.model(), fitted):  # outside of a fit
        model.save(tmp_path / "saved")
        with pytest.raises(ConfigError, match=r"not the place of a run.*model\.load"):
            scenario.fit(scenario.model(), resume=tmp_path / "saved")
    backup = BackupAndRestore(tmp_path / "none yet")
    history = scenario.fit(scenario.model(), [backup], resume="auto")
    assert history.epoch == [0, 1, 2]


def both(tmp_path, **backup):
    """One that saves after each epoch, and one that saves every two updates."""
    backup = {"save_freq": 2, "keep_last": 1, "delete_checkpoint": False, **backup}
    return [
        ModelCheckpoint(tmp_path / "kept", keep=2),
        BackupAndRestore(tmp_path / "backup", **backup),
    ]


def first_update(tmp_path):
    """Where a run that goes on by itself begins: after so many updates."""
    scenario, watcher = Scenario(), Watcher()
    callbacks = [*scenario.callbacks(), *both(tmp_path)]
    scenario.fit(scenario.model(), [*callbacks, watcher], resume="auto")
    return next(entry[2] for entry in watcher.seen if entry[0] == "call") - 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_of_several_callbacks_the_newest_checkpoint_is_taken(tmp_path, is_damaged):
    scenario = Scenario()
    with pytest.raises(FaultError):
        scenario.fit(
            scenario.model(),
            [*scenario.callbacks(), *both(tmp_path), Breaker(11, fail)],
        )
    if not is_damaged:
        assert first_update(tmp_path) == 10
        return
    (newest,) = (tmp_path / "backup").iterdir()
    (newest / "state.json").write_bytes(b"{}")
    with pytest.warns(CheckpointWarning, match=r"state\.json") as caught:
        assert first_update(tmp_path) == 6
    assert caught[0].filename == test_resume.__file__  # which calls fit()


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    scenario = Scenario(callbacks=list)
    seeded(1)
    store = saved(tmp_path, scenario)
    with open(store.latest() / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xaa")
    expected, _ = unbroken(scenario)
    with pytest.warns(CheckpointWarning, match="model.safetensors"):
        result, seen = attempt(scenario, store.directory)
    assert next(entry[2] for entry in seen if entry[0] == "call") == 8
    assert_same(result, expected)


# Models without a run ------------------------------------------------------------


def test_training_goes_on_after_loading_as_without(tmp_path):
    scenario = Scenario(
        module=lambda: torch.nn.Sequential(torch.nn.Linear(3, 4)),  # no dropout
        optimizer=lambda module: Optimizer("adam", 0.1, ema_momentum=0.9),
    )
    x, y = samples(8)
    model = scenario.model()
    for _ in range(3):
        model.train_on_batch(x, y)
    model.save(tmp_path / "saved")
    other = scenario.model()
    other.train_on_batch(x, y)
    other.load(tmp_path / "saved")
    for _ in range(3):
        assert model.train_on_batch(x, y) == other.train_on_batch(x, y)
    one, two = model.checkpoint(), other.checkpoint()
    assert repr(one.state) == repr(two.state)
    for group, tensors in one.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, two.tensors[group][name]), name
    assert model.evaluate(x, y, verbose=0) == other.evaluate(x, y, verbose=0)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(3, 4, bias=False)
        self.up = torch.nn.Linear(3, 4, bias=False)
        self.up.weight = self.down.weight

    def forward(self, x):
        return self.up(self.down(x)[:, :3])


@pytest.mark.parametrize("module", [network, Tied])
def test_plain_torch_loads_the_weights(tmp_path, module):
    scenario = Scenario(module=module)
    model = scenario.model()
    scenario.fit(model)
    model.save(tmp_path / "saved")
    plain = module()
    plain.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    reference.assert_same_weights(plain, model.module, rtol=0, atol=0)
    loaded = scenario.model()
    loaded.load(tmp_path / "saved")
    reference.assert_same_weights(loaded.module, model.module, rtol=0, atol=0)
    state = ipufit.load_checkpoint(tmp_path / "saved").state
    assert state["updates"]["num_updates"] == 18
    if module is Tied:
        expected, _ = unbroken(scenario)
        seeded(1)
        result, _ = attempt(scenario, saved(tmp_path, scenario).directory)
        assert_same(result, expected)
        weights = result.tensors["model"]
        assert torch.equal(weights["up.weight"], weights["down.weight"])


def test_weights_are_saved_and_not_the_averages_that_are_looked_at(tmp_path):
    scenario = Scenario(
        module=lambda: torch.nn.Linear(3, 4),
        optimizer=lambda module: Optimizer("sgd", 0.1, ema_momentum=0.9),
        callbacks=lambda: [SwapEMAWeights(swap_on_epoch=True)],
        fitted={"epochs": 2},
    )
    weights, averages = [], []
    look = ipufit.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(model.get_weights()[0]),
        on_epoch_end=lambda epoch, logs: averages.append(model.get_weights()[0]),
    )
    model, backup = scenario.model(), BackupAndRestore(tmp_path, keep_last=9)
    with pytest.raises(FaultError):
        scenario.fit(model, [*scenario.callbacks(), backup, look, Breaker(8, fail)])
    kept = ipufit.load_checkpoint(backup.store.all()[0]).tensors["model"]["weight"]
    assert (kept.numpy() == weights[5]).all()
    assert (kept.numpy() != averages[0]).any()


def test_two_that_save_are_both_told(tmp_path):
    seeded(1)
    model, watcher = SMALL.model(), Watcher()
    both = [
        BackupAndRestore(tmp_path / "one"),
        ModelCheckpoint(tmp_path / "other", keep=1),
    ]
    SMALL.fit(model, [*both, Breaker(5, evict), watcher])
    for one in both:
        state = load_checkpoint(one.store.latest()).state["run"]
        assert state["updates"] == 5
        assert state["stop_reason"] is None  # a run that goes on from it would stop


def test_all_that_save_are_told_of_an_eviction_though_one_fails():
    run, done = RunState(), []

    def failing(words):
        def act():
            done.append(words)
            raise ValueError(words)

        return act

    for act in (failing("no room"), lambda: done.append("other"), failing("too")):
        run.on_eviction(act)
    with pytest.warns(ipufit.IpufitWarning, match="too"), pytest.raises(
        ValueError, match="no room"
    ):
        run.evict()
    assert done == ["no room", "other", "too"]


def test_the_best_is_not_saved_over(tmp_path):
    path = str(tmp_path / "best")
    code = (
        "import os, signal, torch, ipufit\n"
        "class Evict(ipufit.Callback):\n"
        "    def on_train_batch_end(self, batch, logs):\n"
        "        if self.run.updates == 3:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "model = ipufit.IPUModel(torch.nn.Linear(1, 1))\n"
        "model.compile('sgd', 'mse')\n"
        f"best = ipufit.ModelCheckpoint({path!r}, 'loss', save_best_only=True)\n"
        "x = torch.zeros(4, 1)\n"
        "model.fit(x, x, 2, epochs=2, verbose=0, callbacks=[best, Evict()])\n"
    )
    ended = run_python("-c", code)
    assert ended.returncode == -signal.SIGTERM  # as without it
    assert load_checkpoint(path).state["run"]["updates"] == 2
