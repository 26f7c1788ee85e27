# SPDX-License-Identifier: Apache-2.0
"""Operators that compiled programs leave to torch, in graphs and by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipufit.emulator._machine_code import machine_functions as _machine_functions
from ipufit.emulator._machine_code.kernel_ops import kernel_table

pytestmark = pytest.mark.skipif(
    "torch" in str(_machine_functions._missing()),
    reason="compiled programs need a newer torch",
)

LAYERS = [
    (nn.MaxPool2d(2), (2, 3, 4, 5)),
    (nn.MaxPool2d(3, stride=2, padding=1, dilation=1, ceil_mode=True), (2, 3, 6, 6)),
    (nn.MaxPool2d((2, 1), stride=(1, 2)), (3, 4, 4)),
    (nn.LSTM(3, 4), (5, 2, 3)),
    (nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), (2, 5, 3)),
    (nn.LSTM(3, 4, bias=False), (5, 2, 3)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_layers(layer, shape):
    names = [name for name, _ in layer.named_parameters()]

    def gradients(x, *weights):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights)]
        with torch.enable_grad():
            result = torch.func.functional_call(
                layer, dict(zip(names, leaves[1:])), (leaves[0],)
            )
            value = result[0] if isinstance(result, tuple) else result
            return torch.autograd.grad((value * value).sum(), leaves)

    arguments = [torch.randn(shape), *(p.detach() for p in layer.parameters())]
    graph = _machine_functions._traced(gradients, arguments, kernel_table())
    ours = [n for n in graph.graph.nodes if "ipufit_emulator" in str(n.target)]
    assert len(ours) >= 2
    torch.testing.assert_close(list(graph(*arguments)), list(gradients(*arguments)))
    for node in ours:
        for tensor in node.meta["val"] if len(node.users) > 1 else ():
            assert tensor.device.type == "cpu"
