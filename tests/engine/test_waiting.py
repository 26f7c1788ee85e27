# SPDX-License-Identifier: Apache-2.0
"""Figures of several calls at once are those of one call after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipufit.engine.loop
from ipufit import Callback, IPUConfig, IPUModel
from ipufit.callbacks import ProgressDisplay
from tests import reference
from tests.strategies import examples


class Hears(Callback):
    """Wants the figures of each call."""

    def on_test_batch_end(self, batch, logs=None):
        self.logs = logs


def compiled(loss="cross_entropy", metrics=("accuracy",), **config):
    model = IPUModel(reference.network(), IPUConfig(**config))
    model.compile("sgd", loss, metrics=list(metrics), weighted_metrics=["accuracy"])
    return model


def bits(figures):
    """Figures as text that tells any two numbers apart, and no NaN from another."""
    return {name: float(value).hex() for name, value in figures.items()}


@settings(max_examples=examples(25))
@given(
    st.integers(1, 60),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1, 64, 2**20]),
)
def test_waiting_changes_no_figure(count, size, iterations, is_weighted, most):
    x, y = reference.samples(count)
    y[::7] = -100  # ignored
    weights = torch.linspace(0, 2, count) if is_weighted else None
    model = compiled(device_iterations=iterations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipufit.engine.loop, "_MOST_BYTES", most)
        # Outputs of folded micro-batches may differ from single ones in the last bit.
        patch.setenv("IPUFIT_EMULATOR_FOLD", "0")
        arguments = {"sample_weight": weights, "verbose": 0}
        waited = model.evaluate(x, y, size, **arguments)
        heard = Hears()
        each = model.evaluate(x, y, size, callbacks=heard, **arguments)
    assert bits(waited) == bits(each)
    assert heard.logs == pytest.approx(each, nan_ok=True)


def test_a_display_does_not_change_the_figures(monkeypatch):
    x, y = reference.samples(40)
    model = compiled(inference_iterations=1)
    expected = model.evaluate(x, y, batch_size=2, verbose=0)
    shown = []

    class Display(ProgressDisplay):
        @property
        def is_due(self):
            return True

        def on_test_batch_end(self, batch, logs=None):
            shown.append(dict(logs))

    figures = model.evaluate(x, y, batch_size=2, callbacks=Display(), verbose=0)
    assert figures == expected
    assert len(shown) == 20
    assert shown[4] == pytest.approx(
        model.evaluate(x[:10], y[:10], batch_size=2, verbose=0), rel=1e-5
    )


@pytest.mark.parametrize("where", ["loss", "metrics"])
@pytest.mark.parametrize("iterations", [None, 1, 2, 8])
def test_functions_of_the_users_see_one_pass_at_a_time(where, iterations):
    sizes = []

    def error(outputs, targets):
        sizes.append(len(outputs))
        return torch.nn.functional.cross_entropy(outputs, targets)

    x, y = reference.samples(18)
    given = {"loss": error} if where == "loss" else {"metrics": [error]}
    model = compiled(inference_iterations=iterations, **given)
    model.evaluate(x, y, batch_size=4, verbose=0)
    assert sizes == [4, 4, 4, 4, 2]


def test_targets_that_do_not_fit_fail_at_the_first_call():
    x, _ = reference.samples(12)
    model = compiled(inference_iterations=1)
    with pytest.raises(ipufit.DataError, match=r"float32 \[4, "):
        model.evaluate(x, torch.zeros(12, 1, 5), batch_size=4, verbose=0)
