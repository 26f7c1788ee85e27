# SPDX-License-Identifier: Apache-2.0
"""Programs of all kinds are right, or refused: never another number.

Each is trained, validated, evaluated and asked for predictions, by ipufit and by a
plain torch loop. The tables say which ones must be right, so that nothing passes by
being refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib

import pytest

from ipufit import IpufitError, IpufitWarning, poptorch
from tests.strategies import spread_if_quick

from . import (
    attributes,
    buffers,
    data_types,
    functions,
    gradients,
    objectives,
    returned,
    weights,
)
from .cases import LAYOUTS, RULES, Case, assert_same
from .kinds import (
    BETWEEN,
    KINDS,
    REFUSED,
    RIGHT,
    SAID,
    STEADY,
)
from .reference import run_plainly
from .subject import run

TABLES = (
    attributes,
    functions,
    objectives,
    returned,
    buffers,
    data_types,
    weights,
    gradients,
)
"""Each enters its kinds when it is imported."""

STEADY_SETTINGS = 2
"""How many layouts and update rules a program is tried in that doesn't change.

All but the first are for the thorough profile.
"""


def cases():
    """Every kind and change in some of the settings, always the same ones."""
    settings = list(itertools.product(LAYOUTS, RULES))
    for kind in KINDS:
        usable = [
            (layout, rule)
            for layout, rule in settings
            if kind.has_replicas or LAYOUTS[layout].replicas == 1
        ]
        for when, outcome in kind.outcomes.items():
            start = zlib.crc32(f"{kind.name} {when}".encode())
            several = when == STEADY and outcome == RIGHT and len(kind.outcomes) == 1
            for place in range(STEADY_SETTINGS if several else 1):
                # 7 has no factor in common with the number of settings.
                yield Case(kind, when, *usable[(start + 7 * place) % len(usable)])


CASES = list(cases())
FIRST = {(case.kind.name, case.when): case for case in reversed(CASES)}.values()


def in_modes(case):
    """The case as a parameter."""
    marks = []
    if case.kind.is_known_by_autograd and poptorch.__name__ != "ipufit.emulator":
        reason = "a stand-in for PopTorch's core notes no dependencies, nor float64"
        marks.append(pytest.mark.skip(reason=reason))
    if case not in FIRST:
        marks.append(pytest.mark.thorough)
    return pytest.param(case, marks=marks)


def test_there_are_many_programs():
    assert len(CASES) == len(set(map(str, CASES))) >= 300
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert sum(case.outcome == RIGHT for case in CASES) >= 240


CHANGES = {case.kind.name: case for case in CASES if case.when != STEADY}


@pytest.mark.parametrize("case", CHANGES.values(), ids=str)
def test_a_change_changes_numbers_in_torch(case):
    if REFUSED in {case.outcome, case.kind.outcomes.get(BETWEEN)}:
        case = dataclasses.replace(case, when=BETWEEN)
    steady = run_plainly(dataclasses.replace(case, when=STEADY))
    changed = run_plainly(case)
    with pytest.raises(AssertionError):
        assert_same(changed, steady)


@pytest.mark.parametrize(
    "case", spread_if_quick([in_modes(case) for case in CASES]), ids=str
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
