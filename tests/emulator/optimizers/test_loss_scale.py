# SPDX-License-Identifier: Apache-2.0
"""Automatic loss scaling, and what else float16 gradients need."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from tests.strategies import examples


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


def factors(gradients, **more):
    """The factor after updates with these gradients of a float16 weight."""
    options = poptorch.Options()
    options.Training.setAutomaticLossScaling(True)
    for name, value in more.items():
        options._Popart.set(f"automaticLossScalingSettings.{name}", value)
    model = Scaled()
    sgd = poptorch.optim.SGD(model.parameters(), lr=0.0, loss_scaling=1.0)
    executor = poptorch.trainingModel(model, options, sgd)
    found = [1.0]
    for gradient in gradients:
        # What the device sees is multiplied by the factor.
        x = torch.tensor(gradient) / found[-1]
        executor(x.to(torch.float16))
        found.append(sgd.state_dict()["ipu_state"]["lossScaleUpdateFactor"].item())
    return found


LARGE = 0.125 * 65504


@settings(deadline=None, max_examples=examples(25))
@given(
    st.lists(st.sampled_from([0.0, 1.0, LARGE / 2, LARGE * 2]), max_size=12),
    st.integers(1, 3),
)
def test_the_factor_follows_the_largest_gradients(values, period):
    found = factors([[0.0, 1.0, 0.0, v] for v in values], updatePeriod=period)
    for update, value in enumerate(values, start=1):
        before, after = found[update - 1 : update + 1]
        if update % period:
            assert after == before
        elif value > LARGE:
            assert after == before / 2
        else:
            assert after == min(before * 2, 2.0**15)


@pytest.mark.parametrize(("proportion", "factor"), [(0.2, 0.5), (0.3, 2.0)])
def test_a_few_large_elements_may_be_allowed(proportion, factor):
    found = factors([[1.0, 1.0, 1.0, 9000.0]], thresholdUpperCountProportion=proportion)
    assert found == [1.0, factor]


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
    ("accum_type", "expected"), [(torch.float32, 2050.0), (torch.float16, 2048.0)]
)
def test_half_gradients_are_added_up_in_the_type_of_the_accumulator(
    accum_type, expected
):
    model = Scaled()
    sgd = poptorch.optim.SGD(
        model.parameters(), lr=1.0, loss_scaling=1.0, accum_type=accum_type
    )
    # 2049 isn't a float16: the second gradient gets lost, and so does the third.
    x = torch.tensor([2048.0, 1.0, 1.0], dtype=torch.float16).repeat_interleave(4)
    train(
        x,
        model,
        sgd,
        automatic=False,
        gradientAccumulation=3,
        accumulationAndReplicationReductionType=poptorch.ReductionType.Sum,
    )
    assert model.weight.tolist() == [-expected] * 4
