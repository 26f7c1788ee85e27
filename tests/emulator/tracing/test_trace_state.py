# SPDX-License-Identifier: Apache-2.0
"""Who is told about a trace, and when."""

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

import ipufit.emulator as poptorch
from tests.emulator._models import Function, X


def test_a_layer_on_the_host_is_not_in_the_trace():
    seen = []

    def on_host(x):
        seen.append(poptorch.isRunningOnIpu())
        return poptorch.nop(x)

    def forward(_, x):
        seen.append(poptorch.isRunningOnIpu())
        return poptorch.CPU(on_host, "host")(x)

    assert not poptorch.isRunningOnIpu()
    module = Function(forward)
    poptorch.inferenceModel(module)(X)
    assert seen == [True, True, False]
    module(X)
    assert seen[3:] == [False, False]


class Mode(TorchFunctionMode):
    """A mode of the user's, which remembers what is called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_mode_of_the_user_s_sees_one_call_which_is_recorded_as_one(depth):
    modes = [Mode() for _ in range(depth)]
    calls = []

    def on_host(x):
        calls.append(x.clone())
        return x + 1

    def forward(_, x):
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return poptorch.CPU(on_host, "host")(x)

    executor = poptorch.inferenceModel(Function(forward))
    assert torch.equal(executor(X), X + 1)
    assert torch.equal(executor(X + 1), X + 2)
    assert len(calls) == 3  # in the trace, and in both calls
    for mode in modes:
        assert mode.names.count("call_on_host") == 1
        assert "add" not in mode.names


def test_indexing_is_seen_through_a_mode_of_the_users():
    """torch 2.0 shows indexing to no mode: the trace shows it to one after another."""
    mode = Mode()

    def forward(self, x, index):
        with mode:
            return x[index], x[0]

    x = torch.arange(6.0).reshape(3, 2)
    rows, first = poptorch.inferenceModel(Function(forward))(x, torch.tensor([2, 0, 1]))
    assert rows.tolist() == x[[2, 0, 1]].tolist()
    assert first.tolist() == [0.0, 1.0]
    assert mode.names.count("__getitem__") == 2


# Numbers of tensors -----------------------------------------------------------------

Y = torch.ones(2)


def traced(function, **attributes):
    result = []
    module = Function(lambda self, x: result.append(function(self, x)) or x * 1)
    for name, value in attributes.items():
        setattr(module, name, value)
    poptorch.inferenceModel(module).compile(Y)
    return result[0]


def test_every_tensor_has_a_number_of_its_own():
    def numbers(self, x):
        tensors = [x, self.weight, x + 1, x + 1]
        return [poptorch.getIpuTensorId(tensor) for tensor in tensors]

    found = traced(numbers, weight=torch.nn.Parameter(torch.ones(2)))
    assert all(type(number) is int for number in found)
    assert len(set(found)) == 4


def test_tensors_of_the_host_have_none():
    with pytest.raises(poptorch.Error, match="Only tensors on the IPU have an id"):
        poptorch.getIpuTensorId(Y)
    with pytest.raises(poptorch.Error, match="Only tensors on the IPU have an id"):
        traced(lambda self, x: poptorch.getIpuTensorId(Y))
