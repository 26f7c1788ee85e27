# SPDX-License-Identifier: Apache-2.0
"""`CPU`: calls of the host in the middle of a model."""

from __future__ import annotations

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function, Linear, X, assert_same

Y = torch.tensor([2.0])


def test_each_micro_batch_calls_the_host():
    calls = []

    def double(x):
        calls.append(x.tolist())
        return x * 2

    module = Function(
        lambda self, x: self.cpu(x + 1) * 3, cpu=poptorch.CPU(double, "d")
    )
    options = poptorch.Options().deviceIterations(2)
    model = poptorch.inferenceModel(module, options)
    assert model(torch.tensor([1.0, 4.0])).tolist() == [12.0, 30.0]
    assert calls == [[0.0], [2.0], [5.0]]  # first zeros, to learn the shape


def test_the_host_may_read_values():
    cpu = poptorch.CPU(lambda x: torch.tensor(sorted(x.tolist())), "sort")
    model = poptorch.inferenceModel(Function(lambda _, x: cpu(x)))
    assert model(torch.tensor([3.0, 1.0, 2.0])).tolist() == [1.0, 2.0, 3.0]


def test_one_result_is_a_tensor():
    assert poptorch.CPU(lambda x: x, "one")(X) is X


@pytest.mark.parametrize("outputs", [lambda x: (x,), lambda x: [x]])
def test_a_list_of_one_result_is_a_list(outputs):
    """PopTorch, `ops.py`: only what the layer itself returned single is unpacked."""
    cpu = poptorch.CPU(outputs, "one")
    assert cpu(X)[0] is X
    module = Function(lambda _, x: [y + 1 for y in cpu(x)])
    assert_same(poptorch.inferenceModel(module)(X), [X + 1])


@pytest.mark.parametrize("layer", [lambda x, y: x + y, lambda x, y: (x + y, x - y)])
def test_the_backends_part_can_be_played_by_hand(layer):
    cpu = poptorch.CPU(layer, "both")
    for method in (cpu.execute, cpu.registerPersistentData):
        with pytest.raises(TypeError):
            method()
    poptorch.inferenceModel(Function(lambda _, x, y: cpu(x, y)))(X, Y)
    cpu.registerPersistentData()
    assert [tensor.shape for tensor in cpu.inputs] == [X.shape, Y.shape]
    assert not any(tensor.any() for tensor in [*cpu.inputs, *cpu.outputs])
    for kept, given in zip(cpu.inputs, (X, Y)):
        kept.copy_(given)
    cpu.execute()
    expected = layer(X, Y)
    assert_same(cpu.outputs, expected if isinstance(expected, tuple) else [expected])


def test_a_module_no_longer_trains():
    layer = torch.nn.Linear(6, 2)
    cpu = poptorch.CPU(layer, "layer")
    assert not layer.weight.requires_grad
    model = poptorch.inferenceModel(Function(lambda _, x: cpu(x)))
    assert_same(model(X), layer(X))


def test_keyword_arguments_are_dropped():
    assert torch.equal(poptorch.CPU(lambda x: x, "same")(X, scale=3), X)


def test_training_is_refused():
    cpu = poptorch.CPU(lambda x: x, "same")
    module = Linear(lambda layer, x: poptorch.identity_loss(cpu(layer(x)), "mean"))
    with pytest.raises(poptorch.Error, match=r"CPU\(\) is only supported in inference"):
        poptorch.trainingModel(module)(X)


def test_calls_must_not_overlap():
    inner = poptorch.CPU(lambda x: x, "inner")
    outer = poptorch.CPU(lambda x: inner(x), "outer")
    assert outer(X) is X
    with pytest.raises(poptorch.Error, match=r"must not overlap.*'inner'"):
        poptorch.inferenceModel(Function(lambda _, x: outer(x)))(X)


def test_the_arguments_must_be_on_the_device():
    cpu = poptorch.CPU(lambda x, y: x + y, "add")
    host = torch.ones(6)
    with pytest.raises(poptorch.Error, match="Expected an IPU tensor"):
        poptorch.inferenceModel(Function(lambda _, x: cpu(x, host)))(X)
