# SPDX-License-Identifier: Apache-2.0
"""The same fit in Keras and in ipufit: figures, epochs, hooks, weights."""

import keras
import numpy as np
import pytest

from ipufit import Callback
from tests.keras.twins import (
    OPTIMIZERS,
    IpufitRecorder,
    KerasRecorder,
    assert_same_history,
    assert_same_weights,
    classes,
    compiled,
    data,
    fit_both,
    networks,
)

ROWS = 24


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fit_is_keras_s(optimizer):
    pair = compiled(networks(), optimizer, metrics=["mae", "mse"])
    history = fit_both(pair, *data(ROWS), epochs=4)
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_so_is_one_on_classes():
    model, ipu = compiled(networks(num_outputs=4), loss="mse")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(model.optimizer, loss, metrics=["accuracy"])
    ipu.compile(ipu.optimizer, "cross_entropy", metrics=["accuracy"])
    fit_both((model, ipu), *classes(ROWS), epochs=3, validation_data=classes(8, seed=1))


@pytest.mark.parametrize("frequency", [1, 2, 3, [1, 4]])
def test_validation_comes_when_keras_validates(frequency):
    pair = compiled(networks(), metrics=["mae"])
    fit_both(
        pair,
        *data(ROWS),
        epochs=4,
        validation_data=data(8, seed=1),
        validation_freq=frequency,
    )


@pytest.mark.parametrize("batch_size", [4, 8])
def test_validation_has_a_batch_size_of_its_own(batch_size):
    fit_both(
        compiled(networks()),
        *data(ROWS),
        validation_data=data(16, seed=1),
        validation_batch_size=batch_size,
    )


@pytest.mark.parametrize("share", [0.5, 0.33, 0.1])
def test_the_last_rows_are_split_off(share):
    x, y = data(12)
    batch_size = int(np.floor(12 * (1 - share)))  # one batch, whatever is left
    pair = compiled(networks(), metrics=["mae"])
    fit_both(pair, x, y, validation_split=share, batch_size=batch_size, epochs=2)


@pytest.mark.parametrize(("initial", "epochs"), [(0, 0), (2, 4), (3, 3), (4, 2)])
def test_epochs_are_counted_from_where_they_begin(initial, epochs):
    pair = compiled(networks())
    history = fit_both(pair, *data(ROWS), initial_epoch=initial, epochs=epochs)
    assert history.epoch == list(range(initial, epochs))


def test_a_second_fit_goes_on_with_a_history_of_its_own():
    pair = compiled(networks(), "momentum")
    fit_both(pair, *data(ROWS), epochs=2)
    assert fit_both(pair, *data(ROWS), epochs=2).epoch == [0, 1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_evaluate_is_keras_s(optimizer):
    model, ipu = compiled(networks(), optimizer, metrics=["mae"])
    x, y = data(ROWS)
    theirs, mine = KerasRecorder(), IpufitRecorder()
    expected = model.evaluate(
        x, y, batch_size=8, verbose=0, callbacks=[theirs], return_dict=True
    )
    figures = ipu.evaluate(x, y, batch_size=8, verbose=0, callbacks=[mine])
    assert list(figures) == list(expected)
    assert figures == pytest.approx(expected, rel=1e-5)
    assert mine.events == theirs.events
    assert len(mine.events) == 2 + 2 * 3


def test_predict_is_keras_s():
    model, ipu = compiled(networks(num_outputs=2))
    x, _ = data(ROWS)
    theirs, mine = KerasRecorder(), IpufitRecorder()
    expected = model.predict(x, batch_size=8, verbose=0, callbacks=[theirs])
    outputs = ipu.predict(x, batch_size=8, verbose=0, callbacks=[mine])
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
    assert mine.events == theirs.events
    assert len(mine.events) == 2 + 2 * 3


@pytest.mark.parametrize(
    "stop_at", ["on_train_batch_end", "on_epoch_begin", "on_epoch_end"]
)
def test_a_fit_that_is_stopped_ends_as_keras_s(stop_at):
    def stop(recorder, name):
        hook = getattr(type(recorder), name)

        def stopping(self, index, *arguments, **named):
            hook(self, index, *arguments, **named)
            if index == 1:
                self.model.stop_training = True

        kind = type("Stopping", (type(recorder),), {name: stopping})
        return kind()

    model, ipu = compiled(networks())
    x, y = data(ROWS)
    theirs = stop(KerasRecorder(), stop_at)
    mine = stop(IpufitRecorder(), stop_at)
    common = {
        "batch_size": 4,
        "epochs": 4,
        "shuffle": False,
        "validation_data": data(8, seed=1),
        "verbose": 0,
    }
    expected = model.fit(x, y, callbacks=[theirs], **common)
    history = ipu.fit(x, y, callbacks=[mine], **common)
    assert mine.events == theirs.events
    assert_same_history(history.history, expected.history)
    assert_same_weights(ipu.module, model)


RESETS = {
    "on_train_batch_end": [1, 3, 5],
    "on_train_batch_begin": [0, 4],
    "on_epoch_begin": [0],
    "on_epoch_end": [0],
    "on_test_batch_end": [0, 1],
    "on_test_begin": [None],
    "on_test_end": [None],
}


@pytest.mark.parametrize(
    ("hook", "at"), [(hook, at) for hook, times in RESETS.items() for at in times]
)
def test_metrics_that_a_hook_resets_go_on_from_there(hook, at):
    pair = compiled(networks(), metrics=["mae"])
    seen = []
    for model, base in zip(pair, (keras.callbacks.Callback, Callback)):
        callback = base()

        def reset(number=None, logs=None, callback=callback):
            if at is None or number == at:
                callback.model.reset_metrics()

        setattr(callback, hook, reset)
        run = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        run.update(validation_data=data(8, seed=1), validation_batch_size=4)
        seen.append(model.fit(*data(ROWS), callbacks=[callback], **run).history)
        model.reset_metrics()
    assert_same_history(seen[1], seen[0])
