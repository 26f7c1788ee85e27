# SPDX-License-Identifier: Apache-2.0
"""Buffers that are uploaded by themselves while the model is on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("first", torch.ones(1))
        self.register_buffer("second", torch.ones(1))
        self.register_buffer("count", torch.ones(1, dtype=torch.int32))

    def forward(self, x):
        total = self.weight * x + self.first + self.second + self.count
        return poptorch.identity_loss(total, reduction="sum")


ONE = torch.ones(1)


def infer(*names):
    options = poptorch.Options().updatableNamedBuffers(list(names))
    return poptorch.inferenceModel(Sum(), options)


def test_every_replica_gets_the_new_value():
    options = poptorch.Options().replicationFactor(2).broadcastBuffers(False)
    options.updatableNamedBuffers(["total"])

    def forward(self, x):
        self.total += x
        return self.total * 1

    executor = poptorch.inferenceModel(
        Function(forward, buffers={"total": torch.zeros(1)}), options
    )
    assert executor(torch.tensor([1.0, 2.0])).tolist() == [1, 2]
    executor.total.fill_(10)
    executor.copyNamedBuffersToDevice()
    assert executor(torch.tensor([1.0, 2.0])).tolist() == [11, 12]


def test_a_detached_model_uploads_when_it_attaches():
    executor = infer("first")
    executor(ONE)
    executor.detachFromDevice()
    executor.first.fill_(5)
    with pytest.raises(poptorch.Error, match="holds none"):
        executor.copyNamedBuffersToDevice()
    assert executor(ONE).item() == 8


def test_what_training_has_learnt_is_not_fetched_afterwards():
    model = Sum()
    options = poptorch.Options().updatableNamedBuffers(["first"])
    sgd = poptorch.optim.SGD(model.parameters(), lr=1.0)
    training = poptorch.trainingModel(model, options, sgd)
    training(ONE)
    training.copyNamedBuffersToDevice()
    assert model.weight.item() == 1
    assert training(ONE).item() == 3  # the device has gone on from its own weight
    assert model.weight.item() == -1


def test_an_optimizer_keeps_its_state():
    model = Sum()
    options = poptorch.Options().updatableNamedBuffers(["first"])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    training = poptorch.trainingModel(model, options, sgd)
    for _ in range(2):
        training(ONE)
        training.copyNamedBuffersToDevice()
    training(ONE)
    assert model.weight.item() == 1 - (1 + 2 + 3)


def test_an_uncompiled_model_has_no_buffers_on_the_device():
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        infer("first").copyNamedBuffersToDevice()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("third", "buffers are: first, second, count"),
        ("weight", "buffers are: first"),
        ("count", "only floating-point buffers"),
    ],
)
def test_names_are_those_of_buffers_that_can_be_uploaded(name, message):
    executor = infer(name)
    with pytest.raises(poptorch.Error, match=message):
        executor(ONE)
    assert not executor.isCompiled()
