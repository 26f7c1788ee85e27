# SPDX-License-Identifier: Apache-2.0
"""Arguments: ordered by the signature, then held to the call that was compiled."""

import collections
import functools
import inspect
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._datasets import Pair, PairParser
from tests.emulator._models import Function, make_options
from tests.strategies import examples

Point = collections.namedtuple("Point", ["x", "y"])
ONE = torch.ones(2)
TWO = torch.full((2,), 2.0)


def model_of(forward):
    """A model with the signature of `forward`, and the calls that it gets."""
    module, seen = nn.Module(), []

    @functools.wraps(forward)
    def noting(*args, **kwargs):
        seen.append((args, kwargs))

    module.forward = noting
    return poptorch.inferenceModel(module), seen


def parse(forward, *args, **kwargs):
    executor, seen = model_of(forward)
    executor.compile(*args, **kwargs)
    return seen[-1]


class Echo(nn.Module):
    def forward(self, first, second=None, *rest, key=None, **others):
        leaves = [first, second, rest, key, others]
        return [t * 2 for t in poptorch.flattenTensorStructure(leaves)]


def plain(a, b, c=3):
    pass


def variadic(a, *rest, b, c=3):
    pass


def open_ended(a, b=2, **others):
    pass


# Order ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1, 2), {}), ((1,), {"b": 2}), ((), {"b": 2, "a": 1})]
)
def test_named_arguments_become_positional_and_defaults_are_filled_in(args, kwargs):
    assert parse(plain, *args, **kwargs) == ((1, 2, 3), {})


def test_names_after_a_variadic_argument_stay_names():
    assert parse(variadic, 1, 8, 9, b=2) == ((1, 8, 9), {"b": 2, "c": 3})
    assert parse(variadic, 1, b=2, c=4) == ((1,), {"b": 2, "c": 4})


def test_other_names_go_to_the_variadic_keywords():
    assert parse(open_ended, 1, z=9) == ((1, 2), {"z": 9})


@pytest.mark.parametrize(
    ("forward", "args", "kwargs", "error", "message"),
    [
        (plain, (1, 2, 3, 4), {}, AssertionError, "Too many arguments .*but got 4"),
        (plain, (1,), {"z": 2}, AssertionError, "z is not a valid parameter"),
        (plain, (1,), {"a": 1}, AssertionError, "a was passed more than once"),
        (plain, (1,), {}, poptorch.Error, "Mandatory parameter b missing"),
        (variadic, (1,), {}, poptorch.Error, "Mandatory parameter b missing"),
    ],
)
def test_other_arguments_are_refused(forward, args, kwargs, error, message):
    with pytest.raises(error, match=message):
        parse(forward, *args, **kwargs)


def test_strided_tensors_are_made_contiguous_with_one_warning(caplog):
    strided = torch.arange(6.0).reshape(2, 3).T
    executor = poptorch.inferenceModel(Echo())
    for _ in range(2):
        results = executor(strided, [(strided,)], key={"k": strided})
        for result in results:
            assert torch.equal(result, strided * 2)
    assert caplog.text.count("not contiguous") == 1


# Calls that are plainly like the compiled one -----------------------------------


def many(a, b=None, c=3, d=()):
    pass


VALUES = st.sampled_from(
    [
        None,
        3,
        (),
        ONE,
        TWO,
        torch.ones(3),
        torch.ones(2, dtype=torch.int32),
        torch.ones(2, 2)[:, 0],
        nn.Parameter(ONE),
        [ONE],
        (ONE, 3),
    ]
)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.sampled_from([plain, variadic, open_ended, many]),
    st.lists(VALUES, min_size=1, max_size=4),
    st.lists(VALUES, max_size=4),
    st.booleans(),
)
def test_a_call_is_taken_by_position_as_it_is_by_name(forward, first, later, is_same):
    """Calls without names take a short way where they can."""
    signature = inspect.signature(forward)
    later = tuple(first if is_same else later)
    try:
        names = signature.bind(*later).arguments
        signature.bind(*first)
    except TypeError:
        assume(False)
    assume(len(names) == len(later))  # else some can't be named

    def outcome(*args, **kwargs):
        module = nn.Module()
        module.forward = functools.wraps(forward)(
            lambda *a, **k: [t * 2 for t in poptorch.flattenTensorStructure((a, k))]
        )
        executor = poptorch.inferenceModel(module)
        executor.compile(*first)
        try:
            return [result.tolist() for result in executor(*args, **kwargs)]
        except (poptorch.Error, AssertionError) as error:
            return str(error)
        finally:
            executor.destroy()

    try:
        by_name = outcome(**names)
    except TypeError:
        assume(False)
    assert outcome(*later) == by_name
    if is_same:
        assert isinstance(by_name, list)


