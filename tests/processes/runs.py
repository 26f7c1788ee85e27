# SPDX-License-Identifier: Apache-2.0
"""What tests have several processes do: functions found by their names there."""

from __future__ import annotations

import torch
from torch.utils.data import IterableDataset

import ipufit
from ipufit import distributed

SAMPLES, FEATURES, CLASSES = 90, 6, 3
BATCH = 16


def samples(count=SAMPLES):
    """Inputs, classes and weights that are the same in every process."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    weights = torch.rand(count, generator=generator)
    return x, y, weights


class Answers(IterableDataset):
    """Gives what it hears of the process that it is in."""

    def __iter__(self):
        info = distributed.get_process_info()
        yield info.index, info.count


class Network(torch.nn.Module):
    """A small network; the first layer of one in `frozen` isn't trained."""

    def __init__(self, is_frozen=False):
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 8)
        self.last = torch.nn.Linear(8, CLASSES)
        self.first.requires_grad_(not is_frozen)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def worst(outputs, targets):
    """A figure of all rows at once."""
    return float(abs(outputs).max() + targets.sum())


def model_of(
    replicas=1, loss="cross_entropy", is_frozen=False, network=Network, **config
):
    """A compiled model; the processes begin with different weights."""
    torch.manual_seed(7 * distributed.get_process_info().index)
    network = network(is_frozen)
    config = {"seed": 5, **config}
    model = ipufit.IPUModel(network, ipufit.IPUConfig(replicas=replicas, **config))
    optimizer = ipufit.Optimizer("adam", lr=0.05)
    if loss == "sum":
        loss = torch.nn.CrossEntropyLoss(reduction="sum")
    metrics = ["accuracy", ipufit.metrics.StreamedFunction(worst)]
    model.compile(optimizer, loss, metrics=metrics)
    return model


def fitted(
    replicas=1,
    loss="cross_entropy",
    is_frozen=False,
    is_weighted=False,
    class_weight=None,
    drop_last="pad",
    callbacks=(),
    **config,
):
    """Everything that a run of fit, evaluate and predict comes to."""
    model = model_of(replicas, loss, is_frozen, **config)
    x, y, weights = samples()
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        sample_weight=weights if is_weighted else None,
        class_weight=class_weight,
        drop_last=drop_last,
        validation_data=(x[:37], y[:37]),
        callbacks=list(callbacks),
    )
    return {
        "history": history.history,
        "stop_reason": model._runs.fit.stop_reason,
        "updates": model.num_updates,
        "weights": [w.detach().numpy() for w in model.module.state_dict().values()],
        "evaluated": model.evaluate(x, y, verbose=0),
        "predicted": model.predict(x[:21], verbose=0).numpy(),
        "config": model.config,
    }


def left_open(iterations, form="arrays", **compiled):
    """A fit in which processes choose the updates of a call, or are told them."""
    torch.manual_seed(3)
    network = torch.nn.Sequential(Network(), torch.nn.Dropout(0.2))
    config = ipufit.IPUConfig(seed=5, device_iterations=iterations)
    model = ipufit.IPUModel(network, config)
    model.compile("adam", "cross_entropy", metrics=["accuracy"], **compiled)
    x, y, _ = samples()
    times = 16 if form == "loader" else 1  # a short pass isn't shared by large calls
    data = torch.utils.data.TensorDataset(x.repeat(times, 1), y.repeat(times))
    if form == "loader":
        data = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
    is_second = distributed.get_process_info().index == 1
    hear = print if form == "heard by one" and is_second else None
    history = model.fit(
        data,
        batch_size=BATCH,
        epochs=1,
        verbose=0,
        drop_last="pad",
        callbacks=[ipufit.LambdaCallback(on_train_batch_end=hear)],
    )
    weights = [w.detach().numpy() for w in network.state_dict().values()]
    return {
        "history": history.history,
        "weights": weights,
        "iterations": model._executors._trainer.executor.options.device_iterations,
    }
