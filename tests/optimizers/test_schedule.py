# SPDX-License-Identifier: Apache-2.0
"""Schedules of learning rates and other values, ours and torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from ipufit import ConfigError, PerEpoch, UnknownNameError, UnsupportedError, poptorch
from ipufit.errors import SharedRateWarning
from ipufit.optimizers import LossScaleRamp, Optimizer, Schedule, resolve_optimization

pytestmark = pytest.mark.floor

REQUIRED = {"exponential": {"gamma": 0.9}, "step": {"boundaries": (3, 7)}}
ENDING = ("linear", "cosine", "cosine_restarts", "polynomial", "one_cycle")
NAMES = ("constant", "exponential", "step", "inverse_sqrt", "inverse_time", *ENDING)


def torchs(make, updates):
    """The rate that torch uses at each update, its own rate being 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ours(schedule, updates, total=None):
    return [schedule.factor(update, total) for update in range(updates)]


# torch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Schedule("constant"), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
        (Schedule("linear"), lambda o: lr_scheduler.LinearLR(o, 1, 0, 20)),
        (Schedule("cosine"), lambda o: lr_scheduler.CosineAnnealingLR(o, 20)),
        (
            Schedule("linear", final=0.25, total_updates=9),
            lambda o: lr_scheduler.LinearLR(o, 1, 0.25, 9),
        ),
        (
            Schedule("constant", warmup_updates=5, initial=0.2),
            lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 5),
        ),
        (
            Schedule("cosine", final=0.125),
            lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.125),
        ),
        (
            Schedule("cosine_restarts", cycles=4, final=0.1),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, eta_min=0.1),
        ),
        (
            Schedule("cosine_restarts", every_updates=3, t_mul=2, final=0.1),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2, eta_min=0.1),
        ),
        (
            Schedule("cosine_restarts", every_updates=3, warmup_updates=5, initial=0.2),
            lambda o: lr_scheduler.SequentialLR(
                o,
                [
                    lr_scheduler.LinearLR(o, 0.2, 1.0, 5),
                    lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
                ],
                [5],
            ),
        ),
        (
            Schedule("polynomial", power=2.5),
            lambda o: lr_scheduler.PolynomialLR(o, 20, power=2.5),
        ),
        (
            Schedule("polynomial", total_updates=7),
            lambda o: lr_scheduler.PolynomialLR(o, 7),
        ),
        (
            Schedule("exponential", gamma=0.8),
            lambda o: lr_scheduler.ExponentialLR(o, 0.8),
        ),
        (
            Schedule("step", boundaries=[4, 5, 11], gamma=0.5),
            lambda o: lr_scheduler.MultiStepLR(o, [4, 5, 11], gamma=0.5),
        ),
        (
            Schedule("one_cycle", warmup_fraction=0.17, initial=0.1, final=0.001),
            lambda o: lr_scheduler.OneCycleLR(
                o, 1.0, 20, pct_start=0.17, div_factor=10, final_div_factor=100
            ),
        ),
        (Schedule("one_cycle"), lambda o: lr_scheduler.OneCycleLR(o, 1.0, 20)),
        (
            Schedule("one_cycle", warmup_fraction=0.0),
            lambda o: lr_scheduler.OneCycleLR(o, 1.0, 20, pct_start=0.0),
        ),
        (
            Schedule("one_cycle", warmup_updates=5),
            lambda o: lr_scheduler.OneCycleLR(o, 1.0, 20, pct_start=0.25),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.filterwarnings("ignore:.*cycle_momentum:UserWarning")
def test_rates_are_torchs(schedule, make):
    def made(optimizer):
        optimizer.defaults["momentum"] = 0.0  # OneCycleLR wants one
        return make(optimizer)

    expected = torchs(made, 20)
    assert ours(schedule, 20, total=20) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert len(set(expected)) > 1 or schedule.name == "constant"


def test_inverse_sqrt_has_a_timescale():
    schedule = Schedule("inverse_sqrt", timescale=9)
    assert schedule.factor(0) == 1.0
    assert schedule.factor(27) == 0.5
    assert Schedule("inverse_sqrt").factor(30_000) == 0.5
    warm = Schedule("inverse_sqrt", warmup_updates=4)  # as transformers has it
    assert ours(warm, 6) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0, 0.8**0.5])


# Properties --------------------------------------------------------------------------


@st.composite
def schedules(draw, names=NAMES):
    name = draw(st.sampled_from(names))
    total = draw(st.integers(2, 300))
    settings = dict(REQUIRED.get(name, {}))
    if name in ("linear", "cosine", "cosine_restarts", "polynomial"):
        settings["final"] = draw(st.floats(0, 1))
    if name == "cosine_restarts":
        settings["cycles"] = draw(st.integers(1, 5))
    if name == "polynomial":
        settings["power"] = draw(st.floats(0.25, 4))
    if name == "exponential":
        settings["gamma"] = draw(st.floats(0.5, 1))
        settings["every_updates"] = draw(st.integers(1, 50))
    if draw(st.booleans()):
        settings["warmup_fraction"] = draw(st.floats(0, 0.99))
    else:
        settings["warmup_updates"] = draw(st.integers(0, total - 1))
    if name == "step":
        settings["boundaries"] = (total, total + 2)
    if name != "one_cycle":
        settings["initial"] = draw(st.none() | st.floats(0, 1))
    return Schedule(name, **settings), total


