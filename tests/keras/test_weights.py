# SPDX-License-Identifier: Apache-2.0
"""Sample and class weights in a fit, as Keras counts and names them."""

import keras
import numpy as np
import pytest
import torch

from tests.keras.twins import classes, compiled, data, fit_both, networks


def weights(rows, seed=5):
    return np.random.default_rng(seed).uniform(0, 2, size=rows).astype("float32")


@pytest.mark.parametrize("weighted", [None, ["mae"], ["mse", "mae"]])
@pytest.mark.parametrize("plain", [None, ["mae"]])
def test_sample_weights_count_where_keras_counts_them(plain, weighted):
    pair = compiled(networks(), metrics=plain, weighted_metrics=weighted)
    x, y = data(8, seed=1)
    fit_both(
        pair,
        *data(24),
        epochs=2,
        sample_weight=weights(24),
        validation_data=(x, y, weights(8, seed=6)),
    )


def test_metrics_of_one_name_are_told_apart_as_in_keras():
    pair = compiled(networks(), metrics=["mae"], weighted_metrics=["mae", "mse"])
    history = fit_both(pair, *data(24), sample_weight=weights(24))
    assert list(history.history) == ["loss", "mae", "mse", "weighted_mae"]


@pytest.mark.parametrize("class_weight", [{0: 1.0, 1: 3.0, 2: 0.5, 3: 0.0}, {1: 2.0}])
def test_class_weights_count_in_training_only(class_weight):
    model, ipu = compiled(networks(num_outputs=4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    kwargs = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    model.compile(keras.optimizers.SGD(0.1), loss, **kwargs)
    sgd = torch.optim.SGD(ipu.module.parameters(), lr=0.1)
    ipu.compile(sgd, "cross_entropy", **kwargs)
    fit_both(
        (model, ipu),
        *classes(24),
        epochs=2,
        class_weight=class_weight,
        validation_data=classes(8, seed=1),
    )
