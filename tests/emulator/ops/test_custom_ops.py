# SPDX-License-Identifier: Apache-2.0
"""`custom_op`: zeros on the host; on the device what stands in for the C++."""

import sys

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function, X, run, wrap


def call(x=X, attributes=None):
    return poptorch.custom_op(
        [x], "Op", "ops.test", 1, example_outputs=[x, x.int()], attributes=attributes
    )


def test_the_host_gives_zeros_like_the_examples():
    first, second = call()
    assert torch.equal(first, torch.zeros_like(X))
    assert torch.equal(second, torch.zeros_like(X.int()))


@pytest.mark.parametrize(
    ("attributes", "fragment"),
    [
        ({1: 1.0}, "All attribute keys must be strings"),
        ({"a": None}, "Attribute values must be floats, ints, strings"),
        ({"a": [1, {}]}, "Attribute values must be floats, ints, strings"),
        ({"a": [1.0, 2]}, "must all be the same"),
        ({"a": "b\u1f00"}, "b\u1f00 contains non-ASCII characters"),
        ({"a": ["b\u1f00"]}, "b\u1f00 contains non-ASCII characters"),
        ({"b\u1f00": 1}, "b\u1f00 contains non-ASCII characters"),
    ],
)
def test_other_attributes_are_refused(attributes, fragment):
    with pytest.raises(ValueError, match=fragment):
        call(attributes=attributes)


@pytest.mark.parametrize(
    ("attributes", "fragment"),
    [
        ({"a": sys.float_info.max}, r"1.79769e\+308 is too high for a Popart float"),
        ({"a": [1.0, -1e300]}, r"-1e\+300 is too low for a Popart float"),
        ({"a": []}, "Attribute 'a' is empty"),
        ({"a": 1.0}, "ops.test::Op .* can't be emulated"),
        (None, "ops.test::Op .* can't be emulated"),
    ],
)
def test_compiling_is_refused_without_a_stand_in(attributes, fragment):
    model = poptorch.inferenceModel(Function(lambda _, x: call(x, attributes)))
    with pytest.raises(poptorch.Error, match=fragment):
        model(X)


# Stand-ins ---------------------------------------------------------------------


@pytest.fixture
def register():
    """Register operations of the domain `ops.test` for the time of a test."""
    names = []

    def register_one(name, function):
        names.append(name)
        poptorch.register_custom_op(name, "ops.test", function)

    yield register_one
    for name in names:
        poptorch.register_custom_op(name, "ops.test", None)


def call_op(name, inputs, examples, attributes=None, domain="ops.test"):
    return poptorch.custom_op(inputs, name, domain, 1, examples, attributes)


def test_the_refusal_says_how_to_register_one():
    def forward(x):
        return call_op("Cube", [x], [x], {"alpha": 1.0})

    with pytest.raises(poptorch.Error) as info:
        run(forward, X)
    assert "`ipufit.emulator.register_custom_op('Cube', 'ops.test', " in str(info.value)
    assert "def function(*inputs, alpha)" in str(info.value)


def test_a_registered_function_runs_with_the_attributes_by_name(register):
    """PopTorch, `tests/custom_ops_test.py`: two inputs, two outputs, a float."""

    def scaled(x, y, alpha, text):
        assert text == "t"
        return alpha * x + y, (x > 0).int()

    register("Scaled", scaled)
    first, second = run(
        lambda x: call_op(
            "Scaled", [x, x * 2], [x, x.int()], {"alpha": 3.0, "text": "t"}
        ),
        X,
    )
    torch.testing.assert_close(first, X * 5)
    assert torch.equal(second, (X > 0).int())


def test_it_runs_once_for_each_micro_batch_in_order(register):
    seen = []

    def noted(x):
        seen.append(x.tolist())
        return x * 2

    register("Noted", noted)
    options = poptorch.Options().deviceIterations(3)
    model = Function(lambda _, x: call_op("Noted", [x], [x])[0] + 1)
    executor = poptorch.inferenceModel(model, options)
    executor.compile(torch.arange(6.0))
    seen.clear()
    result = executor(torch.arange(6.0))
    assert result.tolist() == [1, 3, 5, 7, 9, 11]
    assert seen == [[0, 1], [2, 3], [4, 5]]


