# SPDX-License-Identifier: Apache-2.0
"""A run that is asked to stop."""

from __future__ import annotations

from ipufit.state import RunState


def test_a_new_run_goes_on():
    run = RunState()
    assert not run.is_stopping
    assert run.stop_reason is None


def test_the_first_reason_to_stop_is_kept():
    run = RunState()
    run.stop("good enough")
    run.stop("too late")
    assert run.is_stopping
    assert run.stop_reason == "good enough"


def test_runs_share_no_parameters():
    first, second = RunState(), RunState()
    first.params["epochs"] = 3
    assert second.params == {}
