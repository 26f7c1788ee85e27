# SPDX-License-Identifier: Apache-2.0
"""`History`: one row per epoch."""

from __future__ import annotations

from ipufit import History
from ipufit.state import RunState


def test_figures_are_kept_by_name_in_the_order_they_came():
    history = History()
    history.on_epoch_end(0, {"loss": 2.0})
    history.on_epoch_end(1, {"loss": 1.0, "val_loss": 3.0})
    assert history.history == {"loss": [2.0, 1.0], "val_loss": [3.0]}
    assert list(history.history) == ["loss", "val_loss"]
    assert history.epoch == [0, 1]


def test_a_new_run_counts_epochs_anew_and_keeps_what_there_was():
    history = History()
    history.on_epoch_end(0, {"loss": 2.0})
    run = RunState(coverage="half", params={"dropped_samples": 3})
    history.set_run(run)
    history.on_train_begin({})
    assert history.epoch == []
    assert history.history == {"loss": [2.0]}
    assert (history.dropped_samples, history.coverage) == (3, "half")


def test_two_histories_share_nothing():
    first, second = History(), History()
    first.on_epoch_end(0, {"loss": 2.0})
    assert second.history == {}
    assert second.epoch == []


def test_the_model_is_not_kept():
    history = History()
    history.set_model(object())
    assert history.model is None
