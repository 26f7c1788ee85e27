# SPDX-License-Identifier: Apache-2.0
"""Arguments that compute on the host and don't compile for a device."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from tests.emulator._models import run

pytestmark = pytest.mark.floor

X = torch.linspace(-1, 1, 24).reshape(4, 6)
LABELS = torch.tensor([0, 1, 2, 5])
SEQUENCES = torch.linspace(-1, 1, 30).reshape(2, 5, 3)


@pytest.mark.parametrize(
    ("loss", "name"),
    [(nn.CrossEntropyLoss, "cross_entropy_loss"), (nn.NLLLoss, "nll_loss_nd")],
)
def test_class_weights_are_refused(loss, name):
    assert run(loss(), X, LABELS).shape == ()
    with pytest.raises(poptorch.Error, match=f'"weight" is unsupported .*::{name}'):
        run(loss(weight=torch.ones(6)), X, LABELS)


def test_the_mean_with_label_smoothing_is_refused():
    """torch 2.0.1 composes it with `masked_select`."""
    for reduction in ("sum", "none"):
        run(nn.CrossEntropyLoss(label_smoothing=0.1, reduction=reduction), X, LABELS)
    run(nn.CrossEntropyLoss(label_smoothing=0.1), X, X.softmax(1))
    run(nn.CrossEntropyLoss(label_smoothing=0.0), X, LABELS)
    with pytest.raises(poptorch.Error, match=r"masked_select.*reduction='none'"):
        run(nn.CrossEntropyLoss(label_smoothing=0.1), X, LABELS)


def ctc(reduction, targets):
    def loss(x):
        probs = x.reshape(4, 2, 3).log_softmax(2)
        labels = torch.ones(targets, dtype=torch.int64)
        return nn.functional.ctc_loss(
            probs, labels, (4, 4), (1, 1), reduction=reduction
        )

    return loss


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_reduced_ctc_loss_of_padded_targets_is_fine(reduction):
    assert torch.equal(
        run(ctc(reduction, (2, 2)), X), ctc(reduction, (2, 2))(X).detach()
    )


def test_other_ctc_losses_are_refused():
    with pytest.raises(poptorch.Error, match='reduction="none" is currently not'):
        run(ctc("none", (2, 2)), X)
    with pytest.raises(poptorch.Error, match="2-D targets"):
        run(ctc("sum", (2,)), X)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(nn.LSTM, {}), (nn.GRU, {}), (nn.RNN, {}), (nn.GRU, {"bias": False})],
)
def test_a_plain_recurrent_layer_is_fine(kind, settings):
    layer = kind(3, 4, batch_first=True, **settings)
    with torch.no_grad():
        expected = layer(SEQUENCES)[0]
    assert torch.allclose(run(layer, SEQUENCES)[0], expected)


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"num_layers": 2}, "Only LSTM with 1 layer supported"),
        ({"dropout": 0.5}, "LSTM only supports dropout = 0.0"),
        ({"bidirectional": True}, "bidirectional LSTM not supported"),
        ({"bias": False}, "LSTM without biases not supported"),
    ],
)
def test_other_lstms_are_refused(settings, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        run(nn.LSTM(3, 4, **settings), SEQUENCES)


IMAGES = torch.linspace(-1, 1, 192).reshape(2, 3, 4, 8)
INDICES = torch.tensor([0, 3, 1])
BYTES = torch.tensor([1, 6], dtype=torch.uint8)


def upsampled(mode, scale=2, **settings):
    return nn.Upsample(scale_factor=scale, mode=mode, **settings)


def directly_embedded(indices, *settings):
    return torch.embedding(IMAGES[0, 0].to(indices.device), indices, *settings)


REFUSED = [
    (functional.one_hot, INDICES, "OneHot num classes must be specified and must be"),
    (torch.bincount, INDICES, "Bincount `minlength` must be specified and"),
    (upsampled("linear"), IMAGES[0], "mode aten::upsample_linear1d: .* only 'nearest'"),
    (upsampled("trilinear"), IMAGES[None], "aten::upsample_trilinear3d: currently"),
    (upsampled("bicubic", align_corners=True), IMAGES, "support align_corners=False"),
    (nn.Embedding(5, 2, scale_grad_by_freq=True), INDICES, "scale_grad_by_freq"),
    (nn.Embedding(5, 2, sparse=True), INDICES, "aten::embedding operation: sparse"),
    (lambda i: directly_embedded(i, -1, False, True), INDICES, "operation: sparse"),
    (nn.EmbeddingBag(5, 2, padding_idx=1), INDICES[None], "padding_idx parameter is"),
    (nn.AdaptiveAvgPool2d((4, 3)), IMAGES, r"dim 1 \(8\) is not divisible by .*3"),
    (nn.MaxPool2d(2, return_indices=True), IMAGES, "with return_indices=True is not"),
    (nn.ConvTranspose2d(3, 2, 3, dilation=(1, 2)), IMAGES, "Non default .* dilations"),
    (lambda x: x & x, BYTES, "__and__: .* not support binary .* 8-bit"),
    (torch.bitwise_not, BYTES, "bitwise_not: Poplar does not support"),
    (lambda x: torch.linalg.matrix_norm(x, "nuc"), IMAGES, "Matrix nuclear norm is"),
    (lambda x: torch.linalg.matrix_norm(x, 2), IMAGES, "Matrix 2-norm is not"),
    (lambda x: torch.linalg.norm(x, -2, (0, 1)), IMAGES[0, 0], "Matrix 2-norm is not"),
]


@pytest.mark.parametrize(("function", "tensor", "fragment"), REFUSED)
def test_an_argument_is_refused(function, tensor, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        run(function, tensor)


ACCEPTED = [
    (lambda x: functional.one_hot(x, num_classes=5).float(), INDICES),
    (lambda x: x.bincount(minlength=4).float(), INDICES),
    (upsampled("nearest", 2.5), IMAGES),
    (nn.Upsample(size=(6, 12), mode="bilinear"), IMAGES),
    (nn.Embedding(5, 2, padding_idx=1), INDICES),
    (directly_embedded, INDICES),
    (nn.AdaptiveAvgPool2d((2, None)), IMAGES),
    (nn.ConvTranspose2d(3, 2, 3, dilation=1), IMAGES),
    (lambda x: (x & 1).float(), INDICES),
    (lambda x: torch.topk(x, 2).values, IMAGES),
    (lambda x: torch.linalg.norm(x, 2, 1), IMAGES),
    (lambda x: torch.norm(x, 2), IMAGES[0, 0]),
]


@pytest.mark.parametrize(("function", "tensor"), ACCEPTED)
def test_other_arguments_are_fine(function, tensor):
    with torch.no_grad():
        expected = function(tensor)
    torch.testing.assert_close(run(function, tensor), expected)


# Combinations of calls -------------------------------------------------------------

TABLE = torch.arange(10.0).reshape(5, 2)


@pytest.mark.parametrize("function", [torch.triu, lambda x: x.clone().triu_()])
def test_the_triangle_of_what_changes_is_refused(function):
    with pytest.raises(poptorch.Error, match="only supported within constant express"):
        run(function, X)


def test_the_triangle_of_a_constant_is_fine():
    mask = torch.ones(4, 6).triu()
    assert torch.equal(run(lambda x: x * torch.ones(4, 6).triu_(), X), X * mask)
    assert torch.equal(run(lambda x: x * torch.triu(torch.ones(4, 6)), X), X * mask)


@pytest.mark.parametrize("by_name", [True, False])
def test_the_offsets_of_an_embedding_bag_must_be_constant(by_name):
    indices, offsets = torch.tensor([0, 3, 4, 1]), torch.tensor([0, 2])
    bag = nn.EmbeddingBag.from_pretrained(TABLE, freeze=False)

    def given(i, o):
        return bag(i, o) if by_name else functional.embedding_bag(i, bag.weight, o)

    with pytest.raises(poptorch.Error, match="offsets tensor must be a constant"):
        run(given, indices, offsets, bag=bag)
    result = run(lambda i: given(i, torch.tensor([0, 2])), indices, bag=bag)
    assert torch.equal(result, functional.embedding_bag(indices, TABLE, offsets))


def by_assignment(x, step):
    x[::step] = 0.0
    return x


def by_addition(x, step):
    x[:, 1::step] += 1
    return x


def by_method(x, step):
    x[1:][::step].mul_(2)
    return x


@pytest.mark.parametrize("change", [by_assignment, by_addition, by_method])
def test_only_adjacent_elements_can_be_changed_in_place(change):
    with pytest.raises(poptorch.Error, match="step size other than 1 is not supported"):
        run(lambda x: change(x * 1, 2), X)
    assert torch.equal(run(lambda x: change(x * 1, 1), X), change(X * 1, 1))
    assert torch.equal(run(lambda x: x[::2] * 2, X), X[::2] * 2)