class Doubled(torch.autograd.Function):
    """Its gradient is three times what it should be, to see whether it is used."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 6 * gradient


def weight_times(self, x):
    (y,) = call_op("Doubled", [self.weight * x], [x])
    return poptorch.identity_loss(y * 1, "sum")


@pytest.mark.parametrize(
    ("function", "gradient"), [(lambda x: 2 * x, 2), (Doubled.apply, 6)]
)
def test_gradients_are_the_functions_own(register, function, gradient):
    register("Doubled", function)
    model = Function(weight_times, weight=nn.Parameter(torch.ones(1)))
    _, executor = wrap(model, lr=0.5)
    assert executor(torch.ones(1)).item() == 2
    executor.copyWeightsToHost()
    assert model.weight.item() == 1 - 0.5 * gradient


def averaged(self, x, factor):
    """graphcore/examples, `vision/dino/pytorch/core/dino.py`: `ExpMovAvg`."""
    call_op("ExpMovAvg", [x, self.average, factor], [x])
    return self.average + 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_may_change_its_inputs(register, dtype):
    def average(new, old, factor):
        old.copy_((old.float() * factor + new.float() * (1 - factor)).to(old.dtype))
        return old

    register("ExpMovAvg", average)
    executor = poptorch.inferenceModel(
        Function(averaged, buffers={"average": torch.zeros(2)}).to(dtype)
    )
    x, factor = torch.ones(2, dtype=dtype), torch.tensor([0.5])
    results = [executor(x, factor)[0].item() for _ in range(3)]
    assert results == [0.5, 0.75, 0.875]


@pytest.mark.parametrize(
    ("returned", "fragment"),
    [
        (lambda x: x[0], r"returns torch.float32 of shape \(6,\), but example_out"),
        (lambda x: x.half(), "returns torch.float16 of shape"),
        (lambda x: (x, x), r"float32 of shape \(4, 6\), torch.float32"),
        (lambda x: (), "returns nothing, but"),
        (lambda x: 3, "returns int, but"),
    ],
)
def test_other_outputs_than_the_examples_are_refused(register, returned, fragment):
    register("Other", returned)
    with pytest.raises(poptorch.Error, match=fragment):
        run(lambda x: call_op("Other", [x], [x]), X)


# PopTorch's own ------------------------------------------------------------------


def call_own(name, inputs, example, attributes=None):
    return call_op(name, inputs, [example], attributes, "poptorch.custom_ops")[0]


def gather_last(data, index):
    """As DeBERTa of optimum-graphcore calls it."""
    target = torch.zeros_like(index).to(data.dtype)
    return call_own("FastGatherLastDim", [data, index], target, {"axis": -1})


@pytest.mark.parametrize("columns", [6, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gathering_along_the_last_dimension(columns, dtype):
    """PopTorch, `tests/tensor_ops_test.py::test_fastgather_3dim`."""
    data = torch.randn(5, 2, 6).to(dtype)
    index = torch.randint(0, 6, (5, 2, columns))
    expected = torch.gather(data, -1, index)
    assert torch.equal(run(gather_last, data, index), expected)
    assert torch.equal(run(gather_last, data, index.int()), expected)


class Gathered(nn.Module):
    def __init__(self, gather):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 24).reshape(4, 6))
        self.gather = gather

    def forward(self, index):
        return poptorch.identity_loss(self.gather(self.weight, index) ** 2, "sum")


def test_gathered_elements_get_their_gradients():
    weights = []
    for gather in (gather_last, lambda data, index: torch.gather(data, -1, index)):
        model = Gathered(gather)
        _, executor = wrap(model, lr=0.1)
        executor(torch.tensor([[0, 0, 5], [1, 2, 3], [4, 4, 4], [0, 1, 0]]))
        executor.copyWeightsToHost()
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize(
    ("data", "index", "fragment"),
    [
        (torch.ones(3, 4), torch.zeros(4), "do not have same rank"),
        (torch.ones(3, 4), torch.zeros(1, 4), "same dimensions .* except for last"),
        (torch.ones(3, 4).int(), torch.zeros(3, 4), "must be float32 or float16"),
        (torch.ones(3, 4), torch.zeros(3, 4).short(), "and Index int32"),
    ],
)
def test_what_cannot_be_gathered_is_refused(data, index, fragment):
    """PopTorch, `FastGatherLastDim.cpp`."""
    index = index.long() if index.is_floating_point() else index
    with pytest.raises(poptorch.Error, match=fragment):
        run(gather_last, data, index)


@pytest.mark.parametrize(
    ("name", "attributes", "settings"),
    [
        ("TorchSoftplus", None, {"beta": 1.0, "threshold": 1.0}),
        ("TorchSoftplus", {"beta": 2.0, "threshold": 3.0}, None),
    ],
)
def test_softplus_is_linear_above_one(name, attributes, settings):
    result = run(lambda x: call_own(name, [x], x, attributes), X)
    expected = nn.functional.softplus(X, **(settings or attributes))
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("align_corners", [0, 1])
def test_upsampling(align_corners):
    image = torch.randn(1, 2, 3, 4)
    larger = torch.zeros(1, 2, 6, 8)

    def forward(x):
        attributes = {"scaling_factor": 2.0, "align_corners": align_corners}
        return call_own("UpsampleBilinear2d", [x], larger, attributes)

    expected = nn.functional.interpolate(
        image, scale_factor=2, mode="bilinear", align_corners=bool(align_corners)
    )
    torch.testing.assert_close(run(forward, image), expected)


def embedded(self, index):
    example = torch.zeros(len(index), 2)
    inputs = [self.weight, index]
    rows = call_own("Embedding", inputs, example, {"padding_idx": 1})
    return poptorch.identity_loss(rows, "sum")


def test_padding_gets_no_gradient():
    model = Function(embedded, weight=nn.Parameter(torch.ones(3, 2)))
    _, executor = wrap(model)
    assert executor(torch.tensor([0, 1, 1])).item() == 6
    executor.copyWeightsToHost()
    assert model.weight.tolist() == [[0, 0], [1, 1], [1, 1]]
