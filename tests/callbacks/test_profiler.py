# SPDX-License-Identifier: Apache-2.0
"""`Profiler` records some calls, and the phases add up to them."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from ipufit import (
    BackupAndRestore,
    Callback,
    ConfigError,
    FileError,
    IPUConfig,
    IPUModel,
    Profiler,
)

X, Y = torch.arange(48.0).view(24, 2) / 48, torch.ones(24, 1)


def make(**fields):
    torch.manual_seed(1)
    model = IPUModel(
        torch.nn.Linear(2, 1), IPUConfig(**{"device_iterations": 1, **fields})
    )
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def profiler_in(folder, **arguments):
    arguments = {"verbose": 0, **arguments}
    return Profiler(folder / "profile", **arguments)


def events(profiler):
    trace = json.loads(profiler.paths[0].read_text())
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def calls_in(profiler, name="training call"):
    return [
        event["args"]["first update"]
        for event in events(profiler)
        if event["name"] == name
    ]


def fit(model, callbacks, **arguments):
    return model.fit(
        *(X, Y, 4), verbose=0, shuffle=False, callbacks=callbacks, **arguments
    )


@pytest.mark.parametrize("validation", [None, (X, Y)])
def test_phases_add_up_to_the_recording_by_any_clock(tmp_path, validation):
    ticks = map(float, itertools.count())
    profiler = profiler_in(tmp_path, calls=9, skip=2, clock=lambda: next(ticks))
    fit(make(), profiler, epochs=2, validation_data=validation)
    assert sum(profiler.phases.values()) == profiler.seconds
    assert profiler.seconds == next(ticks) - 1  # the clock goes on at each look
    assert events(profiler)[0]["dur"] == 1e6 * profiler.seconds
    assert {"host data", "device", "figures", "callbacks", "call"} <= set(
        profiler.phases
    )


def test_the_calls_asked_for_are_recorded(tmp_path):
    profiler = profiler_in(tmp_path, calls=3, skip=2)
    fit(make(), profiler)
    assert calls_in(profiler) == [2, 3, 4]
    names = [event["name"] for event in events(profiler)]
    assert names.count("device call") == 3
    assert names.index("batch") < names.index("training call")  # with its data
    assert names[0] == "fit"


def test_calls_are_counted_over_epochs_and_a_recording_ends_with_the_run(tmp_path):
    profiler = profiler_in(tmp_path, calls=100, skip=5)
    fit(make(device_iterations=2), profiler, epochs=3)
    assert calls_in(profiler) == [4, 0, 2, 4]
    assert [e["name"] for e in events(profiler) if e["name"].startswith("epoch")] == [
        "epoch 3"
    ]


@pytest.mark.parametrize("skip", [6, 7])
@pytest.mark.parametrize("task", ["fit", "evaluate", "predict"])
def test_nothing_is_written_if_the_run_has_too_few_calls(tmp_path, capsys, task, skip):
    profiler = profiler_in(tmp_path, calls=3, skip=skip, verbose=1)
    model = make(inference_iterations=1)
    if task == "fit":
        fit(model, profiler)
    else:
        data = (X, Y, 4) if task == "evaluate" else (X, 4)
        getattr(model, task)(*data, verbose=0, callbacks=profiler)
    told = f"leaves out skip={skip} calls, and {task} ended with 6"
    assert told in capsys.readouterr().out
    assert profiler.paths == ()
    assert profiler.phases == {}
    assert profiler.seconds == 0.0
    assert list((tmp_path / "profile").iterdir()) == []


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_without_a_recording_leaves_none_of_the_run_before(tmp_path, epochs):
    profiler, model = profiler_in(tmp_path, calls=2, skip=epochs * 6), make()
    fit(model, profiler, epochs=3)
    assert profiler.paths
    assert profiler.phases
    for shorter in (epochs, 1):
        fit(model, profiler, epochs=shorter)
        assert (profiler.paths, profiler.phases, profiler.seconds) == ((), {}, 0.0)
    assert len(list((tmp_path / "profile").iterdir())) == 2


def test_a_run_without_calls_says_so(tmp_path, capsys):
    profiler = profiler_in(tmp_path, calls=2, skip=0, verbose=1)
    fit(make(), profiler, epochs=2, initial_epoch=2)
    assert capsys.readouterr().out == (
        "Profiler: nothing was recorded. fit ended without a call.\n"
    )


def test_each_fit_has_files_of_its_own(tmp_path):
    profiler, model = profiler_in(tmp_path, calls=2, skip=0), make()
    written = []
    for _ in range(2):
        fit(model, profiler)
        written.append(profiler.paths)
    assert [[path.name for path in paths] for paths in written] == [
        ["fit-001.trace.json", "fit-001.html"],
        ["fit-002.trace.json", "fit-002.html"],
    ]
    assert calls_in(profiler) == [0, 1]


class Failing(Callback):
    def on_train_batch_end(self, batch, logs):
        if batch == 3:
            raise KeyError("a callback")


def test_a_run_that_fails_leaves_what_was_recorded(tmp_path):
    profiler = profiler_in(tmp_path, calls=100, skip=1)
    with pytest.raises(KeyError, match="a callback"):
        fit(make(), [Failing(), profiler])
    assert calls_in(profiler) == [1, 2, 3]
    assert {path.suffix for path in (tmp_path / "profile").iterdir()} == {
        ".json",
        ".html",
    }


def test_an_evaluation_and_a_prediction_are_recorded_by_their_calls(tmp_path):
    profiler = profiler_in(tmp_path, calls=2, skip=1)
    model = make(inference_iterations=1)
    model.evaluate(X, Y, 4, verbose=0, callbacks=profiler)
    names = [event["name"] for event in events(profiler)]
    assert profiler.paths[0].name == "evaluate-001.trace.json"
    assert names.count("evaluation call") == 2
    model.predict(X, 4, verbose=0, callbacks=profiler)
    names = [event["name"] for event in events(profiler)]
    assert profiler.paths[0].name == "predict-001.trace.json"
    assert names.count("prediction call") == 2


def test_it_changes_neither_numbers_nor_calls(tmp_path):
    plain, profiled = make(), make()
    before = fit(plain, None, epochs=2)
    after = fit(profiled, profiler_in(tmp_path), epochs=2)
    assert before.history == after.history
    for one, other in zip(plain.get_weights(), profiled.get_weights()):
        assert (one == other).all()
    num_calls = before.params["calls"]
    assert after.params["calls"] == num_calls


def test_a_resumed_run_may_have_it_or_do_without(tmp_path):
    def stopped(callbacks, **arguments):
        return fit(make(), [BackupAndRestore(tmp_path / "run"), *callbacks], epochs=2)

    with pytest.raises(KeyError):
        stopped([Stop(6 + 3), profiler_in(tmp_path)])
    profiler = profiler_in(tmp_path, calls=2, skip=1)
    history = stopped([profiler])
    assert history.epoch == [0, 1]
    assert calls_in(profiler) == [1, 2]  # of the epoch with which the run goes on
    assert profiler.paths[0].name == "fit-002.trace.json"


class Stop(Callback):
    is_saved = False

    def __init__(self, updates):
        self.updates = updates

    def on_train_batch_end(self, batch, logs):
        if self.run.updates == self.updates:
            raise KeyError


def test_it_prints_the_phases_and_the_page(tmp_path, capsys):
    fit(make(), Profiler(tmp_path, calls=2, skip=0))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fit-001: ")
    assert lines[-1] == f"  {tmp_path / 'fit-001.html'}"
    assert any("device" in line for line in lines)


@pytest.mark.parametrize("arguments", [{"calls": 0}, {"skip": -1}, {"calls": 1.5}])
def test_odd_numbers_are_refused(arguments):
    with pytest.raises(ConfigError, match="is not a whole number"):
        Profiler(**arguments)


def test_a_directory_that_cannot_be_made_is_refused_before_the_first_call(tmp_path):
    (tmp_path / "profile").touch()
    profiler = profiler_in(tmp_path, skip=3)
    with pytest.raises(FileError, match="can't be made"):
        fit(make(), [profiler, Failing()])


def test_a_callback_may_have_a_recorder_of_its_own():
    class Own(Callback):
        recorder = "of something else"

    model = make()
    model.fit(X, Y, 4, verbose=0, callbacks=[Own()])
    assert len(model.history.history["loss"]) == 1
