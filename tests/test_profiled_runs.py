# SPDX-License-Identifier: Apache-2.0
"""`IPUConfig(profile_dir=)` writes where the host's time went in each run."""

from __future__ import annotations

import json
import os

import pytest
import torch

from ipufit import (
    BackupAndRestore,
    Callback,
    IPUConfig,
    IPUModel,
    ModelCheckpoint,
    Optimizer,
    Profiler,
)

X, Y = torch.arange(48.0).view(24, 2) / 48, torch.ones(24, 1)


def make(folder, **fields):
    torch.manual_seed(1)
    directory = None if folder is None else str(folder)
    fields = {"device_iterations": 1, **fields}
    model = IPUModel(torch.nn.Linear(2, 1), IPUConfig(profile_dir=directory, **fields))
    averaged = Optimizer("sgd", ema_momentum=0.9)
    model.compile(averaged, "mse", metrics=["mae"])
    return model


def fit(model, callbacks=None, **arguments):
    return model.fit(X, Y, 4, verbose=0, callbacks=callbacks, **arguments)


def trace_of(folder, name="fit-001"):
    return json.loads((folder / f"{name}.trace.json").read_text())


def events(folder, name="fit-001"):
    return [e for e in trace_of(folder, name)["traceEvents"] if e["ph"] == "X"]


def count(folder, event, name="fit-001"):
    return sum(e["name"] == event for e in events(folder, name))


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def check_nesting(spans):
    """Each event lies within the last one that is still going on."""
    around = []
    spans = sorted(spans, key=lambda span: (span["ts"], -span["dur"]))
    for span in spans:
        begin, end = span["ts"], span["ts"] + span["dur"]
        while around and begin >= around[-1] - 1e-3:
            around.pop()
        assert not around or end <= around[-1] + 2e-3  # times are rounded to ns
        around.append(end)
    assert spans[0]["ts"] == 0


def test_a_fit_has_every_phase(tmp_path):
    saving = ModelCheckpoint(tmp_path / "checkpoints" / "{epoch}")
    model = make(tmp_path)
    fit(model, saving, epochs=2, validation_data=(X, Y))
    phases = trace_of(tmp_path)["otherData"]["seconds_by_phase"]
    assert set(phases) >= {
        *("prepare", "programs", "compile", "host data", "call", "device", "optimizer"),
        *("figures", "callbacks", "checkpoints", "weights", "loop", "profile"),
        *("upload", "download"),
    }
    spans = events(tmp_path)
    check_nesting(spans)
    assert sum(phases.values()) == pytest.approx(spans[0]["dur"] / 1e6, rel=1e-6)
    assert count(tmp_path, "training call") == 12
    assert count(tmp_path, "epoch 2") == 1
    assert count(tmp_path, "evaluation") == 2
    num_calls = count(tmp_path, "device call")
    assert count(tmp_path, "upload") == count(tmp_path, "download") == num_calls > 12
    assert count(tmp_path, "compile") == 2
    assert count(tmp_path, "ModelCheckpoint.on_epoch_end") == 2
    assert count(tmp_path, "after hooks") == 2
    assert trace_of(tmp_path)["otherData"]["module"] == "Linear"


def test_the_emulated_device_says_what_it_does(tmp_path):
    fit(make(tmp_path))
    spans = events(tmp_path)
    for part in ("forward", "backward", "update"):
        assert count(tmp_path, part) >= 6
    [first, *_] = [span for span in spans if span["name"] == "backward"]
    calls = [span for span in spans if span["name"] == "device call"]
    assert any(
        one["ts"] < first["ts"] and first["ts"] + first["dur"] < one["ts"] + one["dur"]
        for one in calls
    )


