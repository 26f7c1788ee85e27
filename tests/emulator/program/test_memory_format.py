# SPDX-License-Identifier: Apache-2.0
"""Programs in channels_last against the same programs as they were recorded."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator._program import channels_last as _memory_format
from ipufit.emulator._program.args import CallArguments
from ipufit.emulator._program.channels_last import in_channels_last
from ipufit.emulator._program.program import trace
from tests.strategies import examples

SIZE = 8
CHANNELS = 4

# Each takes the values so far, the last one of which it usually goes on with, and gives
# another of the same shape. Some see strides, some write to what others can see.
CALLS = {
    "conv": lambda net, seen: net.conv(seen[-1]),
    "depthwise": lambda net, seen: net.depthwise(seen[-1]),
    "transposed": lambda net, seen: net.transposed(seen[-1]),
    "norm": lambda net, seen: net.norm(seen[-1]),
    "group_norm": lambda net, seen: net.group_norm(seen[-1]),
    "instance_norm": lambda net, seen: F.instance_norm(seen[-1]),
    "layer_norm": lambda net, seen: F.layer_norm(seen[-1], (SIZE, SIZE)),
    "pool": lambda net, seen: F.interpolate(F.max_pool2d(seen[-1], 2), scale_factor=2),
    "mean": lambda net, seen: seen[-1] * seen[-1].mean((2, 3), keepdim=True).sigmoid(),
    "pad": lambda net, seen: F.avg_pool2d(F.pad(seen[-1], (1, 1, 1, 1)), 3, 1),
    "relu": lambda net, seen: F.relu(seen[-1]),
    "residual": lambda net, seen: seen[-1] + seen[0],
    "skip": lambda net, seen: seen[-1] + seen[len(seen) // 2],
    "cat": lambda net, seen: net.conv_of_two(torch.cat([seen[-1], seen[0]], 1)),
    "dropout": lambda net, seen: F.dropout2d(seen[-1], training=False),
    "view": lambda net, seen: seen[-1].view(-1, SIZE, SIZE).view(seen[-1].shape),
    "flatten": lambda net, seen: seen[-1].flatten(1).reshape(seen[-1].shape),
    "transpose": lambda net, seen: seen[-1].transpose(2, 3).contiguous(),
    "contiguous": lambda net, seen: seen[-1].contiguous(),
    "shuffle": lambda net, seen: torch.cat(seen[-1].chunk(2, 1)[::-1], 1),
    "rows": lambda net, seen: (
        seen[-1] + seen[-1].view(-1, CHANNELS, SIZE**2)[:, :, :1, None]
    ),
    "relu_": lambda net, seen: F.relu(seen[-1] * 2, inplace=True),
    "write": lambda net, seen: seen[-1].add_(1.0),
    "write_old": lambda net, seen: (seen[0].mul_(0.5), seen[-1])[1],
    "write_row": lambda net, seen: (seen[-1].flatten(1).add_(1.0), seen[-1])[1],
    "set_row": lambda net, seen: (seen[-1].view(-1).__setitem__(0, 2.0), seen[-1])[1],
    "clone_and_write": lambda net, seen: (
        seen[-1].flatten(1).clone().add_(1.0).view(seen[-1].shape)
    ),
}
WRITES = frozenset({"write", "write_old", "write_row", "set_row", "relu_"})


class Random(nn.Module):
    """Some of `CALLS`, one after the other."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.transposed = nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1)
        self.conv_of_two = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.group_norm = nn.GroupNorm(2, CHANNELS)

    def forward(self, x):
        seen = [self.first(x)]
        for name in self.names:
            seen.append(CALLS[name](self, seen))
        return seen[-1], seen[0], seen[-1].view(x.shape[0], -1).sin().sum(1)


def recorded(module, *inputs, is_training=False):
    return trace(
        module,
        CallArguments(inputs, {}),
        strategy=poptorch.PipelinedExecution(),
        is_training=is_training,
    )


def rewritten(program, *, is_differentiated=True, always=False):
    """The program's graph in channels_last, if that pays or it must."""
    pays = _memory_format._Rewriting.pays
    with mock.patch.object(
        _memory_format._Rewriting,
        "pays",
        lambda self, *args: always or pays(self, *args),
    ):
        return in_channels_last(
            program.graph, program.weight_shapes, is_differentiated=is_differentiated
        )


