# SPDX-License-Identifier: Apache-2.0
"""`train_on_batch`, `test_on_batch`, `predict_on_batch`: runs of one batch."""

from __future__ import annotations

import pytest
import torch

from ipufit import (
    ConfigError,
    DataError,
    IPUConfig,
    IPUModel,
    NotCompiledError,
    StreamedMetric,
    UnsupportedError,
    poptorch,
)
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


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["plain", "sample_weight", "class_weight"])
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


def test_batches_of_other_sizes_are_compiled_for_anew():
    model, twin = compiled(), reference.network()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
    for count in (4, 7, 4, 20):
        figures = model.train_on_batch(X[:count], Y[:count])
        trained = reference.train(twin, optimizer, X[:count], Y[:count], count)
        expected = trained.figures()
        assert {n: figures[n] for n in expected} == pytest.approx(expected, rel=1e-4)
    reference.assert_same_weights(model.module, twin, rtol=1e-4)


# Weights on the device ----------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch):
    """Which way weights were copied, in order."""
    seen = []
    for name in ("copyWeightsToHost", "copyWeightsToDevice"):
        original = getattr(poptorch.PoplarExecutor, name)

        def copy(self, name=name, original=original):
            seen.append(name)
            original(self)

        monkeypatch.setattr(poptorch.PoplarExecutor, name, copy)
    return seen


def test_weights_stay_on_the_device_from_batch_to_batch(copies):
    model = compiled()
    before = model.get_weights()
    model.train_on_batch(X, Y)
    copies.clear()
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert "copyWeightsToDevice" not in copies
    after = model.get_weights()
    assert copies[-1] == "copyWeightsToHost"
    assert any((mine != theirs).any() for mine, theirs in zip(before, after))


def test_an_evaluation_between_batches_sees_what_was_learnt():
    model, twin = compiled(), reference.network()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        model.train_on_batch(X, Y)
        reference.train(twin, optimizer, X, Y, 48)
        expected = reference.evaluate(twin, X, Y)
        figures = model.test_on_batch(X, Y)
        assert {n: figures[n] for n in expected} == pytest.approx(expected, rel=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(
                model.predict_on_batch(X), twin(X), rtol=1e-4, atol=1e-5
            )


def test_weights_may_be_set_between_batches():
    model, twin = compiled(), compiled()
    start = model.get_weights()
    first = model.train_on_batch(X, Y)
    model.train_on_batch(X, Y)
    model.set_weights(start)
    assert model.test_on_batch(X, Y) == pytest.approx(first, rel=1e-5)
    assert model.train_on_batch(X, Y) == pytest.approx(first, rel=1e-5)
    assert twin.train_on_batch(X, Y) == pytest.approx(first)


def test_parameters_may_be_frozen_between_batches():
    model = compiled()
    model.train_on_batch(X, Y)
    model.train_on_batch(X, Y)
    for parameter in model.module[0].parameters():
        parameter.requires_grad_(False)
    first, last = (model.get_weights()[i] for i in (0, 2))
    model.train_on_batch(X, Y)
    assert (model.get_weights()[0] == first).all()
    assert (model.get_weights()[2] != last).any()


def test_a_fit_goes_on_where_batches_ended():
    model, twin = compiled(), reference.network()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
    model.train_on_batch(X, Y)
    model.fit(X, Y, batch_size=48, shuffle=False, verbose=0)
    model.train_on_batch(X, Y)
    for _ in range(3):
        reference.train(twin, optimizer, X, Y, 48)
    model.get_weights()
    reference.assert_same_weights(model.module, twin, rtol=1e-4)


# Schedules ----------------------------------------------------------------------------


def test_schedules_go_on_from_batch_to_batch():
    model = compiled(lr_schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
    twin = reference.network()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(4):
        model.train_on_batch(X, Y)
        reference.train(twin, optimizer, X, Y, 48)
        scheduler.step()
    model.get_weights()
    reference.assert_same_weights(model.module, twin, rtol=1e-4)


# Errors -------------------------------------------------------------------------------


def test_a_batch_makes_whole_updates():
    model = compiled(IPUConfig(device_iterations=5))
    with pytest.raises(DataError, match="48 samples doesn't make the 5"):
        model.train_on_batch(X, Y)


def test_a_batch_is_made_of_the_factors():
    model = compiled(IPUConfig(replicas=5))
    with pytest.raises(ConfigError, match="batch_size=48"):
        model.train_on_batch(X, Y)


@pytest.mark.parametrize("run", ["train_on_batch", "test_on_batch"])
def test_nothing_is_done_before_compile_or_without_targets(run):
    with pytest.raises(NotCompiledError):
        getattr(IPUModel(reference.network()), run)(X, Y)
    with pytest.raises(DataError, match="no targets"):
        getattr(compiled(), run)(X)
    assert IPUModel(reference.network()).predict_on_batch(X).shape == (48, 4)


def test_class_weights_need_a_loss_with_values_per_sample():
    model = compiled(loss=lambda o, t: torch.nn.functional.cross_entropy(o, t))
    with pytest.raises(UnsupportedError, match="per sample"):
        model.train_on_batch(X, Y, class_weight={0: 2.0})
