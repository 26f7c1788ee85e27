# SPDX-License-Identifier: Apache-2.0
"""Self-attention of inference programs, without the copies that torch makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator._program.self_attention import self_attention
from ipufit.emulator._tracing.constant_nodes import function_name

WIDTH, HEADS, LENGTH, BATCH = 16, 4, 6, 3


def layer(**kwargs):
    torch.manual_seed(0)
    defaults = {"dropout": 0.5, "batch_first": True, "norm_first": True}
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **{**defaults, **kwargs})


class Attention(nn.Module):
    """Attention, and something of its result."""

    def __init__(self, after, before=lambda x: (x, x, x), mask=None):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.after, self.before = after, before
        self.register_buffer("mask", mask)

    def forward(self, x):
        kwargs = {"need_weights": False, "attn_mask": self.mask}
        return self.after(x, self.attention(*self.before(x), **kwargs)[0])


def run(module, dtype=torch.float32):
    """The result of an inference program, and the names of what it runs."""
    module.eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        expected = module(x)
    executor = poptorch.inferenceModel(module.to(dtype))
    result = executor(x.to(dtype))
    program = executor._executable.program
    graph = program.laid_out(program.graph).graph
    tolerance = {} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(result, expected.to(dtype), **tolerance)
    return result, {function_name(node) for node in graph.nodes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_needs_no_copies(norm_first, dtype):
    _, names = run(layer(norm_first=norm_first), dtype)
    assert "self_attention" in names
    assert "multi_head_attention_forward" not in names


def test_a_trace_sees_the_ordinary_operation():
    executor = poptorch.inferenceModel(layer().eval())
    executor(torch.randn(BATCH, LENGTH, WIDTH))
    nodes = executor._executable.program.graph.graph.nodes
    assert "multi_head_attention_forward" in map(function_name, nodes)


def test_half_precision_rounds_its_result_once():
    module = Attention(lambda x, y: x + y).eval()
    x = torch.randn(BATCH, LENGTH, WIDTH).half()
    with torch.no_grad():
        y = module.half().float().attention(x.float(), x.float(), x.float())[0]
    result = poptorch.inferenceModel(module.half())(x)
    expected = (x.float() + y.half().float()).half()
    assert (result != expected).float().mean() < 0.02  # sums in another order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_folded(monkeypatch, dtype):
    module = layer().eval().to(dtype)
    options = poptorch.Options().deviceIterations(4)
    x = torch.randn(4 * BATCH, LENGTH, WIDTH).to(dtype)
    results = []
    for fold in ("1", "0"):
        monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", fold)
        results.append(poptorch.inferenceModel(module, options)(x))
    tolerance = {} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    torch.testing.assert_close(*results, **tolerance)


def test_training_runs_what_was_traced():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer()

        def forward(self, x):
            return poptorch.identity_loss(self.layer(x), reduction="mean")

    executor = poptorch.trainingModel(Loss())
    executor(torch.randn(BATCH, LENGTH, WIDTH))
    program = executor._executable.program
    nodes = program.laid_out(program.graph).graph.nodes
    assert "multi_head_attention_forward" in map(function_name, nodes)


@pytest.mark.filterwarnings("ignore:Converting mask")  # torch 2.0, of its own
@pytest.mark.parametrize(
    "module",
    [
        Attention(lambda x, y: x + y, lambda x: (x, x * 2, x)),
        Attention(lambda x, y: x + y, mask=torch.eye(LENGTH).bool()),
        Attention(lambda x, y: y + x),  # has the strides of y
        Attention(lambda x, y: y.transpose(0, 1)),
        Attention(lambda x, y: y),
    ],
)
def test_what_is_something_else_stays(module):
    _, names = run(module)
    assert "self_attention" not in names


def test_a_sum_that_begins_with_something_else_hides_strides():
    _, names = run(Attention(lambda x, y: (x + y).view(BATCH, -1)))
    assert "self_attention" in names


@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_what_torch_computes(bias):
    attention = nn.MultiheadAttention(WIDTH, HEADS, bias=bias).eval()
    x = torch.randn(LENGTH, BATCH, WIDTH)
    out = attention.out_proj
    packed = attention.in_proj_weight, attention.in_proj_bias
    with torch.no_grad():
        ours, _ = self_attention(x, HEADS, *packed, out.weight, out.bias)
        torch.testing.assert_close(ours, attention(x, x, x, need_weights=False)[0])
