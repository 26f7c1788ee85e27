# SPDX-License-Identifier: Apache-2.0
"""Names and torch's optimisers become PopTorch's."""

from __future__ import annotations

import pytest
import torch

from ipufit import ConfigError, UnsupportedError, poptorch
from ipufit.optimizers import (
    check_covers,
    hyper_parameters,
    resolve_optimizer,
)


@pytest.fixture
def module():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("name", "expected", "lr"),
    [
        ("sgd", "SGD", 1e-2),
        ("adam", "Adam", 1e-3),
        ("adamw", "AdamW", 1e-3),
        ("AdamW", "AdamW", 1e-3),
        ("rmsprop", "RMSprop", 1e-3),
        ("lamb", "LAMB", 1e-3),
    ],
)
def test_a_name_optimises_every_parameter(module, name, expected, lr):
    optimizer = resolve_optimizer(name, module)
    (group,) = optimizer.param_groups
    assert type(optimizer) is getattr(poptorch.optim, expected)
    assert [id(p) for p in group["params"]] == [id(p) for p in module.parameters()]
    assert group["lr"] == lr
    assert not optimizer.variable_attrs.isConstant("lr")


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 1, "momentum": 0.5, "dampening": 0.1}),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-5}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
        (torch.optim.RMSprop, {"lr": 0.1, "alpha": 0.9, "centered": True}),
    ],
)
def test_torchs_optimisers_keep_their_settings(module, make, settings):
    given = make(module.parameters(), **settings)
    optimizer = resolve_optimizer(given, module)
    assert isinstance(optimizer, poptorch.optim.Optimizer)
    assert type(optimizer).__name__ == make.__name__
    for name, value in settings.items():
        assert optimizer.param_groups[0][name] == value


def test_parameter_groups_keep_their_own_settings(module):
    first, second = module
    given = torch.optim.AdamW(
        [
            {"params": first.parameters(), "lr": 0.5},
            {"params": second.parameters(), "weight_decay": 0.25},
        ],
        lr=0.125,
    )
    groups = resolve_optimizer(given, module).param_groups
    assert [group["lr"] for group in groups] == [0.5, 0.125]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.25]
    assert [len(group["params"]) for group in groups] == [2, 2]


def test_a_learning_rate_may_be_a_tensor(module):
    given = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.25))
    lr = resolve_optimizer(given, module).param_groups[0]["lr"]
    assert lr == 0.25
    assert isinstance(lr, float)


def test_an_optimizer_of_poptorch_is_used_as_it_is(module):
    given = poptorch.optim.Adam(module.parameters(), lr=0.1)
    assert resolve_optimizer(given, module) is given


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adagrad(p, lr=0.1), r"torch\.optim.*Adagrad.*adamw"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "maximize=True"),
        (lambda p: torch.optim.SGD, "neither a name"),
        (lambda p: 3, "optimizer=3"),
        (lambda p: None, "optimizer=None"),
    ],
)
def test_what_has_no_counterpart_is_refused(module, make, message):
    with pytest.raises(UnsupportedError, match=message):
        resolve_optimizer(make(module.parameters()), module)


def test_a_subclass_is_refused_because_it_may_do_more(module):
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(UnsupportedError, match="Mine"):
        resolve_optimizer(Mine(module.parameters(), lr=0.1), module)


def test_an_optimizer_that_made_steps_is_refused(module):
    given = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    given.step()
    with pytest.raises(UnsupportedError, match="made steps already"):
        resolve_optimizer(given, module)


@pytest.mark.parametrize("home", [torch.optim, poptorch.optim])
def test_an_optimizer_of_another_module_is_refused(module, home):
    other = home.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"2 parameters .* are not the module's"):
        resolve_optimizer(other, module)


def test_a_trainable_parameter_that_the_optimizer_lacks_is_refused(module):
    first, second = module
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"0\.weight, 0\.bias: trainable, but not"):
        check_covers(optimizer, module)
    first.requires_grad_(False)
    check_covers(optimizer, module)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop])
def test_without_momentum_there_is_no_velocity(module, make):
    optimizer = resolve_optimizer(make(module.parameters(), lr=0.1), module)
    assert optimizer.variable_attrs.isConstant("momentum")
    assert not optimizer.variable_attrs.isConstant("lr")


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop])
def test_momentum_stays_variable_if_a_group_has_some(module, make):
    groups = [
        {"params": module[0].parameters()},
        {"params": module[1].parameters(), "momentum": 0.5},
    ]
    optimizer = resolve_optimizer(make(groups, lr=0.1), module)
    assert not optimizer.variable_attrs.isConstant("momentum")
    assert [group["momentum"] for group in optimizer.param_groups] == [0.0, 0.5]


def test_dampening_without_momentum_does_nothing_as_in_torch(module):
    given = torch.optim.SGD(module.parameters(), lr=0.1, dampening=0.5)
    assert resolve_optimizer(given, module).param_groups[0]["dampening"] == 0.0
    assert given.param_groups[0]["dampening"] == 0.5


def test_the_loss_scaling_is_one_of_the_values_a_device_has(module):
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.1, loss_scaling=2.0)
    before = hyper_parameters(optimizer)
    optimizer.loss_scaling = 4.0
    assert hyper_parameters(optimizer) != before


@pytest.mark.parametrize("kind", [list, tuple, lambda two: dict(enumerate(two))])
def test_several_optimizers_are_called_so(kind):
    module = torch.nn.Linear(3, 2)
    two = [torch.optim.SGD([p], lr=0.1) for p in module.parameters()]
    with pytest.raises(UnsupportedError, match=r"several optimizers \(2\), .*'params'"):
        resolve_optimizer(kind(two), module)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_around_steps_are_refused(kind):
    module = torch.nn.Linear(3, 2)
    given = torch.optim.SGD(module.parameters(), lr=0.1)
    getattr(given, f"register_step_{kind}_hook")(lambda *_: None)
    with pytest.raises(UnsupportedError, match=f"SGD has a step {kind}-hook"):
        resolve_optimizer(given, module)
