# SPDX-License-Identifier: Apache-2.0
"""Strict mode: operators that PopTorch doesn't compile are refused."""

import contextlib
import inspect
import re

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import Options
from ipufit.emulator.core.operators import newer_names
from ipufit.emulator.core.survey import survey
from tests.emulator import _models
from tests.emulator._models import Function, Marked

F = nn.functional
X = torch.linspace(0.1, 1.0, 16).reshape(4, 4)


@pytest.fixture
def _strict(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_STRICT", "1")


def strictly(function, **attributes):
    return _models.run(function, X, **attributes)


def cholesky(x):
    return torch.linalg.cholesky(x @ x.T + torch.eye(4).to("ipu"))


def looped(x):
    return poptorch.for_loop(2, lambda y: y.lgamma(), [x])[0]


UNSUPPORTED = [
    (lambda x: torch.fft.rfft(x).abs(), "aten::_fft_r2c", "torch.fft.rfft"),
    (lambda x: torch.linalg.svd(x)[1], "aten::_linalg_svd", "torch.linalg.svd"),
    (cholesky, "aten::linalg_cholesky_ex", "torch.linalg.cholesky"),
    (lambda x: torch.searchsorted(x, x), "aten::searchsorted", "torch.searchsorted"),
    (lambda x: x.lgamma(), "aten::lgamma", "torch.Tensor.lgamma"),
    (nn.AdaptiveMaxPool1d(2), "aten::adaptive_max_pool2d", "adaptive_max_pool1d"),
    (lambda x: torch.quantile(x, 0.5), "aten::lerp", "torch.quantile"),  # is composed
    (looped, "aten::lgamma", "torch.Tensor.lgamma"),
]


@pytest.mark.parametrize(("function", "operator", "written"), UNSUPPORTED)
def test_an_unsupported_function_is_refused_by_its_names(
    function, operator, written, monkeypatch, caplog
):
    caplog.clear()
    assert isinstance(strictly(function), torch.Tensor)  # it isn't strict yet
    [warning] = [one for one in _models.said(caplog) if "doesn't compile" in one]
    assert written in warning
    monkeypatch.setenv("IPUFIT_EMULATOR_STRICT", "1")
    with pytest.raises(poptorch.Error) as caught:
        strictly(function)
    assert "Unsupported ops found in compiled model: [" in caught.value.message
    assert operator in caught.value.message
    assert re.search(rf"They come from (\S+\.)?{written}", caught.value.message)


def is_new(name):
    """Whether the running torch has a function, or an argument as `f(argument)`."""
    function, _, argument = name.rstrip(")").partition("(")
    found = getattr(F, function, getattr(torch, function, None))
    if not argument or found is None:
        return found is not None
    try:
        return argument in inspect.signature(found).parameters
    except ValueError:  # a builtin, which has signatures in its docstring
        return re.search(rf"\b{argument}\b", found.__doc__) is not None


def test_newer_functions_and_arguments_are_those_that_torch_2_0_does_not_have():
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    names = newer_names()
    assert len(names) > 10
    there = [name for name in names if is_new(name)]
    assert bool(there) == (version > (2, 0))
    assert there == [*names] or version < (2, 13)


NEWER = {
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "unravel_index": lambda x: x + torch.unravel_index(x.argmax(), (4, 4))[0],
    "linear_cross_entropy": lambda x: F.linear_cross_entropy(x, x, x[0].long()),
    "mse_loss(weight)": lambda x: F.mse_loss(x, x + 1, weight=x),
    "scaled_dot_product_attention(scale)": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], scale=0.5
    ),
}


@pytest.mark.skipif(torch.__version__.startswith("2.0."), reason="it has none of them")
@pytest.mark.parametrize("name", NEWER)
@pytest.mark.parametrize("is_dead", [False, True])
def test_functions_that_a_pods_torch_does_not_have_are_named(
    name, is_dead, monkeypatch, caplog
):
    if name == "linear_cross_entropy" and not hasattr(F, name):
        pytest.skip("this torch doesn't have it either")

    def forward(x):
        result = NEWER[name](x)
        return x + 1 if is_dead else result

    strictly(forward)
    assert f"{name}: not in torch 2.0.1" in caplog.text
    found = survey(Function(lambda m, x: forward(x)), [X], Options(), is_training=False)
    [remark] = [remark for remark in found.remarks if remark.topic == "operator"]
    assert f"({name}: not in torch 2.0.1)" in remark.message
    monkeypatch.setenv("IPUFIT_EMULATOR_STRICT", "1")
    with pytest.raises(poptorch.Error, match=r"not in torch 2\.0\.1"):
        strictly(forward)


