# SPDX-License-Identifier: Apache-2.0
"""Rows of several operators: types, indices in inputs, functions that hide others."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from tests.emulator._models import Function
from tests.emulator.operators._programs import gradients, infer, reports

X = torch.linspace(-1, 1, 12).reshape(3, 4)
CLASSES = torch.tensor([0, 3, 1], dtype=torch.int32)
PLACES = torch.tensor([[0, 1, 2, 0]], dtype=torch.int32)
SEQUENCES = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


def test_constants_have_32_bits():
    device = infer(lambda x: x + torch.tensor([2**32 + 7, -1]), torch.zeros(2).int())
    assert device.tolist() == [7, -1]


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda x: x.long() * 2, torch.int32),
        (lambda x: x.double() * 2, torch.float32),
        (lambda x: x.to(torch.int64), torch.int32),
        (lambda x: x.type_as(torch.zeros(1, dtype=torch.int64)), torch.int32),
    ],
)
def test_results_have_32_bits(cast, dtype):
    assert infer(cast, X).dtype == dtype


def test_a_cast_to_whole_numbers_stops_the_gradient():
    (gradient,) = gradients(lambda w: (w * w.int()).sum(), weights=[torch.ones(2) * 3])
    assert gradient.tolist() == [3.0, 3.0]  # of the first factor alone


# Whole numbers of 32 bits -------------------------------------------------------------

NARROW = {
    "gather": (lambda x, i: x.gather(0, i), X, PLACES),
    "scatter": (lambda x, i: x.scatter(0, i, x[:1]), X, PLACES),
    "scatter of a number": (lambda x, i: x.scatter(0, i, 2.0), X, PLACES),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, x[:1]), X, PLACES),
    "in place": (lambda x, i: (x * 1).scatter_add_(0, index=i, src=x[:1]), X, PLACES),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i, x[:1], "amax"), X, PLACES),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 0), X, PLACES),
    "expanded": (lambda x, i: x.gather(0, i[:, 1:2].expand(1, 4)), X, PLACES),
    "cross_entropy": (functional.cross_entropy, X, CLASSES),
    "by keyword": (
        lambda x, y: functional.cross_entropy(target=y, input=x, reduction="sum"),
        *(X, CLASSES),
    ),
    "nll_loss": (nn.NLLLoss(), X, CLASSES),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.filterwarnings("ignore:.* is in beta")
def test_indices_and_classes_may_have_32_bits(name):
    function, x, index = NARROW[name]
    torch.testing.assert_close(
        infer(function, x, index), infer(function, x, index.long())
    )
    assert reports(function, x, index) == reports(function, x, index.long())
    narrow, wide = (
        gradients(lambda w, i: function(w, i), i, weights=[x])
        for i in (index, index.long())
    )
    torch.testing.assert_close(narrow, wide)


def test_one_hot_takes_classes_of_32_bits():
    device = infer(lambda y: functional.one_hot(y, 5), CLASSES)
    assert torch.equal(device, functional.one_hot(CLASSES.long(), 5).int())


# Negative numbers in an index ---------------------------------------------------------


def assigned(x, index):
    y = x * 1
    y[:, index] = 0.0
    return y


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[:, i],
        assigned,
        lambda x, i: torch.index_put(x, (i,), torch.tensor(1.0)),
    ],
)
def test_an_input_with_negative_indices_is_refused(function):
    negative = torch.tensor([0, -1])
    assert "doesn't wrap it" in reports(function, X, negative)[0]
    with pytest.raises(poptorch.Error, match="doesn't wrap it"):
        infer(function, X, negative)
    assert reports(function, X, negative.abs()) == []


@pytest.mark.parametrize(
    ("function", "lost"),
    [
        (lambda x, i: x[:, i], (slice(None), 1)),
        (lambda x, i: x[i], 1),
        (lambda x, i: x[i, i + 1], 1),
        (lambda x, i: x[None, i], (0, 1)),
        (lambda x, i: x[i, :, None], 1),
    ],
)
def test_a_later_negative_index_reads_no_number(function, lost):
    model = poptorch.inferenceModel(Function(lambda _, x, i: function(x, i)))
    first, later = torch.tensor([0, 1]), torch.tensor([0, -2])
    torch.testing.assert_close(model(X, first), function(X, first))
    expected = function(X, later)
    expected[lost] = math.nan
    torch.testing.assert_close(model(X, later), expected, equal_nan=True)
    model.destroy()


# Functions that hide an operator with a row -------------------------------------------


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "settings", [{"num_layers": 2}, {"bidirectional": True}, {"bias": False}]
)
def test_a_gru_is_unrolled_and_has_none_of_the_limits_of_an_lstm(kind, settings):
    layer = kind(4, 3, **settings)
    with torch.no_grad():
        expected = layer(SEQUENCES)
    device = infer(layer, SEQUENCES)
    torch.testing.assert_close(device[0], expected[0])
    torch.testing.assert_close(device[1], expected[1])
    assert reports(layer, SEQUENCES) == []


def test_a_gru_drops_nothing_in_inference():
    layer = nn.GRU(4, 3, num_layers=2, dropout=0.5)
    device = infer(layer, SEQUENCES)[0]
    assert "identity in inference" in reports(layer, SEQUENCES)[0]
    torch.testing.assert_close(device, layer.eval()(SEQUENCES)[0].detach())


HALF = torch.full((4,), 300.0).half()


def test_a_distance_is_a_norm():
    assert infer(torch.dist, HALF, HALF * 0).isinf()
    assert infer(lambda x: torch.dist(x, x * 2, 0), X).isinf()
    torch.testing.assert_close(infer(torch.dist, X, X[0]), torch.dist(X, X[0]))
    (gradient,) = gradients(lambda w: torch.dist(w, w.detach()), weights=[X])
    assert gradient.isnan().all()


def test_a_weight_norm_of_zeros_has_no_gradient():
    direction = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    first, second = gradients(
        lambda v, g: torch._weight_norm(v, g, 0), weights=[direction, torch.ones(2, 1)]
    )
    assert second.isnan().tolist() == [[False], [True]]
    assert first.isnan().any(1).tolist() == [False, True]


IMAGES = torch.linspace(-1, 1, 64).reshape(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("function", "x", "words"),
    [
        (
            lambda x: functional.interpolate(x, (4, 3), mode="area"),
            *(IMAGES, "Input dim 1 (8) is not divisible by the corresponding output"),
        ),
        (lambda x: functional.interpolate(x, (2, 4), mode="area"), IMAGES, ""),
        (
            lambda x: functional.avg_pool1d(x, 1, 2, ceil_mode=True),
            *(IMAGES[0, :, :4], "keeps the last window"),
        ),
        (lambda x: x.cfloat().real, X, "ComplexFloat"),
        (nn.EmbeddingBag(4, 3, max_norm=1.0), PLACES.long(), "embedding_renorm_"),
    ],
)
def test_what_a_check_says(function, x, words):
    said = reports(function, x)
    assert words in said[0] if words else not said


def test_clamp_max_passes_an_infinite_gradient():
    def forward(module, x):
        return module.layer(x).clamp_max(0).rsqrt()

    said = reports(Function(forward, layer=nn.Linear(3, 3)), torch.ones(3), trains=True)
    assert any("clamp" in message for message in said)


# Checks that ended in an error of torch's ---------------------------------------------


def test_values_may_have_more_dimensions_of_1():
    places = torch.tensor([[0, 1], [2, 1]])

    def assign(x, values):
        y = x * 1
        y[:, places.to(x.device)] = values
        return y

    x, values = torch.zeros(2, 5, 3), torch.arange(24.0).reshape(1, 2, 2, 2, 3)
    device = infer(assign, x, values)
    assert torch.equal(device, infer(assign, x, values[0]))
    assert device.any()


def test_gather_of_a_number_is_refused_by_a_check():
    said = reports(lambda x, i: x.sum().gather(0, i.expand(2)), X, PLACES[0, 0].long())
    assert "isn't there" in said[0]
