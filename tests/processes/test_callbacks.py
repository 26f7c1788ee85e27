# SPDX-License-Identifier: Apache-2.0
"""Callbacks of several processes: one end for all, one history, one that writes."""

from __future__ import annotations

import contextlib
import io
import os
import signal

import pytest
import torch

import ipufit
from ipufit import distributed
from tests.processes.runs import fitted, model_of, samples


class StopAt(ipufit.Callback):
    """Ends the run at an update, in one process alone."""

    def __init__(self, process, update):
        self.process = process
        self.update = update

    def on_train_batch_end(self, batch, logs):
        index = distributed.get_process_info().index
        if index == self.process and self.run.updates >= self.update:
            self.run.stop(f"process {index} has seen enough")


class StopAfterEpoch(StopAt):
    """Ends the run after the first epoch, in one process alone."""

    on_train_batch_end = ipufit.Callback.on_train_batch_end

    def on_epoch_end(self, epoch, logs):
        if distributed.get_process_info().index == self.process:
            self.model.stop_training = True


class Seen(ipufit.Callback):
    """Keeps the figures that hooks of calls and epochs see."""

    def __init__(self):
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, batch, logs):
        self.batches.append(dict(logs))

    def on_epoch_end(self, epoch, logs):
        self.epochs.append(dict(logs))


def with_callback(kind, *arguments):
    callback = kind(*arguments)
    run = fitted(callbacks=[callback])
    return {**run, "seen": vars(callback).get("batches")}


def logged(folder):
    index = distributed.get_process_info().index
    logger = ipufit.CSVLogger(os.path.join(folder, f"{index}.csv"))
    run = fitted(callbacks=[logger, ipufit.Throughput()])
    return sorted(os.listdir(folder)), run["history"]


def shown():
    """The lines that this process shows."""
    x, y, _ = samples()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        model = model_of()
        model.fit(x, y, 18, verbose=2)
        model.evaluate(x, y, verbose=2)
        model.predict(x, verbose=2)
    return out.getvalue()


@pytest.mark.parametrize("process", [0, 1])
def test_all_stop_at_the_update_of_the_one_that_says_so(pool, process):
    runs = pool.run(with_callback, StopAt, process, 3)
    assert [run["updates"] for run in runs] == [3, 3]
    assert {run["stop_reason"] for run in runs} == {
        f"process {process} has seen enough"
    }
    assert runs[0]["history"] == runs[1]["history"]


def test_all_end_after_the_epoch_of_the_one_that_says_so(pool):
    runs = pool.run(with_callback, StopAfterEpoch, 1, 0)
    assert [len(run["history"]["loss"]) for run in runs] == [1, 1]
    assert {run["stop_reason"] for run in runs} == {"model.stop_training was set"}


def test_hooks_of_calls_see_the_figures_of_all_processes(pool):
    alone, *_ = pool.run(with_callback, Seen, count=1)
    runs = pool.run(with_callback, Seen)
    assert runs[0]["seen"] == runs[1]["seen"]
    assert len(runs[0]["seen"]) == len(alone["seen"])
    for logs, expected in zip(runs[0]["seen"], alone["seen"]):
        assert logs == pytest.approx(expected, abs=1e-4)


def test_the_first_process_writes_and_shows(pool, tmp_path):
    one, other = pool.run(logged, str(tmp_path))
    assert one == other  # with samples per second, as process 0 has measured them
    assert one[0] == ["0.csv"]
    first, second = pool.run(shown)
    assert "loss" in first
    assert second == ""


def evicted(process, update):
    """A run in which one process alone gets SIGTERM."""

    class Evict(ipufit.Callback):
        def on_train_begin(self, logs):
            self.run.on_eviction(lambda: None)

        def on_train_batch_end(self, batch, logs):
            index = distributed.get_process_info().index
            if index == process and self.run.updates == update:
                os.kill(os.getpid(), signal.SIGTERM)

    return fitted(callbacks=[Evict()])


def test_all_are_evicted_at_the_same_update(pool):
    runs = pool.run(evicted, 1, 4)
    assert [run["updates"] for run in runs] == [4, 4]
    assert {run["stop_reason"] for run in runs} == {"SIGTERM"}


def norms():
    """The norms of gradients that a monitor sees."""
    run = fitted(callbacks=[ipufit.GradientMonitor()])
    return run["history"]["grad_norm"]


def test_watched_gradients_are_those_of_all_processes(pool):
    (expected,) = pool.run(norms, count=1)
    for found in pool.run(norms):
        assert found == pytest.approx(expected, rel=1e-4)


class SlowerInOne(ipufit.Callback):
    """Sets another learning rate, in one process alone."""

    def on_epoch_end(self, epoch, logs):
        if distributed.get_process_info().index == 1:
            self.model.optimizer.param_groups[0]["lr"] = 0.001


def test_a_rate_that_one_process_sets_alone_is_refused(pool):
    with pytest.raises(ipufit.ConfigError, match="learning rates, or other numbers"):
        pool.run(with_callback, SlowerInOne)


class StopEvaluating(ipufit.Callback):
    """Ends an evaluation from a hook that isn't heard, in one process alone."""

    def on_test_batch_begin(self, batch, logs):
        if distributed.get_process_info().index == 1:
            self.model.stop_evaluating = True


def evaluated_in_part():
    model = model_of()
    x, y, _ = samples()
    return model.evaluate(x, y, 4, verbose=0, callbacks=[StopEvaluating()])


def test_all_end_an_evaluation_together(pool):
    one, other = pool.run(evaluated_in_part)
    assert one == other


class Normalised(torch.nn.Module):
    def __init__(self, is_frozen):
        super().__init__()
        self.norm, self.last = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.norm(x))


def nested(hook):
    """A fit in whose hooks the model is trained and evaluated, and how it ends."""
    model = model_of(network=Normalised)
    x, y, _ = samples(32)
    given = {"shuffle": False, "verbose": 0}
    seen = []

    def act(*_):
        seen.append(model.train_on_batch(x[:8], y[:8])["loss"])
        seen.append(model.evaluate(x[:10], y[:10], verbose=0)["loss"])
        seen.append(float(model.predict(x[:5], verbose=0).sum()))

    hooks = ipufit.LambdaCallback(**{hook: act})
    history = model.fit(
        *(x, y, 8), validation_data=(x[:12], y[:12]), callbacks=hooks, **given
    ).history
    model.fit(x, y, 8, **given)  # with each process's own statistics
    state = {n: t.tolist() for n, t in model.module.state_dict().items()}
    return seen, history, state


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_test_batch_end"])
def test_runs_in_hooks_are_alike_in_all_processes(pool, hook):
    one, other = pool.run(nested, hook)
    assert one == other
    assert len(one[0]) >= 3
