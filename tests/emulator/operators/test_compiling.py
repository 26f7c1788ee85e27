# SPDX-License-Identifier: Apache-2.0
"""Programs near a refusal that a device compiles: they run, with torch's numbers."""

import pytest
import torch
from torch import nn

from tests.emulator.operators._programs import infer, reports

X, SQUARE = torch.randn(3, 4), torch.randn(4, 4)
ROWS, COLUMNS = torch.tensor([0, 1]), torch.tensor([1, 2])

# The result of a reduction over everything has the shape [1] on a device.
PROGRAMS = {
    "stack": (lambda a: torch.stack([a.amax(), a.sum()]), X),
    "masked_fill": (lambda a: a.masked_fill(a > 0, a.amin()), X),
    "fill_": (lambda a: torch.zeros_like(a).fill_(a.amax()), X),
    "index_fill": (lambda a, i: (a * 1).index_fill(0, i, a.amax()), X, ROWS),
    "index_select": (
        lambda a, b: b.index_select(0, a.argmax()).reshape(4),
        torch.randn(4),
        SQUARE,
    ),
    "a copy of a slice": (lambda a, i: a[:, ::2][i].mul_(2), SQUARE, ROWS),
    "a copy by rows": (lambda a, i: a[i, ::2].add_(1), SQUARE, ROWS),
    "a copy by a list": (lambda a: a[::2][[0, 1]].mul_(2), SQUARE),
    "by keyword": (lambda a: torch.trunc(input=a), X),
    "out": (lambda a: torch.remainder(a, 2.0, out=torch.zeros(3, 4)), X),
    "norm": (lambda a: a.norm(2, 1, keepdim=True), torch.full((3, 1), -5.0)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs_with_torch_s_numbers(name):
    program, *given = PROGRAMS[name]
    torch.testing.assert_close(infer(program, *given), program(*given))


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
def test_a_list_of_tensors_is_an_index_of_several_dimensions():
    def assign(a, rows, columns):
        b = a * 1
        b[[rows, columns]] = 0.0
        return a[[rows, columns]], b

    given = X, ROWS, COLUMNS
    torch.testing.assert_close(infer(assign, *given), assign(*given))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12, 3))

    def forward(self, indices):
        offsets = torch.tensor([0, 2])
        return torch.embedding_bag(self.weight, indices, offsets, False, 1)[0]


def test_torchs_own_embedding_bag_takes_the_weight_first():
    assert reports(Bag(), torch.arange(4)) == []


# What a POD64 with PopTorch 3.3 refused, in results that are public.
REFUSED = {
    "clamp_max by a tensor": (lambda a: a.clamp_max(a * 0), X, "ir.h:510"),
    "correction=None": (
        lambda a: a.var(dim=1, correction=None),
        X,
        "Cannot force a non-constant node",
    ),
    "padding of one number": (
        lambda a: torch.conv2d(a, torch.ones(2, 3, 2, 2, device=a.device), padding=[0]),
        torch.randn(1, 3, 4, 4),
        "Padding vector",
    ),
    "pooling, padding of one number": (
        lambda a: torch.max_pool2d(a, 2, 2, [0]),
        torch.randn(1, 3, 4, 4),
        "Padding vector",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    program, given, said = REFUSED[name]
    assert said in reports(program, given)[0]


def test_topk_may_be_unsorted():
    torch.testing.assert_close(
        infer(lambda a: a.topk(2, sorted=False)[0].sum(1), X), X.topk(2)[0].sum(1)
    )
