# SPDX-License-Identifier: Apache-2.0
"""Streamed metrics in evaluations, and what an evaluation covers."""

from __future__ import annotations

import warnings

import pytest
import torch

from ipufit import Callback, IPUConfig, IPUModel, poptorch
from tests import reference
from tests.engine.test_training import Echo, Seen, numbers


def options(mode, **settings):
    own = poptorch.Options().deviceIterations(4).replicationFactor(2)
    return own.outputMode(poptorch.OutputMode[mode], **settings)


CONFIGS = {
    "plain": (IPUConfig(), None, 1),
    "replicas": (IPUConfig(replicas=2, device_iterations=3), None, 1),
    "final": (IPUConfig(inference_options=options("Final")), "Final", 4),
    "every": (
        IPUConfig(inference_options=options("EveryN", output_return_period=2)),
        "EveryN",
        2,
    ),
}


@pytest.mark.parametrize("count", [1, 4, 13, 24, 33, 48])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_sample_that_comes_back_is_seen_once(name, count):
    config, mode, period = CONFIGS[name]
    x, y, weights = numbers(count)
    metric = Seen()
    model = IPUModel(Echo(), config)
    model.compile("sgd", "mse", weighted_metrics=[metric])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figures = model.evaluate(x, y, 4, sample_weight=weights, verbose=0)
    covered = reference.covered_samples(config.inference_plan(4), count, mode, period)
    parts = metric.epochs[-1]
    targets = torch.cat([torch.zeros(0), *(part[1].flatten() for part in parts)])
    outputs = torch.cat([torch.zeros(0), *(part[0].flatten() for part in parts)])
    assert torch.equal(targets, torch.arange(count)[covered].float())
    assert torch.equal(outputs, targets)
    assert figures.get("seen", 0.0) == len(targets)


def test_running_figures_are_those_of_the_samples_so_far():
    x, y = reference.samples(10)
    model = IPUModel(reference.network())
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    recorder = reference.Recorder()
    model.evaluate(x, y, batch_size=4, callbacks=recorder, verbose=0)
    ends = [a for name, a in recorder.calls if name == "on_test_batch_end"]
    assert [batch for batch, _ in ends] == [0, 1, 2]
    for (_, logs), rows in zip(ends, (4, 8, 10)):
        expected = reference.evaluate(model.module, x[:rows], y[:rows])
        assert logs == pytest.approx(expected, rel=1e-5)


def test_an_evaluation_that_is_stopped_reports_what_it_saw():
    class Stop(Callback):
        def on_test_batch_end(self, batch, logs):
            self.model.stop_evaluating = batch == 1

    x, y = reference.samples(20)
    model = IPUModel(reference.network())
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    figures = model.evaluate(x, y, batch_size=4, callbacks=Stop(), verbose=0)
    expected = reference.evaluate(model.module, x[:8], y[:8])
    assert figures == pytest.approx(expected, rel=1e-5)
    expected = reference.evaluate(model.module, x, y)
    figures = model.evaluate(x, y, batch_size=4, verbose=0)
    assert figures == pytest.approx(expected, rel=1e-5)
