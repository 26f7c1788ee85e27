# SPDX-License-Identifier: Apache-2.0
"""Epochs of so many steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import BatchPlan, ConfigError, DataError, IPUConfig
from ipufit.data.calls import Epochs, TrainingBatches
from ipufit.data.sources import StreamSource, as_source

PLAN = BatchPlan(2)


def epochs(num_calls, steps, *, num_epochs=1, is_stream=False, plan=PLAN):
    numbers = torch.arange(num_calls * plan.samples_per_call)
    source = as_source(numbers)
    if is_stream:
        blocks = [(numbers,)]
        source = StreamSource(
            iter(blocks) if is_stream == "once" else blocks, lambda b: b, name="x"
        )
    options = IPUConfig(
        micro_batch_size=2, device_iterations=plan.device_iterations
    ).build_training_options(plan)
    batches = TrainingBatches(source, plan, options, shuffle=False)
    return Epochs(batches, plan, steps, num_epochs)


def firsts(epoch):
    """The number of each call."""
    return [int(call.batch[0][0]) // 2 for call in epoch]


def keras_epochs(num_calls, steps, count):
    """Keras's rule: go on, begin anew only where an epoch begins at the end."""
    at, all_epochs = 0, []
    for _ in range(count):
        at = 0 if at == num_calls else at
        calls = list(range(at, min(at + steps, num_calls)))
        is_short = len(calls) < steps
        at = 0 if is_short else at + steps
        all_epochs.append((calls, is_short))
    return all_epochs


@given(st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_epochs_go_on_and_begin_anew_as_kerass(num_calls, steps, is_stream):
    passes = epochs(num_calls, steps, is_stream=is_stream)
    assert passes.num_calls == steps
    for calls, is_short in keras_epochs(num_calls, steps, 7):
        assert firsts(passes) == calls
        assert passes.ran_out == is_short
        assert not passes.is_spent


def test_five_calls_in_epochs_of_two():
    assert [len(calls) for calls, _ in keras_epochs(5, 2, 5)] == [2, 2, 1, 2, 2]


def test_without_steps_every_epoch_is_a_pass():
    passes = epochs(3, None, num_epochs=2)
    assert passes.num_calls == 3
    assert firsts(passes) == firsts(passes) == [0, 1, 2]
    assert not passes.ran_out


def test_a_generator_ends():
    passes = epochs(5, 2, num_epochs=4, is_stream="once")
    assert firsts(passes) == [0, 1]
    assert firsts(passes) == [2, 3]
    assert not passes.is_spent
    assert firsts(passes) == [4]
    assert passes.ran_out
    assert passes.is_spent


def test_a_generator_gives_one_pass():
    assert firsts(epochs(2, None, is_stream="once")) == [0, 1]
    with pytest.raises(DataError, match=r"asks? for 2 passes"):
        epochs(2, None, num_epochs=2, is_stream="once")


def test_steps_are_updates_and_calls_make_several():
    plan = BatchPlan(2, device_iterations=3)
    assert epochs(2, 6, plan=plan).num_calls == 2
    with pytest.raises(ConfigError, match=r"steps_per_epoch=7.*\[6, 9\]"):
        epochs(2, 7, plan=plan)
    with pytest.raises(ConfigError, match=r"steps_per_epoch=2.*\[3\]"):
        epochs(2, 2, plan=plan)


@pytest.mark.parametrize("steps", [0, -1, 2.0, "2", True])
def test_steps_are_whole_numbers(steps):
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        epochs(2, steps)
