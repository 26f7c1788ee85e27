# SPDX-License-Identifier: Apache-2.0
"""Indexing, gathering and scattering as a device computes them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit.emulator as poptorch
from tests.emulator.operators._programs import gradients, infer, reports

X = torch.randn(3, 4)
IMAGES = torch.randn(2, 3, 4, 5)
TWO = torch.tensor([2, 0])
PAIRS = torch.tensor([[0, 1, 2], [2, 0, 1]])


def assigned(index, value):
    """A function that assigns to `x[index]`; a text of the index, of `i`, `m`, `v`."""
    code = compile(f"x = x.clone()\nx[{index}] = {value}", "<assignment>", "exec")

    def assign(x, *given):
        names = {"x": x, **dict(zip("iv", given)), "torch": torch}
        exec(code, names)
        return names["x"]

    return assign


def put(x, index, value):
    """An assignment by loops over flat positions, with the values in turn."""
    result = x.clone().reshape(-1)
    for place, number in zip(index, value):
        result[place] = number
    return result.reshape(x.shape)


REFUSED = [
    (lambda x: x[[0, -1]], (X,), "doesn't wrap it"),
    (lambda x: x[:, torch.tensor([0, -1])], (X,), "doesn't wrap it"),
    (assigned("[0, -1]", "1.0"), (X,), "doesn't wrap it"),
    (assigned("x > 0", "v"), (torch.ones(3, 4), TWO, torch.arange(12.0)), "Expand"),
    (assigned("i, i", "v"), (IMAGES, TWO // 2, torch.ones(2, 1, 5)), "Expand them"),
    (lambda x: x.clone().random_(5), (X,), "reads inputs 1 and 2"),
    (lambda x: x.clone().random_(to=5), (X,), "reads inputs 1 and 2"),
    (lambda x: functional.unfold(x, 2), (IMAGES[0],), "internal error"),
    (
        lambda x, i: x.scatter_add(1, i[..., None].expand(-1, -1, 4), x[:, :3]),
        (IMAGES[..., :4].mean(1), torch.tensor([[0, 1, 2], [1, 1, 0]])),
        "Partial broadcasting of indices",
    ),
]


@pytest.mark.parametrize(("function", "tensors", "fragment"), REFUSED)
def test_what_a_device_refuses(function, tensors, fragment):
    assert fragment in reports(function, *tensors)[0]
    with pytest.raises(poptorch.Error, match=fragment):
        infer(function, *tensors)


def test_one_value_for_many_rows_is_refused():
    def assign(x, i, v):
        return x.index_put((i,), v)

    given = X, TWO, torch.ones(1, 4)
    assert "Failed to expand 'indices' shape" in reports(assign, *given)[0]
    assert not reports(assign, X, TWO, torch.ones(4))


COMPUTED = [
    # Booleans beside other indices are the numbers 0 and 1.
    (
        assigned(":, i", "0.0"),
        (X, torch.tensor([False, False, False, True])),
        torch.cat([torch.zeros(3, 2), X[:, 2:]], 1),
    ),
    # Values for a mask are selected in place, not in turn.
    (
        assigned("i", "v"),
        (X[:2, :2], torch.tensor([[True, False], [False, True]]), TWO.float()),
        torch.tensor([[2.0, X[0, 1]], [X[1, 0], 0.0]]),
    ),
    # Positions with the indexed dimension first, the values with it second.
    (
        assigned(":, i", "v"),
        (IMAGES[..., 0], PAIRS, torch.arange(48.0).view(2, 2, 3, 4)),
        put(
            IMAGES[..., 0],
            [
                row * 12 + index * 4 + column
                for index in PAIRS.view(-1).tolist()
                for row in (0, 1)
                for column in range(4)
            ],
            range(48),
        ),
    ),
    (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (X, TWO, torch.ones(2, 4)),
        torch.stack([torch.ones(4), X[1], torch.ones(4)]),
    ),
    (
        lambda x, i: x.index_fill(-1, i, 7.0),
        (X, TWO),
        torch.stack([torch.full((4,), 7.0), X[1], torch.full((4,), 7.0)]),
    ),
    (
        lambda x, i: x.gather(1, i.view(1, 1, 1).expand(1, 1, 5)),
        (IMAGES[:1, 0], torch.tensor(2)),
        IMAGES[:1, 0, 2],
    ),
    (
        lambda x, i: x.gather(0, i[:, None].expand(-1, 2)),
        (X, TWO),
        X[TWO],
    ),
]


@pytest.mark.parametrize(("function", "tensors", "expected"), COMPUTED)
def test_what_a_device_computes(function, tensors, expected):
    torch.testing.assert_close(infer(function, *tensors), expected)
    assert reports(function, *tensors)


AS_TORCH = [
    (lambda x: x[[2, 0]], X),
    (lambda x, i: x[:, i], X, TWO),
    (lambda x: x[-1] + x[:, -1:].sum(), X),
    (assigned("i", "v"), X, TWO, torch.randn(2, 4)),
    (assigned("[2, 0]", "v"), X, TWO, torch.randn(4)),
    (assigned("i", "v"), X, TWO, torch.randn(1, 2, 4)),
    (assigned(":, i", "v"), X, TWO, torch.randn(3, 2)),
    (assigned("1:, i", "v"), X, TWO, torch.randn(2, 2)),
    (assigned("0, ..., i", "v"), IMAGES, TWO, torch.randn(3, 4, 2)),
    (assigned("i, i", "v"), IMAGES[:, :2], TWO // 2, torch.randn(2, 4, 5)),
    (assigned("i, :, i", "v"), IMAGES[..., 0], TWO // 2, torch.randn(2, 3)),
    (assigned("i", "v"), X, PAIRS, torch.randn(2, 3, 4)),
    (assigned("..., i", "v"), X, PAIRS, torch.randn(3, 2, 3)),
    (assigned(":, i", "5.0"), IMAGES, PAIRS),
    (assigned("x > 0", "0.0"), X),
    (assigned("i", "v"), X, torch.tensor([True, False, True]), torch.randn(4)),
    (lambda x, i: x.index_fill(1, i, 7.0), X, TWO),
    (lambda x, i: x.gather(0, i[:, None].expand(-1, 4)), X, TWO),
    (lambda x, i: x.gather(1, i[:, None].expand(-1, 2)), X[:2], TWO),
    (lambda x, i: x.scatter_add(0, i[:, None].expand(-1, 4), x[:2]), X, TWO),
    (lambda x, i: x.scatter_add(1, i, x[:, :1]), X, TWO[:1].expand(3, 1)),
    (lambda x: functional.unfold(x, 2), IMAGES),
    (lambda x: x.unfold(1, 2, 1), IMAGES[0]),
]


@pytest.mark.parametrize(("function", "tensors"), [(f, x) for f, *x in AS_TORCH])
def test_what_a_device_computes_as_torch_does(function, tensors):
    torch.testing.assert_close(infer(function, *tensors), function(*tensors))
    assert not reports(function, *tensors)


def test_counts_beyond_the_last_bin():
    x = torch.tensor([7, 1, 2, 9])
    counts = infer(lambda x: x.bincount(minlength=5), x)
    assert counts.tolist() == [0, 1, 1, 2, 0]  # large ones in bin len(x) - 1
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0])
    counts = infer(lambda x, w: torch.bincount(x, w, minlength=3), x, weights)
    assert counts.tolist() == [0, 1, 2]


class Scattering(nn.Module):
    """Scatters trained rows."""

    def __init__(self, scatter):
        super().__init__()
        self.source, self.scatter = nn.Parameter(torch.rand(2, 5)), scatter

    def forward(self, x, index):
        return self.scatter(x, index, self.source)


REPORTED = [
    (lambda x, i, s: x.scatter_add(1, i, s), "a row length taken from index"),
    (lambda x, i, s: x.scatter_reduce(1, i, s, "prod"), "grad * out / src"),
    (
        lambda x, i, s: torch.zeros(4, 5).scatter_add(1, i, s).sum() + x.sum(),
        "drops self",
    ),
]


@pytest.mark.parametrize(("scatter", "fragment"), REPORTED)
def test_what_a_check_says_of_scattering(scatter, fragment):
    given = torch.rand(4, 5), torch.zeros(2, 5, dtype=torch.int64)
    found = reports(Scattering(scatter), *given, trains=True)
    assert any(fragment in message for message in found)
    same = torch.rand(2, 5), given[1]
    plain = Scattering(lambda x, i, s: x.scatter_add(1, i, s))
    assert not reports(plain, *same, trains=True)


@pytest.mark.parametrize(
    ("function", "tensors", "fragment"),
    [
        (assigned("i", "v"), (X, TWO, torch.ones(2, 1)), "column 0 only"),
        (lambda x: torch.bucketize(1.5, x), (torch.arange(3.0),), "a tensor"),
        (
            lambda x, i: x.scatter_reduce(0, i, x, "mean"),
            (torch.tensor([4, 2]), torch.tensor([0, 0])),
            "perhaps refused",
        ),
        (
            lambda x, i: poptorch.dynamic_slice(x, -1, i, 2, 1),
            (X, torch.tensor([2])),
            "negative dim",
        ),
    ],
)
def test_what_is_reported_alone(function, tensors, fragment):
    assert fragment in reports(function, *tensors)[0]
    infer(function, *tensors)


SOURCE = torch.tensor([2.0, 3.0, 3.0, 1.0, 1.0])
GROUPS = torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(
    ("includes_self", "of_source", "of_self"),
    [(True, [0, 1, 1, 0, 0], [1, 1, 1]), (False, [0, 1, 1, 1, 1], [0, 0, 1])],
)
@pytest.mark.parametrize("name", ["scatter_reduce", "index_reduce", "index_reduce_"])
def test_gradients_of_equal_extremes(includes_self, of_source, of_self, name):
    def largest(source, own, index):
        function = getattr(own.clone(), name)
        return function(0, index, source, "amax", include_self=includes_self).sum()

    own = torch.tensor([3.0, 5.0, 0.0])
    found = gradients(largest, GROUPS, weights=[SOURCE, own])
    assert [gradient.tolist() for gradient in found] == [of_source, of_self]


@pytest.fixture(scope="module")
def operators():
    """Operators as torch_scatter and torch_spline_conv define them."""
    scatter = torch.library.Library("torch_scatter", "DEF")
    splines = torch.library.Library("torch_spline_conv", "DEF")
    scatter.define(
        "scatter_mul(Tensor s, Tensor i, int d, Tensor? o, int? n) -> Tensor"
    )
    splines.define("spline_basis(Tensor p, Tensor k, Tensor o, int d) -> Tensor")

    def multiply(src, index, dim, out, size):
        ones = src.new_ones(index.unique().numel() if size is None else size)
        return ones.scatter_reduce(dim, index, src, "prod")

    def basis(pseudo, kernel, is_open, degree):
        return pseudo * degree

    scatter.impl("scatter_mul", multiply, "CompositeImplicitAutograd")
    splines.impl("spline_basis", basis, "CompositeImplicitAutograd")
    yield torch.ops.torch_scatter.scatter_mul, torch.ops.torch_spline_conv.spline_basis
    del scatter, splines


def test_products_of_groups_have_a_size(operators):
    multiply, _ = operators
    x, groups = torch.tensor([2.0, 3.0, 4.0]), torch.tensor([0, 0, 1])
    assert (
        "give dim_size"
        in reports(lambda x, i: multiply(x, i, 0, None, None), x, groups)[0]
    )
    assert infer(lambda x, i: multiply(x, i, 0, None, 2), x, groups).tolist() == [6, 4]
    trained = Scattering(lambda x, i, s: multiply(s[0, :3] + x, i, 0, None, 2))
    assert "0 * inf" in reports(trained, x, groups, trains=True)[0]


def test_nothing_before_splines_trains(operators):
    _, basis = operators
    assert "between 0 and 3" in reports(lambda x: basis(x, x, x, 4), X)[0]
    (gradient,) = gradients(lambda w: basis(w, w, w, 2) + w, weights=[X])
    torch.testing.assert_close(gradient, 2 * 3 * X / X.numel())


@pytest.mark.parametrize(
    ("index", "is_refused"),
    [
        ((torch.tensor([[0], [1]]), torch.tensor([0, 2])), True),
        (([0], [1, 2]), True),
        ((torch.tensor([[0, 1]]), torch.tensor([[2], [0]])), True),
        (([1, 0], torch.tensor([1])), False),
        ((torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 2])), False),
        ((slice(None), [0, 2]), False),
        (torch.tensor([[True, False, True], [False, True, True]]), False),
    ],
)
def test_tensors_of_an_index_that_broadcast_each_other_are_refused(index, is_refused):
    def read(x):
        return x[index]

    def write(x):
        y = x * 1
        y[index] = 5.0
        return y

    x = torch.arange(6.0).reshape(2, 3)
    for function in (read, write) if is_refused else (write,):
        said = any("torch.broadcast_tensors" in text for text in reports(function, x))
        assert said == is_refused
