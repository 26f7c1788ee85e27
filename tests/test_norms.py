# SPDX-License-Identifier: Apache-2.0
"""Convolutional networks with each norm and activation train as in a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from ipufit import IPUConfig, IPUModel
from tests.strategies import spread

NORMS = {
    "none": nn.Identity,
    "batch": lambda: nn.BatchNorm2d(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "instance": lambda: nn.InstanceNorm2d(8),
    "affine": lambda: nn.InstanceNorm2d(8, affine=True),
    "layer": lambda: nn.LayerNorm((8, 6, 6)),
    "local": lambda: nn.LocalResponseNorm(3),
}
ACTIVATIONS = (nn.Identity, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh)


CASES = [
    (1 + (i + j) % 2, norm, activation)
    for i, norm in enumerate(NORMS)
    for j, activation in enumerate(ACTIVATIONS)
]


@pytest.mark.spread
@pytest.mark.parametrize(("micro_batch_size", "norm", "activation"), spread(CASES))
def test_a_network_trains_as_in_a_plain_loop(micro_batch_size, norm, activation):
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        NORMS[norm](),
        activation(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    plain = copy.deepcopy(network)
    x, y = torch.randn(4, 3, 6, 6), torch.randint(0, 4, (4,))

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for rows in torch.arange(4).split(micro_batch_size):
            loss = F.cross_entropy(plain(x[rows]), y[rows])
            (loss * len(rows) / 4).backward()
        optimizer.step()

    model = IPUModel(network, IPUConfig(micro_batch_size=micro_batch_size))
    model.compile(torch.optim.SGD(network.parameters(), lr=0.1), "cross_entropy")
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(network.state_dict()[name], weight)
