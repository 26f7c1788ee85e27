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


def test_actions_are_done_once_in_the_order_in_which_they_were_asked_for():
    run, done = RunState(), []
    run.after_hooks(lambda: done.append(1))
    run.after_hooks(lambda: done.append(2))
    assert done == []
    run.act()
    run.act()
    assert done == [1, 2]


def test_an_action_that_fails_is_not_tried_again():
    run = RunState()

    def fail():
        raise ValueError("no room")

    run.after_hooks(fail)
    with pytest.raises(ValueError, match="no room"):
        run.act()
    run.act()


def failing(words, done):
    def act():
        done.append(words)
        raise ValueError(words)

    return act


def test_an_action_that_fails_takes_no_other_with_it():
    run, done = RunState(), []
    run.after_hooks(failing("no room", done))
    run.after_hooks(lambda: done.append("the other"))
    with pytest.raises(ValueError, match="no room"):
        run.act()
    assert done == ["no room", "the other"]


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
