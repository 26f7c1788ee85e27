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


def test_who_looks_does_so_while_the_caller_has_what_it_has_for_a_while(tmp_path):
    seen = []

    def look(model, arguments):
        seen.append((model, sorted(arguments), (tmp_path / "data").read_text()))

    def script():
        (tmp_path / "data").write_text("here")
        try:
            arrived("a model", {"x": 1, "y": 2})
        finally:
            (tmp_path / "data").unlink()

    with awaited(look), pytest.raises(FirstFit):
        script()
    assert seen == [("a model", ["x", "y"], "here")]


def test_the_error_of_who_looks_is_the_cause():
    def look(model, arguments):
        raise OSError("of the look")

    with awaited(look), pytest.raises(FirstFit) as stop:
        arrived("a model", {})
    assert isinstance(stop.value.__cause__, OSError)