# Later calls ------------------------------------------------------------------


def check(compiled, later):
    executor = poptorch.inferenceModel(Echo())
    executor.compile(*compiled[0], **compiled[1])
    return executor(*later[0], **later[1])


def call(*args, **kwargs):
    return args, kwargs


MISMATCHES = [
    (
        call(ONE, 1, 2),
        call(ONE, 1),
        "Number of positional arguments mismatch: expected 3 arguments but got 2.",
    ),
    (call(ONE, ONE), call(ONE, 1.0), "Type mismatch for second: expected .*Tensor"),
    (call(ONE, 1), call(ONE, True), "Type mismatch for second: expected .*int.*bool"),
    (
        call(ONE, Point(1, 2)),
        call(ONE, (1, 2)),
        "Type mismatch for second: expected .*Point.*tuple",
    ),
    (
        call(ONE, (1, ONE)),
        call(ONE, (1, ONE, 2)),
        "Length mismatch for second: expected 2 elements but got 3.",
    ),
    (
        call({"a": ONE, "b": 1}),
        call({"a": ONE, "d": 1, "c": 1}),
        r"Keys mismatch for first: Unexpected arguments: c, d\. Missing arguments: b\.",
    ),
    (
        call(ONE),
        call(ONE.int()),
        "Data type mismatch for first: expected torch.float32 but got torch.int32.",
    ),
    (
        call(ONE),
        call(torch.ones(3)),
        r"Shape mismatch for first: expected torch.Size\(\[2\]\) but got torch.*\[3\]",
    ),
    (call(ONE, 1), call(ONE, 2), "Value mismatch for second: expected 1 but got 2."),
    (
        call(ONE, (ONE, ("text", 1))),
        call(ONE, (ONE, ("other", 1))),
        r"Value mismatch for second\[1\]\[0\]: expected text but got other.",
    ),
    (call(ONE, 1, 2, 3), call(ONE, 1, 2, 4), r"Value mismatch for \*rest\[1\]"),
    (call(ONE, key=1), call(ONE, key=2), "Value mismatch for key: expected 1"),
    (call(ONE, z=1), call(ONE, y=1), "Keys mismatch for named arguments: .*y.*z"),
    (
        call(ONE, [ONE, 1]),
        call(ONE, [torch.ones(3), 1]),
        r"Shape mismatch for second\[0\]",
    ),
]


@pytest.mark.parametrize(("compiled", "later", "message"), MISMATCHES)
def test_what_differs_from_the_compiled_call_is_named(compiled, later, message):
    with pytest.raises(poptorch.Error, match=message) as caught:
        check(compiled, later)
    assert "Wrap the model again, or call destroy()" in str(caught.value)


@pytest.mark.parametrize(
    ("compiled", "later"),
    [
        (call(ONE, 1), call(TWO, 1)),
        (call(ONE, second=1), call(TWO, 1)),
        (call(ONE), call(TWO, None)),
        (call(ONE, (1, "text", None)), call(TWO, (1, "text", None))),
        (call(ONE, [ONE, 1]), call(TWO, [ONE, 2])),  # beside a tensor in a list: unseen
        (call({"a": ONE, "b": TWO}), call({"b": TWO, "a": TWO})),
    ],
)
def test_what_agrees_passes(compiled, later):
    assert check(compiled, later)[0].tolist() == [4, 4]


def test_a_default_tensor_is_an_input():
    class Default(nn.Module):
        def forward(self, x, y=torch.ones(2)):  # noqa: B008
            return x + y

    executor = poptorch.inferenceModel(Default())
    assert executor(ONE).tolist() == [2, 2]
    assert executor(ONE, TWO).tolist() == [3, 3]


