# SPDX-License-Identifier: Apache-2.0
"""Types that torch refuses are found without values, and nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from ipufit.emulator._program.fakes import Fakes
from ipufit.emulator._program.kernel_types import check_types
from ipufit.emulator._tracing.half import in_float32
from ipufit.emulator._tracing.operation import Operation

KINDS = torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool
FUNCTIONS = {
    F.linear: 2,
    torch.matmul: 2,
    torch.mm: 2,
    torch.sub: 2,
    torch.Tensor.__rsub__: 2,
    torch.add: 2,
    torch.Tensor.__and__: 2,
    torch.bitwise_xor: 2,
    F.softmax: 1,
    F.gelu: 1,
    F.relu: 1,
    F.mse_loss: 2,
    torch.std: 1,
    torch.cumsum: 1,
}
"""Functions, and the number of their operands."""

MORE = {F.softmax: (1,), torch.cumsum: (0,)}


def is_refused(function, *args):
    try:
        function(*args)
    except (RuntimeError, NotImplementedError):
        return True
    return False


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_it_refuses_what_a_run_refuses(function, first, second):
    kinds = (first, second)[: FUNCTIONS[function]]
    args = [torch.zeros(3, 3, dtype=kind) for kind in kinds]
    more = MORE.get(function, ())
    operation = in_float32(
        Operation(function, function.__name__, (*args, *more), {})
    ).function
    fakes = Fakes()
    given = [fakes.like(one) for one in args]
    is_known = is_refused(fakes.run, operation, *given, *more)
    assert is_known == is_refused(operation, *args, *more)


def test_values_arent_looked_at():
    table, indices = torch.ones(1, 2), torch.tensor([5])
    check_types(F.embedding, (indices, table), {})
    check_types(torch.Tensor.__getitem__, (table, indices), {})


def test_no_function_of_the_users_is_called():
    def own(tensor):
        raise AssertionError("called")

    check_types(own, (torch.ones(1, dtype=torch.int64),), {})


def test_large_tensors_take_no_memory():
    huge = torch.zeros((), dtype=torch.int64).expand(10**6, 10**6)
    check_types(torch.matmul, (huge, huge), {})
