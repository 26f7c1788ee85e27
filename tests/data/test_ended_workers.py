# SPDX-License-Identifier: Apache-2.0
"""A loading process that ends is an error with what to do, wherever torch tells.

torch raises it in the handler of a signal, so at any place. These tests raise it at
some: a worker that is really killed breaks the locks of torch's queues now and then.
"""

from __future__ import annotations

import multiprocessing.connection

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ipufit import Callback, DataError, IPUModel
from tests.ports import free_port

X, Y = torch.ones(32, 6), torch.zeros(32, dtype=torch.int64)
SAID = "A process that loads samples has ended: .*With num_workers=0 this process loads"


def raise_as_torch(*_):
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


class Batches:
    """Gives two batches, and then learns that a worker has ended."""

    def __iter__(self):
        yield X[:8], Y[:8]
        yield X[:8], Y[:8]
        raise_as_torch()


class Told(Callback):
    on_train_batch_end = raise_as_torch


def compiled(loss="cross_entropy"):
    model = IPUModel(torch.nn.Linear(6, 3))
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize(
    "run",
    [
        lambda: compiled().fit(Batches(), verbose=0),
        lambda: compiled().evaluate(Batches(), verbose=0),
        lambda: list(compiled().predict(Batches(), stream=True, verbose=0)),
        lambda: compiled().fit(X, Y, batch_size=8, verbose=0, callbacks=Told()),
        lambda: compiled(raise_as_torch).fit(X, Y, batch_size=8, verbose=0),
    ],
    ids=["fit", "evaluate", "predict", "hook", "loss"],
)
def test_the_error_says_what_to_do(run):
    with pytest.raises(DataError, match=SAID):
        run()


def test_a_connection_to_a_worker_that_has_ended(monkeypatch):
    nowhere = "127.0.0.1", free_port()

    def connect(*_, **__):
        multiprocessing.connection.Client(nowhere)

    iterator = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
    monkeypatch.setattr(f"{iterator}._try_get_data", connect)
    loader = DataLoader(TensorDataset(X, Y), batch_size=8, num_workers=1)
    with pytest.raises(DataError, match=SAID):
        compiled().fit(loader, verbose=0)


def test_other_errors_are_the_users():
    class Failing(Batches):
        def __iter__(self):
            yield X[:8], Y[:8]
            raise ConnectionResetError("the server of the data is gone")

    with pytest.raises(ConnectionResetError, match="the server of the data is gone"):
        compiled().fit(Failing(), verbose=0)
