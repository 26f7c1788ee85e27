# SPDX-License-Identifier: Apache-2.0
"""Schedules by name: torch's numbers, transformers' formulas, and their properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from ipufit import ConfigError, UnknownNameError
from ipufit.optimizers import Schedule

REQUIRED = {"exponential": {"gamma": 0.9}, "step": {"boundaries": (3, 7)}}
ENDING = ("linear", "cosine", "cosine_restarts", "polynomial", "one_cycle")
NAMES = ("constant", "exponential", "step", "inverse_sqrt", *ENDING)


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
        (
            Schedule("linear", final=0.25, total_updates=9),
            lambda o: lr_scheduler.LinearLR(o, 1, 0.25, 9),
        ),
        (
            Schedule("constant", warmup_updates=5, initial=0.2),
            lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 5),
        ),
        (Schedule("cosine"), lambda o: lr_scheduler.CosineAnnealingLR(o, 20)),
        (
            Schedule("cosine", final=0.125),
            lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.125),
        ),
        (
            Schedule("cosine_restarts", cycles=4, final=0.1),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, eta_min=0.1),
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
        (Schedule("one_cycle"), lambda o: lr_scheduler.OneCycleLR(o, 1.0, 20)),
        (
            Schedule("one_cycle", warmup_fraction=0.17, initial=0.1, final=0.001),
            lambda o: lr_scheduler.OneCycleLR(
                o, 1.0, 20, pct_start=0.17, div_factor=10, final_div_factor=100
            ),
        ),
        (
            Schedule("one_cycle", warmup_updates=5),
            lambda o: lr_scheduler.OneCycleLR(o, 1.0, 20, pct_start=0.25),
        ),
        (
            Schedule("one_cycle", warmup_fraction=0.0),
            lambda o: lr_scheduler.OneCycleLR(o, 1.0, 20, pct_start=0.0),
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


# transformers ------------------------------------------------------------------------
# Stated from its documentation, as functions of update, warm-up and total.


def after_warmup(formula):
    def rate(k, w, t):
        return k / w if k < w else formula(k, w, t)

    return rate


TRANSFORMERS = {
    "constant": after_warmup(lambda k, w, t: 1.0),
    "linear": after_warmup(lambda k, w, t: max(0.0, (t - k) / max(1, t - w))),
    "cosine": after_warmup(
        lambda k, w, t: max(0.0, 0.5 + 0.5 * math.cos(math.pi * (k - w) / (t - w)))
    ),
    "cosine_restarts": after_warmup(
        lambda k, w, t: 0.5 + 0.5 * math.cos(math.pi * ((3 * (k - w) / (t - w)) % 1.0))
    ),
    "polynomial": after_warmup(
        lambda k, w, t: (1.0 - 0.01) * (1.0 - (k - w) / (t - w)) ** 2 + 0.01
    ),
    "inverse_sqrt": after_warmup(lambda k, w, t: 1.0 / math.sqrt(k / w)),
}
SETTINGS = {"cosine_restarts": {"cycles": 3}, "polynomial": {"power": 2, "final": 0.01}}


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize(("warmup", "total"), [(1, 12), (4, 20), (7, 31)])
def test_rates_are_those_of_transformers(name, warmup, total):
    schedule = Schedule(name, warmup_updates=warmup, **SETTINGS.get(name, {}))
    expected = [TRANSFORMERS[name](k, warmup, total) for k in range(total)]
    got = ours(schedule, total, total)
    # A restart falls on an update; rounding may put it one cycle earlier there.
    exact = [
        name != "cosine_restarts" or 3 * (k - warmup) % (total - warmup) != 0
        for k in range(total)
    ]
    assert [g for g, is_exact in zip(got, exact) if is_exact] == pytest.approx(
        [e for e, is_exact in zip(expected, exact) if is_exact], abs=1e-12
    )
    assert got[warmup] == 1.0


def test_inverse_sqrt_has_a_timescale():
    schedule = Schedule("inverse_sqrt", timescale=9)
    assert schedule.factor(0) == 1.0
    assert schedule.factor(27) == 0.5
    assert Schedule("inverse_sqrt").factor(30_000) == 0.5


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


@given(schedules(), st.integers(0, 400))
def test_a_factor_is_a_share(made, update):
    schedule, total = made
    assert 0.0 <= schedule.factor(update, total) <= 1.0


@given(schedules([name for name in NAMES if name not in ("step", "one_cycle")]))
def test_the_warm_up_rises_in_a_line_and_meets_the_rest(made):
    schedule, total = made
    warmup = schedule.warmup(total)
    assume(0 < warmup < total)
    rise = ours(schedule, warmup + 1, total)
    assert rise[0] == (schedule.initial or 0.0)
    assert rise[-1] == 1.0
    slope = (1.0 - rise[0]) / warmup
    steps = [after - before for before, after in zip(rise, rise[1:])]
    assert steps == pytest.approx([slope] * warmup, abs=1e-9)


@given(schedules([name for name in NAMES if name != "cosine_restarts"]))
def test_after_its_top_a_schedule_only_falls(made):
    schedule, total = made
    factors = ours(schedule, total + 3, total)
    top = factors.index(max(factors))
    rise, fall = factors[: top + 1], factors[top:]
    assert rise == sorted(rise)
    assert all(after <= before + 1e-12 for before, after in zip(fall, fall[1:]))


@given(schedules(ENDING))
def test_a_schedule_keeps_its_end(made):
    schedule, total = made
    assume(schedule.warmup(total) < total)
    end = 1.0 / 25 / 1e4 if schedule.final is None else schedule.final
    for update in (total, total + 1, 10 * total):
        assert schedule.factor(update, total) == pytest.approx(end, abs=1e-12)


@given(schedules(["cosine_restarts"]))
def test_restarts_are_as_many_as_asked_for(made):
    schedule, total = made
    rest = total - schedule.warmup(total)
    assume(rest >= 4 * schedule.cycles and schedule.final < 0.9)
    factors = ours(schedule, total, total)[-rest:]
    jumps = sum(after > before + 1e-9 for before, after in zip(factors, factors[1:]))
    assert jumps == schedule.cycles - 1


# What is refused ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ENDING)
def test_an_end_must_be_known(name):
    schedule = Schedule(name)
    assert schedule.needs_total
    with pytest.raises(ConfigError, match=rf"'{name}'.*length .* unknown.*total_upda"):
        schedule.factor(0)
    assert Schedule(name, total_updates=10).factor(0) == schedule.factor(0, 10)


@pytest.mark.parametrize("name", ["constant", "exponential", "step", "inverse_sqrt"])
def test_only_a_share_of_warm_up_needs_the_end_otherwise(name):
    settings = REQUIRED.get(name, {})
    assert not Schedule(name, warmup_updates=3, **settings).needs_total
    assert Schedule(name, warmup_fraction=0.1, **settings).needs_total


def test_a_warm_up_must_fit_in():
    Schedule("linear", warmup_updates=9).check_fits(10)
    with pytest.raises(ConfigError, match="warms up for 10 updates, but there are 10"):
        Schedule("linear", warmup_updates=10).check_fits(10)
    Schedule("constant", warmup_updates=10).check_fits(5)
    schedule = Schedule("step", warmup_fraction=0.5, boundaries=(50,))
    schedule.check_fits(100)
    with pytest.raises(ConfigError, match="51 updates, past its boundary 50"):
        schedule.check_fits(101)


def test_its_own_total_wins():
    assert Schedule("linear", total_updates=10).factor(5, total=1000) == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_updates": -1}, "warmup_updates=-1"),
        ({"warmup_updates": 0.1}, r"warmup_updates=0\.1: use a whole number"),
        ({"warmup_fraction": 1}, "warmup_fraction=1"),
        ({"warmup_fraction": 0.1, "warmup_updates": 1}, "Give one of them"),
        ({"total_updates": 0}, "total_updates=0"),
        ({"initial": 2}, "initial=2"),
        ({"final": -1}, "final=-1"),
        ({"power": 2}, r"has no power.*belongs to 'polynomial'"),
        ({"gamma": 0.5}, "belongs to 'exponential', 'step'"),
        ({"warmup_updates": 10, "total_updates": 10}, "warms up for 10 updates"),
    ],
)
def test_bad_values_are_refused(settings, message):
    with pytest.raises(ConfigError, match=rf"^Schedule\('cosine'\) .*{message}"):
        Schedule("cosine", **settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("exponential", {}, "needs gamma"),
        ("exponential", {"gamma": 1.5}, r"gamma=1\.5"),
        ("exponential", {"gamma": 0.5, "every_updates": 0}, "every_updates=0"),
        ("step", {}, "boundaries=None"),
        ("step", {"boundaries": 5}, "boundaries=5"),
        ("step", {"boundaries": ()}, r"boundaries=\(\)"),
        ("step", {"boundaries": (0,)}, "a boundary=0"),
        ("step", {"boundaries": (5, 3)}, "sort them"),
        ("step", {"boundaries": (3, 3)}, "sort them"),
        ("step", {"boundaries": (3, 9), "warmup_updates": 4}, "past its boundary 3"),
        ("polynomial", {"power": 0}, "power=0"),
        ("cosine_restarts", {"cycles": 0}, "cycles=0"),
        ("inverse_sqrt", {"timescale": 0}, "timescale=0"),
        ("inverse_sqrt", {"final": 0.1}, "has no final"),
        ("constant", {"final": 0.1}, "has no final"),
    ],
)
def test_bad_settings_of_a_schedule_are_refused(name, settings, message):
    with pytest.raises(ConfigError, match=rf"^Schedule\('{name}'\).*{message}"):
        Schedule(name, **settings)


@pytest.mark.parametrize("name", ["cosin", None, 3])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(UnknownNameError, match=r"Unknown schedule .*Known: constant"):
        Schedule(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_epochs": -1}, "warmup_epochs=-1"),
        ({"warmup_epochs": 1, "warmup_updates": 3}, "Give one of them"),
        ({"warmup_epochs": 1, "warmup_fraction": 0.5}, "Give one of them"),
        ({"total_epochs": 1, "total_updates": 3}, "Give one of them"),
        ({"total_epochs": 0}, "total_epochs=0"),
        ({"boundary_epochs": (1,)}, "has no boundary_epochs"),
        ({"every_epochs": 1}, "has no every_epochs"),
    ],
)
def test_unusable_lengths_in_epochs_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Schedule("linear", **settings)


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


def test_lengths_in_epochs_are_shown_where_there_are_any():
    assert "epochs" not in repr(Schedule("linear"))
    assert repr(Schedule("linear", total_epochs=2)).endswith("total_epochs=2)")
