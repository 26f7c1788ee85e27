# SPDX-License-Identifier: Apache-2.0
"""`trainingModel` and `inferenceModel`, of modules and of executors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch


class Model(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

    def forward(self, x):
        return poptorch.identity_loss(super().forward(x), "sum")


X = torch.ones(1, 1)


def test_wrapping_twice_for_training_is_an_error():
    model = Model()
    executor = poptorch.trainingModel(model)
    for again in (model, executor):
        with pytest.raises(RuntimeError, match=r"model\.destroy\(\)"):
            poptorch.trainingModel(again)


def test_any_number_of_inference_models_may_share_a_module():
    model = Model()
    training = poptorch.trainingModel(model)
    executors = [poptorch.inferenceModel(m) for m in (model, training, model)]
    outs = {executor(X).item() for executor in executors}
    assert len(outs) == 1


def test_a_module_can_be_trained_after_its_inference_executor_was_given():
    inference = poptorch.inferenceModel(Model())
    training = poptorch.trainingModel(inference)
    before = inference(X).item()
    training(X)
    training.copyWeightsToHost()
    inference.copyWeightsToDevice()
    assert inference(X).item() < before


def test_attributes_of_the_top_are_those_at_wrapping():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
            self.child = nn.Module()
            self.child.scale = 2.0

        def forward(self, x):
            return x * self.scale, x * self.child.scale

    model = Scaled()
    executor = poptorch.inferenceModel(model)
    model.scale = model.child.scale = 3.0
    top, child = executor(torch.ones(1))
    assert (top.item(), child.item()) == (2, 3)  # children are shared


def test_inference_takes_no_optimizer():
    with pytest.raises(TypeError):
        poptorch.inferenceModel(Model(), None, None)
