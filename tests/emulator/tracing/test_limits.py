# SPDX-License-Identifier: Apache-2.0
"""Arguments that compute on the host and don't compile for a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from tests.emulator._models import run

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
@pytest.mark.parametrize(("kind", "name"), [(nn.LSTM, "LSTM"), (nn.GRU, "GRU")])
@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"num_layers": 2}, "Only {} with 1 layer supported"),
        ({"dropout": 0.5}, "{} only supports dropout = 0.0"),
        ({"bidirectional": True}, "bidirectional {} not supported"),
    ],
)
def test_other_recurrent_layers_are_refused(kind, name, settings, fragment):
    with pytest.raises(poptorch.Error, match=fragment.format(name)):
        run(kind(3, 4, **settings), SEQUENCES)


IMAGES = torch.linspace(-1, 1, 192).reshape(2, 3, 4, 8)
INDICES = torch.tensor([0, 3, 1])
BYTES = torch.tensor([1, 6], dtype=torch.uint8)

REFUSED = {
    "classes that depend on values": (
        functional.one_hot,
        INDICES,
        "OneHot num classes must be specified and must be constant",
    ),
    "bins that depend on values": (
        torch.bincount,
        INDICES,
        "Bincount `minlength` must be specified and must be a constant. On the IPU MK2",
    ),
    "linear upsampling": (
        nn.Upsample(scale_factor=2, mode="linear"),
        IMAGES[0],
        "Unsupported upsample mode aten::upsample_linear1d: .* only 'nearest' is supp",
    ),
    "trilinear upsampling": (
        nn.Upsample(scale_factor=2, mode="trilinear"),
        IMAGES[None],
        "aten::upsample_trilinear3d: currently only 'nearest' is supported",
    ),
    "bicubic upsampling from corner to corner": (
        nn.Upsample(scale_factor=2, mode="bicubic", align_corners=True),
        IMAGES,
        "Only support align_corners=False",
    ),
    "bilinear upsampling by fractions": (
        nn.Upsample(scale_factor=2.5, mode="bilinear"),
        IMAGES,
        "Bilinear upsampling with non-integer factor not supported: 2.5",
    ),
    "uneven bilinear upsampling": (
        nn.Upsample(scale_factor=(2, 3), mode="bilinear"),
        IMAGES,
        "Non-uniform bilinear upsampling not supported",
    ),
    "scaled gradients of embeddings": (
        nn.Embedding(5, 2, scale_grad_by_freq=True),
        INDICES,
        "Unsupported aten::embedding operation: scale_grad_by_freq",
    ),
    "sparse gradients of embeddings": (
        nn.Embedding(5, 2, sparse=True),
        INDICES,
        "Unsupported aten::embedding operation: sparse",
    ),
    "padding of embedding bags": (
        nn.EmbeddingBag(5, 2, padding_idx=1),
        INDICES[None],
        "padding_idx parameter is unsupported",
    ),
    "uneven adaptive pooling": (
        nn.AdaptiveAvgPool2d((4, 3)),
        IMAGES,
        r"Input dim 1 \(8\) is not divisible by the corresponding output dim \(3\)",
    ),
    "indices of maxima": (
        nn.MaxPool2d(2, return_indices=True),
        IMAGES,
        "max_pool2d with return_indices=True is not supported",
    ),
    "dilated transposed convolutions": (
        nn.ConvTranspose2d(3, 2, 3, dilation=(1, 2)),
        IMAGES,
        "Non default value for dilations is not supported",
    ),
    "bits of bytes": (
        lambda x: x & x,
        BYTES,
        "__and__: Poplar does not support binary operations on 8-bit integral types",
    ),
    "negated bytes": (torch.bitwise_not, BYTES, "bitwise_not: Poplar does not supp"),
    "unsorted maxima": (
        lambda x: torch.topk(x, 2, sorted=False).values,
        IMAGES,
        "sorted=False is not supported for torch.topk",
    ),
    "the nuclear norm": (
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
        IMAGES,
        "Matrix nuclear norm is not supported",
    ),
    "torch.norm's nuclear norm": (
        lambda x: torch.norm(x, p="nuc", dim=(2, 3)),
        IMAGES,
        "Matrix nuclear norm is not supported",
    ),
    "the 2-norm of a matrix": (
        lambda x: torch.linalg.matrix_norm(x, 2),
        IMAGES,
        "Matrix 2-norm is not supported",
    ),
    "the 2-norm of a matrix by its dimensions": (
        lambda x: torch.linalg.norm(x, -2, (0, 1)),
        IMAGES[0, 0],
        "Matrix 2-norm is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_is_refused(name):
    function, tensor, fragment = REFUSED[name]
    with pytest.raises(poptorch.Error, match=fragment):
        run(function, tensor)


ACCEPTED = {
    "given classes": (lambda x: functional.one_hot(x, num_classes=5).float(), INDICES),
    "given bins": (lambda x: x.bincount(minlength=4).float(), INDICES),
    "bins by position": (lambda x: torch.bincount(x, None, 4).float(), INDICES),
    "nearest upsampling": (nn.Upsample(scale_factor=2.5), IMAGES),
    "bilinear upsampling": (nn.Upsample(scale_factor=2, mode="bilinear"), IMAGES),
    "bilinear to a size": (nn.Upsample(size=(9, 5), mode="bilinear"), IMAGES),
    "bicubic upsampling": (nn.Upsample(scale_factor=2, mode="bicubic"), IMAGES),
    "padding of embeddings": (nn.Embedding(5, 2, padding_idx=1), INDICES),
    "even adaptive pooling": (nn.AdaptiveAvgPool2d((2, None)), IMAGES),
    "adaptive pooling to one": (nn.AdaptiveAvgPool2d(1), IMAGES),
    "maxima": (nn.MaxPool2d(2), IMAGES),
    "transposed convolutions": (nn.ConvTranspose2d(3, 2, 3, dilation=1), IMAGES),
    "bits of integers": (lambda x: (x & 1).float(), INDICES),
    "bits of truth values": (lambda x: (~(x > 0) ^ (x > 1)).float(), INDICES),
    "sorted maxima": (lambda x: torch.topk(x, 2).values, IMAGES),
    "the Frobenius norm": (lambda x: torch.linalg.norm(x, "fro", (0, 1)), IMAGES),
    "a vector's 2-norm": (lambda x: torch.linalg.norm(x, 2, 1), IMAGES),
    "a 2-norm of all elements": (lambda x: torch.norm(x, 2), IMAGES[0, 0]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_other_arguments_are_fine(name):
    function, tensor = ACCEPTED[name]
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


def test_a_loops_body_has_no_constants_but_its_own():
    def body(x):
        return x.triu()

    with pytest.raises(poptorch.Error, match="only supported within constant express"):
        run(lambda x: poptorch.for_loop(2, body, [x])[0], X)


@pytest.mark.parametrize("by_name", [True, False])
def test_the_offsets_of_an_embedding_bag_must_be_constant(by_name):
    indices, offsets = torch.tensor([0, 3, 4, 1]), torch.tensor([0, 2])
    bag = nn.EmbeddingBag.from_pretrained(TABLE)

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


def test_a_constant_can_be_changed_anyhow():
    expected = X + by_assignment(torch.ones(4, 6), 2)
    assert torch.equal(
        run(lambda x: x + by_assignment(torch.ones(4, 6), 2), X), expected
    )
