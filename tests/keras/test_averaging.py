# SPDX-License-Identifier: Apache-2.0
"""Running averages of weights against Keras's own `use_ema`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ipufit.optimizers import WeightAverage

keras = pytest.importorskip("keras")

MOMENTUM = 0.8
X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X @ np.array([[1.0], [-2.0], [0.5]], dtype="float32")


def keras_model(**settings):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    kernel = np.full((3, 1), 0.25, dtype="float32")
    model.set_weights([kernel, np.zeros(1, dtype="float32")])
    model.compile(keras.optimizers.SGD(0.05, **settings), loss="mse")
    return model


def fit(model, epochs, callbacks=()):
    model.fit(
        X,
        Y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def put(module, weights):
    kernel, bias = weights
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(kernel.T.copy()))
        module.bias.copy_(torch.from_numpy(bias))


def taken(module):
    return [module.weight.detach().numpy().T, module.bias.detach().numpy()]


def follow(module, average):
    """Let an average see the weights of a Keras model after each of its updates."""

    class Follow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            put(module, self.model.get_weights())
            average.update(1)

    return Follow()


def assert_same(module, model):
    for mine, theirs in zip(taken(module), model.get_weights()):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_after_fit_the_weights_are_keras_averages(epochs):
    with_average = keras_model(use_ema=True, ema_momentum=MOMENTUM)
    fit(with_average, epochs)

    module = torch.nn.Linear(3, 1)
    average = WeightAverage(module, MOMENTUM)
    plain = keras_model()
    fit(plain, epochs, [follow(module, average)])
    assert_same(module, plain)
    average.apply()
    assert_same(module, with_average)


def test_after_the_first_update_the_average_is_the_weights():
    with_average = keras_model(use_ema=True, ema_momentum=0.999)
    one = {"batch_size": 24, "epochs": 1, "shuffle": False, "verbose": 0}
    with_average.fit(X, Y, **one)
    plain = keras_model()
    plain.fit(X, Y, **one)
    for mine, theirs in zip(with_average.get_weights(), plain.get_weights()):
        np.testing.assert_array_equal(mine, theirs)


def test_the_next_fit_goes_on_from_the_averages_and_with_them():
    with_average = keras_model(use_ema=True, ema_momentum=MOMENTUM)
    module = torch.nn.Linear(3, 1)
    average = WeightAverage(module, MOMENTUM)
    plain = keras_model()
    for epochs in (2, 1):
        fit(with_average, epochs)
        fit(plain, epochs, [follow(module, average)])
        average.apply()
        assert_same(module, with_average)
        plain.set_weights([w.copy() for w in taken(module)])
