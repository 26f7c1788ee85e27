# SPDX-License-Identifier: Apache-2.0
"""The list of operators: sorted, without repetition, and known to torch."""

from __future__ import annotations

import pytest
import torch

from ipufit.emulator._program import strict as _supported_ops
from ipufit.emulator._program.strict import SUPPORTED_OPERATORS

GROUPS = ("_HANDLED", "_INTERCEPTED", "_EXTENSIONS", "_COMPOSED", "_OF_PROCESSORS")


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_sorted_and_repeats_nothing(group):
    names = getattr(_supported_ops, group).split()
    assert names == sorted(set(names))
    assert SUPPORTED_OPERATORS.issuperset(names)


def test_no_two_groups_share_a_name():
    names = [
        name for group in GROUPS for name in getattr(_supported_ops, group).split()
    ]
    assert len(names) == len(set(names)) == len(SUPPORTED_OPERATORS)


def test_torch_has_what_poptorch_handles():
    operators = torch._C._dispatch_get_all_op_names()
    known = {name.partition("::")[2].partition(".")[0] for name in operators}
    unknown = {
        name
        for group in ("_HANDLED", "_INTERCEPTED", "_COMPOSED")
        for name in getattr(_supported_ops, group).split()
        if name not in known and f"{name}_" not in known
    }
    # The last is written in Python.
    assert unknown == {"multilabel_soft_margin_loss"}
