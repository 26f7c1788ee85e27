# SPDX-License-Identifier: Apache-2.0
"""Operators are refused only where they are live, and depend on a variable.

PopTorch eliminates dead operators before its handlers see the others
(`LowerToPopartFactories.cpp`), and computes constant expressions with torch
(`EvaluateConstexprs.cpp`).
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from ipufit.emulator.core.survey import survey
from tests.emulator._models import Function, assert_same

X = torch.linspace(-1, 1, 24).reshape(4, 6)
LABELS = torch.tensor([0, 1, 2, 5])
SEQUENCES = torch.linspace(-1, 1, 30).reshape(2, 5, 3)
IMAGES = torch.linspace(-1, 1, 192).reshape(2, 3, 4, 8)
INDICES = torch.tensor([0, 3, 1])
BYTES = torch.tensor([1, 6], dtype=torch.uint8)
LAYERS = [w.detach() for w in nn.LSTM(3, 4, 2).parameters()]
STATES = [torch.zeros(2, 5, 4), torch.zeros(2, 5, 4)]
PROBABILITIES = X.reshape(4, 2, 3).log_softmax(2)
TARGETS = torch.ones(2, 2, dtype=torch.int64)
BOUNDS = torch.tensor([0, 2])


def lstm(x, *weights):
    states, layers = list(weights[:2]), list(weights[2:])
    return torch.lstm(x, states, layers, True, 2, 0.0, False, False, False)[0]


def triangle_in_place(x):
    return (x * 1).triu_()


def every_second(x):
    x = x.clone()
    x[::2] = 0.0
    return x


REFUSED = {
    "two layers": (lstm, SEQUENCES, *STATES, *LAYERS),
    "CTC": (
        lambda p, t: functional.ctc_loss(p, t, (4, 4), (1, 1), reduction="none"),
        PROBABILITIES,
        TARGETS,
    ),
    "class weights": (functional.cross_entropy, X, LABELS, torch.arange(6.0)),
    "smoothing": (
        lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1),
        X,
        LABELS,
    ),
    "linear": (
        lambda x: functional.interpolate(x, scale_factor=2, mode="linear"),
        IMAGES[0],
    ),
    "indivisible": (lambda x: functional.adaptive_avg_pool2d(x, (4, 3)), IMAGES),
    "sparse": (lambda i, w: functional.embedding(i, w, sparse=True), INDICES, X),
    "bits of 8": (lambda x: x & x, BYTES),
    "8 bits": (lambda x: x + x, BYTES),
    "indices": (lambda x: functional.max_pool2d(x, 2, return_indices=True)[1], IMAGES),
    "dilation": (
        lambda x, w: functional.conv_transpose2d(x, w, dilation=2),
        *(IMAGES, torch.ones(3, 2, 3, 3)),
    ),
    "offsets": (functional.embedding_bag, INDICES, X, BOUNDS),
    "triangle": (triangle_in_place, X),
    "steps": (every_second, X),
    "division": (lambda i: i / 2, INDICES),
}
"""A function that a device refuses, and its arguments."""


def module_of(name, use):
    """A model that calls what is refused with its further inputs."""
    function, *_ = REFUSED[name]
    return Function(lambda module, x, *tensors: use(x, function(*tensors)))


def refusals(module, *tensors):
    found = survey(module, tensors, poptorch.Options(), is_training=False)
    assert found.error is None
    return [remark for remark in found.remarks if remark.is_refused]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_used_is_refused_and_what_is_unused_is_not(name):
    used = module_of(name, lambda x, y: (x * 2, y))
    unused = module_of(name, lambda x, y: x * 2)
    inputs = torch.ones(3), *REFUSED[name][1:]
    with pytest.raises(poptorch.Error) as error:
        poptorch.inferenceModel(used)(*inputs)
    first, *_ = refusals(used, *inputs)
    assert first.message in error.value.message
    assert torch.equal(poptorch.inferenceModel(unused)(*inputs), inputs[0] * 2)
    assert refusals(unused, *inputs) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_computed_of_constants_is_torchs(name):
    function, *tensors = REFUSED[name]

    def forward(module, x):
        return x * 2, function(*(tensor.to("ipu") for tensor in tensors)) * 1

    module, x = Function(forward), torch.ones(3)
    assert_same(poptorch.inferenceModel(module)(x), (x * 2, function(*tensors)))
    assert refusals(module, x) == []


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(6, 4, num_layers=2),
        nn.GRU(6, 4, bidirectional=True),
        nn.ConvTranspose1d(4, 2, 3, dilation=2),
        nn.AdaptiveAvgPool1d(4),
        nn.Upsample(scale_factor=2, mode="linear"),
    ],
)
def test_a_training_model_has_unused_layers(layer):
    def forward(module, x):
        module.unused(x if isinstance(layer, nn.RNNBase) else x[None])
        functional.cross_entropy(x, LABELS.to("ipu"), weight=torch.ones(6))
        return poptorch.identity_loss(module.layer(x).pow(2), "mean")

    module = Function(forward, layer=nn.Linear(6, 2), unused=layer)
    before = module.layer.weight.detach().clone()
    poptorch.trainingModel(module)(X)
    assert not torch.equal(module.layer.weight, before)


def test_a_gradient_that_nothing_uses_is_not_refused():
    def forward(module, x, use):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad((x[INDICES.to("ipu")] ** 2).sum(), x)
        return x * 2, gradient if use else x

    unused = Function(lambda m, x: forward(m, x, False))
    assert torch.equal(poptorch.inferenceModel(unused)(X)[0], X * 2)
    with pytest.raises(poptorch.Error, match="gradient through indexing"):
        poptorch.inferenceModel(Function(lambda m, x: forward(m, x, True)))(X)


def test_a_buffer_of_whole_numbers_is_a_constant_for_every_rule():
    def taking(index):
        return Function(lambda m, x: x[m.index], buffers={"index": torch.tensor(index)})

    assert poptorch.inferenceModel(taking([0, 2]))(X).shape == (2, 6)
    with pytest.raises(poptorch.Error, match="doesn't wrap it"):
        poptorch.inferenceModel(taking([0, -1]))(X)
    bound = torch.zeros(6, dtype=torch.int64)
    clamped = Function(lambda m, x: x.clamp_max(m.bound), buffers={"bound": bound})
    assert_same(poptorch.inferenceModel(clamped)(X), X.clamp_max(bound))
    with pytest.raises(poptorch.Error, match="`clamp_max`"):
        poptorch.inferenceModel(Function(lambda m, x: x.clamp_max(x)))(X)


@pytest.mark.parametrize("settings", [{}, {"ceil_mode": True}, {"padding": 1}])
def test_unused_indices_of_a_pooling_are_not_refused(settings):
    """Used ones are (PopTorch, `PopartCanonicalization.cpp`)."""

    def values(module, x):
        pooled, _ = functional.max_pool2d(x, 3, 2, return_indices=True, **settings)
        return pooled

    options = poptorch.Options().deviceIterations(2)
    pooled = poptorch.inferenceModel(Function(values), options)(IMAGES)
    assert torch.equal(pooled, functional.max_pool2d(IMAGES, 3, 2, **settings))
