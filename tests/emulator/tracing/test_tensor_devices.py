# SPDX-License-Identifier: Apache-2.0
"""Tensors of the host and of the device: which is which, and that they don't mix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function, said


def test_a_tensor_that_is_no_buffer_is_not_on_the_ipu():
    module = Function(lambda m, x: torch.index_select(x, 0, torch.LongTensor([1, 0])))
    with pytest.raises(poptorch.Error) as caught:
        poptorch.inferenceModel(module)(torch.ones(4))
    expected = (
        "Expected an IPU tensor but got tensor(device=cpu, shape=[2], dtype=Long)"
    )
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x + torch.from_numpy(np.ones(6, np.float32)),
        lambda m, x: x + torch.ones(6, device="cpu"),
        lambda m, x: x[:, :4] @ torch.eye(4),
        lambda m, x: x + m.constant,
        lambda m, x: x.to(m.constant),
        lambda m, x: m.constant.copy_(x),
        lambda m, x: m.hidden[0](x),
    ],
)
def test_tensors_of_host_and_device_do_not_mix(function):
    module = Function(function, constant=torch.ones(6), hidden=[nn.Linear(6, 6)])
    with pytest.raises(poptorch.Error, match="Expected an IPU tensor"):
        poptorch.inferenceModel(module)(torch.ones(2, 6))


@pytest.mark.parametrize(
    "move",
    [
        lambda constant, x: constant.to(x.device),
        lambda constant, x: constant.to(device=x.device),
        lambda constant, x: constant.to("ipu"),
        lambda constant, x: constant.to(torch.device("ipu", 0), torch.float32),
        lambda constant, x: constant.to(x),
        lambda constant, x: constant.type_as(x),
        lambda constant, x: torch.zeros(6).copy_(constant),
        lambda constant, x: torch.zeros(6, device="ipu:0").copy_(constant),
        lambda constant, x: torch.as_tensor(constant, device=x.device),
        lambda constant, x: torch.tensor(constant.tolist()),
    ],
)
def test_a_constant_can_be_moved_and_is_frozen(move):
    def forward(m, x):
        constant = move(m.constant, x)
        constant += x  # in a copy
        return constant * 1

    module = Function(forward, constant=torch.arange(6.0))
    executor = poptorch.inferenceModel(module)
    for _ in range(2):
        assert executor(torch.ones(6)).tolist() == [1, 2, 3, 4, 5, 6]
    assert module.constant.tolist() == [0, 1, 2, 3, 4, 5]
    module.constant.zero_()
    assert executor(torch.ones(6)).tolist() == [1, 2, 3, 4, 5, 6]


def test_values_of_the_hosts_tensors_can_be_read():
    module = Function(
        lambda m, x: x * 2 if m.flag.item() else x, flag=torch.tensor(True)
    )
    assert poptorch.inferenceModel(module)(torch.ones(1)).item() == 2


def test_factories_without_a_device_are_warned_of_each_time(caplog):
    """PopTorch, `_poplar_executor.py` `_SetDefaultDeviceType`."""

    def forward(m, x):
        for _ in range(2):
            x = x + torch.zeros(6)
        return x + torch.zeros_like(x) + torch.ones(6, device=x.device)

    with caplog.at_level("WARNING"):
        poptorch.inferenceModel(Function(forward))(torch.ones(2, 6))
    forced = [line for line in said(caplog) if "forcing to IPU" in line]
    functions = [line.partition("torch.")[2].partition("(")[0] for line in forced]
    assert functions == ["zeros", "zeros", "zeros_like"]


def test_no_device_at_all_is_the_hosts():
    """A `device` that is None is one that was given."""
    module = Function(lambda m, x: x + torch.ones(6, device=None))
    with pytest.raises(poptorch.Error, match="Expected an IPU tensor"):
        poptorch.inferenceModel(module)(torch.ones(2, 6))


def test_random_numbers_around_tensors_go_where_these_are(caplog):
    module = Function(lambda m, x: torch.normal(x, 1.0) + torch.normal(0.0, 1.0, (6,)))
    with caplog.at_level("WARNING"):
        poptorch.inferenceModel(module)(torch.ones(2, 6))
    assert sum("forcing to IPU" in line for line in said(caplog)) == 1
