# SPDX-License-Identifier: Apache-2.0
"""`ipu_print_tensor` writes when the device runs, and only then."""

from __future__ import annotations

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function, X


def test_on_the_host_it_is_silent(capfd):
    assert poptorch.ipu_print_tensor(X, "title") is X
    assert capfd.readouterr().err == ""


def test_each_run_writes_the_values_of_the_run(capfd):
    module = Function(lambda _, x: poptorch.ipu_print_tensor(x + 1, "y") * 2)
    model = poptorch.inferenceModel(module)
    assert torch.equal(model(torch.tensor([1.0])), torch.tensor([4.0]))
    assert capfd.readouterr().err == "y: (2.000)\n"
    model(torch.tensor([3.0]))
    assert capfd.readouterr().err == "y: (4.000)\n"


def test_each_micro_batch_is_written(capfd):
    options = poptorch.Options().deviceIterations(2)
    module = Function(lambda _, x: poptorch.ipu_print_tensor(x, "x"))
    poptorch.inferenceModel(module, options)(torch.tensor([1, 2]))
    assert capfd.readouterr().err == "x: (1)\nx: (2)\n"


def test_a_result_that_nothing_uses_is_not_written(capfd):
    def forward(_, x):
        poptorch.ipu_print_tensor(x, "unused")
        return x + 1

    poptorch.inferenceModel(Function(forward))(X)
    assert capfd.readouterr().err == ""


def test_separator_and_brackets_are_one_character(capfd):
    def forward(_, x):
        return poptorch.ipu_print_tensor(
            x, "x", separator="; ", open_bracket="<<", close_bracket=">>"
        )

    poptorch.inferenceModel(Function(forward))(torch.tensor([1, 2]))
    assert capfd.readouterr().err == "x: <1;2>\n"


class Trained(torch.nn.Module):
    def __init__(self, print_gradient):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))
        self.print_gradient = print_gradient

    def forward(self, x):
        y = poptorch.ipu_print_tensor(x * self.weight, "y", self.print_gradient)
        return poptorch.identity_loss(3 * y, "sum")


@pytest.mark.parametrize("print_gradient", [True, False])
def test_training_writes_the_gradient_if_asked(capfd, print_gradient):
    model = poptorch.trainingModel(Trained(print_gradient))
    model(torch.tensor([5.0]))
    expected = "y: (10.00)\n" + print_gradient * "y_gradient: (3.000)\n"
    assert capfd.readouterr().err == expected


def test_it_takes_tensors_only():
    with pytest.raises(poptorch.Error, match=r"must take a torch\.tensor argument"):
        poptorch.ipu_print_tensor([1.0])