@pytest.mark.usefixtures("_strict")
def test_a_way_round_is_told_where_there_is_one():
    with pytest.raises(poptorch.Error, match=r"torch\.searchsorted \(try torch\.bucke"):
        strictly(lambda x: torch.searchsorted(x, x))


@pytest.mark.usefixtures("_strict")
def test_a_way_round_is_that_of_the_function():
    with pytest.raises(
        poptorch.Error, match=r"logit \(try \(x / \(1 - x\)\)\.log\(\)\)"
    ):
        strictly(torch.logit)
    with pytest.raises(poptorch.Error, match=r"come from torch\.vdot\. Not"):
        strictly(lambda x: torch.vdot(x[0], x[0]))


def attention(x):
    return F.scaled_dot_product_attention(x[None], x[None], x[None])


def updated(x):
    place = torch.tensor([1], dtype=torch.int32)
    return poptorch.dynamic_update(x, x[:1], 0, place, 1)


SUPPORTED = [
    lambda x: torch.cumsum(x, 1),
    lambda x: torch.einsum("ij,kj->ik", x, x).swapaxes(0, 1),  # composed by torch
    attention,  # composed for processors
    lambda x: x[:, torch.tensor([0, 2])][None, 1:],
    lambda x: torch.clone(x).index_put_((torch.tensor([0]),), x[1]),
    lambda x: x * torch.ones(4, 4).tril() + torch.linspace(0, 1, 4),  # of constants
    lambda x: (x.lgamma(), x + 1)[1],  # unused
    updated,
]


@pytest.mark.parametrize("function", SUPPORTED)
@pytest.mark.usefixtures("_strict")
def test_supported_functions_pass(function):
    torch.testing.assert_close(strictly(function), function(X))


@pytest.mark.usefixtures("_strict")
def test_layers_that_the_processor_computes_otherwise_pass():
    model = nn.Sequential(
        nn.Conv1d(3, 4, 2),
        nn.BatchNorm1d(4),
        nn.MaxPool1d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    loss = nn.CrossEntropyLoss()
    executor = poptorch.trainingModel(
        Function(lambda m, x, y: loss(m.model(x), y), model=model)
    )
    assert executor(torch.ones(2, 3, 5), torch.tensor([0, 1])).shape == ()


@pytest.mark.usefixtures("_strict")
def test_what_runs_on_the_host_is_anybodys():
    on_host = poptorch.CPU(lambda x: x.lgamma(), "gamma")
    table = torch.arange(4.0)
    expected = X.lgamma() + table.lgamma()
    result = strictly(lambda x: on_host(x) + table.lgamma().to("ipu"))
    torch.testing.assert_close(result, expected)


@pytest.mark.usefixtures("_strict")
def test_an_integer_buffer_is_a_constant_and_a_weight_is_not():
    mask = torch.ones(4, 4, dtype=torch.int64)
    layer = nn.Linear(4, 4)
    layer.register_buffer("mask", mask)
    result = strictly(lambda x: x * layer.mask.tril(), layer=layer)
    torch.testing.assert_close(result, X * mask.tril())
    with pytest.raises(poptorch.Error, match="aten::tril"):
        strictly(lambda x: x * layer.weight.tril(), layer=layer)


@pytest.mark.usefixtures("_strict")
def test_a_training_model_is_refused_too():
    executor = poptorch.trainingModel(Marked(lambda layer, x: layer(x).lgamma()))
    with pytest.raises(poptorch.Error, match="Unsupported ops found"):
        executor(torch.ones(4, 6))
    assert not executor.isCompiled()


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("0", False), ("", False)]
)
def test_the_environment_decides(value, expected, monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_STRICT", value)
    executor = poptorch.inferenceModel(Function(lambda _, x: x.sinc()))
    with (
        pytest.raises(poptorch.Error, match="Unsupported ops")
        if expected
        else (contextlib.nullcontext())
    ):
        executor.compile(torch.ones(2))
