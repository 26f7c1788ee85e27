# SPDX-License-Identifier: Apache-2.0
"""Classes of users whose constructors don't call `super().__init__()`."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import ipufit
from ipufit import Callback, IPUModel, Metric, StreamedMetric, callbacks, metrics

X, Y = torch.arange(32.0).reshape(16, 2) / 32, torch.arange(16) % 2


def construct(self, *arguments):
    self.count = 0


def derived(base, **members):
    """Return a subclass whose constructor doesn't call that of its base."""
    return type("Mine", (base,), {"__init__": construct, **members})


def fit(*, model=IPUModel, optimizer="sgd", metrics=(), callbacks=(), **arguments):
    model = model(torch.nn.Linear(2, 2))
    model.compile(optimizer, "cross_entropy", metrics=list(metrics), **arguments)
    model.fit(X, Y, 8, verbose=0, callbacks=list(callbacks))
    return model.history.history


def correct(self, outputs, targets, weights=None):
    hits = outputs.argmax(1).eq(targets).float()
    return torch.stack([hits.sum(), torch.ones_like(hits).sum()])


STREAMED = {
    "update": lambda self, *_: None,
    "result": lambda self: 0.5,
    "reset": lambda self: None,
}


@pytest.mark.parametrize(
    "kind",
    [
        derived(Metric, sums=correct),
        derived(StreamedMetric, **STREAMED),
        derived(metrics.SparseCategoricalAccuracy),
    ],
)
def test_metrics_have_the_name_of_their_class(kind):
    metric = kind()
    assert metric.name in ("mine", "sparse_categorical_accuracy")
    assert set(fit(metrics=[metric])) == {"loss", metric.name}
    assert repr(metric) == "Mine()"


def test_a_metric_s_name_can_be_set():
    kind = derived(Metric, sums=correct)
    metric = kind()
    metric.name = "hits"
    assert "hits" in fit(metrics=[metric])


@pytest.mark.parametrize("base", [Callback, callbacks.LambdaCallback])
def test_callbacks_without_arguments_need_no_constructor(base):
    def count(self, epoch, logs):
        self.count += 1

    callback = derived(base, on_epoch_end=count)()
    fit(callbacks=[callback])
    assert callback.count == 1


BASES = {
    "callbacks": [
        callbacks.BackupAndRestore,
        callbacks.CSVLogger,
        callbacks.EarlyStopping,
        callbacks.GradientMonitor,
        callbacks.LearningRateScheduler,
        callbacks.ModelCheckpoint,
        callbacks.ProgressBar,
        callbacks.ReduceLROnPlateau,
        callbacks.Throughput,
    ],
    "metrics": [metrics.AUC, metrics.ConfusionMatrix, metrics.F1Score],
    "optimizer": [ipufit.Optimizer],
    "lr_schedule": [ipufit.Schedule, ipufit.PerEpoch],
    "model": [IPUModel],
}


@pytest.mark.parametrize(
    ("place", "base"), [(place, base) for place in BASES for base in BASES[place]]
)
def test_other_classes_say_what_to_do(place, base):
    kind = derived(base)
    if place != "model":
        kind = kind() if place in ("optimizer", "lr_schedule") else [kind()]
    advice = re.escape("Let Mine.__init__ call super().__init__() first.")
    with pytest.raises((AttributeError, ValueError), match=advice):
        fit(**{place: kind})


def test_an_attribute_that_is_missing_otherwise_is_python_s_error():
    class Mine(callbacks.EarlyStopping):
        def __init__(self):
            super().__init__("loss")

        @property
        def odd(self):
            return self.cuont

    for name in ("cuont", "odd"):
        with pytest.raises(AttributeError) as caught:
            getattr(Mine(), name)
        assert str(caught.value) == "'Mine' object has no attribute 'cuont'"


def test_errors_of_properties_and_other_constructors_stay_as_they_are():
    class Late(ipufit.Callback):
        tries = 0

        @property
        def client(self):
            self.tries += 1
            if self.tries % 2:
                raise AttributeError("not connected yet")
            return "client"

    @dataclasses.dataclass
    class Fields(ipufit.Callback):
        every: int = 2

        def __post_init__(self):
            super().__init__()

    class Counts(dict, ipufit.Callback):
        pass

    assert Late().client == "client"
    name = "missing"
    for kind in (Fields, Counts):
        with pytest.raises(
            AttributeError, match=f"'{kind.__name__}' object has no .*'$"
        ):
            getattr(kind(), name)