class Network(torch.nn.Module):
    """Has layers that torch differentiates in different ways."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(1, 6, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(6)
        self.blocks = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Conv2d(6, 6, 3), torch.nn.ReLU(inplace=True))]
        )
        self.rnn = torch.nn.LSTM(6, 5, batch_first=True)
        self.dropout = torch.nn.Dropout(0.3)
        self.head = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))

    def forward(self, x):
        stem = self.norm(self.stem(x)).relu_() * 2.0
        body = stem[:, :, 1:-1, 1:-1].add_(1.0)
        for block in self.blocks:
            body = body * 0.5 + block(body).mean((2, 3), keepdim=True)
        steps, _ = self.rnn(body.flatten(2).transpose(1, 2))
        return self.head(self.dropout(steps[:, -1]))


IMAGES = torch.linspace(-1, 1, 24 * 64).sin().view(24, 1, 8, 8)


def fitted(folder, **fields):
    torch.manual_seed(2)
    config = IPUConfig(profile_dir=folder and str(folder), seed=3, **fields)
    model = IPUModel(Network(), config)
    model.compile("adamw", "mse", metrics=["mae"])
    of = {"epochs": 2, "shuffle": False, "validation_data": (IMAGES, Y)}
    history = model.fit(IMAGES, Y, 4, verbose=0, **of)
    return model, history.history


@pytest.mark.parametrize(
    "fields", [{"device_iterations": 3}, {"gradient_accumulation": 2}, {"replicas": 2}]
)
def test_modules_are_told_apart_and_no_bit_changes(tmp_path, fields):
    plain, before = fitted(None, **fields)
    profiled, after = fitted(tmp_path, **fields)
    assert before == after
    for one, other in zip(plain.get_weights(), profiled.get_weights()):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    spans = events(tmp_path)
    check_nesting(spans)
    names = {(span["name"], span["cat"]) for span in spans}
    children = {"stem", "norm", "blocks.0", "rnn", "head", "Network", "loss"}
    for phase in ("forward", "backward"):
        assert names >= {(child, phase) for child in children}


def test_every_run_has_files_of_its_own(tmp_path):
    model = make(tmp_path)
    fit(model)
    fit(model)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert files(tmp_path) == [
        *("evaluate-001.html", "evaluate-001.trace.json"),
        *("fit-001.html", "fit-001.trace.json"),
        *("fit-002.html", "fit-002.trace.json"),
        *("predict-001.html", "predict-001.trace.json"),
    ]
    assert count(tmp_path, "compile", "fit-001") == 1
    assert count(tmp_path, "compile", "fit-002") == 0
    assert count(tmp_path, "prediction call", "predict-001") == 1


def test_the_next_run_of_a_model_without_a_profile_has_no_timers(tmp_path):
    model = make(None)
    settings = model._settings
    parts = [
        *(model._executors, settings.training_figures, settings.test_figures),
        *(settings.optimization, settings.average),
    ]
    fit(model, validation_data=(X, Y))
    before = [set(vars(part)) for part in parts]
    profiler = Profiler(tmp_path, calls=3, verbose=0)
    fit(model, profiler, validation_data=(X, Y))
    assert [set(vars(part)) for part in parts] == before
    assert all("run" not in vars(one) for one in model._executors._programs())
    assert model._runs.profile.timelines == ()


def test_numbers_are_those_of_a_run_without(tmp_path):
    of = {"epochs": 3, "validation_data": (X, Y), "shuffle": False}
    plain, profiled = make(None), make(tmp_path)
    assert fit(plain, **of).history == fit(profiled, **of).history
    assert plain.evaluate(X, Y, verbose=0) == profiled.evaluate(X, Y, verbose=0)
    assert plain.predict(X, verbose=0).equal(profiled.predict(X, verbose=0))


def test_a_recorded_run_makes_the_calls_that_it_makes_otherwise(tmp_path):
    for folder in (None, str(tmp_path)):
        model = IPUModel(torch.nn.Linear(2, 1), IPUConfig(profile_dir=folder))
        model.compile("sgd", "mse")
        fit(model)
        model.evaluate(X, Y, 4, verbose=0)
        programs = model._executors
        for program in (programs._training, programs._inference):
            assert program.executor.options.device_iterations == 6
    assert count(tmp_path, "training call") == 1
    assert count(tmp_path, "device call", "evaluate-001") == 1


class Failing(Callback):
    is_saved = False

    def __init__(self, error, updates=8):
        self.error, self.updates = error, updates

    def on_train_batch_end(self, batch, logs):
        if self.run.updates == self.updates:
            raise self.error


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_run_that_fails_leaves_a_trace_of_what_happened(tmp_path, error):
    with pytest.raises(error):
        fit(make(tmp_path), Failing(error), epochs=3)
    assert files(tmp_path) == ["fit-001.html", "fit-001.trace.json"]
    spans = events(tmp_path)
    check_nesting(spans)
    assert spans[0]["args"] == {"ended by": error.__name__}
    assert count(tmp_path, "training call") == 8


def test_a_run_that_never_began_leaves_nothing(tmp_path):
    with pytest.raises(Exception, match="samples"):
        make(tmp_path / "profile").fit(X[:2], Y[:2], 4, verbose=0)
    assert not (tmp_path / "profile").exists()


def test_a_resumed_run_has_files_of_its_own(tmp_path):
    def run(*callbacks):
        backup = BackupAndRestore(tmp_path / "run")
        return fit(make(tmp_path), [backup, *callbacks], epochs=2)

    with pytest.raises(KeyError):
        run(Failing(KeyError))
    assert run().epoch == [0, 1]
    assert count(tmp_path, "training call", "fit-001") == 8
    assert count(tmp_path, "training call", "fit-002") == 6
    assert count(tmp_path, "go on from checkpoint", "fit-002") == 1


class Evaluating(Callback):
    def on_epoch_end(self, epoch, logs):
        self.model.evaluate(X, Y, verbose=0)
        self.model.predict(X, verbose=0)


def test_a_run_in_a_callback_is_a_part_of_the_run_around_it(tmp_path):
    fit(make(tmp_path), Evaluating())
    assert files(tmp_path) == ["fit-001.html", "fit-001.trace.json"]
    check_nesting(events(tmp_path))
    assert count(tmp_path, "evaluation") == 1
    assert count(tmp_path, "prediction") == 1
    assert count(tmp_path, "loss and metrics") == 1


def test_a_config_and_a_callback_record_side_by_side(tmp_path):
    profiler = Profiler(tmp_path, calls=2, verbose=0)
    fit(make(tmp_path), profiler)
    assert count(tmp_path, "training call", "fit-001") == 2  # is written first
    assert count(tmp_path, "training call", "fit-002") == 6
    check_nesting(events(tmp_path, "fit-001"))
    check_nesting(events(tmp_path, "fit-002"))


def test_a_stream_that_is_left_is_recorded_until_then(tmp_path):
    model = make(tmp_path, inference_iterations=1)
    parts = model.predict(X, 4, verbose=0, stream=True)
    next(parts)
    next(parts)
    parts.close()
    assert count(tmp_path, "device call", "predict-001") == 2


def fit_in_process(folder):
    model = make(folder)
    fit(model)
    model.detach()
    return os.getpid()


def test_each_process_writes_what_it_has_done(tmp_path, pool):
    ids = pool.run(fit_in_process, tmp_path)
    assert files(tmp_path) == [
        *("fit-001.process-0.html", "fit-001.process-0.trace.json"),
        *("fit-001.process-1.html", "fit-001.process-1.trace.json"),
    ]
    for index, process in enumerate(ids):
        found = events(tmp_path, f"fit-001.process-{index}")
        assert {event["pid"] for event in found} == {process}
        assert len([e for e in found if e["name"] == "training call"]) == 6
