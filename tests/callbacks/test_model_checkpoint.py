# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint`: which files or directories, when, and what it says."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from ipufit import (
    BackupAndRestore,
    Callback,
    CheckpointError,
    ConfigError,
    EarlyStopping,
    IPUConfig,
    IPUModel,
    load_checkpoint,
)
from ipufit.callbacks import ModelCheckpoint
from ipufit.checkpoint import read_manifest, store, write_checkpoint
from ipufit.errors import CheckpointWarning
from ipufit.state import RunState
from tests.callbacks.driving import ScriptedModel, play

NAN = float("nan")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def saved(series, path="e{epoch}.safetensors", *, batches=0, runs=1, **arguments):
    model = ScriptedModel()
    checkpoint = ModelCheckpoint(path, "q", mode="min", **arguments)
    for _ in range(runs):
        play(checkpoint, series, model=model, batches=batches)
    return [name[: -len(".safetensors")] for name in model.saved]


@pytest.mark.parametrize(
    "path",
    [f"{name}.safetensors" for name in ("{batch}", "{0}", "{q:zz}", "{q[0]}", "{q")],
)
def test_a_name_that_cannot_be_made_is_refused(path):
    with pytest.raises(ConfigError, match=r"Failed to format.*epoch, q\.$"):
        saved([1.0], path)


def test_a_call_of_several_updates_is_saved_once():
    module = torch.nn.Linear(2, 1)
    model = IPUModel(module, IPUConfig(device_iterations=3))
    model.compile("sgd", "mse")
    x, y = torch.randn(24, 2), torch.randn(24, 1)
    checkpoint = ModelCheckpoint("e{epoch}-b{batch}.safetensors", save_freq=2)
    model.fit(x, y, batch_size=4, epochs=2, callbacks=checkpoint, verbose=0)
    names = sorted(path.stem for path in Path().iterdir())
    assert names == ["e1-b3", "e1-b6", "e2-b3", "e2-b6"]


def test_the_number_of_an_update_may_have_zeros_before_it():
    checkpoint = ModelCheckpoint("{epoch:02d}-{batch:04d}-{loss:.0f}", save_freq=2)
    compiled().fit(*batch(), batch_size=4, verbose=0, callbacks=checkpoint)
    assert {path.stem[:7] for path in Path().iterdir()} == {"01-0002", "01-0004"}


def test_it_is_written_when_every_callback_has_heard():
    class Counting(Callback):
        saved_attributes = ("epochs",)
        epochs = 0

        def on_epoch_end(self, epoch, logs):
            self.epochs += 1

    model, data = compiled(), batch()
    checkpoint = ModelCheckpoint("run")
    model.fit(*data, batch_size=4, verbose=0, callbacks=[checkpoint, Counting()])
    state = load_checkpoint("run").state
    assert state["callbacks"]["1:Counting"] == {"epochs": 1}
    assert state["run"]["epoch"] == 1


# Whole checkpoints ------------------------------------------------------------------


