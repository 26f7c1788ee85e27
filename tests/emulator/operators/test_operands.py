# SPDX-License-Identifier: Apache-2.0
"""Shapes, dimensions and options of operators on a device."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ipufit.emulator.errors import Error
from tests.emulator.operators._programs import gradients, infer, reports, trained

X = torch.arange(6.0).reshape(2, 3)

# torch says so once of `scatter_reduce` and `index_reduce`.
pytestmark = pytest.mark.filterwarnings("ignore:.* is in beta")


@pytest.mark.parametrize(
    ("function", "is_refused"),
    [
        (lambda x: torch.cross(x, x, dim=-1), True),
        (lambda x: torch.linalg.cross(x, x), True),
        (lambda x: torch.linalg.cross(x, x, dim=1), False),
        (lambda x: torch.cross(x, x + 1, dim=1), False),
        (lambda x: torch.linalg.cross(x, x[:1], dim=1), True),
        (lambda x: x.take_along_dim(x.long() % 2, -1), True),
        (lambda x: x.take_along_dim(x.long() % 2, 1), False),
        (lambda x: x.sum().gather(0, x[:1, 0].long()), True),
        (lambda x: x[0].gather(0, x[:1, 0].long()), False),
        (lambda x: x.sum().scatter_reduce(0, x[0, 0].long(), x[0, 1], "sum"), True),
        (lambda x: x.sum().index_reduce(0, x[0, :1].long(), x[0, 1], "amax"), True),
        (lambda x: x.sum().log_softmax(0), True),
        (lambda x: x[0].log_softmax(0), False),
        (lambda x: functional.l1_loss(x.sum(), x.mean()), True),
        (lambda x: functional.l1_loss(x, x), False),
        (lambda x: functional.dropout(x, 1.0), True),
        (lambda x: functional.dropout(x, 1.0, training=False), False),
        (lambda x: x.argsort(stable=True), True),
        (lambda x: x.argsort(), False),
        (lambda x: x.tensor_split(x.long()[0, :2] * 0 + 1)[0], True),
        (lambda x: x.tensor_split([1])[0], False),
        (lambda x: nn.functional.pad(x[None], (1, 1), mode="circular"), True),
    ],
)
def test_what_a_device_refuses(function, is_refused):
    if is_refused:
        with pytest.raises(Error, match="a device"):
            infer(function, X)
    else:
        infer(function, X)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "constant"])
def test_padding_of_what_is_trained(mode):
    padding = {"padding": 1, "padding_mode": mode.replace("constant", "zeros")}
    layers = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Conv1d(1, 1, 3, **padding))
    x = torch.ones(1, 1, 4)
    trained(layers[1:], x)  # a padded input has no gradient
    infer(layers, x)
    if mode in ("reflect", "replicate"):
        with pytest.raises(Error, match="PadGradOp"):
            trained(layers, x)
    else:
        trained(layers, x)


def test_dropout_is_the_identity_in_an_inference_model():
    x = torch.ones(2, 50)
    for layer in (nn.Dropout(), nn.Dropout1d(), lambda x: torch.dropout(x, 0.5, True)):
        assert torch.equal(infer(layer, x), x)
        assert "the identity in inference" in reports(layer, x)[0]
    assert not reports(nn.Dropout().eval(), x)
    assert (infer(nn.Dropout(inplace=True), x) == 0).any()


def test_dropout_drops_in_a_training_model():
    (gradient,) = gradients(
        lambda w: functional.dropout(w).sum(), weights=[torch.ones(50)]
    )
    assert set(gradient.tolist()) == {0.0, 2.0}


def test_a_random_number_passes_gradients_on():
    mean, spread = torch.zeros(3), torch.ones(3)
    first, second = gradients(
        lambda m, s: torch.normal(m, s).sum(), weights=[mean, spread]
    )
    assert first.tolist() == [1, 1, 1]
    assert len(set(second.tolist())) == 3


def test_an_index_without_dimensions_removes_the_dimension():
    device = infer(lambda x, i: x.index_select(1, i), X, torch.tensor(2).int())
    assert device.tolist() == [2, 5]


def after(x, change):
    change(x)
    return x + 0


# Arguments by name ------------------------------------------------------------------

PLACES = torch.tensor([[0, 1, 0]])

BY_NAME = {
    "one": (lambda x: torch.reciprocal(input=x), torch.reciprocal),
    "NumPy's": (
        lambda x: torch.amax(a=x, axis=1, keepdims=True),
        lambda x: torch.amax(x, 1, True),
    ),
    "of a method": (
        lambda x, i: x.scatter_reduce(dim=0, index=i, src=x, reduce="amax"),
        lambda x, i: x.scatter_reduce(0, i, x, "amax"),
    ),
    "of a function": (
        lambda x, i: torch.index_reduce(
            input=x, dim=0, index=i[0, :2], source=x, reduce="amin"
        ),
        lambda x, i: torch.index_reduce(x, 0, i[0, :2], x, "amin"),
    ),
    "in another order": (
        lambda x: torch.where(other=x, condition=x > 2, input=x * 3),
        lambda x: torch.where(x > 2, x * 3, x),
    ),
    "after a gap": (lambda x: x.clamp(max=2.0), lambda x: x.clamp(None, 2.0)),
    "of a form with fewer places": (
        lambda x: torch.var_mean(input=x, dim=1, keepdim=True)[1],
        lambda x: torch.var_mean(x, 1, keepdim=True)[1],
    ),
    "beside a constant": (
        lambda x: x * torch.bucketize(boundaries=x[0] * 1, input=x),
        lambda x: x * torch.bucketize(x, x[0] * 1),
    ),
    "of a move": (
        lambda x: x.to(
            device=x.device,
            dtype=x.dtype,
            non_blocking=False,
            copy=True,
            memory_format=torch.contiguous_format,
        ),
        lambda x: x.to(x.device, x.dtype, False, True),
    ),
    "of a size": (
        lambda x: x.new_zeros(size=(2, 3)) + x.view(size=(2, 3)),
        lambda x: x.new_zeros((2, 3)) + x.view(2, 3),
    ),
}


@pytest.mark.parametrize(("by_name", "by_place"), BY_NAME.values(), ids=BY_NAME)
def test_arguments_by_name_are_those_by_place(by_name, by_place):
    indices = [PLACES] * (by_name.__code__.co_argcount - 1)
    x = X + 1
    assert torch.equal(infer(by_name, x, *indices), infer(by_place, x, *indices))
    named, placed = (
        gradients(function, *indices, weights=[x]) for function in (by_name, by_place)
    )
    assert torch.equal(named[0], placed[0])
    assert named[0].any()


def add_to_first_row(x):
    x[0] += 1


@pytest.mark.parametrize(
    ("function", "x", "words"),
    [
        (lambda x: torch.zeros_like(x).copy_(x[0]), X, "shape of the source"),
        (lambda x: torch.zeros_like(x).copy_(x), X, ""),
        (lambda x: x.argsort(), X.int(), "bitonic"),
        (lambda x: after((x * 1), lambda y: y[0].add_(1)), X, "leaves the base"),
        (lambda x: after((x * 1), lambda y: y.t().mul_(2)), X, "leaves the base"),
        (lambda x: after((x * 1), lambda y: y.t().copy_(y.t())), X, "leaves the base"),
        (lambda x: after((x * 1), lambda y: y[0].copy_(y[1])), X, ""),
        (
            lambda x: after((x * 1), lambda y: y.chunk(2)[0].zero_()),
            X,
            "leaves the base",
        ),
        (lambda x: after((x * 1), lambda y: y.add_(1)), X, ""),
        (lambda x: after((x * 1).view(-1), lambda y: y.add_(1)), X, ""),
        (lambda x: after((x * 1), add_to_first_row), X, ""),
        (lambda x: after(x, lambda y: y[0].add_(1)), X, ""),
        (lambda x: x.sort(stable=True)[1], X.int(), ""),
    ],
)
def test_what_a_check_says(function, x, words):
    said = reports(function, x)
    assert (words in said[0]) if words else not said


def straight_through(w, x):
    y = w * x
    return y + (y.round() - y).data


def written_through_data(w, x):
    y = w * x
    y.data.mul_(2)
    return y * 1


def assigned(w, x):
    y = w * x
    y.data = y.detach().round()
    return y * 1


WAYS_OF_DATA = {
    "straight through": (straight_through, X * 0),  # the gradient of `round`
    "frozen": (lambda w, x: w.data * x, X),
    "written": (written_through_data, X * 2),
    "assigned": (assigned, X),
    "of a size": (lambda w, x: w * x.new_zeros(w.data.shape), X * 0),
}


@pytest.mark.parametrize("name", WAYS_OF_DATA)
def test_data_is_the_tensor_itself(name):
    function, expected = WAYS_OF_DATA[name]
    [gradient] = gradients(lambda w, x: function(w, x).sum(), X, weights=[X * 0.3])
    torch.testing.assert_close(gradient, expected)

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(X * 0.3)

        def forward(self, x):
            return function(self.weight, x)

    said = reports(Weighted(), X, trains=True)
    assert [text.split(":")[0] for text in said] == {
        "assigned": ["`data` (x isn't a weight)"],
        "of a size": [],
    }.get(name, ["`data` (training and x requires a gradient)"])


def test_an_assignment_to_data_is_lost_in_inference_too():
    def shifted(x):
        y = x * 1
        y.data = y + 1
        return y * 2

    torch.testing.assert_close(infer(shifted, X), X * 2)


def test_training_does_not_hear_of_requires_grad_in_forward():
    class Frozen(nn.Linear):
        def forward(self, x):
            self.weight.requires_grad_(False)
            return super().forward(x).requires_grad_(True)

    assert trained(Frozen(3, 2), X) == {"weight", "bias"}
