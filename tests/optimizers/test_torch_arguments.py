# SPDX-License-Identifier: Apache-2.0
"""Each argument of torch's optimisers trains as in torch, or is refused by its name."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from ipufit import IPUModel, UnsupportedError, poptorch

VALUES = {
    "alpha": 0.5,
    "amsgrad": True,
    "betas": (0.5, 0.7),
    "capturable": False,
    "centered": True,
    "decoupled_weight_decay": True,
    "differentiable": False,
    "eps": 0.01,
    "foreach": True,
    "fused": True,
    "lr": 0.03,
    "maximize": True,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 0.3,
}
REFUSED = {"amsgrad", "maximize"}
BESIDE = {"nesterov": {"momentum": 0.9}}
KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)
# PopTorch applies dampening from the first update on (docs/reference/optimizers.md).
CASES = [
    (kind, name)
    for kind in KINDS
    for name in inspect.signature(kind).parameters
    if name not in ("params", "dampening")
    and (name != "fused" or torch.__version__ >= "2.4")
]


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_an_argument_counts_as_in_torch(kind, name, in_groups):
    arguments = {"lr": 0.1, "weight_decay": 0.1, **BESIDE.get(name, {})}
    given = {name: VALUES[name]}
    if in_groups and name in ("capturable", "differentiable", "foreach", "fused"):
        pytest.skip("torch reads it for all groups at once")

    def optimizer_of(network):
        groups = [{"params": [weight]} for weight in network.parameters()]
        if not in_groups:
            return kind(groups, **{**arguments, **given})
        return kind([{**group, **given} for group in groups], **arguments)

    network = torch.nn.Linear(3, 2)
    plain = copy.deepcopy(network)
    model = IPUModel(network)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=f"with {name}=True can't run"):
            model.compile(optimizer_of(network), "mse")
        return
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    model.compile(optimizer_of(network), "mse")
    model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    optimizer = optimizer_of(plain)
    for rows in [*torch.arange(8).split(4)] * 3:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(plain(x[rows]), y[rows]).backward()
        optimizer.step()
    for weight, expected in zip(network.parameters(), plain.parameters()):
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters,
    reason="this torch has no decoupled_weight_decay",
)
def test_weight_decay_is_decoupled_in_all_groups_or_none():
    network = torch.nn.Linear(3, 2)
    groups = [
        {"params": [network.weight], "decoupled_weight_decay": True},
        {"params": [network.bias]},
    ]
    with pytest.raises(UnsupportedError, match="decoupled_weight_decay in some groups"):
        IPUModel(network).compile(torch.optim.Adam(groups), "mse")


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_rmsprop_is_centered_in_all_groups_or_none(library):
    network = torch.nn.Linear(3, 2)
    groups = [
        {"params": [network.weight], "centered": True},
        {"params": [network.bias]},
    ]
    with pytest.raises(UnsupportedError, match="centered in some groups only"):
        IPUModel(network).compile(library.RMSprop(groups, lr=0.1), "mse")
