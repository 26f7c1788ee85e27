# SPDX-License-Identifier: Apache-2.0
"""Who sets the learning rates: nobody, a `Schedule`, or a scheduler of torch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from ipufit import ConfigError, UnsupportedError, poptorch
from ipufit.errors import SharedRateWarning
from ipufit.optimizers import Optimizer, Schedule, resolve_optimization


@pytest.fixture
def module():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def groups_of(module):
    return [
        {"params": module[0].parameters(), "lr": 0.5},
        {"params": module[1].parameters(), "lr": 0.25},
    ]


def run(optimization, calls, per_call=1):
    """What the PopTorch optimizer's groups have before each call."""
    seen = []
    for _ in range(calls):
        optimization.before_call()
        seen.append(settings(optimization.optimizer))
        optimization.after_call(per_call)
    return seen


def settings(optimizer):
    names = ("lr", "momentum", "betas", "weight_decay")
    return [
        {name: group[name] for name in names if name in group}
        for group in optimizer.param_groups
    ]


def in_torch(optimizer, scheduler, updates):
    """The same in a plain loop of torch's."""
    seen = []
    for _ in range(updates):
        seen.append(settings(optimizer))
        optimizer.step()
        scheduler.step()
    return seen


# torch ------------------------------------------------------------------------------

SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "step": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], 12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3),
}
OPTIMIZERS = {
    "sgd": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
    "plain sgd": lambda g: torch.optim.SGD(g, lr=0.1),
    "adamw": lambda g: torch.optim.AdamW(g),
    "rmsprop": lambda g: torch.optim.RMSprop(g, momentum=0.5),
}


# In torch 2.0 CyclicLR can't cycle the betas of AdamW.
PAIRS = [
    (s, o) for s in SCHEDULERS for o in OPTIMIZERS if (s, o) != ("cyclic", "adamw")
]


@pytest.mark.parametrize("by", ["scheduler", "factory"])
@pytest.mark.parametrize(("scheduler", "optimizer"), PAIRS)
def test_values_are_torchs_at_each_update(module, scheduler, optimizer, by):
    make, build = SCHEDULERS[scheduler], OPTIMIZERS[optimizer]
    twin = build(groups_of(module))
    expected = in_torch(twin, make(twin), 12)
    given = build(groups_of(module))
    optimization = resolve_optimization(
        given, make(given) if by == "scheduler" else make, module
    )
    optimization.begin_fit(12, 1)
    assert run(optimization, 12) == expected
    assert len({str(groups) for groups in expected}) > 1
    assert isinstance(optimization.optimizer, poptorch.optim.Optimizer)
    assert not given.state  # it never made a step


@pytest.mark.parametrize("by", ["scheduler", "factory"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_values_of_poptorchs_own_optimizer_are_set_likewise(module, scheduler, by):
    make = SCHEDULERS[scheduler]
    twin = torch.optim.SGD(groups_of(module), lr=0.1, momentum=0.9)
    expected = in_torch(twin, make(twin), 12)
    given = poptorch.optim.SGD(groups_of(module), lr=0.1, momentum=0.9)
    optimization = resolve_optimization(
        given, make(given) if by == "scheduler" else make, module
    )
    optimization.begin_fit(12, 1)
    assert run(optimization, 12) == expected
    assert optimization.optimizer is given


def test_a_sequence_of_schedulers_is_followed(module):
    def make(optimizer):
        parts = [
            lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3),
            lr_scheduler.ExponentialLR(optimizer, 0.5),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, [3])

    optimization = resolve_optimization("sgd", make, module)
    optimization.begin_fit(None, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.0 warns of itself here
        rates = [groups[0]["lr"] for groups in run(optimization, 5)]
    assert rates == pytest.approx([0.001, 0.004, 0.007, 0.01, 0.005])


@pytest.mark.parametrize("per_call", [2, 5])
def test_torchs_schedulers_are_stepped_once_per_update(module, per_call):
    sgd = torch.optim.SGD(module.parameters(), lr=1.0)
    scheduler = lr_scheduler.LambdaLR(sgd, lambda k: 1 / (k + 1))
    optimization = resolve_optimization(sgd, scheduler, module)
    rates = [groups[0]["lr"] for groups in run(optimization, 3, per_call)]
    assert rates == [1.0, 1 / (per_call + 1), 1 / (2 * per_call + 1)]
    assert scheduler.last_epoch == optimization.num_updates == 3 * per_call


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb", "rmsprop", "sgd"])
def test_a_function_gets_the_optimizer_of_a_name(module, name):
    optimization = resolve_optimization(
        name, lambda o: lr_scheduler.StepLR(o, 1, 0.5), module
    )
    first, second = run(optimization, 2)
    assert second[0]["lr"] == first[0]["lr"] / 2
    assert optimization.has_schedule


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_momentum_that_is_cycled_is_no_constant(module, name):
    spec = Optimizer(name, **({"momentum": 0.5} if name == "sgd" else {}))
    optimization = resolve_optimization(
        spec, lambda o: lr_scheduler.OneCycleLR(o, 0.1, 9), module
    )
    word = "momentum" if name == "sgd" else "betas"
    assert not optimization.optimizer.variable_attrs.isConstant(word)
    assert len({str(groups[0][word]) for groups in run(optimization, 5)}) > 3


def test_a_constant_that_a_scheduler_changes_is_named(module):
    class Decay(lr_scheduler.StepLR):
        def step(self, epoch=None):
            super().step()
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.5 * self.last_epoch

    given = poptorch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"Decay changes weight_decay.*constant"):
        run(resolve_optimization(given, lambda o: Decay(o, 1), module), 1)
    given = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = run(resolve_optimization(given, lambda o: Decay(o, 1), module), 2)
    assert seen[1][0]["weight_decay"] == 0.5


def test_what_is_set_by_hand_and_not_by_the_scheduler_stays(module):
    given = torch.optim.AdamW(module.parameters(), weight_decay=0.1)
    optimization = resolve_optimization(
        given, lr_scheduler.ExponentialLR(given, 0.5), module
    )
    optimization.optimizer.param_groups[0]["weight_decay"] = 0.75
    seen = run(optimization, 3)
    assert [groups[0]["weight_decay"] for groups in seen] == [0.75] * 3
    assert [groups[0]["lr"] for groups in seen] == [1e-3, 5e-4, 2.5e-4]


def test_a_learning_rate_may_be_a_tensor(module):
    given = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.5))
    optimization = resolve_optimization(
        given, lr_scheduler.ExponentialLR(given, 0.5), module
    )
    rates = [groups[0]["lr"] for groups in run(optimization, 3)]
    assert rates == [0.5, 0.25, 0.125]
    assert all(type(rate) is float for rate in rates)


