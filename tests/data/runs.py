# SPDX-License-Identifier: Apache-2.0
"""Runs on data of each kind that tests have several processes do."""

from __future__ import annotations

import gc
import random
import warnings

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ipufit
from ipufit import distributed

COUNT, BATCH = 50, 12


def samples(count=COUNT):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=generator)
    return x, torch.randint(0, 2, (count,), generator=generator)


class Transformed(Dataset):
    """Samples with noise, which processes must draw alike."""

    def __init__(self):
        self.x, self.y = samples()

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        noise = torch.rand(3) + random.random()
        return self.x[index] + noise, self.y[index]


class Stream(IterableDataset):
    """All samples in each process, in a new order for each pass."""

    def __iter__(self):
        x, y = samples()
        return iter([(x[i], y[i]) for i in torch.randperm(COUNT).tolist()])


class OwnStream(IterableDataset):
    """The samples of this process, so that updates have those of a global order."""

    is_divided = True

    def __iter__(self):
        info = distributed.get_process_info()
        x, y = samples()
        share = BATCH // info.count
        for index in range(COUNT):
            if index % BATCH // share == info.index:
                yield x[index], y[index]


def batches(count):
    x, y = samples()
    while count:
        yield from zip(x.split(7), y.split(7))
        count -= 1


def data_of(kind):
    """Arguments of `fit`, beside the number of epochs."""
    x, y = samples()
    validation = {"validation_data": (x[:31], y[:31])}
    loader = TensorDataset(x, y)
    return {
        "arrays": {"x": x, "y": y, "validation_split": 0.3},
        "mixed": {"x": x, "y": y},
        "weights": {"x": x, "y": y, "class_weight": {0: 0.5, 1: 3.0}},
        "dataset": {"x": Transformed(), **validation},
        "cache": {"x": ipufit.CachedDataset(loader), **validation},
        "loader": {
            "x": DataLoader(loader, BATCH, shuffle=True, num_workers=1),
            "validation_data": DataLoader(loader, 7),
        },
        "stream": {"x": Stream(), "validation_data": Stream()},
        "own stream": {"x": OwnStream(), "validation_data": OwnStream()},
        "generator": {"x": batches(3), "steps_per_epoch": 4},
    }[kind]


def fitted(kind, drop_last="pad"):
    """The figures and weights of a run."""
    gc.collect()  # groups of earlier runs, which a forked process couldn't end
    torch.manual_seed(3)
    random.seed(3)
    network = torch.nn.Linear(3, 2)
    config = {"seed": 5, "num_workers": 1 if kind == "dataset" else 0}
    is_mixed = kind == "mixed"
    if is_mixed:
        config["micro_batch_size"] = 2  # whose samples are mixed
    model = ipufit.IPUModel(network, ipufit.IPUConfig(**config))
    model.compile(
        ipufit.Optimizer("sgd", lr=0.3),
        "cross_entropy",
        metrics=["accuracy"],
        augment=ipufit.Mixing(mixup=0.4) if is_mixed else None,
    )
    given = data_of(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = model.fit(
            batch_size=BATCH, epochs=2, verbose=0, drop_last=drop_last, **given
        )
    return history.history, [w.tolist() for w in network.parameters()]


def by_batches():
    """The figures of single batches, and weights."""
    torch.manual_seed(3)
    network = torch.nn.Linear(3, 2)
    model = ipufit.IPUModel(network)
    model.compile(
        ipufit.Optimizer("sgd", lr=0.3), "cross_entropy", metrics=["accuracy"]
    )
    x, y = samples()
    figures = [model.train_on_batch(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
    figures.append(model.test_on_batch(x[:13], y[:13]))
    return figures, [w.tolist() for w in network.parameters()]
