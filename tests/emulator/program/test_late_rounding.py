# SPDX-License-Identifier: Apache-2.0
"""Rounding after ReLU and max-pooling gives what rounding before them gives."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ipufit import poptorch
from ipufit.emulator._program.late_rounding import with_late_rounding
from ipufit.emulator._program.program import Program

SPECIAL = torch.tensor([float("nan"), float("inf"), -65504.0, -1e-7, 1e-7, 0.0, 3.0])
LAYERS = {
    "conv": lambda: nn.Conv2d(3, 3, 3, padding=1),
    "transposed": lambda: nn.ConvTranspose2d(3, 3, 3, padding=1),
    "norm": lambda: nn.BatchNorm2d(3),
    "groups": lambda: nn.GroupNorm(1, 3),
    "relu": nn.ReLU,
    "in place": lambda: nn.ReLU(inplace=True),
    "pool": lambda: nn.MaxPool2d(2, stride=1, padding=1),
    "slices": lambda: nn.MaxPool2d(2),
    "sigmoid": nn.Sigmoid,
    "linear": lambda: nn.LazyLinear(8),
}


def inferred(module, x, *, is_late=True, is_random=False, iterations=1):
    options = poptorch.Options().deviceIterations(iterations).randomSeed(3)
    options.Precision.enableStochasticRounding(is_random)
    unchanged = f"{Program.__module__}.with_late_rounding", lambda graph: graph
    if is_late:
        return poptorch.inferenceModel(module, options)(x)
    with mock.patch(*unchanged):
        return poptorch.inferenceModel(module, options)(x)


@pytest.mark.filterwarnings("ignore:Lazy modules")  # of torch 2.0
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
    is_special=st.booleans(),
    is_random=st.booleans(),
    iterations=st.sampled_from([1, 2]),
)
def test_results_are_those_of_rounding_before(names, is_special, is_random, iterations):
    torch.manual_seed(0)
    module = nn.Sequential(*(LAYERS[name]() for name in names)).eval()
    x = torch.randn(4, 3, 32, 32)  # five poolings leave one
    if is_special:
        x = SPECIAL[torch.randint(0, len(SPECIAL), x.shape)]
    with torch.no_grad():
        module(x)  # for the lazy ones
    kinds = {"is_random": is_random, "iterations": iterations}
    x, module = x.half(), module.half()
    found = inferred(module, x, **kinds)
    expected = inferred(module, x, is_late=False, **kinds)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class Net(nn.Module):
    """A layer, and what picks of its result."""

    def __init__(self, forward, layer):
        super().__init__()
        self.layer = layer
        self._forward = forward

    def forward(self, x):
        return self._forward(self.layer, x)


def names_of(forward, layer=None, dtype=torch.float16):
    """The functions that an inference program calls when it has been rewritten."""
    module = Net(forward, layer or nn.Conv2d(3, 3, 1)).eval().to(dtype)
    executor = poptorch.inferenceModel(module)
    executor(torch.randn(2, 3, 4, 4).to(dtype))
    graph = with_late_rounding(executor._executable.program.graph).graph
    return [node.target.__name__ for node in graph.nodes if node.op == "call_function"]


def test_a_layer_is_rounded_after_all_that_picks():
    def forward(layer, x):
        return F.relu(F.max_pool2d(F.relu_(layer(x) + x), 2))

    assert names_of(forward) == [
        "half_conv2d",
        *("wide_add", "wide_relu_", "wide_max_pool2d", "late_relu"),
    ]


@pytest.mark.parametrize(
    ("forward", "layer"),
    [
        (lambda layer, x: F.relu(layer(x)), nn.BatchNorm2d(3)),
        (lambda layer, x: torch.relu(layer(x)), nn.GroupNorm(1, 3)),
        (lambda layer, x: F.relu(layer(x), inplace=True), nn.Linear(4, 2)),
    ],
)
def test_a_layer_without_weights_to_change_is_rounded_late(forward, layer):
    wide, late = names_of(forward, layer)
    assert wide.startswith("wide_")
    assert late.startswith("late_relu")
    assert not any(
        name.startswith(("wide_", "late_", "half_"))
        for name in names_of(forward, layer.float(), torch.float32)
    )


def relu_in_place(layer, x):
    y = layer(x) * 1
    before = y.view(-1)
    return F.max_pool2d(F.relu(y, inplace=True), 2), before


def named_relu_in_place(layer, x):
    y = layer(x) * 1
    return F.max_pool2d(y.relu_(), 2), y


def input_in_place(layer, x):
    return F.max_pool2d(F.relu(x, inplace=True), 2), x + 0


SEEN = [
    lambda layer, x: F.relu(y := layer(x)) + y,
    lambda layer, x: F.relu(layer(x).sigmoid()),
    lambda layer, x: F.relu(layer(x).flatten(1)),
    lambda layer, x: (F.relu(y := layer(x)), y.view(-1)),
    lambda layer, x: F.relu(F.batch_norm(layer(x), None, None, training=True)),
    lambda layer, x: torch.relu(input=layer(x)),
    lambda layer, x: F.relu(layer(x) + x.float()),
    lambda layer, x: F.relu(x.sum() + x.float()),
    lambda layer, x: F.relu(F.conv2d(x.float(), layer.weight)),
    relu_in_place,
    named_relu_in_place,
    input_in_place,
]
"""Programs whose layers are seen before, or whose results aren't float16."""

UNSEEN = [
    lambda layer, x: F.relu(layer(x) + x.sum()),
    lambda layer, x: F.relu(torch.add(layer(x), x, alpha=300)),
    lambda layer, x: F.relu_(layer(x) + x.float().sum()),
    lambda layer, x: F.max_pool2d(torch.relu(layer(x) * 30_000 + x), 3, padding=1),
]


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("forward", [*SEEN, *UNSEEN])
def test_a_program_gives_what_it_gave(forward, iterations):
    torch.manual_seed(0)
    module = Net(forward, nn.Conv2d(3, 3, 1)).eval().half()
    x = torch.randn(2 * iterations, 3, 4, 4).half()
    found = inferred(module, x.clone(), iterations=iterations)
    expected = inferred(module, x.clone(), is_late=False, iterations=iterations)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("forward", SEEN)
def test_what_others_see_is_rounded_at_once(forward):
    assert not any(name.startswith("wide_") for name in names_of(forward))


@pytest.mark.parametrize("forward", UNSEEN)
def test_what_nobody_else_sees_is_rounded_late(forward):
    assert any(name.startswith("wide_") for name in names_of(forward))


def test_training_is_as_it_was():
    class Loss(Net):
        def forward(self, x):
            return poptorch.identity_loss(super().forward(x), reduction="mean")

    module = Loss(lambda layer, x: F.relu(layer(x)), nn.Linear(4, 2)).half()
    executor = poptorch.trainingModel(module)
    executor(torch.randn(2, 4).half())
    program = executor._executable.program
    assert program.laid_out(program.graph) is program.graph
