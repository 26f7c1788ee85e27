# SPDX-License-Identifier: Apache-2.0
"""Programs without host data."""

from __future__ import annotations

import torch
from torch import nn

import ipufit.emulator as poptorch


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, y):
        out = self.layer(x)
        return out, nn.functional.cross_entropy(out, y)


def options(enabled=True):
    return poptorch.Options().enableSyntheticData(enabled)


def test_outputs_have_their_shapes_and_nothing_in_them():
    executor = poptorch.inferenceModel(nn.Linear(4, 2), options().deviceIterations(3))
    output = executor(torch.ones(6, 4))
    assert output.shape == (6, 2)
    assert not output.any()


def test_nothing_depends_on_the_callers_data():
    weights = []
    for fill in (0.0, 100.0):
        torch.manual_seed(0)
        model = Loss()
        executor = poptorch.trainingModel(model, options())
        executor(torch.full((2, 4), fill), torch.tensor([1, 1]))
        weights.append(model.layer.weight.tolist())
    assert weights[0] == weights[1]


def test_inputs_that_a_model_writes_stay_as_they_are():
    class Writes(nn.Module):
        def forward(self, x):
            x += 1
            return x

    given = torch.zeros(2)
    poptorch.inferenceModel(Writes(), options())(given)
    assert given.tolist() == [0, 0]
    poptorch.inferenceModel(Writes(), options(False))(given)
    assert given.tolist() == [1, 1]


def test_training_on_synthetic_data_brings_nothing_back():
    """PopART streams neither weights nor the optimiser's state then."""
    module = Loss()
    before = module.layer.weight.detach().clone()
    optimizer = poptorch.optim.Adam(module.parameters(), lr=0.1)
    executor = poptorch.trainingModel(module, options(), optimizer)
    for _ in range(2):
        outputs, loss = executor(torch.ones(1, 4), torch.tensor([1]))
    assert outputs.shape == (1, 2)
    assert loss.shape == ()
    executor.copyWeightsToHost()
    assert torch.equal(module.layer.weight.detach(), before)
    for _ in range(2):
        state = optimizer.state_dict()["ipu_state"]
        moments = [t for name, t in state.items() if name.startswith("Accl")]
        assert len(moments) == 4
        assert not any(t.any() for t in moments)
        executor.detachFromDevice()
        executor.attachToDevice()
    assert torch.equal(module.layer.weight.detach(), before)