def compiled(seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
    model = IPUModel(torch.nn.Sequential(*layers), IPUConfig(seed=1))
    model.compile("adam", "mse", lr_schedule="cosine")
    return model


def batch():
    torch.manual_seed(7)
    return torch.randn(16, 2), torch.randn(16, 1)


@pytest.mark.parametrize(
    ("path", "resume", "arguments"),
    [
        ("run-{epoch}-{batch}", "run-2-3", {"save_freq": 7}),
        ("run-{epoch}-{loss:.3f}", "run-2*", {}),
        ("runs", "runs", {"keep": 1, "save_freq": 3}),
        ("best", "best", {"save_best_only": True, "monitor": "loss"}),
    ],
)
def test_a_fit_goes_on_from_it(path, resume, arguments):
    data = batch()
    common = {"batch_size": 4, "epochs": 3, "verbose": 0, "validation_data": data}

    def callbacks():
        return [ModelCheckpoint(path, **arguments), EarlyStopping(patience=1)]

    whole = compiled()
    expected = whole.fit(*data, callbacks=callbacks(), **common)
    (found,) = Path().glob(resume)
    resumed = compiled(seed=5)  # with other weights, which are replaced
    history = resumed.fit(*data, callbacks=callbacks(), resume=found, **common)
    assert history.epoch == expected.epoch
    assert history.history == expected.history
    for one, other in zip(resumed.get_weights(), whole.get_weights()):
        assert (one == other).all()


def test_a_seed_of_64_bits_is_saved():
    def fit(**arguments):
        torch.manual_seed(-1)  # a process begins with such a one half of the time
        layers = torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
        model = IPUModel(torch.nn.Sequential(*layers))
        model.compile("sgd", "mse")
        arguments["callbacks"] = ModelCheckpoint("run-{epoch}")
        return model.fit(*data, batch_size=4, epochs=2, verbose=0, **arguments)

    data = batch()
    assert fit(resume=None).history == fit(resume="run-1").history
    seed = load_checkpoint("run-1").tensors["random"]["device"][0]
    assert seed == -1  # the bits of 2^64 - 1


# The last ones and the best ---------------------------------------------------------


def kept(series, keep, mode, **arguments):
    checkpoint = ModelCheckpoint("runs", "q", mode=mode, keep=keep, **arguments)
    play(checkpoint, series, batches=1)
    paths = checkpoint.store.all()
    epochs = [load_checkpoint(path).state["epoch"] for path in paths]
    best = checkpoint.store.best()
    return epochs, None if best is None else load_checkpoint(best).state["epoch"]


@pytest.mark.parametrize(
    ("keep", "mode", "best_only", "expected"),
    [
        (1, "min", False, ([1, 4], 1)),
        (2, "max", False, ([2, 3, 4], 2)),
        (1, "min", True, ([1], 1)),
    ],
)
def test_the_last_and_the_best_are_kept(keep, mode, best_only, expected):
    series = [3.0, 1.0, 5.0, 2.0, NAN]
    assert kept(series, keep, mode, save_best_only=best_only) == expected


def test_a_newest_that_is_as_good_as_the_best_is_kept_alone():
    assert kept([3.0, 1.0, 1.0], 1, "min") == ([2], 2)


@pytest.mark.parametrize("save_freq", ["epoch", 4])
def test_an_eviction_at_the_end_of_an_epoch_leaves_one_of_it(save_freq):
    class Evict(Callback):
        def on_epoch_end(self, epoch, logs):
            self.run.is_evicted = epoch == 1

    checkpoint = ModelCheckpoint("runs", "loss", keep=1, save_freq=save_freq)
    logs = small_fit(checkpoint, Evict(), epochs=3).history.history
    (path,) = checkpoint.store.all()
    moment = read_manifest(path).moment
    assert (moment.epoch, moment.value) == (2, logs["loss"][1])


def test_the_direction_of_the_best_is_the_figure_s():
    checkpoint = ModelCheckpoint("runs", "val_q", keep=1)
    series = [{"val_q": value} for value in (1.0, 2.0, 1.5)]
    play(checkpoint, series, directions={"q": "max"}, batches=1)
    assert load_checkpoint(checkpoint.store.best()).state == {"epoch": 1}
    with pytest.raises(ConfigError, match="can't tell whether more or less"):
        play(ModelCheckpoint("runs", "q", keep=1), [1.0])


def run_of(values, directions, **arguments):
    checkpoint = ModelCheckpoint("runs", "val_q", keep=1, **arguments)
    series = [{} if value is None else {"val_q": value} for value in values]
    play(checkpoint, series, directions=directions, batches=1)
    return [read_manifest(path).moment.value for path in checkpoint.store.all()]


def test_a_run_that_begins_anew_knows_which_is_best_before_the_figure_comes():
    more = {"q": "max"}
    assert run_of([0.9, 0.5], more) == [0.9, 0.5]
    # While nobody knows whether more is better, no rated one is deleted.
    assert run_of([None, None], {}) == [0.9, 0.5, None]
    assert run_of([None], more) == [0.9, None]


def test_an_eviction_right_after_a_start_leaves_the_best():
    run_of([0.9, 0.5], {"q": "max"})
    checkpoint = ModelCheckpoint("runs", "val_q", keep=1)
    run = RunState(directions={"q": "max"}, is_evicted=True)
    checkpoint.set_model(ScriptedModel())
    checkpoint.set_run(run)
    checkpoint.on_train_begin({})
    run.heed_eviction()
    metrics = [read_manifest(path).moment.value for path in checkpoint.store.all()]
    assert metrics == [0.9, None]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("ipufit.callbacks.checkpoints.monotonic", self)

    def __call__(self):
        return self.now


def test_seconds_are_counted_from_the_last_save(monkeypatch):
    clock = Clock(monkeypatch)

    class Pass(Callback):
        def on_train_batch_begin(self, batch, logs):
            clock.now += 4.0

    model = ScriptedModel()
    checkpoint = ModelCheckpoint("e{epoch}-b{batch}.safetensors", save_seconds=10)
    play([Pass(), checkpoint], [1.0, 1.0], model=model, batches=4)
    # 12 seconds after the beginning, then 12 after that.
    assert model.saved == ["e1-b3.safetensors", "e2-b2.safetensors"]


def small_fit(*callbacks, **arguments):
    torch.manual_seed(1)
    model = IPUModel(torch.nn.Linear(3, 1), IPUConfig(seed=1))
    model.compile("adam", "mse")
    x = torch.arange(24.0).reshape(8, 3) / 24
    model.fit(x, x[:, :1], 2, verbose=0, callbacks=list(callbacks), **arguments)
    return model


@pytest.mark.parametrize("path", ["e{epoch}.safetensors", "e{epoch}"])
def test_what_is_written_in_the_background_is_the_same(path):
    here = ModelCheckpoint(f"here/{path}")
    behind = ModelCheckpoint(f"behind/{path}", is_background=True)
    small_fit(here, behind, epochs=3)
    names = sorted(f.name for f in Path("here").iterdir())
    assert names == sorted(f.name for f in Path("behind").iterdir())
    for name in names:
        if path.endswith(".safetensors"):
            pairs = [load_file(Path(folder, name)) for folder in ("here", "behind")]
        else:
            pairs = []
            for folder in ("here", "behind"):
                checkpoint = load_checkpoint(Path(folder, name))
                pairs.append(checkpoint.tensors["model"])
                assert checkpoint.state["run"]["epoch"] == int(name[1:])
        assert all(torch.equal(pairs[0][n], pairs[1][n]) for n in pairs[0])
        assert pairs[0].keys() == pairs[1].keys()


def test_training_goes_on_while_it_is_written(monkeypatch):
    held, seen = threading.Event(), []

    def write(path, checkpoint, **_):
        assert held.wait(timeout=60)  # until a later call has been made
        seen.append(checkpoint.state["run"]["updates"])

    class Release(Callback):
        def on_train_batch_end(self, batch, logs):
            if self.run.updates == 2:
                held.set()

    monkeypatch.setattr("ipufit.callbacks.checkpoints.write_checkpoint", write)
    checkpoint = ModelCheckpoint("a", save_freq=1, is_background=True)
    small_fit(Release(), checkpoint, epochs=1)
    assert seen == [1, 2, 3, 4]


def test_a_run_that_fails_leaves_what_was_being_written(monkeypatch):
    class Fail(Callback):
        def on_epoch_begin(self, epoch, logs):
            if epoch:
                raise RuntimeError("in the second epoch")

    with pytest.raises(RuntimeError, match="in the second epoch"):
        small_fit(ModelCheckpoint("a", is_background=True), Fail(), epochs=2)
    assert load_checkpoint("a").state["run"]["epoch"] == 1


# Failures in the background ---------------------------------------------------------


class Raise(Callback):
    """Raises an error once the second epoch begins."""

    def __init__(self, error):
        self.error = error
        self.has_ended = False

    def on_epoch_begin(self, epoch, logs):
        if epoch:
            raise self.error

    def on_train_end(self, logs):
        self.has_ended = True


def full(path, checkpoint, **_):
    raise CheckpointError("the disk is full")


@pytest.mark.parametrize(
    ("error", "is_before"),
    [(ValueError("a mistake"), True), (KeyboardInterrupt("by hand"), False)],
)
def test_the_error_that_came_first_is_raised(monkeypatch, error, is_before):
    monkeypatch.setattr("ipufit.callbacks.checkpoints.write_checkpoint", full)
    callbacks = [ModelCheckpoint("a", is_background=True), Raise(error)]
    if not is_before:
        callbacks.reverse()
    with pytest.warns(CheckpointWarning, match="disk is full"), pytest.raises(
        type(error), match=str(error)
    ):
        small_fit(*callbacks, epochs=3)


@pytest.mark.parametrize("is_before", [True, False])
def test_a_backup_stays_if_the_last_write_fails(monkeypatch, is_before):
    write = write_checkpoint

    def fail_at_last(path, checkpoint, **_):
        if checkpoint.state["run"]["epoch"] == 2:
            full(path, checkpoint)
        write(path, checkpoint)

    monkeypatch.setattr("ipufit.callbacks.checkpoints.write_checkpoint", fail_at_last)
    backup = BackupAndRestore("backup")
    callbacks = [backup, ModelCheckpoint("run-{epoch}", is_background=True)]
    if not is_before:
        callbacks.reverse()
    with pytest.raises(CheckpointError, match="disk is full"):
        small_fit(*callbacks, epochs=2)
    assert load_checkpoint(backup.store.latest()).state["run"]["epoch"] == 2


def test_an_eviction_is_saved_though_the_write_before_failed(monkeypatch):
    write, failed = write_checkpoint, []

    def fail_once(path, checkpoint, **_):
        if not failed:
            failed.append(path)
            full(path, checkpoint)
        write(path, checkpoint)

    class Evict(Callback):
        def on_train_batch_end(self, batch, logs):
            self.run.is_evicted = self.run.updates == 5

    monkeypatch.setattr("ipufit.callbacks.checkpoints.write_checkpoint", fail_once)
    checkpoint = ModelCheckpoint("run-{epoch}", is_background=True)
    with pytest.raises(CheckpointError, match="disk is full"):
        small_fit(checkpoint, Evict(), epochs=3)
    assert failed == ["run-1"]
    assert load_checkpoint("run-2").state["run"]["updates"] == 5


def test_an_interrupt_while_it_waits_loses_no_failure(monkeypatch):
    waited, wait = [], store.wait

    def interrupted(futures):
        waited.append(futures)
        if len(waited) == 1:
            raise KeyboardInterrupt
        return wait(futures)

    monkeypatch.setattr("ipufit.callbacks.checkpoints.write_checkpoint", full)
    monkeypatch.setattr(store, "wait", interrupted)
    checkpoint = ModelCheckpoint("a", is_background=True)
    with pytest.warns(CheckpointWarning, match="disk is full"), pytest.raises(
        KeyboardInterrupt
    ):
        small_fit(checkpoint, epochs=1)


class Odd(torch.nn.Module):
    """With tied weights, and a dtype that NumPy lacks."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.second = torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("odd", torch.full((2,), 1.5, dtype=torch.bfloat16))

    def forward(self, x):
        return self.second(self.first(x)).sum(1, keepdim=True)


def test_weights_of_any_dtype_and_tied_ones_are_written_in_the_background():
    model = IPUModel(Odd())
    model.compile("sgd", "mse")
    callbacks = [
        ModelCheckpoint("here.safetensors"),
        ModelCheckpoint("behind.safetensors", is_background=True),
    ]
    model.fit(torch.rand(4, 3), torch.rand(4, 1), 2, verbose=0, callbacks=callbacks)
    assert Path("here.safetensors").read_bytes() == (
        Path("behind.safetensors").read_bytes()
    )
    with safetensors.safe_open("behind.safetensors", "pt") as file:
        assert "first.weight" in file.metadata()["ipufit.tied"]
        assert file.get_tensor("odd").dtype == torch.bfloat16
