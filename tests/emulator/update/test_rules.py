# SPDX-License-Identifier: Apache-2.0
"""Rules of optimisers: one for each kind."""

from __future__ import annotations

from ipufit.emulator._optimizers.kinds import OptimizerKind
from ipufit.emulator._update import adaptive, sgd


def test_each_kind_has_one_rule():
    assert not sgd.RULES.keys() & adaptive.RULES.keys()
    assert {*sgd.RULES, *adaptive.RULES} == set(OptimizerKind)
