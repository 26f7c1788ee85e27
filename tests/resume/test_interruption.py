# SPDX-License-Identifier: Apache-2.0
"""Runs that are cut short, go on by themselves, or can't."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

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


SMALL = Scenario(
    callbacks=lambda: [EarlyStopping("loss", patience=9, restore_best_weights=True)],
    optimizer=lambda module: Optimizer("adam", 0.05, ema_momentum=0.9),
)


@functools.lru_cache(maxsize=None)
def small():
    """What the small run leaves that nothing ends, and what its hooks were told."""
    return unbroken(SMALL)


@pytest.mark.parametrize(
    ("what", "error", "update"),
    [
        *((fail, FaultError, update) for update in (2, 6, 7, 18)),
        *((interrupt, KeyboardInterrupt, update) for update in (5, 12, 17)),
    ],
)
def test_a_run_that_was_ended_goes_on_when_begun_again(tmp_path, what, error, update):
    expected, seen = small()
    folder = tmp_path / "run"
    seeded(1)
    model, callbacks = SMALL.model(), SMALL.callbacks()
    backup = BackupAndRestore(folder, save_freq=1)
    with pytest.raises(error):
        SMALL.fit(model, [*callbacks, backup, Breaker(update, what)])
    result, rest = attempt(SMALL, folder)
    assert_same(result, expected)
    assert repr(rest) == repr(seen[-len(rest) :])
    calls = [entry[2] for entry in rest if entry[0] == "call"]
    assert calls[0] == update  # its own hooks failed, so this call wasn't saved
    assert not folder.exists()


def test_two_interruptions_in_one_epoch_lose_nothing(tmp_path):
    # Keras forgets the epoch at the second one.
    expected, _ = small()
    seeded(1)
    for update in (8, 10, 11):
        model, callbacks = SMALL.model(), SMALL.callbacks()
        backup = BackupAndRestore(tmp_path / "run", save_freq=1)
        with pytest.raises(FaultError):
            SMALL.fit(model, [*callbacks, backup, Breaker(update, fail)])
        seeded(update)
    assert_same(attempt(SMALL, tmp_path / "run")[0], expected)


@pytest.mark.parametrize("update", [1, 6, 9, 18])
def test_an_evicted_run_saves_ends_in_order_and_goes_on(tmp_path, update):
    expected, _ = small()
    seeded(1)
    model, callbacks, watcher = SMALL.model(), SMALL.callbacks(), Watcher()
    backup = BackupAndRestore(tmp_path / "run")
    before = signal.getsignal(signal.SIGTERM)
    SMALL.fit(model, [*callbacks, backup, Breaker(update, evict), watcher])
    assert signal.getsignal(signal.SIGTERM) is before
    calls = [entry[2] for entry in watcher.seen if entry[0] == "call"]
    assert calls[-1] <= update + 1
    assert backup.store.all()
    model.detach()
    assert_same(attempt(SMALL, tmp_path / "run")[0], expected)
    assert not (tmp_path / "run").exists()


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


@pytest.mark.parametrize(
    ("make", "resume", "update"),
    [
        *((lambda: ModelCheckpoint("run", keep=2), "auto", at) for at in (3, 6, 10)),
        (lambda: ModelCheckpoint("run"), "run", 3),
    ],
)
def test_a_whole_model_checkpoint_is_saved_too(
    tmp_path, monkeypatch, make, resume, update
):
    monkeypatch.chdir(tmp_path)
    expected, _ = small()
    seeded(1)
    model, callbacks, watcher = SMALL.model(), SMALL.callbacks(), Watcher()
    SMALL.fit(model, [*callbacks, make(), Breaker(update, evict), watcher])
    assert [e[2] for e in watcher.seen if e[0] == "call"][-1] == update
    seeded(2)
    model, callbacks = SMALL.model(), SMALL.callbacks()
    history = SMALL.fit(model, [*callbacks, make()], resume=resume)
    assert_same(result_of(model, history, callbacks), expected)


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


class EvictInValidation(ipufit.Callback):
    """Sends the signal in the first call of a validation, and counts calls after it."""

    is_saved = False

    def __init__(self, epoch):
        self.epoch = epoch
        self.calls = 0

    def on_test_batch_end(self, batch, logs):
        if self.run.told_by is not None:
            self.calls += 1
        if self.epoch == 0 and batch == 0:
            evict()
        self.epoch -= batch == 0


@pytest.mark.filterwarnings("ignore:The data ran out")
@pytest.mark.parametrize(
    ("epoch", "more"),
    [
        (0, {}),
        (1, {}),
        (1, {"steps_per_epoch": 4}),
        (0, {"validation_updates": 2}),
    ],
)
def test_an_eviction_in_a_validation_does_not_wait_for_its_end(tmp_path, epoch, more):
    scenario = Scenario(
        data=lambda: {"x": Augmented(), "validation_data": Augmented(16)},
        fitted={"validation_batch_size": 4, **more},
    )
    expected, _ = unbroken(scenario)
    seeded(1)
    model, evicting = scenario.model(), EvictInValidation(epoch)
    backup = BackupAndRestore(tmp_path / "run")
    history = scenario.fit(model, [backup, evicting])
    is_within = "validation_updates" in more  # the first epoch has several
    assert history.epoch == ([] if is_within else list(range(epoch)))
    assert evicting.calls == 0
    result, _ = attempt(scenario, tmp_path / "run")
    assert_same(result, expected)
