# SPDX-License-Identifier: Apache-2.0
"""`Profiler` records some calls of a run by torch's profiler."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ipufit import (
    BackupAndRestore,
    Callback,
    ConfigError,
    IPUConfig,
    IPUModel,
    ModelCheckpoint,
    Optimizer,
    Profiler,
)

X, Y = torch.arange(48.0).view(24, 2) / 48, torch.ones(24, 1)


def make(optimizer="sgd", **fields):
    torch.manual_seed(1)
    model = IPUModel(
        torch.nn.Linear(2, 1), IPUConfig(**{"device_iterations": 1, **fields})
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def profiler_in(folder, **arguments):
    return Profiler(folder / "profile", **{"verbose": 0, **arguments})


def count(profiler, name):
    trace = json.loads(profiler.path.read_text())
    found = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    return sum(event["name"] == name for event in found)


def fit(model, callbacks, **arguments):
    return model.fit(
        *(X, Y, 4), verbose=0, shuffle=False, callbacks=callbacks, **arguments
    )


def test_the_calls_asked_for_are_recorded_with_the_operators_of_torch(tmp_path):
    profiler = profiler_in(tmp_path, calls=3, skip=2)
    fit(make(), profiler)
    assert count(profiler, "device call") == 3
    assert count(profiler, "host data") == 3  # each call with its data
    assert count(profiler, "optimizer") == 6
    assert count(profiler, "aten::linear") >= 3
    [device] = [e for e in profiler.profile.key_averages() if e.key == "device call"]
    assert (device.count, device.cpu_time_total > 0) == (3, True)


def test_a_run_says_what_it_does(tmp_path):
    profiler = profiler_in(tmp_path, calls=100, skip=0)
    saving = ModelCheckpoint(tmp_path / "{epoch}")
    model = make(Optimizer("sgd", ema_momentum=0.9))
    fit(model, [saving, profiler], epochs=2, validation_data=(X, Y))
    for name in ("metrics", "weights", "save", "ModelCheckpoint.on_epoch_end"):
        assert count(profiler, name) >= 2, name


def test_two_profilers_at_once_are_refused(tmp_path):
    refused = pytest.raises(ConfigError, match="another profiler of torch")
    with profile(activities=[ProfilerActivity.CPU]), refused:
        fit(make(), profiler_in(tmp_path))


@pytest.mark.parametrize(("task", "skip"), [("fit", 6), ("evaluate", 7)])
def test_nothing_is_written_if_the_run_has_too_few_calls(tmp_path, capsys, task, skip):
    profiler = profiler_in(tmp_path, calls=3, skip=skip, verbose=1)
    model = make(inference_iterations=1)
    getattr(model, task)(X, Y, 4, verbose=0, callbacks=profiler)
    told = f"leaves out skip={skip} calls, and {task} ended with 6"
    assert told in capsys.readouterr().out
    assert (profiler.path, profiler.profile) == (None, None)
    assert list((tmp_path / "profile").iterdir()) == []


def test_each_run_has_a_file_of_its_own(tmp_path):
    profiler = profiler_in(tmp_path, calls=2, skip=0)
    model = make(inference_iterations=1)
    names = []
    for run in (
        lambda: fit(model, profiler),
        lambda: fit(model, profiler),
        lambda: model.evaluate(X, Y, 4, verbose=0, callbacks=profiler),
        lambda: model.predict(X, 4, verbose=0, callbacks=profiler),
    ):
        run()
        names.append(profiler.path.name)
        assert count(profiler, "device call") == 2
    assert names == [
        *("fit-001.trace.json", "fit-002.trace.json"),
        *("evaluate-001.trace.json", "predict-001.trace.json"),
    ]


class Stop(Callback):
    is_saved = False

    def __init__(self, updates):
        self.updates = updates

    def on_train_batch_end(self, batch, logs):
        if self.run.updates == self.updates:
            raise KeyError


def test_a_run_that_fails_leaves_what_was_recorded(tmp_path):
    profiler = profiler_in(tmp_path, calls=100, skip=1)
    with pytest.raises(KeyError):
        fit(make(), [profiler, Stop(4)])
    assert count(profiler, "device call") == 3
    fit(make(), profiler)  # torch's profiler isn't left on


def test_it_changes_neither_numbers_nor_calls(tmp_path):
    plain, profiled = make(), make()
    before = fit(plain, None, epochs=2)
    after = fit(profiled, profiler_in(tmp_path), epochs=2)
    assert before.history == after.history
    for one, other in zip(plain.get_weights(), profiled.get_weights()):
        assert (one == other).all()
    assert after.params["calls"] == before.params["calls"]


def test_a_resumed_run_may_have_it_or_do_without(tmp_path):
    def stopped(callbacks, **arguments):
        return fit(make(), [BackupAndRestore(tmp_path / "run"), *callbacks], epochs=2)

    with pytest.raises(KeyError):
        stopped([Stop(6 + 3), profiler_in(tmp_path)])
    profiler = profiler_in(tmp_path, calls=2, skip=1)
    assert stopped([profiler]).epoch == [0, 1]
    assert count(profiler, "device call") == 2
    assert profiler.path.name == "fit-002.trace.json"


def fit_in_process(folder):
    model = make()
    fit(model, Profiler(folder, calls=2, skip=0, verbose=0))
    model.detach()


def test_each_process_writes_a_file(tmp_path, pool):
    pool.run(fit_in_process, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fit-001.process-0.trace.json",
        "fit-001.process-1.trace.json",
    ]