def is_rewritten(module, *inputs, **kwargs):
    program = recorded(module, *inputs)
    return rewritten(program, **kwargs) is not program.graph


def num_conversions(graph):
    nodes = [node for node in graph.graph.nodes if node.op == "call_method"]
    to_last = [n for n in nodes if n.kwargs.get("memory_format") is not None]
    back = [n for n in nodes if n.target == "contiguous"]
    return len(to_last), len(back)


class Run(NamedTuple):
    """What a run of a graph leaves; no gradients if autograd refuses."""

    results: tuple[torch.Tensor, ...]
    weights: list[torch.Tensor]
    gradients: tuple[torch.Tensor | None, ...] | None


def run(graph, weights, image):
    copies = [w.detach().clone().requires_grad_(w.requires_grad) for w in weights]
    results = graph.forward(*copies, image.clone())
    total = sum((result * result.detach().cos()).sum() for result in results)
    trained = [copy for copy in copies if copy.requires_grad]
    try:
        gradients = torch.autograd.grad(total, trained, allow_unused=True)
    except RuntimeError:  # a value that it needs was written to
        gradients = None
    return Run(results, copies, gradients)


def assert_close(actual, expected):
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right)


@settings(max_examples=examples(120))
@given(st.lists(st.sampled_from(sorted(CALLS)), max_size=7))
def test_any_program_computes_the_same(names):
    torch.manual_seed(0)
    module = Random(names).double()  # so that only wrong values make a difference
    program = recorded(module, torch.randn(2, 3, SIZE, SIZE).float())
    graph = rewritten(program, always=True)
    assert graph is not program.graph or WRITES.intersection(names)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    weights = [named[name] for name in program.weight_names]
    image = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    expected, actual = (run(g, weights, image) for g in (program.graph, graph))
    assert_close(actual.results, expected.results)
    assert_close(actual.weights, expected.weights)
    assert all(result.is_contiguous() for result in actual.results)
    if expected.gradients is not None:
        assert_close(actual.gradients, expected.gradients)


# What is rewritten --------------------------------------------------------------------


def layers(*modules):
    return nn.Sequential(*modules)


def test_a_network_of_convolutions_goes_there_and_back_once():
    def block():
        return nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)

    net = layers(
        nn.Conv2d(1, 6, 3, padding=1), *block(),
        nn.Conv2d(6, 6, 3, padding=1), *block(),
        nn.Flatten(), nn.Linear(24, 3), nn.ReLU(inplace=True),
    )  # fmt: skip
    program = recorded(net, torch.randn(2, 1, 8, 8))
    graph = rewritten(program)
    assert num_conversions(graph) == (1, 1)
    image = torch.randn(2, 1, 8, 8)
    weights = [
        dict([*net.named_parameters(), *net.named_buffers()])[n].detach()
        for n in program.weight_names
    ]
    states = []
    hook = torch.max_pool2d

    def seeing(tensor, *args):
        states.append(tensor.is_contiguous(memory_format=torch.channels_last))
        return hook(tensor, *args)

    with mock.patch.object(torch, "max_pool2d", seeing):
        graph.forward(*weights, image)
    assert states == [True, True]


def test_residual_sums_in_place_stay_inside():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Conv2d(3, 6, 3, padding=1)
            self.two = nn.Conv2d(6, 6, 3, padding=1)

        def forward(self, x):
            y = self.one(x)
            z = self.two(y)
            z += y
            return F.relu(z, inplace=True).mean((2, 3))

    program = recorded(Residual(), torch.randn(2, 3, 8, 8))
    assert num_conversions(rewritten(program)) == (1, 1)


@pytest.mark.parametrize(
    ("write", "is_sound"),
    [
        (lambda y: y.view(-1).add_(1.0), False),
        (lambda y: y.flatten(1)[0].zero_(), False),
        (lambda y: y.transpose(1, 2).relu().add_(1.0), True),
        (lambda y: y.reshape(-1).clone().add_(1.0), True),
        (lambda y: F.linear(y.flatten(1), torch.ones(2, 96)).relu_(), True),
        (lambda y: y.zero_(), False),
        (lambda y: y.relu_(), True),
    ],
)
def test_programs_that_write_through_views_stay_as_they_are(write, is_sound):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 1)

        def forward(self, x):
            y = self.conv(x)
            written = write(y)
            return written.sum() + F.max_pool2d(y, 2).sum()

    assert is_rewritten(Writes(), torch.randn(1, 3, 4, 4)) == is_sound