@given(schedules(ENDING))
def test_a_schedule_keeps_its_end(made):
    schedule, total = made
    assume(schedule.warmup(total) < total)
    end = 1.0 / 25 / 1e4 if schedule.final is None else schedule.final
    for update in (total, total + 1, 10 * total):
        assert schedule.factor(update, total) == pytest.approx(end, abs=1e-12)


# What is refused ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ENDING)
def test_an_end_must_be_known(name):
    schedule = Schedule(name)
    assert schedule.needs_total
    with pytest.raises(ConfigError, match=rf"'{name}'.*length .* unknown.*total_upda"):
        schedule.factor(0)
    assert Schedule(name, total_updates=10).factor(0) == schedule.factor(0, 10)


def test_a_warm_up_must_fit_in():
    Schedule("linear", warmup_updates=9).check_fits(10)
    with pytest.raises(ConfigError, match="warms up for 10 updates, but there are 10"):
        Schedule("linear", warmup_updates=10).check_fits(10)
    Schedule("constant", warmup_updates=10).check_fits(5)
    schedule = Schedule("step", warmup_fraction=0.5, boundaries=(50,))
    schedule.check_fits(100)
    with pytest.raises(ConfigError, match="51 updates, past its boundary 50"):
        schedule.check_fits(101)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("exponential", {}, "needs gamma"),
        ("exponential", {"gamma": 1.5}, r"gamma=1\.5"),
        ("exponential", {"gamma": 0.5, "every_updates": 0}, "every_updates=0"),
        ("step", {}, "boundaries=None"),
        ("step", {"boundaries": 5}, "boundaries=5"),
        ("step", {"boundaries": (0,)}, "a boundary=0"),
        ("step", {"boundaries": (5, 3)}, "sort them"),
        ("step", {"boundaries": (3, 9), "warmup_updates": 4}, "past its boundary 3"),
        ("polynomial", {"power": 0}, "power=0"),
        ("cosine_restarts", {"cycles": 0}, "cycles=0"),
        ("cosine_restarts", {"every_updates": 4, "t_mul": 0.5}, "t_mul=0.5"),
        ("cosine_restarts", {"cycles": 2, "t_mul": 2}, "cycles=2 and t_mul=2"),
        ("cosine_restarts", {"t_mul": 2}, "t_mul=2 and no length of a cycle"),
        ("cosine_restarts", {"m_mul": 0.5}, "m_mul=0.5 and no length of a cycle"),
        (
            "step",
            {"boundaries": (3, 7), "factors": (1, 0.5)},
            "2 factors and 2 boundaries",
        ),
        ("step", {"boundaries": (3, 7), "factors": (1, 0.5, -1)}, "a factor=-1"),
        (
            "step",
            {"boundaries": (3, 7), "factors": (1, 1, 1), "gamma": 1},
            r"factors=.* and gamma=1",
        ),
        ("inverse_sqrt", {"timescale": 0}, "timescale=0"),
        ("inverse_sqrt", {"final": 0.1}, "has no final"),
        ("linear", {"warmup_epochs": -1}, "warmup_epochs=-1"),
        ("linear", {"warmup_epochs": 1, "warmup_updates": 3}, "Give one of them"),
        ("linear", {"total_epochs": 1, "total_updates": 3}, "Give one of them"),
        ("linear", {"total_epochs": 0}, "total_epochs=0"),
        ("linear", {"boundary_epochs": (1,)}, "has no boundary_epochs"),
        ("cosine", {"warmup_updates": -1}, "warmup_updates=-1"),
        ("cosine", {"warmup_updates": 0.1}, r"warmup_updates=0\.1: use a whole number"),
        ("cosine", {"warmup_fraction": 1}, "warmup_fraction=1"),
        ("cosine", {"warmup_fraction": 0.1, "warmup_updates": 1}, "Give one of them"),
        ("cosine", {"total_updates": 0}, "total_updates=0"),
        ("cosine", {"initial": 2}, "initial=2"),
        ("cosine", {"final": -1}, "final=-1"),
        ("cosine", {"power": 2}, r"has no power.*belongs to 'polynomial'"),
        (
            "cosine",
            {"warmup_updates": 10, "total_updates": 10},
            "warms up for 10 updates",
        ),
    ],
)
def test_bad_settings_of_a_schedule_are_refused(name, settings, message):
    with pytest.raises(ConfigError, match=rf"Schedule\('{name}'\).*{message}"):
        Schedule(name, **settings)


@pytest.mark.parametrize("name", ["cosin", None])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(UnknownNameError, match=r"Unknown schedule .*Known: constant"):
        Schedule(name)


