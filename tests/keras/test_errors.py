# SPDX-License-Identifier: Apache-2.0
"""What Keras refuses with a `ValueError`, ipufit refuses with one too."""

import keras
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ipufit import ConfigError, IPUModel
from tests.keras.twins import compiled, data, networks, two_heads

X, Y = data(8)
LOADER = DataLoader(TensorDataset(*map(torch.from_numpy, (X, Y))), batch_size=4)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((X, Y[:5]), {}),
        ((X, Y), {"validation_data": (X, Y[:5])}),
        ((X, Y), {"validation_split": 0.95}),
        ((LOADER, Y), {}),
        ((X, Y), {"sample_weight": Y[:5, 0]}),
        ((X, None), {}),
    ],
)
def test_data_that_does_not_fit_is_refused(arguments, named):
    for fitted in compiled(networks()):
        with pytest.raises(ValueError):  # noqa: PT011 - the words are each one's own
            fitted.fit(*arguments, batch_size=4, verbose=0, **named)


def test_a_model_must_be_compiled():
    model, module = networks()
    for fitted in (model, IPUModel(module)):
        with pytest.raises(ValueError, match=r"You must call `?compile"):
            fitted.fit(X, Y, verbose=0)


def test_weights_of_samples_and_of_classes_are_not_mixed():
    model, ipu = compiled(networks(num_outputs=2))
    labels = np.arange(8) % 2
    ipu.compile("sgd", "cross_entropy")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for fitted in (model, ipu):
        with pytest.raises(ValueError, match="class_weight"):
            fitted.fit(
                X, labels, sample_weight=Y[:, 0], class_weight={0: 2.0}, verbose=0
            )


@pytest.mark.parametrize("metrics", [["mae"], ["mae", "mse", "mae"]])
def test_a_list_of_metrics_has_one_for_each_output(metrics):
    x, targets = X, {"left": Y, "right": data(8, num_targets=2)[1]}
    for fitted in compiled(two_heads(), metrics=metrics):
        with pytest.raises(ValueError, match="metrics"):
            fitted.evaluate(x, targets, verbose=0)


@pytest.mark.parametrize("frequency", ["2", 1.5])
def test_an_unusable_validation_frequency_is_refused(frequency):
    for fitted in compiled(networks()):
        with pytest.raises(ValueError, match="validation_freq"):
            fitted.fit(
                X,
                Y,
                batch_size=4,
                validation_data=(X, Y),
                validation_freq=frequency,
                verbose=0,
            )


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        (
            "loss",
            keras.losses.CategoricalCrossentropy(from_logits=True),
            "'categorical_crossentropy'",
        ),
        ("loss", keras.losses.mean_squared_error, "'mean_squared_error'"),
        ("loss", [keras.losses.MeanSquaredError()], "'mean_squared_error'"),
        ("loss", keras.losses.MeanSquaredError, "'mean_squared_error'"),
        ("loss", keras.losses.Tversky(), "a loss of torch"),
        ("metrics", [keras.metrics.AUC()], "'auc'"),
        ("metrics", [keras.metrics.binary_accuracy], "'binary_accuracy'"),
        ("metrics", {"a": [keras.metrics.R2Score()]}, "'r2_score'"),
        ("weighted_metrics", [keras.metrics.MeanIoU(2)], "'mean_iou'"),
        ("optimizer", keras.optimizers.Adam(), "'adam'"),
        ("optimizer", keras.optimizers.Nadam(), "an ipufit.Optimizer"),
        (
            "lr_schedule",
            keras.optimizers.schedules.CosineDecay(0.1, 10),
            "an ipufit.Schedule",
        ),
    ],
)
def test_objects_of_keras_are_refused_by_compile(argument, value, words):
    arguments = {"optimizer": "sgd", "loss": "mse", argument: value}
    with pytest.raises(ConfigError, match=f"of Keras.*{words}"):
        IPUModel(torch.nn.Linear(2, 1)).compile(**arguments)


class Overriding(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred - y_true


def test_subclasses_models_and_callbacks_of_keras_are_refused():
    model = IPUModel(torch.nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="Overriding of Keras"):
        model.compile("sgd", Overriding())
    with pytest.raises(ConfigError, match="Dense of Keras"):
        IPUModel(keras.layers.Dense(1))
    module = keras.layers.TorchModuleWrapper(torch.nn.Linear(X.shape[1], 1))
    assert IPUModel(module).predict(X, verbose=0).shape == (len(X), 1)  # it is torch's
    with pytest.raises(ConfigError, match=r"EarlyStopping of Keras.*in ipufit"):
        model.predict(X, callbacks=[keras.callbacks.EarlyStopping()])