def test_a_view_that_was_made_before_a_write_keeps_the_plain_order():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 1)

        def forward(self, x):
            y = self.conv(x)
            view = y.view(-1)
            y.mul_(2.0)
            return view + F.max_pool2d(y, 2).sum()

    assert not is_rewritten(Views(), torch.randn(1, 3, 4, 4), always=True)


def test_an_image_that_is_written_to_is_brought_in_again():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Conv2d(3, 6, 1)
            self.two = nn.Conv2d(3, 6, 1)

        def forward(self, x):
            image = x * 2
            before = self.one(image) + self.two(image)
            image.add_(1.0)
            return F.max_pool2d(before * self.one(image), 2)

    module, image = Twice(), torch.randn(1, 3, 4, 4)
    program = recorded(module, image)
    graph = rewritten(program, always=True)
    assert num_conversions(graph) == (2, 1)
    weights = [dict(module.named_parameters())[name] for name in program.weight_names]
    expected = program.graph.forward(*weights, image)
    torch.testing.assert_close(graph.forward(*weights, image), expected)


@pytest.mark.parametrize(
    ("net", "trained", "evaluated"),
    [
        (layers(nn.Conv2d(1, 16, 3), nn.MaxPool2d(2)), True, True),
        (layers(nn.Conv2d(16, 16, 3, groups=16)), True, True),
        (layers(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3)), False, True),
        (layers(nn.Conv2d(20, 20, 3), nn.Conv2d(20, 20, 3)), True, True),
        (layers(nn.Conv2d(20, 20, 3)), False, False),
        (layers(nn.Conv2d(3, 192, 4, 4), nn.Flatten(2)), False, False),
        (layers(nn.Conv2d(512, 513, 1), nn.MaxPool2d(2)), False, False),
        (layers(nn.Linear(8, 8), nn.MaxPool2d(2)), False, False),
    ],
)
def test_the_rule_says_where_it_pays(net, trained, evaluated):
    channels = getattr(net[0], "in_channels", 1)
    program = recorded(net, torch.randn(2, channels, 8, 8))
    actual = [rewritten(program, is_differentiated=d) for d in (True, False)]
    assert [g is not program.graph for g in actual] == [trained, evaluated]


def test_what_follows_a_large_convolution_stays_as_it_is():
    first = (nn.Conv2d(1, 6, 1), nn.MaxPool2d(2), nn.Conv2d(6, 600, 1))
    large = (nn.Conv2d(600, 600, 1), nn.Conv2d(600, 6, 1), nn.MaxPool2d(2))
    net = layers(*first, *large)
    graph = rewritten(recorded(net, torch.randn(2, 1, 8, 8)))
    assert num_conversions(graph) == (1, 1)
    names = [node.name for node in graph.graph.nodes]
    assert names.index("conv2d_1") < names.index("contiguous") < names.index("conv2d_2")


def test_half_precision_is_rewritten_too():
    net = layers(nn.Conv2d(1, 6, 1), nn.MaxPool2d(2)).half()
    x = torch.randn(2, 1, 8, 8).half()
    program = recorded(net, x)
    changed = rewritten(program)
    assert changed is not program.graph
    weights = [weight.detach() for weight in net.parameters()]
    (one,), (other,) = program.graph(*weights, x), changed(*weights, x)
    assert other.dtype == torch.float16
    assert other.stride() == one.stride()
    torch.testing.assert_close(other, one, rtol=2e-3, atol=2e-3)


def test_convolutions_of_computed_weights_stay_as_they_are():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 1, 3, 3))

        def forward(self, x):
            return F.max_pool2d(F.conv2d(x, self.weight * 2), 2)

    assert not is_rewritten(Scaled(), torch.randn(2, 1, 8, 8), always=True)


# Through an executor ------------------------------------------------------------------


