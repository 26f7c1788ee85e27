# SPDX-License-Identifier: Apache-2.0
"""What a device computes in which type."""

import math

import pytest
import torch
from torch.nn import functional

from ipufit.emulator.errors import Error
from tests.emulator.operators._programs import infer, reports

BYTES = torch.tensor([1, 2, 3], dtype=torch.uint8)
SHORTS, INTS, FLOATS = BYTES.short(), BYTES.int(), BYTES.float()
BOOLS = BYTES > 1


@pytest.mark.parametrize(
    ("function", "refused", "allowed"),
    [
        (lambda x: x > 1, [BYTES, SHORTS], [INTS, FLOATS]),
        (lambda x: x.greater_equal(x), [BYTES, SHORTS], [INTS, FLOATS, BOOLS]),
        (lambda x: x > 1.5, [], [BYTES, SHORTS, INTS]),
        (lambda x: x == 1, [BYTES, BYTES.char()], [SHORTS, INTS, BOOLS]),
        (lambda x: x != x.float(), [], [BYTES, SHORTS]),
        (lambda x: x + 1, [BYTES, SHORTS], [INTS, FLOATS, BOOLS]),
        (lambda x: x * 2.0, [], [BYTES, SHORTS]),
        (lambda x: x.clamp(0, 2), [BYTES], [INTS]),
        (lambda x: torch.max(x, x), [BYTES, BOOLS], [INTS]),
        (lambda x: x.max(), [], [INTS]),
        (lambda x: x**2, [SHORTS], [INTS]),
        (lambda x: 3 - x, [BYTES], [INTS]),
        (lambda x: torch.where(x.bool(), x, x), [BYTES, SHORTS], [INTS, FLOATS, BOOLS]),
        (lambda x: x.masked_fill(x.bool(), 1), [BYTES], [FLOATS]),
        (torch.exp, [INTS, BOOLS, BYTES], [FLOATS]),
        (torch.relu, [INTS], [FLOATS]),
        (torch.log1p, [INTS], [FLOATS]),
        (torch.floor, [INTS], [FLOATS]),
        (torch.isnan, [INTS], [FLOATS]),
        (abs, [BYTES, SHORTS], [INTS, FLOATS]),
        (lambda x: -x, [BYTES], [INTS]),
        (torch.logical_not, [INTS, FLOATS], [BOOLS]),
        (lambda x: torch.logical_and(x, x > 1), [INTS], [BOOLS]),
        (lambda x: x & 1, [BYTES, BYTES.char()], [SHORTS, INTS]),
        (lambda x: x.to(torch.bfloat16).float(), [FLOATS], []),
        (lambda x: torch.complex(x, x).real, [FLOATS], []),
        (lambda x: x.topk(1)[0], [BYTES], [INTS, FLOATS]),
        (lambda x: x.argsort(), [BYTES, BOOLS], [INTS, FLOATS]),
        (lambda x: x.max(0)[0], [BYTES, BOOLS], [INTS, FLOATS]),
    ],
)
def test_a_device_refuses(function, refused, allowed):
    for x in refused:
        with pytest.raises(Error, match=r"device|Poplar"):
            infer(function, x)
    for x in allowed:
        infer(function, x)


@pytest.mark.parametrize(
    ("function", "x", "words"),
    [
        (lambda x: x.masked_fill(x, False), BOOLS, "int32 instead of bool"),
        (lambda x: x.masked_fill(x > 1, 5), INTS, ""),
        (lambda x: (x * 1).masked_fill_(x > 1, 5), INTS, "casts the mask"),
        (lambda x: (x * 1).masked_fill_(x > 1, 5), FLOATS, ""),
        (lambda x: x > 2**40, FLOATS, "cannot be represented"),
        (lambda x: x > 2**30, FLOATS, ""),
        (lambda x: x.sort()[0], BYTES, "int32 values"),
        (lambda x: x.clone().scatter_(0, x.long(), 0), BYTES, "casts the index"),
        (lambda x: x.clone().scatter_(0, x.long(), 0), INTS, ""),
    ],
)
def test_what_a_check_says(function, x, words):
    said = reports(function, x % 3 if x is not BOOLS else x)
    assert any(words in message for message in said) if words else not said