def test_boundaries_in_epochs_are_sorted_and_no_others_are_given():
    for boundaries in ((), (2, 1), (0, 1), 3):
        with pytest.raises(ConfigError, match="boundar"):
            Schedule("step", boundary_epochs=boundaries)
    with pytest.raises(ConfigError, match="Give one of them"):
        Schedule("step", boundary_epochs=(1,), boundaries=(30,))
    with pytest.raises(ConfigError, match="each above the one before"):
        Schedule("step", boundary_epochs=(0.4, 0.45)).in_updates(3)


def test_epochs_are_rounded_to_the_nearest_update_and_are_at_least_one():
    schedule = Schedule("exponential", gamma=0.5, every_epochs=0.01, warmup_epochs=1.5)
    schedule = schedule.in_updates(3)
    assert (schedule.every_updates, schedule.warmup_updates) == (1, 5)
    assert not schedule.needs_epochs


# Who sets the learning rates: nobody, a `Schedule`, or a scheduler of torch ---------


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


@pytest.mark.parametrize("per_call", [2, 5])
def test_torchs_schedulers_are_stepped_once_per_update(module, per_call):
    sgd = torch.optim.SGD(module.parameters(), lr=1.0)
    scheduler = lr_scheduler.LambdaLR(sgd, lambda k: 1 / (k + 1))
    optimization = resolve_optimization(sgd, scheduler, module)
    rates = [groups[0]["lr"] for groups in run(optimization, 3, per_call)]
    assert rates == [1.0, 1 / (per_call + 1), 1 / (2 * per_call + 1)]
    assert scheduler.last_epoch == optimization.num_updates == 3 * per_call


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
        (lambda update: 0.95**update, "the optimizer: unsup.* update's index pass"),
        (lambda epoch, lr: lr, r"'lr'\..*epoch and rate .*LearningRateScheduler\(func"),
        (PerEpoch(lambda epoch: 0.9**epoch), "can't be called with the optimizer"),
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


# Loss scaling, and calls outside of a fit ---------------------------------------------


@pytest.mark.parametrize("per_call", [1, 3])
def test_a_ramp_rises_with_the_updates_over_all_fits(module, per_call):
    ramp = LossScaleRamp(2, factor=2, every_updates=4, maximum=16)
    optimization = resolve_optimization(
        Optimizer("adam", loss_scaling=ramp), None, module
    )
    seen = []
    for _ in range(2):
        optimization.begin_fit(None, per_call)
        for _ in range(5):
            optimization.before_call()
            seen.append(optimization.optimizer.loss_scaling)
            optimization.after_call(per_call)
    assert seen == [ramp.value(call * per_call) for call in range(10)]
    assert max(seen) == (8 if per_call == 1 else 16)


def test_a_fixed_loss_scaling_set_by_hand_stays(module):
    optimization = resolve_optimization(
        Optimizer("adam", loss_scaling=2.0), None, module
    )
    optimization.optimizer.loss_scaling = 4.0
    optimization.begin_fit(None, 1)
    optimization.before_call()
    assert optimization.optimizer.loss_scaling == 4.0


def test_data_of_unknown_length_need_a_total(module):
    optimization = resolve_optimization("adam", "cosine", module)
    with pytest.raises(ConfigError, match=r"length of the data is unk.*total_updates"):
        optimization.begin_fit(None, 1)
    with pytest.raises(ConfigError, match="total_updates"):
        optimization.before_call()
    resolve_optimization("adam", Schedule("cosine", total_updates=5), module).begin_fit(
        None, 1
    )
    resolve_optimization("adam", "inverse_sqrt", module).begin_fit(None, 1)


def test_calls_outside_a_fit_go_on_counting(module):
    schedule = Schedule("exponential", gamma=0.5)
    optimization = resolve_optimization(Optimizer("sgd", 1.0), schedule, module)
    rates = []
    for _ in range(3):
        optimization.before_call()
        rates.append(optimization.optimizer.param_groups[0]["lr"])
        optimization.after_call(1)
    assert rates == [1.0, 0.5, 0.25]


# A loss scaling that grows ----------------------------------------------------------


@given(
    st.floats(2**-4, 2**10),
    st.floats(1.01, 8),
    st.integers(1, 50),
    st.floats(1, 2**15),
    st.integers(0, 500),
)
def test_a_ramp_is_a_loop_that_multiplies(initial, factor, every, times, update):
    ramp = LossScaleRamp(initial, factor, every, initial * times)
    expected = initial
    for _ in range(update // every):
        expected = min(ramp.maximum, expected * factor)
    assert ramp.value(update) == pytest.approx(expected, rel=1e-9)
    assert initial <= ramp.value(update) <= ramp.maximum


def test_a_ramp_stays_at_its_maximum_for_ever():
    assert LossScaleRamp(1, 2.0, 1, 2**20).value(10**9) == 2**20
    assert LossScaleRamp(8, 2.0, 1, 8).value(10**9) == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 2, 1, 8), "initial=0: use a number above 0"),
        ((1, 1, 1, 8), "factor=1: use a number above 1"),
        ((1, 2, 0, 8), "every_updates=0: use a whole number"),
        ((1, 2, 1.5, 8), r"every_updates=1\.5"),
        ((1, 2, 1, float("inf")), "maximum=inf"),
        ((16, 2, 1, 8), "maximum=8, which is less than initial=16"),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LossScaleRamp(*values)
