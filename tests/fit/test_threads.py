# SPDX-License-Identifier: Apache-2.0
"""Models in threads: each gets its own numbers, and one model has one thread."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ipufit import ConfigError, LambdaCallback
from tests.reference import compiled


def trained(seed, results):
    random = torch.Generator().manual_seed(seed)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    network = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random))
    x = torch.randn(32, 4, generator=random)
    y = torch.randint(0, 3, (32,), generator=random)
    model = compiled(network, seed=seed, optimizer="adam", metrics=["accuracy"])
    history = model.fit(x, y, 8, epochs=3, verbose=0)
    results[seed] = history.history, model.predict(x, verbose=0).tolist()


def test_models_that_train_in_threads_get_the_numbers_that_they_get_alone(capfd):
    alone, together = {}, {}
    for seed in range(3):
        trained(seed, alone)
    threads = [threading.Thread(target=trained, args=(s, together)) for s in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    sys.stdout.write("still printed")
    assert "still printed" in capfd.readouterr().out


def drawing(x, y):
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)


METHODS = {
    "fit": lambda model, x, y: model.fit(x, y, 4, verbose=0),
    "evaluate": lambda model, x, y: model.evaluate(drawing(x, y), verbose=0),
    "predict": lambda model, x, y: model.predict(drawing(x, y), verbose=0),
    "train_on_batch": lambda model, x, y: model.train_on_batch(x, y),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_runs_is_refused_in_another_thread(method):
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    model = compiled(torch.nn.Linear(2, 1), loss="mse")
    seen = []

    def elsewhere():
        before = torch.random.get_rng_state()
        try:
            METHODS[method](model, x, y)
        except ConfigError as error:
            seen.append(str(error))
        assert torch.equal(torch.random.get_rng_state(), before)
        twin = copy.deepcopy(model)
        METHODS[method](twin, x, y)  # a copy may

    def ask(epoch, logs):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    history = model.fit(x, y, 4, epochs=2, verbose=0, callbacks=LambdaCallback(ask))
    assert len(seen) == 2
    assert "Another thread is in fit, evaluate or predict" in seen[0]
    assert len(history.history["loss"]) == 2
    METHODS[method](model, x, y)  # nothing runs any more
