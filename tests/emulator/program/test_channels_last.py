# SPDX-License-Identifier: Apache-2.0
"""Programs in channels_last give what they give in the plain order."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function, wrap
from tests.strategies import examples

pytestmark = pytest.mark.looped

SIZE = 8
CHANNELS = 4


def pooled(x):
    return F.max_pool2d(x, 2, 2)


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
    "pool": lambda net, seen: F.interpolate(pooled(seen[-1]), scale_factor=2),
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


def both_ways(run):
    """What `run` gives in channels_last, and in the plain order."""
    results = []
    for switch in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("IPUFIT_EMULATOR_CHANNELS_LAST", switch)
            results.append(run())
    return results


def inferred(module, image):
    executor = poptorch.inferenceModel(module)
    try:
        return executor(image)
    finally:
        executor.destroy()


def assert_close(actual, expected):
    for left, right in zip(actual, expected):
        assert left.is_contiguous()
        scale = right.abs().max().item() + 1.0
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4 * scale)


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.sampled_from(sorted(CALLS)), max_size=7))
def test_any_program_computes_the_same(names):
    image = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))

    def run():
        torch.manual_seed(0)
        module = Random(names).eval()
        return inferred(module, image)

    assert_close(*both_ways(run))


class Trained(Random):
    def forward(self, x):
        results = super().forward(x)
        losses = (result.tanh().mean() for result in results)
        return poptorch.identity_loss(sum(losses), reduction="none")


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.sampled_from(sorted(set(CALLS) - {"norm"})), max_size=5))
def test_any_program_learns_the_same(names):
    image = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))

    def run():
        torch.manual_seed(0)
        module = Trained(names)
        _, executor = wrap(module, lr=0.1)
        try:
            executor(image)
        except RuntimeError as error:  # a value that autograd needs was written to
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            return []
        finally:
            executor.destroy()
        return [weight.detach() for weight in module.parameters()]

    actual, expected = both_ways(run)
    assert len(actual) == len(expected)
    assert_close(actual, expected)


def test_an_image_that_is_written_to_is_brought_in_again():
    def forward(m, x):
        same = x.view(x.shape)
        before = m.one(same) + m.two(same)
        x.add_(1.0)
        return (pooled(before * m.one(same)),)

    twice = Function(forward, one=nn.Conv2d(3, 6, 1), two=nn.Conv2d(3, 6, 1))
    image = torch.randn(1, 3, 4, 4)
    expected = twice(image.clone())
    for result in both_ways(lambda: inferred(twice, image.clone())):
        assert_close(result, expected)


def test_half_precision_is_rewritten_too():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 1), nn.MaxPool2d(2), nn.Conv2d(6, 6, 1)).half()
    image = torch.randn(2, 1, 8, 8).half()
    one, other = both_ways(lambda: inferred(net, image))
    assert one.dtype == other.dtype == torch.float16
    assert one.stride() == other.stride()
    torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


SIZES = st.integers(1, 9)
SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), -1.0, 2.0])


@settings(max_examples=examples(40), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), SIZES, SIZES, SIZES),
    kernel=st.one_of(st.integers(1, 4), st.tuples(*2 * [st.integers(1, 4)])),
    stride=st.sampled_from(["kernel", 1, (2, 1)]),
    others=st.sampled_from([{}, {"padding": 1}, {"ceil_mode": True}]),
    is_special=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pooling_gives_the_values_of_torch(
    shape, kernel, stride, others, is_special, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if is_special:
        x = SPECIAL[torch.randint(0, len(SPECIAL), shape, generator=generator)]
    stride = kernel if stride == "kernel" else stride

    def forward(_, x):
        same = F.conv2d(x, _.weight, groups=x.shape[1])
        return F.max_pool2d(same, kernel, stride, **others)

    weight = nn.Parameter(torch.ones(shape[1], 1, 1, 1))
    module = Function(forward, weight=weight)
    try:
        expected = module(x)
    except RuntimeError:  # a window is larger than the image
        with pytest.raises(RuntimeError):
            inferred(module, x)
        return
    found = inferred(module, x)
    assert found.is_contiguous()
    height, width = expected.shape[2:]  # a device may have one window more
    torch.testing.assert_close(
        found[..., :height, :width], expected, rtol=0, atol=0, equal_nan=True
    )


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
        images = self.two(pooled(self.norm(self.one(x)).relu_()))
        images = self.dropout(images)
        assert images.stride() == (160, 16, 4, 1)
        scores = self.last(images.view(len(x), -1))
        if target is None:
            return scores, images
        return scores, images, F.cross_entropy(scores, target)


DATA = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(24) % 4


def trained(dropout=0.0, optimizer="AdamW"):
    """Outputs, weights and the optimiser's state after three calls."""
    torch.manual_seed(0)
    module = Classifier(dropout).train()
    options = poptorch.Options().deviceIterations(2).randomSeed(7)
    options.outputMode(poptorch.OutputMode.All)
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


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_training_is_the_same_both_ways(monkeypatch, optimizer):
    # Passes forced upon this program part its convolutions, and none pays then.
    monkeypatch.delenv("IPUFIT_EMULATOR_FOLD", raising=False)
    results = both_ways(lambda: trained(optimizer=optimizer))
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


def test_random_numbers_meet_the_same_elements_both_ways():
    for value, expected in zip(*both_ways(lambda: trained(dropout=0.5)[0])):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3)


def test_large_means_leave_their_variance_to_group_norm():
    def forward(m, x):
        return pooled(m.norm(pooled(m.conv(x)) + 1000.0))

    def run():
        torch.manual_seed(0)
        conv, norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        return inferred(Function(forward, conv=conv, norm=norm), image)

    image = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(*both_ways(run), rtol=1e-3, atol=2e-3)


def test_a_single_image_has_the_plain_order():
    def forward(net, x):
        hidden = net.first(x)  # channels, rows and columns, but no batch
        return poptorch.identity_loss(net.second(hidden).square().sum(), "none")

    torch.manual_seed(0)
    layers = {"first": nn.Conv2d(4, 4, 3, groups=4), "second": nn.Conv2d(4, 5, 3)}
    module, x = Function(forward, **layers), torch.randn(4, SIZE, SIZE)
    before = [weight.detach().clone() for weight in module.parameters()]
    gradients = torch.autograd.grad(forward(module, x), module.parameters())
    wrap(module, lr=0.1)[1](x)
    for weight, old, gradient in zip(module.parameters(), before, gradients):
        torch.testing.assert_close(weight.detach(), old - 0.1 * gradient)
