# SPDX-License-Identifier: Apache-2.0
"""The random states of this process, to tensors and back."""

from __future__ import annotations

import random

import pytest
import torch

from ipufit.data.random_state import random_state, set_random_state
from ipufit.errors import DataError


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.pop("torch"),
        lambda state: state.pop("python"),
        lambda state: state.update(numpy=torch.zeros(3, dtype=torch.int64)),
        lambda state: state.update(python=torch.zeros(3, dtype=torch.int64)),
        lambda state: state.update(torch=torch.zeros(3, dtype=torch.uint8)),
    ],
)
def test_what_is_no_state_is_refused_and_sets_nothing(spoil):
    state = random_state()
    random.random()
    spoil(state)
    before = random_state()
    with pytest.raises(DataError, match="saved random states don't fit"):
        set_random_state(state)
    after = random_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_generators_must_be_as_many():
    with pytest.raises(DataError, match="generator0"):
        set_random_state(random_state(), [torch.Generator()])
