# SPDX-License-Identifier: Apache-2.0
"""`Throughput` on a clock that is moved by hand."""

import re

import pytest
import torch

from ipufit.callbacks import CallbackList, LambdaCallback, Throughput
from ipufit.state import RunState
from tests.callbacks.driving import linear


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def driven(clock):
    throughput = Throughput(clock)
    hooks = CallbackList(throughput)
    hooks.set_run(RunState())
    return throughput, hooks


def test_seconds_of_an_epoch_end_with_its_last_call():
    clock = Clock()
    throughput, hooks = driven(clock)
    clock.now += 1000  # compilation
    hooks.on_train_begin({})
    for samples, expected in (((8, 4), 2.4), ((6, 6), 2.4)):
        clock.now += 50
        hooks.on_epoch_begin(0, {})
        for number, count in enumerate(samples):
            clock.now += 1.5  # loading data
            hooks.on_train_batch_begin(number, {})
            clock.now += 1.0 if number else 0.5
            throughput.run.samples += count
            hooks.on_train_batch_end(number, {})
            clock.now += 0.25 if number else 0.5  # somebody else's callback
        clock.now += 70  # a validation
        logs = {"loss": 1.0}
        hooks.on_epoch_end(0, logs)
        assert logs == {
            "loss": 1.0,
            "samples_per_second": pytest.approx(expected),
            "latency_ms": pytest.approx(750.0),
        }


def test_validations_within_an_epoch_do_not_count():
    clock = Clock()

    def wait(_):
        clock.now += 50.0

    def call(*_):
        clock.now += 0.5

    hooks = LambdaCallback(on_test_begin=wait, on_train_batch_begin=call)
    model = linear(2, micro_batch_size=2)
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    throughput = Throughput(clock, verbose=0)
    history = model.fit(
        x,
        y,
        verbose=0,
        validation_data=(x, y),
        validation_updates=1,
        callbacks=[throughput, hooks],
    )
    assert throughput.epoch_seconds == pytest.approx(4 * 0.5)
    assert history.history["samples_per_second"] == [pytest.approx(4.0)]


def test_a_fit_an_evaluation_and_a_prediction_are_timed():
    clock = Clock()
    throughput = Throughput(clock)

    def wait(seconds):
        def hook(*_):
            clock.now += seconds

        return hook

    # They come before it at the end of a call, and after it at the beginning.
    before = LambdaCallback(
        on_train_batch_end=wait(2.0),
        on_test_batch_end=wait(0.5),
        on_predict_batch_end=wait(0.25),
    )
    model = linear(device_iterations=2)
    x = torch.ones(24, 1)
    callbacks = [before, throughput]
    history = model.fit(
        x,
        x,
        batch_size=4,
        epochs=2,
        validation_data=(x[:8], x[:8]),
        callbacks=callbacks,
        verbose=0,
    ).history
    assert history["samples_per_second"] == [pytest.approx(24 / 6.0)] * 2
    assert history["latency_ms"] == [pytest.approx(2000.0)] * 2
    model.evaluate(x, x, callbacks=callbacks, verbose=0)
    model.predict(x, callbacks=callbacks, verbose=0)
    assert throughput.latencies_ms == pytest.approx(
        {"training": 2000.0, "evaluation": 500.0, "prediction": 250.0}
    )


# The line ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verbose", "of_fit", "lines"),
    [("auto", 0, 0), ("auto", 2, 3), (1, 0, 3), (0, 2, 0)],
)
def test_each_epoch_prints_a_line_that_benchmark_files_find(
    verbose, of_fit, lines, capsys
):
    model = linear(2)
    history = model.fit(
        torch.zeros(8, 2),
        torch.zeros(8, 1),
        batch_size=4,
        epochs=3,
        verbose=of_fit,
        callbacks=Throughput(verbose=verbose),
    )
    # Of vision/cnns/pytorch/train/benchmarks.yml in graphcore/examples.
    found = re.findall(r"throughput: *(.*?) samples\/sec", capsys.readouterr().out)
    assert len(found) == lines
    rates = history.history["samples_per_second"][:lines]
    assert [float(rate) for rate in found] == pytest.approx(rates, rel=1e-3)
