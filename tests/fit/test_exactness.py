# SPDX-License-Identifier: Apache-2.0
"""A fit is a plain torch loop: figures, weights, and what they cover."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit import (
    BatchPlan,
    CoverageWarning,
    DroppedRowsWarning,
    IPUConfig,
    IPUModel,
    poptorch,
)
from tests import reference
from tests.strategies import config_for, examples, output_modes, plans, sample_counts

pytestmark = [pytest.mark.floor, pytest.mark.looped]

OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


@contextlib.contextmanager
def warned_of(*kinds):
    """Exactly these kinds of warnings come."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert {warning.category for warning in caught} == set(kinds)


def make_models(config, optimizer, *, loss="cross_entropy", metrics=("accuracy",)):
    """A model, and a twin of its module with its own optimizer."""
    module, twin = reference.network(), reference.network()
    model = IPUModel(module, config)
    model.compile(
        OPTIMIZERS[optimizer](module.parameters()), loss, metrics=list(metrics)
    )
    return model, twin, OPTIMIZERS[optimizer](twin.parameters())


@settings(max_examples=examples(60))
@given(st.data(), plans(), st.sampled_from(sorted(OPTIMIZERS)), st.integers(1, 2))
def test_a_fit_equals_a_plain_torch_loop(data, plan, optimizer, epochs):
    mode, period = data.draw(output_modes(plan))
    count = data.draw(sample_counts(plan))
    x, y = reference.samples(count)
    model, twin, twin_optimizer = make_models(config_for(plan, mode, period), optimizer)
    trained_on = count - count % plan.samples_per_call
    covered = reference.covered_samples(plan, trained_on, mode, period)
    expected_warnings = [
        kind
        for kind, is_expected in (
            (DroppedRowsWarning, trained_on < count),
            (CoverageWarning, not covered.all()),
        )
        if is_expected
    ]
    with warned_of(*expected_warnings):
        history = model.fit(x, y, epochs=epochs, shuffle=False, verbose=0)
    for epoch in range(epochs):
        trained = reference.train(
            twin, twin_optimizer, x[:trained_on], y[:trained_on], plan.batch_size
        )
        for name, value in trained.figures(covered).items():
            assert history.history[name][epoch] == pytest.approx(value, rel=1e-5)
    reference.assert_same_weights(model.module, twin)
    assert history.dropped_samples == count - trained_on
    says_trained_on = f"training on {trained_on} of {count} samples"
    left_out_many = 10 * (count - trained_on) >= count
    assert (says_trained_on in history.coverage) == left_out_many
    if covered.all():
        assert history.coverage in ("", says_trained_on)
    else:
        calls = trained_on // plan.samples_per_call
        assert mode in history.coverage
        assert str(int(covered.sum()) // calls) in history.coverage
        assert str(plan.samples_per_call) in history.coverage


@settings(max_examples=examples(20))
@given(st.data(), plans(), st.sampled_from([None, 5]))
def test_a_shuffled_fit_trains_on_each_sample_at_most_once_and_says_the_truth(
    data, plan, seed
):
    count = data.draw(sample_counts(plan))
    x, y = reference.samples(count)
    dataset = reference.Recorded(x, y)
    orders = []
    model, twin, twin_optimizer = make_models(
        IPUConfig(
            micro_batch_size=plan.micro_batch_size,
            replicas=plan.replicas,
            device_iterations=plan.device_iterations,
            seed=seed,
        ),
        "momentum",
    )

    class Orders(reference.Recorder):
        def on_epoch_begin(self, epoch, logs):
            dataset.asked.clear()

        def on_epoch_end(self, epoch, logs):
            orders.append(list(dataset.asked))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DroppedRowsWarning)
        history = model.fit(
            dataset, batch_size=plan.batch_size, epochs=2, callbacks=Orders(), verbose=0
        )
    for epoch, order in enumerate(orders):
        assert len(order) == count - count % plan.samples_per_call
        assert len(set(order)) == len(order)
        trained = reference.train(
            twin, twin_optimizer, x[order], y[order], plan.batch_size
        )
        for name, value in trained.figures().items():
            assert history.history[name][epoch] == pytest.approx(value, rel=1e-5)
    assert len(orders) == 2
    reference.assert_same_weights(model.module, twin)


