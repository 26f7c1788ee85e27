# SPDX-License-Identifier: Apache-2.0
"""Tensors as text."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipufit.emulator as poptorch
from tests.emulator._models import Function
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
        ([[[1]], [[2]]], {}, "[\n [\n  [1]\n ]\n [\n  [2]\n ]\n]"),
        ([1, 2], {}, "[1,2]"),
        (2.5, {}, "2.500"),
        ([], {}, "[]"),
        ([1.0, float("inf"), float("nan")], {}, "[1.000,  inf,  nan]"),
        ([0.25, 10.5], {"float_format": "auto"}, "[ 0.25,10.50]"),
        ([0.25, 10.5], {"float_format": "fixed"}, "[ 0.25,10.50]"),
        ([0.25, 10.5], {"float_format": "scientific"}, "[2.500e-01,1.050e+01]"),
        ([0.25, 10.5], {"float_format": "none"}, "[0.25,10.5]"),
        # Digits count before and after the point; none means no alignment.
        ([123.456], {"digits": 5}, "[123.46]"),
        ([1, 200], {"digits": 0}, "[1,200]"),
        # Large dimensions are shortened.
        (
            torch.arange(100).reshape(10, 10),
            {"summarise_threshold": 50, "edge_items": 1},
            "[\n [ 0,..., 9]\n ...\n [90,...,99]\n]",
        ),
        (
            torch.arange(20).reshape(10, 2),
            {"summarise_threshold": 5, "edge_items": 1},
            "[\n [ 0, 1]\n ...\n [18,19]\n]",
        ),
    ],
)
def test_tensors_are_laid_out_as_on_a_device(tensor, settings, expected):
    assert text(torch.as_tensor(tensor), **settings) == expected


@pytest.mark.parametrize("value", [1e5, 1e-6])
def test_auto_is_scientific_where_digits_do_not_suffice(value):
    assert "e" in text(torch.tensor([value]), float_format="auto")


def test_long_rows_are_broken():
    lines = text(torch.arange(10, 20), max_line_width=10).split("\n")
    assert lines[:2] == ["[10,11,12,", "  13,14,"]
    assert all(len(line) <= 10 for line in lines)


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
