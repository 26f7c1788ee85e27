# SPDX-License-Identifier: Apache-2.0
"""The random states of this process, to tensors and back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit.data.random_state import random_state, set_random_state
from ipufit.errors import DataError


def draws(*generators):
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.normal()),
        float(torch.rand(())),
        float(torch.randn(())),
        *(float(torch.rand((), generator=one)) for one in generators),
    )


@given(st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_the_same_numbers_come_again(seed, count):
    random.seed(seed)
    np.random.seed(seed)
    own = torch.Generator().manual_seed(seed)
    for _ in range(count):  # both gauss have a second number ready every other time
        draws(own)
    state = random_state([own])
    first = [draws(own) for _ in range(3)]
    assert first[0] != first[1]
    set_random_state(state, [own])
    assert [draws(own) for _ in range(3)] == first


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
    draws()
    spoil(state)
    before = random_state()
    with pytest.raises(DataError, match="no random states"):
        set_random_state(state)
    after = random_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_generators_must_be_as_many():
    with pytest.raises(DataError, match="generator0"):
        set_random_state(random_state(), [torch.Generator()])
