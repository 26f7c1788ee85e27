# SPDX-License-Identifier: Apache-2.0
"""Tensors of one number in places of ints: constants if they are the host's.

What is accepted and refused here was held against PopTorch 3.4's own Python front end
on torch 2.0.1, whose dispatcher never sees the host's tensors.
"""

import pytest
import torch
from torch.nn import functional

import ipufit.emulator as poptorch
from tests.emulator._models import Function, X, assert_device_equals_host

ONE, TWO, THREE, SIX = (torch.tensor(number) for number in (1, 2, 3, 6))

ACCEPTED = {
    "reshape": lambda x: x.reshape(2, TWO, 6),
    "view": lambda x: x.view(TWO, -1),
    "expand": lambda x: x[:1].expand(THREE, -1),
    "repeat": lambda x: x.repeat(TWO, 1),
    "split": lambda x: x.split(TWO),
    "split into sizes": lambda x: x.split([ONE, THREE]),
    "chunk": lambda x: x.chunk(TWO),
    "narrow": lambda x: x.narrow(0, ONE, TWO),
    "select": lambda x: x.select(0, ONE),
    "index": lambda x: x[ONE],
    "slice": lambda x: x[ONE:THREE],
    "new_zeros": lambda x: x.new_zeros(TWO) + x.sum(),
    "topk": lambda x: x.topk(k=TWO).values,
    "transpose": lambda x: x.transpose(ONE, 0),
    "softmax": lambda x: x.softmax(ONE),
    "cat": lambda x: torch.cat([x, x], dim=ONE),
    "unfold": lambda x: x.unfold(0, TWO, ONE),
    "pad": lambda x: functional.pad(x, (ONE, 0)),
    "interpolate": lambda x: functional.interpolate(x[None, None], size=(SIX, SIX)),
    "adaptive pooling": lambda x: functional.adaptive_avg_pool2d(
        x[None, None], (TWO, THREE)
    ),
    "layer norm": lambda x: functional.layer_norm(x, (SIX,)),
    "one element": lambda x: x.repeat(torch.tensor([2], device="cpu"), 1),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_number_of_the_host_is_a_size(name):
    assert_device_equals_host(Function(lambda _, x: ACCEPTED[name](x)), X)


def test_sizes_are_divided_as_in_dino():
    """graphcore/examples, `vision/dino/pytorch/core/vision_transformer.py`."""

    def forward(_, x):
        rows, columns = x.shape
        half = torch.div(columns, 2, rounding_mode="trunc")
        return x.reshape(rows, 2, half).permute(1, 0, 2)

    assert_device_equals_host(Function(forward), X)


OPERANDS = {
    "add": lambda x: x + TWO,
    "mul": lambda x: TWO * x,
    "pow": lambda x: x**TWO,
    "repeat_interleave": lambda x: x.repeat_interleave(TWO, 0),
    "index of several": lambda x: x[torch.tensor([0, 1], device="cpu")],
    "bool": lambda x: x.repeat(torch.tensor(True, device="cpu"), 1),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_of_the_host_stay_refused(name):
    model = Function(lambda _, x: OPERANDS[name](x))
    with pytest.raises(poptorch.Error, match="Expected an IPU tensor"):
        poptorch.inferenceModel(model)(X)


NEEDS_VALUES = {
    "reshape": lambda x, n: x.reshape(2, n, 6),
    "repeat": lambda x, n: x.repeat(n, 1),
    "split": lambda x, n: x.split(n),
    "split into sizes": lambda x, n: x.split([n, n]),
    "narrow": lambda x, n: x.narrow(0, 1, n),
    "index": lambda x, n: x[n],
    "topk": lambda x, n: x.topk(n),
    "softmax": lambda x, n: x.softmax(n),
    "zeros": lambda x, n: torch.zeros(n, 6) + x,
    "eye": lambda x, n: torch.eye(n) + x[0, 0],
}


@pytest.mark.parametrize("name", NEEDS_VALUES)
@pytest.mark.parametrize("is_input", [True, False])
def test_a_number_of_the_device_is_no_size(name, is_input):
    """`torch.tensor` without a device makes one too: it is forced to the IPU."""
    forward = NEEDS_VALUES[name]
    if is_input:
        model, inputs = Function(lambda _, x, n: forward(x, n)), (X, torch.tensor(1))
    else:
        model, inputs = Function(lambda _, x: forward(x, torch.tensor(1))), (X,)
    # Some versions of torch turn the refusal into "must be tuple of ints".
    with pytest.raises((poptorch.Error, TypeError), match=r"needs the value|argument"):
        poptorch.inferenceModel(model)(*inputs)


def test_a_mask_of_one_element_is_no_index():
    mask = torch.tensor(1, dtype=torch.uint8)
    with pytest.raises(poptorch.Error, match="indexing with a mask"):
        poptorch.inferenceModel(Function(lambda _, x: x[mask]))(X)