def test_a_one_cycle_must_be_long_enough(module):
    make = SCHEDULERS["one cycle"]
    given = torch.optim.SGD(groups_of(module), lr=0.1, momentum=0.9)
    optimization = resolve_optimization(given, make, module)
    optimization.begin_fit(10, 1)
    run(optimization, 10)
    optimization.begin_fit(None, 1)
    with pytest.raises(ConfigError, match=r"12 updates, of which 10 .*total_steps=13"):
        optimization.begin_fit(3, 1)
    optimization.begin_fit(2, 1)
    run(optimization, 2)


def test_torchs_plateau_is_refused(module):
    given = torch.optim.SGD(module.parameters(), lr=0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(given)
    for schedule in (plateau, lr_scheduler.ReduceLROnPlateau):
        factory = schedule if schedule is plateau else lambda o: plateau
        with pytest.raises(UnsupportedError, match=r"callback ipufit\.ReduceLROnPlat"):
            resolve_optimization(given, factory, module)


def test_a_scheduler_of_another_optimizer_is_refused(module):
    given = torch.optim.SGD(module.parameters(), lr=0.1)
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    for optimizer in (given, "sgd", Optimizer("sgd")):
        with pytest.raises(ConfigError, match=r"StepLR is bound to another optimizer"):
            resolve_optimization(optimizer, lr_scheduler.StepLR(other, 1), module)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (3, "lr_schedule=3 is neither a name"),
        (0.1, r"lr_schedule=0\.1 is neither"),
        (lambda optimizer: None, "is neither a name, nor an ipufit.Schedule"),
        (lr_scheduler.StepLR, r"StepLR is a class.*lambda optimizer: StepLR\(optim"),
    ],
)
def test_what_is_no_schedule_is_refused(module, schedule, message):
    with pytest.raises(ConfigError, match=message):
        resolve_optimization("sgd", schedule, module)


# Schedules ---------------------------------------------------------------------------


def test_a_schedule_is_a_factor_on_each_groups_rate(module):
    given = torch.optim.SGD(groups_of(module), lr=0.1)
    optimization = resolve_optimization(given, "linear", module)
    optimization.begin_fit(4, 1)
    rates = [[group["lr"] for group in groups] for groups in run(optimization, 5)]
    assert rates == [
        [0.5, 0.25],
        [0.375, 0.1875],
        [0.25, 0.125],
        [0.125, 0.0625],
        [0.0, 0.0],
    ]


def test_a_schedule_begins_anew_with_each_fit(module):
    optimization = resolve_optimization(Optimizer("sgd", 1.0), "linear", module)
    for total in (4, 2):
        optimization.begin_fit(total, 1)
        rates = [groups[0]["lr"] for groups in run(optimization, total)]
        assert rates == [1 - k / total for k in range(total)]


def test_a_schedule_with_a_total_goes_on_over_fits(module):
    schedule = Schedule("linear", total_updates=8)
    optimization = resolve_optimization(Optimizer("sgd", 1.0), schedule, module)
    rates = []
    for _ in range(2):
        with pytest.warns(SharedRateWarning):
            optimization.begin_fit(4, 2)
        rates += [groups[0]["lr"] for groups in run(optimization, 2, per_call=2)]
    assert rates == [1.0, 0.75, 0.5, 0.25]


def test_another_schedule_begins_with_the_rates_before_the_first(module):
    given = poptorch.optim.SGD(groups_of(module), lr=0.1)
    for _ in range(2):
        optimization = resolve_optimization(given, "linear", module)
        optimization.begin_fit(4, 1)
        run(optimization, 5)
        assert [group["lr"] for group in given.param_groups] == [0.0, 0.0]
    given.param_groups[0]["lr"] = 8.0  # the user's new choice
    optimization = resolve_optimization(given, "linear", module)
    optimization.begin_fit(4, 1)
    assert [group["lr"] for group in given.param_groups] == [8.0, 0.0]


def test_a_scheduled_rate_is_no_constant(module):
    for schedule in ("linear", lambda o: lr_scheduler.StepLR(o, 1)):
        given = poptorch.optim.Adam(module.parameters())
        assert given.variable_attrs.isConstant("lr")
        resolve_optimization(given, schedule, module)
        assert not given.variable_attrs.isConstant("lr")
