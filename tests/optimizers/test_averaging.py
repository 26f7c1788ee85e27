# SPDX-License-Identifier: Apache-2.0
"""Running averages of the weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import ConfigError, IPUModel, Optimizer
from ipufit.checkpoint import write_checkpoint
from ipufit.optimizers import WeightAverage


@pytest.fixture
def module():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


@torch.no_grad()
def fill(module, value):
    for parameter in module.parameters():
        parameter.fill_(value)


def value(module):
    (found,) = {x for p in module.parameters() for x in p.flatten().tolist()}
    return found


@given(
    st.floats(0, 0.999),
    st.lists(st.tuples(st.floats(-8, 8), st.integers(1, 20)), min_size=1, max_size=9),
)
def test_the_average_is_the_formulas(momentum, calls):
    module = torch.nn.Linear(1, 1, dtype=torch.float64)
    average = WeightAverage(module, momentum)
    expected = None
    for weight, updates in calls:
        fill(module, weight)
        average.update(updates)
        keep = momentum**updates
        expected = weight if expected is None else keep * expected + (1 - keep) * weight
    average.apply()
    assert value(module) == pytest.approx(expected, abs=1e-9)
    assert average.num_updates == sum(updates for _, updates in calls)


def test_buffers_that_are_not_finite_stay_as_they_are():
    module = torch.nn.Linear(1, 1)
    module.register_buffer("mask", torch.tensor([0.25, -torch.inf, torch.nan]))
    module.register_buffer("level", torch.zeros(1), persistent=False)
    average = WeightAverage(module, 0.5)
    for value in (1.0, torch.inf, 3.0, 5.0):
        module.level.fill_(value)
        average.update(1)
    average.apply()
    torch.testing.assert_close(
        module.mask, torch.tensor([0.25, -torch.inf, torch.nan]), equal_nan=True
    )
    assert module.level.item() == 4.0


def test_half_precision_weights_have_an_average_in_single_precision():
    module = torch.nn.Linear(1, 1).half()
    average = WeightAverage(module, 0.999)
    fill(module, 1.0)
    average.update(1)
    fill(module, 1.25)
    for _ in range(1000):
        average.update(1)  # each step is less than float16 can add to 1
    average.apply()
    assert value(module) == pytest.approx(1.25 - 0.25 * 0.999**1000, abs=1e-3)
    assert module.weight.dtype is torch.float16


@pytest.mark.parametrize("momentum", [1, -0.1, True, None, "0.9"])
def test_a_momentum_out_of_range_is_refused(module, momentum):
    with pytest.raises(ConfigError, match="momentum="):
        WeightAverage(module, momentum)


def test_a_checkpoint_of_another_average_is_refused(tmp_path):
    x, y = torch.rand(8, 3), torch.rand(8, 1)

    def saved(path, **average):
        model = IPUModel(torch.nn.Linear(3, 1))
        model.compile(Optimizer("sgd", 0.1, **average), "mse")
        model.fit(x, y, batch_size=4, verbose=0)
        checkpoint = model.checkpoint()
        if path == "equal":  # as version 0.1 had them
            checkpoint.state["average"]["num_averaged"] = 1
        write_checkpoint(tmp_path / path, checkpoint)
        return model

    moving = saved("moving", ema_momentum=0.9)
    saved("equal", ema_momentum=0.9)
    plain = saved("none")
    moving.load(tmp_path / "moving")
    plain.load(tmp_path / "none")
    for model, path in ((moving, "none"), (plain, "moving"), (moving, "equal")):
        with pytest.raises(ConfigError, match="average of the weights"):
            model.load(tmp_path / path)
    moving.load_weights(tmp_path / "equal" / "model.safetensors")
