# SPDX-License-Identifier: Apache-2.0
"""`SwapEMAWeights` and Keras's: what validations and other callbacks see."""

import keras
import numpy as np
import pytest

from ipufit import IPUModel, Optimizer
from ipufit.callbacks import LambdaCallback, SwapEMAWeights
from tests.keras.twins import (
    as_keras,
    assert_same_history,
    assert_same_weights,
    data,
    networks,
)


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_fits_with_validation(swap_on_epoch):
    model, module = networks()
    model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8), "mse")
    ipu = IPUModel(module)
    ipu.compile(Optimizer("sgd", 0.1, ema_momentum=0.8), "mse")
    x, y = data(16)
    common = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    common["validation_data"] = data(6, seed=1)
    seen = {"theirs": [], "mine": []}
    theirs = [
        keras.callbacks.SwapEMAWeights(swap_on_epoch),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: seen["theirs"].append(model.get_weights())
        ),
    ]

    def look(epoch, logs):
        ipu.get_weights()
        seen["mine"].append(as_keras(module))

    mine = [SwapEMAWeights(swap_on_epoch), LambdaCallback(on_epoch_end=look)]
    for _ in range(2):  # the second goes on from the averages, and with them
        expected = model.fit(x, y, callbacks=theirs, **common)
        history = ipu.fit(x, y, callbacks=mine, **common)
        assert_same_history(history.history, expected.history)
        assert_same_weights(module, model)
    assert len(seen["mine"]) == len(seen["theirs"]) == 4
    for mine, theirs in zip(seen["mine"], seen["theirs"]):
        for one, other in zip(mine, theirs):
            np.testing.assert_allclose(one, other, atol=1e-5)
