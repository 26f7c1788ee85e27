# SPDX-License-Identifier: Apache-2.0
"""Doing all of several things, though some of them fail."""

from __future__ import annotations

import traceback
import warnings

import pytest

from ipufit._failures import do_all
from ipufit.errors import CheckpointError, CheckpointWarning, IpufitWarning


def doing(done, *errors):
    """An action for each, which notes its place and raises its error, if any."""

    def act(place, error):
        done.append(place)
        if error is not None:
            raise error

    return [lambda p=p, e=e: act(p, e) for p, e in enumerate(errors)]


def test_all_are_done_in_order():
    done = []
    do_all(doing(done, None, None, None))
    assert done == [0, 1, 2]


def test_the_first_failure_is_raised_and_the_others_are_warned_of():
    done = []
    actions = doing(done, None, ValueError("a"), CheckpointError("b"), KeyError("c"))
    with pytest.warns(IpufitWarning) as caught, pytest.raises(ValueError, match="a"):
        do_all(actions)
    assert done == [0, 1, 2, 3]
    assert [(w.category, str(w.message).split(": ", 1)[1]) for w in caught] == [
        (CheckpointWarning, "CheckpointError: b"),
        (IpufitWarning, "KeyError: 'c'"),
    ]


def test_nothing_is_raised_over_an_error_that_is_on_its_way():
    with pytest.warns(IpufitWarning, match="ValueError: a"):
        do_all(doing([], ValueError("a"), None), is_failing=True)


@pytest.mark.parametrize("is_failing", [False, True])
def test_an_interrupt_goes_before_errors(is_failing):
    done = []
    actions = doing(done, ValueError("a"), KeyboardInterrupt(), None)
    with pytest.warns(IpufitWarning, match="ValueError: a"), pytest.raises(
        KeyboardInterrupt
    ):
        do_all(actions, is_failing=is_failing)
    assert done == [0, 1, 2]


def test_warnings_that_are_errors_hide_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(IpufitWarning, match="KeyError: 'b'") as caught:
            do_all(doing([], ValueError("a"), KeyError("b")))
    assert "ValueError: a" in "".join(traceback.format_exception(*caught._excinfo))