def test_custom_types_are_cut_leaf_by_leaf_and_come_back():
    class Model(nn.Module):
        def forward(self, pair):
            assert pair.left.shape == (2,)
            return Pair(pair.left * 2, pair.right)

    poptorch.registerCustomArgParser(Pair, PairParser())
    try:
        options = poptorch.Options().deviceIterations(3)
        executor = poptorch.inferenceModel(Model(), options)
        for _ in range(2):
            out = executor(Pair(torch.arange(6.0), torch.ones(3)))
            assert out.left.tolist() == [0, 2, 4, 6, 8, 10]
            assert out.right.tolist() == [1, 1, 1]
    finally:
        poptorch.registerCustomArgParser(Pair, None)


# Batches and types ------------------------------------------------------------


def test_every_input_is_a_multiple_of_all_factors():
    executor = poptorch.inferenceModel(Echo(), make_options(D=2, R=3))
    with pytest.raises(AssertionError, match="Invalid batch dimension") as caught:
        executor.compile(torch.ones(6), torch.ones(8))
    for part in (
        "(8,)",
        "device iterations (2)",
        "groups (3",
        "accumulation (1)",
        "= 6",
    ):
        assert part in str(caught.value)
    executor.compile(torch.ones(6), torch.ones(12))


def test_a_number_is_an_input_of_one_micro_batch():
    out = poptorch.inferenceModel(Echo())(torch.tensor(3.0))
    assert out[0].shape == ()
    for options in (make_options(D=2), make_options(R=2)):
        with pytest.raises(AssertionError, match="Invalid batch dimension"):
            poptorch.inferenceModel(Echo(), options)(torch.tensor(3.0))


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_empty_tensors_are_refused(shape):
    # PopTorch's own words, for code that looks at them (`Tensor.cpp`).
    words = f"Zero-sized tensors are unsupported (Got shape {list(shape)})"
    with pytest.raises(poptorch.Error, match=re.escape(words)):
        poptorch.inferenceModel(Echo())(torch.ones(shape))


def test_weights_without_elements_are_refused():
    module = Echo()
    module.register_buffer("empty", torch.ones(0, 2))
    with pytest.raises(poptorch.Error, match=r"\[0, 2\]\): the weight empty"):
        poptorch.inferenceModel(module)(ONE)
    module.register_buffer("empty", torch.ones(0, dtype=torch.int64))  # a constant
    assert poptorch.inferenceModel(module)(ONE)[0].tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.parametrize("iterations", [1, 2])
def test_sparse_tensors_are_refused(layout, iterations):
    name = "to_sparse" if layout == "coo" else f"to_sparse_{layout}"
    to_sparse, x = getattr(torch.Tensor, name), torch.eye(4)
    graph = Function(lambda self, x: torch.mm(self.edges, x))
    graph.register_buffer("edges", to_sparse(x))
    programs = [
        (Function(lambda _, x: to_sparse(x).to_dense()), x, f"the result of `{name}`"),
        (Function(lambda _, x: torch.mm(x, x)), to_sparse(x), "an input"),
        (graph, x, "the weight edges"),
    ]
    for module, argument, what in programs:
        model = poptorch.inferenceModel(module, make_options(D=iterations))
        with pytest.raises(poptorch.Error) as caught:
            model(argument)
        assert f"type torch.sparse_{layout} ({what})" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_types_without_a_counterpart_are_refused(dtype):
    with pytest.raises(poptorch.Error, match=f"Unsupported input type {dtype}"):
        poptorch.inferenceModel(Echo())(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.uint8, torch.uint8),
        (torch.int8, torch.int8),
        (torch.int16, torch.int16),
        (torch.int32, torch.int32),
        (torch.int64, torch.int32),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bool, torch.bool),
    ],
)
def test_types_come_back_as_a_device_returns_them(given, returned):
    out = poptorch.inferenceModel(nn.Identity())(torch.ones(2, dtype=given))
    assert out.dtype == returned
    assert out.tolist() == [1, 1]


def test_integers_keep_32_bits_of_their_value():
    big = torch.tensor([2**31, -(2**31) - 1, 5, 2**40 + 3])
    result = poptorch.inferenceModel(nn.Identity())(big)
    assert result.dtype == torch.int32
    assert result.tolist() == [-(2**31), 2**31 - 1, 5, 3]


def test_float64_is_computed_in_float32():
    x = torch.tensor([1e8], dtype=torch.float64)
    module = nn.Identity()
    module.forward = lambda x: (x + 1) - x
    assert poptorch.inferenceModel(module)(x).item() == 0
