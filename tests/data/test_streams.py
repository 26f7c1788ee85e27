# SPDX-License-Identifier: Apache-2.0
"""Streams of batches are counted as samples with an index are; steps of an epoch."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ipufit import ConfigError, DataError, IPUConfig, IPUModel
from tests import reference
from tests.strategies import config_for, examples, plans

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@settings(max_examples=examples(12))
@given(SIZES, plans(2), st.sampled_from([True, "pad"]))
def test_streams_are_padded_dropped_and_covered_as_indexed_samples_are(
    sizes, plan, drop_last
):
    count = sum(sizes)
    assume(drop_last == "pad" or count >= plan.samples_per_call)
    x, y = reference.samples(count)
    found = []
    for data in (
        (x, y),
        (reference.Restartable(lambda: zip(x.split(sizes), y.split(sizes))),),
    ):
        model = reference.compiled(config=config_for(plan), metrics=["accuracy"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            history = model.fit(
                *data,
                batch_size=plan.batch_size,
                epochs=2,
                shuffle=False,
                drop_last=drop_last,
                verbose=0,
            )
        figures = model.evaluate(*data, batch_size=plan.batch_size, verbose=0)
        model.detach()
        found.append((history.dropped_samples, history.history, figures, model))
    (dropped, history, figures, model), (*others, other) = found
    assert others[0] == dropped
    for name, values in history.items():
        assert others[1][name] == pytest.approx(values)
    assert others[2] == pytest.approx(figures)
    reference.assert_same_weights(model.module, other.module)


@given(SIZES, st.integers(1, 12))
def test_memory_that_is_used_again_is_not_kept(sizes, rows):
    def reused():
        at = 0
        memory = torch.empty(9, dtype=torch.int64)
        for size in sizes:
            memory[:] = -1
            memory[:size] = torch.arange(at, at + size)
            at += size
            yield memory[:size]

    seen = IPUModel(torch.nn.Identity()).predict(reused(), batch_size=rows, verbose=0)
    assert seen.tolist() == list(range(sum(sizes)))


def test_too_few_samples_for_a_call_show_every_factor():
    config = IPUConfig(
        micro_batch_size=2, gradient_accumulation=3, replicas=4, device_iterations=5
    )
    model = reference.compiled(config=config)
    words = r"119.*120 =.*micro-batch 2.*accumulation 3.*replicas 4.*iterations 5"
    with pytest.raises(DataError, match=words):
        model.fit(*reference.samples(119), verbose=0)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (7, r"steps_per_epoch=7.*\[6, 9\]"),  # calls make three updates
        (2, r"steps_per_epoch=2.*\[3\]"),
        *((steps, "steps_per_epoch") for steps in (0, 2.0, True)),
    ],
)
def test_steps_are_whole_numbers_of_updates_that_calls_make(steps, words):
    model = reference.compiled(config=IPUConfig(device_iterations=3))
    with pytest.raises(ConfigError, match=words):
        model.fit(*reference.samples(32), 2, steps_per_epoch=steps, verbose=0)


def orders(seed, of_torch=0):
    """The samples of two epochs, in the order in which a model with a seed has them."""
    data = reference.Recorded(*reference.samples(32))
    torch.manual_seed(of_torch)
    model = reference.compiled(config=IPUConfig(seed=seed))
    torch.manual_seed(of_torch)
    model.fit(data, batch_size=8, epochs=2, verbose=0)
    return data.asked[-64:-32], data.asked[-32:]


def test_orders_differ_from_epoch_to_epoch_and_come_again_with_a_seed():
    first, second = orders(1)
    assert sorted(first) == sorted(second) == list(range(32))
    assert len({tuple(one) for one in (first, second, *orders(2))}) == 4
    assert orders(1, of_torch=5) == (first, second)
    assert orders(None) == orders(None) != orders(None, of_torch=5)
