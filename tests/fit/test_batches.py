# SPDX-License-Identifier: Apache-2.0
"""`train_on_batch`, `test_on_batch`, `predict_on_batch`: runs of one batch."""

from __future__ import annotations

import pytest
import torch

from ipufit import IPUConfig, IPUModel, StreamedMetric
from tests import reference

X, Y = reference.samples(48)
CONFIGS = [
    IPUConfig(),
    IPUConfig(replicas=2, gradient_accumulation=3),
    IPUConfig(device_iterations=2),
    IPUConfig(pipeline=("0", "2"), gradient_accumulation=3),
]


class Median(StreamedMetric):
    def reset(self):
        self.seen = []

    def update(self, outputs, targets, weights=None):
        self.seen.append(outputs.max(dim=1).values)

    def result(self):
        return float(torch.cat(self.seen).median())


def compiled(config=None, **settings):
    module = reference.network()
    model = IPUModel(module, config or IPUConfig())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    settings = {
        "metrics": ["accuracy", Median("median")],
        "weighted_metrics": ["accuracy"],
        **settings,
    }
    model.compile(optimizer, settings.pop("loss", "cross_entropy"), **settings)
    return model


@pytest.fixture(autouse=True)
def _ipus(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "8")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        *((config, "sample_weight") for config in CONFIGS),
        (CONFIGS[0], "plain"),
        (CONFIGS[1], "class_weight"),
    ],
)
def test_training_on_a_batch_is_a_fit_of_one_call(config, kind):
    weights = {
        "plain": {},
        "sample_weight": {"sample_weight": torch.linspace(0, 2, 24)},
        "class_weight": {"class_weight": {0: 3.0, 2: 0.5}},
    }[kind]
    alone, whole = compiled(config), compiled(config)
    updates = config.device_iterations or 1
    for rows in torch.arange(48).split(24):
        figures = alone.train_on_batch(X[rows], Y[rows], **weights)
        history = whole.fit(
            X[rows], Y[rows], 24 // updates, shuffle=False, verbose=0, **weights
        ).history
        assert figures == pytest.approx({n: v[0] for n, v in history.items()})
        assert list(figures) == sorted(figures)
    for mine, theirs in zip(alone.get_weights(), whole.get_weights()):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))
    alone.detach()
    whole.detach()


@pytest.mark.parametrize("config", CONFIGS)
def test_looking_at_a_batch_is_a_run_over_it(config):
    model = compiled(config)
    for count in (1, 7, 24):
        x, y = X[:count], Y[:count]
        weights = torch.linspace(0.5, 2, count)
        figures = model.test_on_batch(x, y, weights)
        expected = model.evaluate(x, y, sample_weight=weights, verbose=0)
        assert figures == pytest.approx(expected, rel=1e-5)
        predicted = model.predict_on_batch(x)
        torch.testing.assert_close(predicted, model.predict(x, verbose=0))
        with torch.no_grad():
            torch.testing.assert_close(predicted, model.module(x))
    model.detach()


def test_a_list_has_the_figures_in_the_order_of_compile():
    model = compiled()
    order = ["loss", "accuracy", "median", "weighted_accuracy"]
    named = model.test_on_batch(X, Y)
    assert model.test_on_batch(X, Y, return_dict=False) == [named[n] for n in order]
    assert model.train_on_batch(X, Y, return_dict=False) == pytest.approx(
        [named[n] for n in order], rel=1e-5
    )
    only = compiled(metrics=None, weighted_metrics=None)
    assert only.test_on_batch(X, Y, return_dict=False) == pytest.approx(named["loss"])


def test_batches_of_any_size_evaluations_and_fits_go_on_from_each_other():
    """With a schedule, which goes on, too."""
    model = compiled(lr_schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
    twin = reference.network()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for count in (4, 7, 4, 20, 48):
        x, y = X[:count], Y[:count]
        figures = model.train_on_batch(x, y)
        expected = reference.train(twin, optimizer, x, y, count).figures()
        scheduler.step()
        assert {n: figures[n] for n in expected} == pytest.approx(expected, rel=1e-4)
        expected = reference.evaluate(twin, X, Y)
        figures = model.test_on_batch(X, Y)
        assert {n: figures[n] for n in expected} == pytest.approx(expected, rel=1e-4)
    model.fit(X, Y, batch_size=48, shuffle=False, verbose=0)
    reference.train(twin, optimizer, X, Y, 48)
    reference.assert_same_weights(model.module, twin, rtol=1e-4)
    start = model.get_weights()
    first = model.train_on_batch(X, Y)
    model.set_weights(start)
    assert model.test_on_batch(X, Y) == pytest.approx(first, rel=1e-5)


# Weights on the device ----------------------------------------------------------------