def test_every_epoch_has_an_order_of_its_own():
    dataset = reference.Recorded(*reference.samples(64))
    orders = []
    model, *_ = make_models(IPUConfig(), "momentum")
    model.fit(
        dataset,
        epochs=3,
        verbose=0,
        callbacks=reference.AtEpochEnd(lambda *_: orders.append(dataset.asked[-64:])),
    )
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(64)) for order in orders)


@settings(max_examples=examples(15))
@given(plans(), st.sampled_from(["sum", "none"]))
def test_a_loss_may_be_a_sum_or_a_value_per_sample(plan, reduction):
    x, y = reference.samples(2 * plan.samples_per_call)
    loss = torch.nn.CrossEntropyLoss(reduction=reduction)
    model, twin, twin_optimizer = make_models(config_for(plan), "momentum", loss=loss)
    history = model.fit(x, y, shuffle=False, verbose=0)
    trained = reference.train(
        twin, twin_optimizer, x, y, plan.batch_size, is_sum=reduction == "sum"
    )
    assert history.history["loss"] == [
        pytest.approx(trained.figures()["loss"], rel=1e-5)
    ]
    reference.assert_same_weights(model.module, twin, rtol=1e-4, atol=1e-5)
    evaluated = model.evaluate(x, y, verbose=0)
    expected = reference.evaluate(model.module, x, y)
    assert evaluated["loss"] == pytest.approx(expected["loss"], rel=1e-5)


# Replicas -------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_replicas_change_nothing_at_one_batch_size(shuffle):
    x, y = reference.samples(96)
    curves = {}
    for replicas in (1, 2, 8):
        module = reference.network()
        model = IPUModel(module, IPUConfig(replicas=replicas, seed=3))
        optimizer = OPTIMIZERS["adam"](module.parameters())
        model.compile(optimizer, "cross_entropy", metrics="acc")
        history = model.fit(
            x,
            y,
            batch_size=16,
            epochs=3,
            validation_split=1 / 3,
            shuffle=shuffle,
            verbose=0,
        )
        curves[replicas] = history.history
    first = curves.pop(1)
    assert len(set(first["loss"])) == 3
    for curve in curves.values():
        assert curve.keys() == first.keys()
        for name, values in first.items():
            assert curve[name] == pytest.approx(values, rel=1e-4)


# Evaluate and predict -------------------------------------------------------------

LOOKS = [
    IPUConfig(),
    IPUConfig(replicas=2),
    IPUConfig(device_iterations=3),
    IPUConfig(replicas=2, device_iterations=2),
]


@pytest.mark.parametrize("config", LOOKS)
def test_evaluate_and_predict_cover_every_sample_once_whatever_their_number(config):
    batch_size = 4
    rows = config.inference_plan(batch_size).samples_per_call
    model = reference.compiled(config=config, metrics=["accuracy"])
    for count in range(1, 2 * rows + 2):
        x, y = reference.samples(count, seed=count)
        figures = model.evaluate(x, y, batch_size=batch_size, verbose=0)
        expected = reference.evaluate(model.module, x, y)
        assert figures == pytest.approx(expected, rel=1e-5), count
        predicted = model.predict(x, batch_size=batch_size, verbose=0)
        with torch.no_grad():
            torch.testing.assert_close(predicted, model.module(x))


@settings(max_examples=examples(15))
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from(["Final", "EveryN"]),
)
def test_targets_are_cut_to_the_rows_that_evaluate_gets_back(
    replicas, micro, iterations, count, mode
):
    period = iterations  # of EveryN: once per call
    own = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    if mode == "EveryN":
        own.outputMode(poptorch.OutputMode.EveryN, output_return_period=period)
    else:
        own.outputMode(poptorch.OutputMode.Final)
    model = reference.compiled(inference_options=own, metrics=["accuracy"])
    x, y = reference.samples(count)
    plan = BatchPlan(micro, replicas=replicas, device_iterations=iterations)
    covered = reference.covered_samples(plan, count, mode, period)
    with warned_of(*[CoverageWarning] * (iterations > 1)):
        figures = model.evaluate(x, y, batch_size=micro * replicas, verbose=0)
    if covered.any():
        expected = reference.evaluate(model.module, x[covered], y[covered])
    else:
        expected = {"accuracy": float("nan"), "loss": float("nan")}
    assert figures == pytest.approx(expected, rel=1e-5, nan_ok=True)