class Classifier(nn.Module):
    """Looks at strides wherever it can."""

    def __init__(self, dropout=0.0):
        super().__init__()
        # Before a normalisation, a bias has gradients of rounding errors alone.
        self.one = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.two = nn.Conv2d(6, 10, 3, padding=1)
        self.dropout = nn.Dropout2d(dropout)
        self.last = nn.Linear(160, 4)

    def forward(self, x, target=None):
        images = self.two(F.max_pool2d(self.norm(self.one(x)).relu_(), 2))
        images = self.dropout(images)
        assert images.stride() == (160, 16, 4, 1)
        scores = self.last(images.view(len(x), -1))
        if target is None:
            return scores, images
        return scores, images, F.cross_entropy(scores, target)


DATA = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(24) % 4


def trained(mode, dropout=0.0, optimizer="AdamW"):
    """Outputs, weights and the optimiser's state after three calls."""
    torch.manual_seed(0)
    module = Classifier(dropout).train()
    options = poptorch.Options().deviceIterations(2).outputMode(mode).randomSeed(7)
    options.Training.gradientAccumulation(2)
    cls = getattr(poptorch.optim, optimizer)
    extra = {"momentum": 0.9} if optimizer == "SGD" else {}
    chosen = cls(module.parameters(), lr=0.01, **extra)
    executor = poptorch.trainingModel(module, options, chosen)
    outputs = [executor(DATA, TARGETS) for _ in range(3)][-1]
    ipu_state = chosen.state_dict()["ipu_state"]
    weights = {n: t.detach().clone() for n, t in module.state_dict().items()}
    executor.destroy()
    assert not any(
        p.stride() != torch.empty(p.shape).stride() for p in module.parameters()
    )
    return outputs, weights, ipu_state


MODES = [poptorch.OutputMode.Final, poptorch.OutputMode.All, poptorch.OutputMode.Sum]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_training_is_the_same_both_ways(monkeypatch, mode, optimizer):
    # Passes forced upon this program part its convolutions, and none pays then.
    monkeypatch.delenv("IPUFIT_EMULATOR_FOLD", raising=False)
    results = []
    for switch in ("1", "0"):
        monkeypatch.setenv("IPUFIT_EMULATOR_CHANNELS_LAST", switch)
        results.append(trained(mode, optimizer=optimizer))
    (outputs, weights, state), (plain_outputs, plain_weights, plain_state) = results
    assert not all(map(torch.equal, weights.values(), plain_weights.values()))
    for actual, expected in ((weights, plain_weights), (state, plain_state)):
        assert list(actual) == list(expected)
        for name, value in actual.items():
            assert value.is_contiguous()
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
    for value, expected in zip(outputs, plain_outputs):
        assert value.is_contiguous()
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3)


def test_random_numbers_meet_the_same_elements_both_ways(monkeypatch):
    results = []
    for switch in ("1", "0"):
        monkeypatch.setenv("IPUFIT_EMULATOR_CHANNELS_LAST", switch)
        results.append(trained(poptorch.OutputMode.All, dropout=0.5)[0])
    for value, expected in zip(*results):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3)


def test_inference_is_the_same_both_ways(monkeypatch):
    results = []
    for switch in ("1", "0"):
        monkeypatch.setenv("IPUFIT_EMULATOR_CHANNELS_LAST", switch)
        torch.manual_seed(0)
        options = poptorch.Options().deviceIterations(3)
        executor = poptorch.inferenceModel(Classifier().eval(), options)
        results.append(executor(DATA))
    for value, expected in zip(*results):
        assert value.is_contiguous()
        torch.testing.assert_close(value, expected)


def test_large_means_leave_their_variance_to_group_norm(monkeypatch):
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.norm = nn.GroupNorm(2, 8)

        def forward(self, x):
            return F.max_pool2d(self.norm(F.max_pool2d(self.conv(x), 2) + 1000.0), 2)

    image = torch.randn(2, 3, 16, 16)
    results = []
    for switch in ("1", "0"):
        monkeypatch.setenv("IPUFIT_EMULATOR_CHANNELS_LAST", switch)
        executor = poptorch.inferenceModel(Normalised())
        results.append(executor(image))
        executor.destroy()
    torch.testing.assert_close(*results, rtol=1e-3, atol=2e-3)


def test_the_switch_turns_it_off(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_CHANNELS_LAST", "1")
    program = recorded(Classifier().eval(), DATA[:4])
    assert program.laid_out(program.graph) is not program.graph
    monkeypatch.setenv("IPUFIT_EMULATOR_CHANNELS_LAST", "0")
    assert program.laid_out(program.graph) is program.graph
