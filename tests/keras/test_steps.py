# SPDX-License-Identifier: Apache-2.0
"""Partial batches, and epochs and validations of so many steps, as Keras has them."""

import warnings

import numpy as np
import pytest

from tests.keras.twins import (
    OPTIMIZERS,
    IpufitRecorder,
    KerasRecorder,
    compiled,
    data,
    fit_both,
    networks,
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rows", [10, 9, 5])
def test_a_partial_batch_is_padded_to_keras_s_figures(optimizer, rows):
    model, ipu = compiled(networks(), optimizer, metrics=["mae"])
    ipu.fit = pads(ipu.fit)
    fit_both((model, ipu), *data(rows), epochs=3, validation_data=data(7, seed=1))


def pads(fit):
    return lambda *arguments, **named: fit(*arguments, drop_last="pad", **named)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("epochs", [1, 3, 4])
def test_epochs_of_so_many_steps_go_on_where_the_last_ended(steps, epochs):
    pair = compiled(networks(), metrics=["mae"])
    fit_both(pair, *data(24), epochs=epochs, steps_per_epoch=steps)


def test_an_epoch_that_runs_out_of_data_is_cut_short():
    pair = compiled(networks())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit_both(pair, *data(20), epochs=3, steps_per_epoch=2)
    said = [str(warning.message) for warning in caught]
    assert sum("ran out of data" in text for text in said) == 1  # Keras
    assert sum("data ran out after 1 updates" in text for text in said) == 1
    assert history.epoch == [0, 1, 2]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_validations_of_so_many_steps_begin_at_the_beginning(steps):
    pair = compiled(networks(), metrics=["mae"])
    fit_both(
        pair,
        *data(8),
        epochs=3,
        validation_data=data(12, seed=1),
        validation_steps=steps,
    )


@pytest.mark.parametrize("steps", [1, 2, None])
def test_evaluate_and_predict_take_so_many_steps(steps):
    model, ipu = compiled(networks(), metrics=["mae"])
    x, y = data(11)
    theirs, mine = KerasRecorder(), IpufitRecorder()
    common = {"batch_size": 4, "steps": steps, "verbose": 0}
    expected = model.evaluate(x, y, return_dict=True, callbacks=[theirs], **common)
    figures = ipu.evaluate(x, y, callbacks=[mine], **common)
    assert figures == pytest.approx(expected, rel=1e-5)
    expected = model.predict(x, callbacks=[theirs], **common)
    outputs = ipu.predict(x, callbacks=[mine], **common)
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
    assert mine.events == theirs.events


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({}, 6), ({"steps_per_epoch": 2}, 2)],
)
def test_callbacks_see_keras_s_params(arguments, expected):
    seen = []
    for fitted, recorder in zip(
        compiled(networks()), (KerasRecorder(), IpufitRecorder())
    ):
        x, y = data(24)
        fitted.fit(
            x, y, batch_size=4, epochs=2, callbacks=[recorder], verbose=0, **arguments
        )
        seen.append({name: recorder.params[name] for name in ("epochs", "steps")})
    assert seen[0] == seen[1] == {"epochs": 2, "steps": expected}
