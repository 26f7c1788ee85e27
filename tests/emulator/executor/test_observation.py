# SPDX-License-Identifier: Apache-2.0
"""Names and anchored values of the tensors in a program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import ONE


@pytest.fixture
def executor():
    options = poptorch.Options()
    options.anchorTensor("x", "input")
    return poptorch.inferenceModel(nn.ReLU(), options)


def test_without_anchors_there_is_nothing_to_find():
    plain = poptorch.inferenceModel(nn.ReLU())
    plain(ONE)
    with pytest.raises(AssertionError, match="there are: none"):
        plain.getAnchoredTensor("x")


def test_values_outlive_the_attachment_but_no_compilation(executor):
    executor(ONE)
    executor.detachFromDevice()
    assert executor.getAnchoredTensor("x").tolist() == [1]
    executor.destroy()
    executor.compile(torch.ones(2))
    with pytest.raises(AssertionError, match="No tensor with name x found"):
        executor.getAnchoredTensor("x")
