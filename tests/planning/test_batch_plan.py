# SPDX-License-Identifier: Apache-2.0
"""`batch_plan` says what `fit` does then, whatever data and factors it gets."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit import (
    Callback,
    ConfigError,
    DataError,
    LossScaleRamp,
    Optimizer,
    StreamedMetric,
    poptorch,
)
from tests import reference
from tests.reference import Stream
from tests.strategies import examples


def compiled(**fields):
    torch.manual_seed(0)
    return reference.compiled(torch.nn.Linear(3, 2), **fields)


def data(count):
    return torch.rand(count, 3), torch.zeros(count, dtype=torch.int64)


class Counted(Callback):
    """Counts calls and updates as a run has them."""

    hears_every = None

    def __init__(self):
        self.calls = 0

    def on_train_batch_end(self, batch, logs):
        self.calls += 1

    def on_epoch_end(self, epoch, logs):
        self.seen = self.run.updates, self.run.samples


@settings(max_examples=examples(100))
@given(
    count=st.integers(1, 60),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    replicas=st.integers(1, 2),
    iterations=st.none() | st.integers(1, 3),
    drop_last=st.sampled_from([True, "pad"]),
)
def test_fit_does_what_the_plan_says(
    count, micro, accumulation, replicas, iterations, drop_last
):
    model = compiled(
        micro_batch_size=micro,
        gradient_accumulation=accumulation,
        replicas=replicas,
        device_iterations=iterations,
    )
    plan = model.batch_plan(*data(count), drop_last=drop_last)
    counted = Counted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            history = model.fit(
                *data(count), drop_last=drop_last, callbacks=counted, verbose=0
            )
        except DataError:  # not one call
            assert plan.calls == 0
            return
    assert plan.calls == counted.calls
    assert (plan.updates, count - plan.dropped_samples) == counted.seen
    assert plan.dropped_samples == history.dropped_samples
    assert plan.padded_rows == (plan.calls * plan.samples_per_call - count) * (
        drop_last == "pad"
    )


@settings(max_examples=examples(50))
@given(count=st.integers(8, 200), size=st.integers(1, 10), iterations=st.integers(1, 3))
def test_the_sizes_that_it_names_leave_nothing_over(count, size, iterations):
    model = compiled(micro_batch_size=1, replicas=2, device_iterations=iterations)
    size *= 2
    plan = model.batch_plan(*data(count), batch_size=size)
    near = range(2, min(count, 2 * size) + 1, 2)
    good = [n for n in near if count % (n * iterations) == 0 and 2 * n >= size]
    if not plan.dropped_samples or count % iterations:
        assert plan.nearest_batch_sizes == ()
        return
    smaller, larger = [g for g in good if g < size], [g for g in good if g > size]
    assert plan.nearest_batch_sizes == (*smaller[-2:], *larger[:2])
    for one in plan.nearest_batch_sizes:
        assert not model.batch_plan(*data(count), batch_size=one).dropped_samples


def test_what_a_plan_says():
    model = compiled(micro_batch_size=8)
    assert str(model.batch_plan(*data(100), batch_size=48)).splitlines() == [
        "batch size 48 = micro-batch 8 * gradient accumulation 6",
        "A call makes 2 updates, of 96 samples together (not more because no larger "
        "number divides the 2 updates of an epoch).",
        "An epoch of 100 samples is 1 call, 2 updates. 4 samples are left out.",
    ]
    padded = str(model.batch_plan(*data(99), batch_size=24, drop_last="pad"))
    assert "The last call is filled up with 21 rows." in padded


@pytest.mark.parametrize(
    ("arguments", "samples", "updates"),
    [({"validation_split": 0.25}, 48, 6), ({"steps_per_epoch": 3}, 24, 3)],
)
def test_arguments_that_choose_the_samples_count(arguments, samples, updates):
    model = compiled(micro_batch_size=8)
    plan = model.batch_plan(*data(64), **arguments)
    assert (plan.num_samples, plan.updates) == (samples, updates)
    assert model.plan(*data(64), **arguments).epoch == plan
    counted = Counted()
    model.fit(*data(64), verbose=0, callbacks=counted, **arguments)
    assert (counted.calls, counted.seen) == (plan.calls, (updates, samples))


class Each(Callback):
    def on_train_batch_end(self, batch, logs):
        pass


def asks_for_final(options, is_training):
    if is_training:
        options.outputMode(poptorch.OutputMode.Final)


@pytest.mark.parametrize(
    ("config", "given", "reason"),
    [
        ({}, {"callbacks": Each()}, "Each hears each update"),
        ({"customize": asks_for_final}, {}, "customize asks for Final"),
        ({}, None, "the data doesn't say for certain how many samples come"),
    ],
)
def test_a_plan_says_why_a_call_makes_one_update(config, given, reason):
    model = compiled(**config)
    arguments = {} if given is None else given
    given_data = [Stream([*zip(*data(8))])] if given is None else data(48)
    plan = model.batch_plan(*given_data, batch_size=4, **arguments)
    assert (plan.batch.device_iterations, plan.reason) == (1, reason)
    if given is None:
        assert plan.calls is plan.updates is None
        assert str(plan).endswith("The number of samples of an epoch isn't known.")


class Streamed(StreamedMetric):
    def _nothing(self, *_):
        return 0.0

    reset = update = result = _nothing


@pytest.mark.parametrize(
    ("given_settings", "reason"),
    [
        ({"lr_schedule": "cosine"}, "a schedule sets the learning rate of each update"),
        (
            {"optimizer": Optimizer("sgd", ema_momentum=0.9)},
            "weights are averaged after each update",
        ),
        (
            {"optimizer": Optimizer("sgd", loss_scaling=LossScaleRamp(1, 2, 2, 8))},
            "the loss scaling may change with each update",
        ),
        (
            {"metrics": [Streamed("streamed")]},
            "outputs come back for a streamed metric, and may be large",
        ),
    ],
)
def test_what_happens_after_each_update_makes_calls_of_one(given_settings, reason):
    model = compiled()
    model.compile(**{"optimizer": "sgd", "loss": "cross_entropy", **given_settings})
    plan = model.batch_plan(*data(48), batch_size=4)
    assert (plan.batch.device_iterations, plan.reason) == (1, reason)


@pytest.mark.parametrize(
    ("rows", "features", "size", "most", "reason"),
    [
        (64, 2**20, 1, 8, "a call's samples and metrics take 64 MiB of host memory"),
        (8192, 2**10, 64, 16, "a larger call would take long, with 64 samples and"),
    ],
)
def test_memory_and_work_bound_a_call(rows, features, size, most, reason):
    module = torch.nn.Linear(features, 1024 if size > 1 else 1)
    model = reference.compiled(module, loss="mse")
    x = torch.zeros(rows, 1)
    given_data = x.expand(rows, features), x.expand(rows, module.out_features)
    plan = model.batch_plan(*given_data, batch_size=size)
    assert plan.batch.device_iterations == most
    assert reason in plan.reason


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_layers_get_their_shapes_and_bad_factors_are_refused():
    model = reference.compiled(torch.nn.Sequential(torch.nn.LazyLinear(2)))
    assert model.batch_plan(*data(48), batch_size=4).batch.device_iterations == 12
    with pytest.raises(ConfigError, match="nearest legal values are 24 and 32"):
        compiled(micro_batch_size=8).batch_plan(*data(64), batch_size=30)


def test_a_generator_keeps_its_first_batch():
    batches = iter([data(4)] * 3)
    with pytest.raises(DataError, match="take its first batch away"):
        compiled().batch_plan(batches, batch_size=4)
    assert len(list(batches)) == 3