def test_a_fraction_that_fills_whole_numbers_makes_fractions():
    device = infer(lambda x: x.masked_fill(x > 1, 0.5), INTS)
    assert device.tolist() == [1.0, 0.5, 0.5]
    assert device.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")  # torch deprecates such masks
def test_a_mask_of_bytes_is_reported():
    said = reports(lambda x: torch.where(x, x.float(), 0.0), BYTES)
    assert "Select takes a bool selector" in said[0]
    infer(lambda x: torch.where(x, x.float(), 0.0), BYTES)


def test_square_roots_of_whole_numbers_are_truncated():
    whole = torch.tensor([1, 3, 4, 10])
    assert infer(torch.sqrt, whole).tolist() == [1, 1, 2, 3]
    assert infer(torch.rsqrt, whole).tolist() == [1, 1, 0, 0]
    assert "sqrt(10) is 3" in reports(torch.sqrt, whole)[0]


# Operands beside float16 ------------------------------------------------------------

HALVES = torch.tensor([3.0, 0.0]).half()
BESIDE_HALF = [
    (lambda x: x * 0.1, [0.2998, 0.0]),
    (lambda x: x.clone().mul_(0.1), [0.2998, 0.0]),
    (lambda x: x * torch.tensor(0.1), [0.2998, 0.0]),
    (lambda x: x.clone().mul_(torch.full((2,), 0.1)), [0.2998, 0.0]),
    (lambda x: x * torch.full((2,), 0.1), [0.3, 0.0]),  # float32
    (lambda x: x.sum() * 0.1, 0.3),  # without dimensions
    (lambda x: x * 1e-8 * 1e8, [math.nan, math.nan]),
    (lambda x: x / 1e5, [0.0, 0.0]),
    (lambda x: (1 - x / 3) * -1e9, [math.nan, -math.inf]),
    (lambda x: x + torch.tensor([70_000, 2049]).to(x.device), [math.inf, 2048.0]),
    (lambda x: x / 30 == 0.1, [1.0, 0.0]),
    (lambda x: 2.3**x, [12.1797, 1.0]),
]


@pytest.mark.parametrize(("function", "expected"), BESIDE_HALF)
def test_what_meets_float16_is_rounded_to_it(function, expected):
    device = infer(lambda x: function(x).float(), HALVES)
    torch.testing.assert_close(
        device, torch.tensor(expected), rtol=3e-4, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(
    ("function", "is_reported"),
    [
        (lambda x: (1 - x) * -1e9, True),
        (lambda x: x / 1e5, True),
        (lambda x: x.float() * 1e-8, False),
        (lambda x: x * 0.1 + 1e-8 - math.inf * x, False),
        (lambda x: x + x.new_ones(2) * 1e9, False),  # a constant
    ],
)
def test_numbers_that_float16_does_not_have_are_reported(function, is_reported):
    said = reports(function, HALVES)
    assert [is_reported] == ["infinite or 0" in text for text in said or [""]]


def test_a_whole_power_of_float16():
    assert infer(lambda x: x**2, HALVES).tolist() == [9.0, 0.0]


@pytest.mark.parametrize(
    ("function", "is_float"),
    [
        (functional.smooth_l1_loss, True),
        (lambda x, y: functional.margin_ranking_loss(x, y, y), True),
        (lambda x, y: functional.triplet_margin_loss(x, y, -y), True),
        (lambda x, y: functional.cosine_embedding_loss(x, y, y[:, 0]), True),
        (functional.mse_loss, False),
        (lambda x, y: torch.baddbmm(x[None], x[None], y[None], alpha=0.5), True),
        (lambda x, y: torch.baddbmm(x[None], x[None], y[None], beta=0.5), False),
    ],
)
def test_numbers_inside_a_handler_make_float16_float32(function, is_float):
    x = torch.eye(3)
    messages = reports(function, x.half(), x.half())
    assert any("returns float32" in text for text in messages) == is_float
    assert not any("returns float32" in text for text in reports(function, x, x))
