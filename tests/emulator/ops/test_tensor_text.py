# SPDX-License-Identifier: Apache-2.0
"""`ipu_print_tensor`: what it writes, and that it writes when the device runs."""

import contextlib
import io
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipufit.emulator as poptorch
from tests.emulator._models import Function, X
from tests.strategies import examples

SQUARE = {"open_bracket": "[", "close_bracket": "]", "separator": ","}


def text(tensor, **settings):
    """The text of a tensor as a device writes it."""
    chosen = {**SQUARE, **settings}

    def forward(_, x):
        return poptorch.ipu_print_tensor(x if tensor.numel() else x[:0], **chosen)

    rows = tensor if tensor.numel() else torch.ones(1)
    written = io.StringIO()
    model = poptorch.inferenceModel(Function(forward))
    with contextlib.redirect_stderr(written):
        model(rows)
    model.destroy()
    return written.getvalue().rstrip("\n")


@pytest.mark.parametrize(
    ("tensor", "settings", "expected"),
    [
        # Rows are on lines of their own, layers are indented.
        ([[1, -20], [3, 4]], {}, "[\n [  1,-20]\n [  3,  4]\n]"),
        ([], {}, "[]"),
        ([1.0, float("inf"), float("nan")], {}, "[1.000,  inf,  nan]"),
        ([0.25, 10.5], {"float_format": "auto"}, "[ 0.25,10.50]"),
        ([0.25, 10.5], {"float_format": "scientific"}, "[2.500e-01,1.050e+01]"),
        ([0.25, 10.5], {"float_format": "none"}, "[0.25,10.5]"),
        # Digits count before and after the point; none means no alignment.
        ([123.456], {"digits": 5}, "[123.46]"),
        # Large dimensions are shortened.
        (
            torch.arange(100).reshape(10, 10),
            {"summarise_threshold": 50, "edge_items": 1},
            "[\n [ 0,..., 9]\n ...\n [90,...,99]\n]",
        ),
    ],
)
def test_tensors_are_laid_out_as_on_a_device(tensor, settings, expected):
    assert text(torch.as_tensor(tensor), **settings) == expected


def test_other_float_formats_are_refused():
    with pytest.raises(KeyError, match="hex"):
        poptorch.ipu_print_tensor(torch.ones(1), float_format="hex")


@settings(max_examples=examples(40))
@given(
    st.lists(st.integers(-999, 999), min_size=1, max_size=12),
    st.integers(0, 40),
)
def test_every_element_is_in_the_text_in_order(values, width):
    result = text(torch.tensor(values), max_line_width=width)
    assert [int(number) for number in re.findall(r"-?\d+", result)] == values


# When it is written ---------------------------------------------------------------


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


def test_a_result_that_nothing_uses_is_not_written(capfd):
    def forward(_, x):
        poptorch.ipu_print_tensor(x, "unused")
        return x + 1

    poptorch.inferenceModel(Function(forward))(X)
    assert capfd.readouterr().err == ""


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
