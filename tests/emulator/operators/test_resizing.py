# SPDX-License-Identifier: Apache-2.0
"""Pooling and upsampling as a device computes them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from tests.emulator.operators._programs import infer, reports

IMAGES = torch.randn(2, 3, 4, 8)
SQUARES = torch.randn(1, 2, 3, 3)
ROWS = torch.randn(1, 2, 11)


def resized(**settings):
    return lambda x: functional.interpolate(x, **settings)


def bilinear(**settings):
    return resized(mode="bilinear", **settings)


REFUSED = [
    (lambda x: functional.max_pool2d(x, 2), IMAGES, "2 values for each spatial dim"),
    (lambda x: functional.avg_pool2d(x, 2), IMAGES, "give stride=kernel_size"),
    (nn.LPPool2d(2, 2), IMAGES, "give stride=kernel_size"),
    (nn.MaxPool2d(2, dilation=2), IMAGES, "Dilations of value other than 1"),
    (nn.AvgPool1d(2, padding=1), IMAGES[0], "pads only the right side"),
    (nn.AdaptiveAvgPool2d(2), IMAGES[0], "not same rank as the tensor"),
    (bilinear(size=(1, 1)), SQUARES, "nothing is left of the result"),
    (lambda x: resized(size=1)(x.half()).float(), ROWS[..., :3], "nothing is left"),
]


@pytest.mark.parametrize(("function", "x", "fragment"), REFUSED)
def test_what_a_device_refuses(function, x, fragment):
    assert fragment in reports(function, x)[0]
    with pytest.raises(poptorch.Error, match=fragment):
        infer(function, x)


COMPUTED = [
    (
        nn.AvgPool2d(2, divisor_override=3),
        lambda x: functional.avg_pool2d(x, 2),
        IMAGES,
    ),
    (
        nn.AvgPool2d(3, 1, padding=(1, 0)),  # one row above, one column on the left
        lambda x: functional.avg_pool2d(functional.pad(x, (1, 0, 1, 0)), 3, 1),
        IMAGES,
    ),
    (
        nn.MaxPool2d(1, 2, ceil_mode=True),
        lambda x: functional.pad(x[..., ::2, ::2], (0, 1, 0, 1), value=-torch.inf),
        IMAGES,
    ),
    (resized(size=13), lambda x: x[..., torch.arange(12) * 11 // 13], ROWS),
    (resized(size=82), lambda x: x.repeat_interleave(41, -1), ROWS[..., :2]),
    (resized(scale_factor=1.1), lambda x: x, ROWS[..., :4]),
    (
        resized(size=(13, 13), mode="bicubic"),
        lambda x: resized(size=(13, 13), mode="bicubic")(x)[..., :12, :12],
        torch.randn(1, 2, 11, 11),
    ),
    (bilinear(size=(8, 24)), bilinear(scale_factor=2), IMAGES),
    (
        bilinear(scale_factor=(3, 1), align_corners=True),
        bilinear(scale_factor=3, align_corners=True),
        SQUARES,
    ),
    (bilinear(size=(7, 7)), bilinear(scale_factor=2.333333), SQUARES),
    (bilinear(scale_factor=2.5), bilinear(size=(12, 12)), torch.randn(1, 2, 5, 5)),
]


@pytest.mark.parametrize(("function", "expected", "x"), COMPUTED)
def test_what_a_device_computes(function, expected, x):
    torch.testing.assert_close(infer(function, x), expected(x))
    assert reports(function, x)
    wanted = function(x)
    is_equal = wanted.shape == expected(x).shape and torch.allclose(wanted, expected(x))
    assert not is_equal


def test_factors_are_rounded_to_half_precision():
    def enlarge(x):
        return resized(size=(4, 4))(x.half()).float()

    torch.testing.assert_close(infer(enlarge, SQUARES), SQUARES.half().float())
    assert "3 -> 4 comes out 3" in reports(enlarge, SQUARES)[0]


AS_TORCH = [
    (nn.MaxPool2d(3, 2, padding=1, ceil_mode=True), IMAGES),
    (nn.AvgPool2d(3, 1, padding=1), IMAGES),
    (nn.AvgPool1d(3, padding=1, count_include_pad=False), IMAGES[0]),
    (lambda x: functional.avg_pool1d(x, 2), IMAGES[0]),
    (nn.AdaptiveAvgPool2d(2), IMAGES),
    (resized(scale_factor=2), IMAGES),
    (resized(scale_factor=3.5), ROWS),
    (resized(size=(9, 9), mode="bicubic"), SQUARES),
    (bilinear(scale_factor=2), IMAGES),
    (bilinear(scale_factor=1.5, align_corners=True), IMAGES),
    (bilinear(size=(10, 20)), IMAGES),
    (bilinear(size=(2, 4)), IMAGES),
]


@pytest.mark.parametrize(("function", "x"), AS_TORCH)
def test_what_a_device_computes_as_torch_does(function, x):
    torch.testing.assert_close(infer(function, x), function(x))
    assert not reports(function, x)


class Upsampling(nn.Module):
    """Enlarges the result of a convolution."""

    def __init__(self, size):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.enlarge = nn.Upsample(size=(size, size), mode="bilinear")

    def forward(self, x):
        return self.enlarge(self.conv(x))


@pytest.mark.parametrize(
    ("size", "fragment"),
    [(7, "a gradient of floor"), (5, "a gradient of floor"), (1, "nothing is left")],
)
def test_sizes_to_which_nothing_trains_bilinearly(size, fragment):
    assert fragment in reports(Upsampling(size), SQUARES, trains=True)[0]


def test_other_sizes_train():
    assert not reports(Upsampling(6), SQUARES, trains=True)
    assert infer(Upsampling(5), SQUARES).shape == (1, 2, 5, 5)


def test_a_wrong_shape_passes_on_until_something_refuses_it():
    enlarge = bilinear(size=(7, 7))
    assert infer(lambda x: enlarge(x).relu() + 1, SQUARES).shape == (1, 2, 6, 6)
    with pytest.raises(poptorch.Error, match=r"Here: flatten to \[1, 98\] of 72 elem"):
        infer(lambda x: enlarge(x).flatten(1), SQUARES)
    skip = torch.randn(1, 2, 7, 7)
    with pytest.raises(poptorch.Error, match=r"loses the last row.* Here: .*size"):
        infer(lambda x, y: torch.cat([enlarge(x), y], 1), SQUARES, skip)
