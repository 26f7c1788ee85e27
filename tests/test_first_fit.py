# SPDX-License-Identifier: Apache-2.0
"""The first `fit` of a script, which whoever awaits it stops."""

from __future__ import annotations

import contextlib

import pytest
import torch

from ipufit import IPUModel
from ipufit.first_fit import FirstFit, arrived, awaited

X, Y = torch.zeros(8, 2), torch.zeros(8, 1)


def model():
    made = IPUModel(torch.nn.Linear(2, 1))
    made.compile("sgd", "mse")
    return made


def test_a_fit_that_is_awaited_does_nothing():
    of_script = model()
    before = of_script.module.weight.clone()

    def script():
        with contextlib.suppress(Exception):
            of_script.fit(X, y=Y, batch_size=4, epochs=2, verbose=0)

    with awaited(), pytest.raises(FirstFit) as stop:
        script()
    assert stop.value.model is of_script
    assert stop.value.arguments["x"] is X
    assert stop.value.arguments["batch_size"] == 4
    assert "self" not in stop.value.arguments
    assert torch.equal(of_script.module.weight, before)
    assert of_script.history is None


def test_nobody_awaits_a_fit_otherwise():
    with awaited():
        with awaited():
            pass
        with pytest.raises(FirstFit):
            arrived(None, {})
    arrived(None, {})
    assert model().fit(X, Y, 4, verbose=0).epoch == [0]
