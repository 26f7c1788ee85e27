# SPDX-License-Identifier: Apache-2.0
"""Max-pooling by comparisons gives what torch's kernel gives."""

from __future__ import annotations

from functools import reduce
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st

from ipufit import poptorch
from ipufit.emulator._ground.switches import uses_channels_last
from ipufit.emulator._program.channels_last import max_pool2d, with_sliced_pooling
from ipufit.emulator._program.program import Program

SIZES = st.integers(1, 9)
SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), -1.0, 2.0])


@given(
    shape=st.tuples(st.integers(1, 3), SIZES, SIZES, SIZES),
    kernel=st.one_of(st.integers(1, 4), st.tuples(*2 * [st.integers(1, 4)])),
    stride=st.sampled_from([None, "kernel", 1, (2, 1)]),
    is_special=st.booleans(),
    is_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_are_those_of_torch(shape, kernel, stride, is_special, is_last, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if is_special:
        x = SPECIAL[torch.randint(0, len(SPECIAL), shape, generator=generator)]
    if is_last:
        x = x.to(memory_format=torch.channels_last)
    height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    if height > shape[2] or width > shape[3]:
        with pytest.raises(RuntimeError):
            max_pool2d(x, kernel)
        return
    stride = kernel if stride == "kernel" else stride
    found, expected = max_pool2d(x, kernel, stride), F.max_pool2d(x, kernel, stride)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.data_ptr() != x.data_ptr()
    if is_last and min(found.shape) > 1:
        assert found.is_contiguous(memory_format=torch.channels_last)


class Net(torch.nn.Module):
    def __init__(self, **pooling):
        super().__init__()
        self.first = torch.nn.Conv2d(1, 3, 3)
        self.second = torch.nn.Conv2d(3, 4, 3)
        self.pooling = {"kernel_size": 2, **pooling}

    def forward(self, x):
        return self.second(F.max_pool2d(self.first(x), **self.pooling)).flatten(1)


@pytest.mark.parametrize(
    ("pooling", "is_sliced"),
    [
        ({}, True),
        ({"kernel_size": (2, 3), "stride": (2, 3)}, True),
        ({"stride": 1}, False),
        ({"padding": 1}, False),
        ({"dilation": 2}, False),
        ({"ceil_mode": True}, False),
        ({"kernel_size": 5}, False),
    ],
)
def test_a_program_gives_what_the_module_gives(pooling, is_sliced):
    torch.manual_seed(0)
    module, x = Net(**pooling).eval(), torch.randn(6, 1, 17, 17)
    expected = module(x)
    program = poptorch.inferenceModel(module)
    with mock.patch(f"{max_pool2d.__module__}.reduce", wraps=reduce) as compared:
        found = program(x)
    torch.testing.assert_close(found, expected)
    assert compared.called == (is_sliced and uses_channels_last())


def test_programs_of_half_precision_are_sliced_too():
    torch.manual_seed(0)
    module, x = Net().eval().half(), torch.randn(6, 1, 17, 17).half()
    found = poptorch.inferenceModel(module)(x)
    unchanged = f"{Program.__module__}.with_sliced_pooling", lambda graph: graph
    with mock.patch(*unchanged):
        expected = poptorch.inferenceModel(module)(x)
    assert torch.equal(found, expected)
    with mock.patch(f"{max_pool2d.__module__}.reduce", wraps=reduce) as compared:
        poptorch.inferenceModel(module)(x)
    assert compared.called == uses_channels_last()


def test_padded_windows_stay():
    class Padded(torch.nn.Module):
        def forward(self, x):
            return F.max_pool2d(x, 2, padding=1)

    program = torch.fx.symbolic_trace(Padded())
    assert with_sliced_pooling(program) is program
