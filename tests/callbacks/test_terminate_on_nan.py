# SPDX-License-Identifier: Apache-2.0
"""`TerminateOnNaN`: which losses end a run, and how."""

from __future__ import annotations

import contextlib

import pytest
import torch

from ipufit import IPUConfig, IPUModel
from ipufit.callbacks import TerminateOnNaN
from ipufit.errors import NonFiniteLossWarning
from tests.callbacks.driving import play
from tests.reference import Recorder

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_a_loss_that_is_no_number_ends_the_run(loss, capsys):
    series = [{"loss": 1.0}, {"loss": loss}, {"loss": 1.0}]
    played = play(TerminateOnNaN(), series, batches=1)
    assert played.epochs == [0, 1]
    assert played.run.stop_reason == f"the loss is {loss} (TerminateOnNaN)"
    assert capsys.readouterr().out == "Batch 0: Invalid loss, terminating training\n"


def test_other_losses_and_none_end_nothing(capsys):
    series = [{"loss": 1e38}, {"loss": -3.0}, {"q": NAN}]
    assert len(play(TerminateOnNaN(), series, batches=2).epochs) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("raises", [False, True])
def test_a_fit_ends_after_the_call(raises, capsys):
    model = IPUModel(torch.nn.Linear(1, 1), IPUConfig(device_iterations=2))
    model.compile("sgd", "mse")
    x = torch.ones(12, 1)
    x[8] = NAN  # in the third update, the first of the second call
    recorder = Recorder()

    def fit():
        model.fit(
            x,
            torch.ones(12, 1),
            batch_size=2,
            epochs=3,
            shuffle=False,
            callbacks=[TerminateOnNaN(raise_error=raises), recorder],
            verbose=0,
        )

    expected = contextlib.nullcontext()
    if raises:
        expected = pytest.raises(RuntimeError, match="it is nan at batch 5 of epoch 1")
    with pytest.warns(NonFiniteLossWarning), expected:
        fit()
    said = "" if raises else "Batch 5: Invalid loss, terminating training\n"
    assert capsys.readouterr().out == said
    names = recorder.names()
    assert names.count("on_train_batch_begin") == 3
    assert names.count("on_train_batch_end") == (2 if raises else 3)
    assert names.count("on_train_end") == (0 if raises else 1)
