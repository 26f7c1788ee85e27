# SPDX-License-Identifier: Apache-2.0
"""Programs of all kinds are right, or refused: never another number.

Each is trained, validated, evaluated and asked for predictions, by ipufit and by a
plain torch loop. The tables say which ones must be right, so that nothing passes by
being refused.
"""

import dataclasses
import itertools
import zlib

import pytest

from ipufit import IpufitError, IpufitWarning, poptorch

from . import attributes, buffers, gradients, returned
from .cases import LAYOUTS, RULES, Case, assert_same, run, run_plainly
from .kinds import (
    BETWEEN,
    KINDS,
    REFUSED,
    RIGHT,
    SAID,
    STEADY,
)

TABLES = (attributes, returned, buffers, gradients)
"""Each enters its kinds when it is imported."""


def case_of(kind, when):
    """The kind and change in one of the settings, always the same one."""
    settings = [
        (layout, rule)
        for layout, rule in itertools.product(LAYOUTS, RULES)
        if kind.has_replicas or LAYOUTS[layout].replicas == 1
    ]
    number = zlib.crc32(f"{kind.name} {when}".encode())
    return Case(kind, when, *settings[number % len(settings)])


CASES = [case_of(kind, when) for kind in KINDS for when in kind.outcomes]


def is_costly(case):
    """Whether the kind changes at another time every day, so that this one may wait."""
    times = list(case.kind.outcomes)
    return case.when != times[zlib.crc32(case.kind.name.encode()) % len(times)]


COSTLY = [case for case in CASES if is_costly(case)]
DAILY = [case for case in CASES if case not in COSTLY]


def in_modes(number, case):
    """The case as a parameter; each tenth also runs looped, and on the floor."""
    marks = [pytest.mark.floor, pytest.mark.looped] if number % 10 == 0 else []
    if case.kind.is_known_by_autograd and poptorch.__name__ != "ipufit.emulator":
        reason = "a stand-in for PopTorch's core notes no dependencies, nor float64"
        marks.append(pytest.mark.skip(reason=reason))
    if is_costly(case):
        marks.append(pytest.mark.slow)
    return pytest.param(case, marks=marks)


def test_there_are_many_programs():
    assert len(CASES) == len(set(map(str, CASES))) >= 500
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert sum(case.outcome == RIGHT for case in CASES) >= 390


CHANGES = [case for case in CASES if case.when == BETWEEN]


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGES, ids=str)
def test_a_change_changes_numbers_in_torch(case):
    steady = run_plainly(dataclasses.replace(case, when=STEADY))
    changed = run_plainly(case)
    with pytest.raises(AssertionError):
        assert_same(changed, steady)


@pytest.mark.parametrize(
    "case", list(map(in_modes, *zip(*enumerate([*DAILY, *COSTLY])))), ids=str
)
def test_a_program_is_right_or_refused(case):
    if case.outcome == REFUSED:
        with pytest.raises((IpufitError, poptorch.Error)):
            run(case)
    elif case.outcome == SAID:
        with pytest.raises(IpufitWarning):  # the suite makes errors of warnings
            run(case)
    else:
        assert_same(run(case), run_plainly(case))
