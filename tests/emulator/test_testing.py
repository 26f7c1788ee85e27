# SPDX-License-Identifier: Apache-2.0
"""`allclose` for structures."""

from __future__ import annotations

import pytest
import torch

from ipufit.emulator.testing import allclose
from tests.interpreters import run_python

A = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([A, (A, A)], True),
        ([A + 1e-7, (A, A)], True),
        ([A, (A, A + 1)], False),
        ((A, (A, A)), False),
        ([A, (A,)], False),
        ([A, [A, A]], False),
    ],
)
def test_types_lengths_and_values_must_agree(other, expected):
    assert allclose([A, (A, A)], other) is expected


def test_anything_else_is_refused():
    with pytest.raises(AssertionError, match="not float"):
        allclose([1.0], [1.0])


def test_it_needs_an_import_of_its_own():
    code = "import ipufit.emulator as p; print(hasattr(p, 'testing'))"
    result = run_python("-c", code)
    assert result.stdout == "False\n"
