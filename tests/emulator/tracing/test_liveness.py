# SPDX-License-Identifier: Apache-2.0
"""Dead calls go before anything else is looked at."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import Block
from tests.emulator._models import Function


def calls(forward, *inputs, **buffers):
    """The operators of the compiled program."""
    model = Function(forward)
    for name, tensor in buffers.items():
        model.register_buffer(name, tensor)
    executor = poptorch.inferenceModel(model)
    executor.compile(*(inputs or (torch.ones(3),)))
    return [n.partition(":")[0] for n in executor.getTensorNames() if ":0" in n]


def test_a_result_that_nothing_uses_is_not_computed():
    def forward(m, x):
        torch.exp(x).sin()
        return torch.relu(x)

    assert calls(forward) == ["Relu"]


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda m, x: [y := x * 2, y.add_(1)][0], ["Mul", "Add"]),
        (lambda m, x: [y := x * 2, y + 1, y.sin_()][1], ["Mul", "Add"]),
        (lambda m, x: [y := x * 2, y[0].fill_(5), y + 1][2], None),
        (lambda m, x: [x * 2, x.add_(1)][0], ["Mul", "Add"]),
        (lambda m, x: [m.total.add_(x), x * 2][1], ["Add", "Mul"]),
        (lambda m, x: [m.total[0].fill_(5), x * 2][1], None),
    ],
)
def test_writing_counts_if_somebody_reads_it_later(forward, expected):
    """A write to a weight, to an input, or to what a later live call reads (torch's
    `EliminateDeadCode`, which PopTorch calls)."""
    found = calls(forward, total=torch.zeros(3))
    if expected is None:
        assert "Fill" in found
    else:
        assert found == expected


def test_unused_normalisation_updates_no_statistics():
    """torch's schema doesn't say that `batch_norm` changes them."""

    def forward(self, x):
        self.norm(x)
        return x * 2

    model = Function(forward, norm=nn.BatchNorm1d(3))
    executor = poptorch.inferenceModel(model)
    executor(torch.randn(4, 3))
    executor.copyWeightsToHost()
    assert torch.equal(model.norm.running_mean, torch.zeros(3))


def test_host_calls_are_made_whether_they_are_used_or_not():
    """PopTorch, `RegisterAtenOverloads.cpp`: `call_cpu_op` has side effects."""
    seen = []

    def layer(x):
        seen.append(x.clone())
        return x * 2

    def forward(m, x):
        poptorch.CPU(layer, "seen")(x)
        return x + 1

    executor = poptorch.inferenceModel(Function(forward))
    executor(torch.full((3,), 7.0))
    assert torch.equal(seen[-1], torch.full((3,), 7.0))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: [poptorch.for_loop(2, lambda y: y * 2, [x]), x * 1][1],
        lambda m, x: [
            poptorch.cond(x.sum() > 0, lambda y: y, [x], lambda y: -y, [x]),
            x * 1,
        ][1],
    ],
)
def test_the_end_of_a_loop_must_be_used(forward):
    """PopTorch, `EvaluateConstexprs.cpp` and `InplaceOps.cpp`: the end of a loop or
    branch is eliminated like any operator, its start isn't, and that is an error."""
    with pytest.raises(poptorch.Error, match=r"Nothing uses what poptorch\.(for|cond)"):
        calls(forward)


def test_blocks_without_operators_need_no_ipu():
    """PopTorch, `CompilerImpl.cpp`: an IPU is used once an operator is put on it."""

    def forward(self, x):
        with Block("a", ipu_id=0):
            y = x * 2
        with Block("b", ipu_id=1):
            torch.sin(x)
        return y

    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.ShardedExecution())
    executor = poptorch.inferenceModel(Function(forward), options)
    executor(torch.ones(1))
    assert executor._executable.program.num_ipus == 1


_STEPS = st.lists(
    st.sampled_from(["add", "write", "view", "write view", "drop"]), max_size=8
)


@given(_STEPS)
def test_results_are_those_of_torch(steps):
    def forward(m, x):
        values = [x * 1]
        for step in steps:
            last = values[-1]
            if step == "add":
                values.append(last + values[0])
            elif step == "write":
                last.mul_(3)
            elif step == "view":
                values.append(last.view(3, 1).view(3))
            elif step == "write view":
                last[1:].sub_(1)
            else:
                torch.exp(last).add_(1)
        return values[-1], values[len(values) // 2]

    x = torch.arange(3.0)
    executor = poptorch.inferenceModel(Function(forward))
    for result, expected in zip(executor(x.clone()), forward(None, x.clone())):
        torch.testing.assert_close(result, expected)
    executor.destroy()
