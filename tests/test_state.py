# SPDX-License-Identifier: Apache-2.0
"""A run that is asked to stop."""

from __future__ import annotations

import pytest

from ipufit.errors import IpufitWarning
from ipufit.state import RunState


def test_the_first_reason_to_stop_is_kept():
    run = RunState()
    run.stop("good enough")
    run.stop("too late")
    assert run.is_stopping
    assert run.stop_reason == "good enough"


def failing(words, done):
    def act():
        done.append(words)
        raise ValueError(words)

    return act


def test_all_that_save_are_told_of_an_eviction_though_one_fails():
    run, done = RunState(is_evicted=True), []
    for action in (
        failing("no room", done),
        lambda: done.append("the other"),
        failing("too", done),
    ):
        run.on_eviction(action)
    with pytest.warns(IpufitWarning, match="too"), pytest.raises(
        ValueError, match="no room"
    ):
        run.heed_eviction()
    assert done == ["no room", "the other", "too"]
