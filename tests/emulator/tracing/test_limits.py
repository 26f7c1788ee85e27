# SPDX-License-Identifier: Apache-2.0
"""Arguments that compute on the host and don't compile for a device.

They are refused only where they are live, and depend on a variable. PopTorch eliminates
dead operators before its handlers see the others (`LowerToPopartFactories.cpp`), and
computes constant expressions with torch (`EvaluateConstexprs.cpp`).
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from ipufit.emulator.core.survey import survey
from tests.emulator._models import Function, assert_same, run

pytestmark = pytest.mark.floor

X = torch.linspace(-1, 1, 24).reshape(4, 6)
LABELS = torch.tensor([0, 1, 2, 5])
SEQUENCES = torch.linspace(-1, 1, 30).reshape(2, 5, 3)
IMAGES = torch.linspace(-1, 1, 192).reshape(2, 3, 4, 8)
INDICES = torch.tensor([0, 3, 1])
BYTES = torch.tensor([1, 6], dtype=torch.uint8)
KERNEL = torch.ones(3, 2, 3, 3)
PROBABILITIES = X.reshape(4, 2, 3).log_softmax(2)
TARGETS = torch.ones(2, 2, dtype=torch.int64)


def lstm(dropout=0.0, **settings):
    """A function of a sequence, states and weights, and these."""
    layer = nn.LSTM(3, 4, **settings)
    directions = 2 if layer.bidirectional else 1
    states = torch.zeros(2, layer.num_layers * directions, 5, 4)

    def apply(x, state, cell, *weights):
        flags = False, layer.bidirectional, False
        return torch.lstm(
            x,
            [state, cell],
            weights,
            layer.bias,
            layer.num_layers,
            dropout,
            *flags,
        )[0]

    return apply, SEQUENCES, *states, *(w.detach() for w in layer.parameters())


def upsample(mode, **settings):
    return lambda x: functional.interpolate(x, scale_factor=2, mode=mode, **settings)


def embed(**settings):
    return lambda i, w: functional.embedding(i, w, **settings)


def ctc(reduction):
    return lambda probabilities, targets: functional.ctc_loss(
        probabilities, targets, (4, 4), (1, 1), reduction=reduction
    )


def changed(change):
    def function(x):
        x = x * 1
        change(x)
        return x

    return function


def by_addition(x):
    x[:, 1::2] += 1


STEP = "step size other than 1 is not supported"
CONSTANT = "only supported within constant express"
REFUSED = {
    "two layers": ("Only LSTM with 1 layer supported", *lstm(num_layers=2)),
    "dropout": ("LSTM only supports dropout = 0.0", *lstm(0.5)),
    "both ways": ("bidirectional LSTM not supported", *lstm(bidirectional=True)),
    "no bias": ("LSTM without biases not supported", *lstm(bias=False)),
    "CTC": ('reduction="none" is currently not', ctc("none"), PROBABILITIES, TARGETS),
    "1-D targets": ("2-D targets", ctc("sum"), PROBABILITIES, TARGETS[0]),
    "class weights": (
        '"weight" is unsupported .*::cross_entropy_loss',
        *(functional.cross_entropy, X, LABELS, torch.arange(6.0)),
    ),
    "class weights of NLL": (
        '"weight" is unsupported .*::nll_loss_nd',
        *(functional.nll_loss, X, LABELS, torch.arange(6.0)),
    ),
    "smoothing": (  # torch 2.0.1 composes it with `masked_select`
        r"masked_select.*reduction='none'",
        lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1),
        *(X, LABELS),
    ),
    "linear": (
        "mode aten::upsample_linear1d: .* only 'nearest'",
        *(upsample("linear"), IMAGES[0]),
    ),
    "trilinear": (
        "aten::upsample_trilinear3d: currently",
        *(upsample("trilinear"), IMAGES[None]),
    ),
    "corners": (
        "support align_corners=False",
        *(upsample("bicubic", align_corners=True), IMAGES),
    ),
    "indivisible": (
        r"dim 1 \(8\) is not divisible by .*3",
        lambda x: functional.adaptive_avg_pool2d(x, (4, 3)),
        IMAGES,
    ),
    "by frequency": ("scale_grad_by_freq", embed(scale_grad_by_freq=True), INDICES, X),
    "sparse": (
        "aten::embedding operation: sparse",
        *(embed(sparse=True), INDICES, X),
    ),
    "sparse, directly": (
        "operation: sparse",
        lambda i, w: torch.embedding(w, i, -1, False, True),
        *(INDICES, X),
    ),
    "padding of a bag": (
        "padding_idx parameter is",
        lambda i, w: functional.embedding_bag(i, w, padding_idx=1),
        *(INDICES[None], X),
    ),
    "offsets": (
        "offsets tensor must be a constant",
        *(functional.embedding_bag, INDICES, X, torch.tensor([0, 2])),
    ),
    "8 bits": ("`add`", lambda x: x + x, BYTES),
    "bits of 8": ("__and__: .* not support binary .* 8-bit", lambda x: x & x, BYTES),
    "not of 8": ("bitwise_not: Poplar does not support", torch.bitwise_not, BYTES),
    "indices": (
        "with return_indices=True is not",
        lambda x: functional.max_pool2d(x, 2, 2, return_indices=True)[1],
        IMAGES,
    ),
    "dilation": (
        "Non default .* dilations",
        lambda x, w: functional.conv_transpose2d(x, w, dilation=(1, 2)),
        *(IMAGES, KERNEL),
    ),
    "triangle": (CONSTANT, torch.triu, X),
    "triangle in place": (CONSTANT, changed(torch.Tensor.triu_), X),
    "assignment": (STEP, changed(lambda x: x[::2].fill_(0.0)), X),
    "addition": (STEP, changed(by_addition), X),
    "method": (STEP, changed(lambda x: x[1:][::2].mul_(2)), X),
    "division": ("int32, truncated", lambda i: i / 2, INDICES),
}
"""Words of a refusal, the function that a device refuses, and its arguments."""


def refusals(module, *tensors):
    found = survey(module, tensors, poptorch.Options(), is_training=False)
    assert found.error is None
    return [remark for remark in found.remarks if remark.is_refused]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_used_is_refused_and_what_is_unused_is_not(name):
    words, function, *tensors = REFUSED[name]
    used = Function(lambda _, x, *given: (x * 2, function(*given)))
    unused = Function(lambda _, x, *given: (x * 2, function(*given))[0])
    inputs = torch.ones(3), *tensors
    with pytest.raises(poptorch.Error, match=words) as error:
        poptorch.inferenceModel(used)(*inputs)
    first, *_ = refusals(used, *inputs)
    assert first.message in error.value.message
    assert torch.equal(poptorch.inferenceModel(unused)(*inputs), inputs[0] * 2)
    assert refusals(unused, *inputs) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_computed_of_constants_is_torchs(name):
    _, function, *tensors = REFUSED[name]

    def forward(module, x):
        return x * 2, function(*(tensor.to("ipu") for tensor in tensors)) * 1

    module, x = Function(forward), torch.ones(3)
    assert_same(poptorch.inferenceModel(module)(x), (x * 2, function(*tensors)))
    assert refusals(module, x) == []


@pytest.mark.parametrize(
    ("function", "tensor", "words"),
    [
        (functional.one_hot, INDICES, "OneHot num classes must be specified and must"),
        (torch.bincount, INDICES, "Bincount `minlength` must be specified and"),
        (lambda x: torch.linalg.matrix_norm(x, "nuc"), IMAGES, "Matrix nuclear norm"),
        (lambda x: torch.linalg.matrix_norm(x, 2), IMAGES, "Matrix 2-norm is not"),
        (lambda x: torch.linalg.norm(x, -2, (0, 1)), X, "Matrix 2-norm is not"),
    ],
)
def test_others_are_refused_wherever_they_are(function, tensor, words):
    with pytest.raises(poptorch.Error, match=words):
        run(function, tensor)


ACCEPTED = [
    (nn.LSTM(3, 4, batch_first=True), SEQUENCES),
    (nn.GRU(3, 4, batch_first=True), SEQUENCES),
    (nn.GRU(3, 4, bias=False), SEQUENCES),
    (nn.RNN(3, 4, batch_first=True), SEQUENCES),
    (ctc("sum"), PROBABILITIES, TARGETS),
    (ctc("mean"), PROBABILITIES, TARGETS),
    (nn.CrossEntropyLoss(), X, LABELS),
    (nn.NLLLoss(), X, LABELS),
    (nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"), X, LABELS),
    (nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none"), X, LABELS),
    (nn.CrossEntropyLoss(label_smoothing=0.1), X, X.softmax(1)),
    (nn.CrossEntropyLoss(label_smoothing=0.0), X, LABELS),
    (lambda x: functional.one_hot(x, num_classes=5), INDICES),
    (lambda x: x.bincount(minlength=4), INDICES),
    (nn.Upsample(scale_factor=2.5), IMAGES),
    (nn.Upsample(size=(6, 12), mode="bilinear"), IMAGES),
    (nn.Embedding(5, 2, padding_idx=1), INDICES),
    (lambda i, w: torch.embedding(w, i), INDICES, X),
    (nn.AdaptiveAvgPool2d((2, None)), IMAGES),
    (nn.ConvTranspose2d(3, 2, 3, dilation=1), IMAGES),
    (lambda x: x & 1, INDICES),
    (lambda x: torch.topk(x, 2).values, IMAGES),
    (lambda x: torch.linalg.norm(x, 2, 1), IMAGES),
    (lambda x: torch.norm(x, 2), IMAGES[0, 0]),
    (lambda x: x * torch.ones(4, 6).triu_(), X),
    (lambda x: x * torch.triu(torch.ones(4, 6)), X),
    (changed(lambda x: x[::1].fill_(0.0)), X),
    (changed(lambda x: x[1:][::1].mul_(2)), X),
    (lambda x: x[::2] * 2, X),
]


@pytest.mark.parametrize(("function", "tensors"), [(f, x) for f, *x in ACCEPTED])
def test_other_arguments_are_fine(function, tensors):
    with torch.no_grad():
        expected = function(*tensors)
    assert_same(run(function, *tensors), expected)


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
