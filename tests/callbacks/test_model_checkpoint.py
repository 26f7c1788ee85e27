# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint`: which files or directories, when, and what it says."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from ipufit import (
    Callback,
    ConfigError,
    EarlyStopping,
    IPUConfig,
    IPUModel,
    load_checkpoint,
)
from ipufit.callbacks import ModelCheckpoint
from ipufit.checkpoint import read_manifest
from ipufit.metrics import Recall
from ipufit.state import RunState
from tests import reference
from tests.callbacks.driving import ScriptedModel, play

pytestmark = [pytest.mark.floor, pytest.mark.usefixtures("in_tmp_path")]

NAN = float("nan")


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


def test_the_metric_of_a_threshold_may_be_part_of_a_name():
    model = IPUModel(torch.nn.Linear(2, 1))
    model.compile("sgd", "bce", metrics=[Recall([0.3, 1.0])])
    checkpoint = ModelCheckpoint("{epoch:02d}-{recall_1.0:.2f}.safetensors", "loss")
    x, y = torch.randn(8, 2), torch.ones(8, 1)
    model.fit(x, y, batch_size=4, callbacks=checkpoint, verbose=0)
    assert [path.name for path in Path().iterdir()] == ["01-0.00.safetensors"]


def test_a_call_of_several_updates_is_saved_once():
    module = torch.nn.Linear(2, 1)
    model = reference.compiled(module, device_iterations=3, loss="mse")
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
        model = reference.compiled(torch.nn.Sequential(*layers), loss="mse")
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
            if epoch == 1:
                self.run.stop("Evict", is_eviction=True)

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
    run = RunState(directions={"q": "max"})
    checkpoint.set_model(ScriptedModel())
    checkpoint.set_run(run)
    checkpoint.on_train_begin({})
    run.evict()
    metrics = [read_manifest(path).moment.value for path in checkpoint.store.all()]
    assert metrics == [0.9, None]


def small_fit(*callbacks, **arguments):
    torch.manual_seed(1)
    model = IPUModel(torch.nn.Linear(3, 1), IPUConfig(seed=1))
    model.compile("adam", "mse")
    x = torch.arange(24.0).reshape(8, 3) / 24
    model.fit(x, x[:, :1], 2, verbose=0, callbacks=list(callbacks), **arguments)
    return model


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


def test_weights_of_any_dtype_and_tied_ones_are_written():
    model = reference.compiled(Odd(), loss="mse")
    saving = ModelCheckpoint("weights.safetensors")
    model.fit(torch.rand(4, 3), torch.rand(4, 1), 2, verbose=0, callbacks=saving)
    with safetensors.safe_open("weights.safetensors", "pt") as file:
        assert "first.weight" in file.metadata()["ipufit.tied"]
        assert file.get_tensor("odd").dtype == torch.bfloat16
