# SPDX-License-Identifier: Apache-2.0
"""Automatic loss scaling, and what else float16 gradients need."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator._update.loss_scale import AutomaticLossScale


class Scaled(nn.Module):
    """The gradient of each weight is its input."""

    def __init__(self, dtype=torch.float16):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=dtype))

    def forward(self, x):
        product = self.weight * x
        return poptorch.identity_loss(product.float(), reduction="sum"), self.weight * 1


def train(x, model, optimizer, calls=1, *, automatic=True, **training):
    options = poptorch.Options()
    options.Training.setAutomaticLossScaling(automatic)
    for name, value in training.items():
        getattr(options.Training, name)(value)
    options.anchorTensor("scale", "lossScaling_FLOAT")
    if automatic:
        options.anchorTensor("scale", "finalLossScale")
    executor = poptorch.trainingModel(model, options, optimizer)
    scales = []
    for _ in range(calls):
        executor(x)
        scales.append(executor.getAnchoredTensor("scale").item())
    executor.copyWeightsToHost()
    return executor, scales


@given(
    st.lists(st.lists(st.floats(0, 60000), min_size=1, max_size=5), max_size=12),
    st.integers(1, 3),
)
def test_the_factor_follows_the_largest_gradients(gradients, period):
    scale = AutomaticLossScale(0.125, 1e-7, period)
    for update, values in enumerate(gradients, start=1):
        before = scale.factor
        scale.adapt([torch.tensor(values)], loss_scaling=1.0)
        if update % period:
            assert scale.factor == before
        elif max(values) > 0.125 * 65504:
            assert scale.factor == before / 2
        else:
            assert scale.factor == min(before * 2, 2.0**15)


def test_what_is_not_a_number_counts_as_large():
    scale = AutomaticLossScale(0.125, 1e-7, 1)
    scale.adapt([torch.tensor([1.0, float("nan")])], loss_scaling=1.0)
    assert scale.factor == 0.5


def test_a_few_large_elements_may_be_allowed():
    gradient = torch.tensor([1.0] * 9 + [9000.0])
    for proportion, factor in ((0.05, 0.5), (0.2, 2.0)):
        scale = AutomaticLossScale(0.125, proportion, 1)
        scale.adapt([gradient], loss_scaling=1.0)
        assert scale.factor == factor


OPTIMIZERS = {
    "SGD": lambda w: poptorch.optim.SGD(w, lr=0.5, loss_scaling=4.0),
    "momentum": lambda w: poptorch.optim.SGD(w, lr=0.5, momentum=0.5, loss_scaling=4.0),
    "Adam": lambda w: poptorch.optim.Adam(w, lr=0.5, loss_scaling=4.0),
    "LAMB": lambda w: poptorch.optim.LAMB(w, lr=0.5, loss_scaling=4.0),
    "torch": lambda w: torch.optim.SGD(w, lr=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_do_not_depend_on_the_scale(name):
    x = torch.tensor([0.25, 0.5, 1.0, 2.0], dtype=torch.float16)
    weights = []
    for automatic in (False, True):
        model = Scaled()
        optimizer = OPTIMIZERS[name](model.parameters())
        _, scales = train(x, model, optimizer, calls=5, automatic=automatic)
        weights.append(model.weight.detach().clone())
    first = scales[0]
    assert scales == [first * 2**n for n in range(5)]
    torch.testing.assert_close(*weights, atol=2e-3, rtol=2e-3)


def test_the_scale_falls_when_gradients_grow_too_large():
    model = Scaled()
    x = torch.full((4,), 5000.0, dtype=torch.float16)
    sgd = poptorch.optim.SGD(model.parameters(), lr=0.0, loss_scaling=8.0)
    _, scales = train(x, model, sgd, calls=6)
    assert scales == [8.0, 4.0, 2.0, 1.0, 2.0, 1.0]


def test_single_precision_weights_leave_the_scale_alone():
    model = Scaled(torch.float32)
    sgd = poptorch.optim.SGD(model.parameters(), lr=0.1)
    _, scales = train(torch.ones(4), model, sgd, calls=3)
    assert scales == [1.0, 1.0, 1.0]


def test_the_factor_is_part_of_the_state():
    x = torch.ones(4, dtype=torch.float16)
    model = Scaled()
    sgd = poptorch.optim.SGD(model.parameters(), lr=0.1)
    executor, _ = train(x, model, sgd, calls=3)
    assert sgd.state_dict()["ipu_state"]["lossScaleUpdateFactor"] == 8
    executor.detachFromDevice()
    executor(x)
    assert executor.getAnchoredTensor("scale") == 8
    state = sgd.state_dict()
    executor.destroy()

    again = Scaled()
    other = poptorch.optim.SGD(again.parameters(), lr=0.1)
    other.load_state_dict(state)
    _, scales = train(x, again, other)
    assert scales == [16.0]


# Accumulation -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("accum_type", "expected"), [(torch.float32, 2049.0), (torch.float16, 2048.0)]
)
def test_half_gradients_are_added_up_in_the_type_of_the_accumulator(
    accum_type, expected
):
    model = Scaled()
    adam = poptorch.optim.SGD(
        model.parameters(), lr=1.0, loss_scaling=1.0, accum_type=accum_type
    )
    x = torch.tensor([2048.0, 1.0] * 2, dtype=torch.float16)[[0] * 4 + [1] * 4]
    model.weight.data.fill_(0.0)
    sgd_like, _ = train(
        x,
        model,
        adam,
        automatic=False,
        gradientAccumulation=2,
        accumulationAndReplicationReductionType=poptorch.ReductionType.Sum,
    )
    # 2049 isn't a float16: the update of the weight rounds it to 2048 again.
    seen = {}
    optimizer = sgd_like._device._link.device_optimizer
    step = type(optimizer).step

    def spy(self, gradients):
        seen.update(gradients)
        step(self, gradients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(optimizer), "step", spy)
        sgd_like(x)
    assert seen["weight"].tolist() == [expected] * 4
    assert seen["weight"].dtype == accum_type
