# SPDX-License-Identifier: Apache-2.0
"""Numbers for the tensors of a trace."""

from __future__ import annotations

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function

X = torch.ones(2)


def traced(function, **attributes):
    result = []
    module = Function(lambda self, x: result.append(function(self, x)) or x * 1)
    for name, value in attributes.items():
        setattr(module, name, value)
    poptorch.inferenceModel(module).compile(X)
    return result[0]


def test_every_tensor_has_a_number_of_its_own():
    def numbers(self, x):
        tensors = [x, self.weight, x + 1, x + 1]
        return [poptorch.getIpuTensorId(tensor) for tensor in tensors]

    found = traced(numbers, weight=torch.nn.Parameter(torch.ones(2)))
    assert all(type(number) is int for number in found)
    assert len(set(found)) == 4


def test_a_tensor_keeps_its_number():
    def numbers(self, x):
        y = x + 1
        before = poptorch.getIpuTensorId(y)
        z = y.add_(1)
        return before, poptorch.getIpuTensorId(y), poptorch.getIpuTensorId(z)

    assert len(set(traced(numbers))) == 1


def test_tensors_of_the_host_have_none():
    with pytest.raises(poptorch.Error, match="Only tensors on the IPU have an id"):
        poptorch.getIpuTensorId(X)
    with pytest.raises(poptorch.Error, match="Only tensors on the IPU have an id"):
        traced(lambda self, x: poptorch.getIpuTensorId(X))


def test_other_things_are_no_tensors():
    with pytest.raises(poptorch.Error, match=r"takes a tensor\. Got int"):
        poptorch.getIpuTensorId(3)
