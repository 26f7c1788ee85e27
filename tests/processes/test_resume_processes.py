# SPDX-License-Identifier: Apache-2.0
"""Several processes go on with a run, in as many processes or in others."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ipufit
from ipufit import (
    BackupAndRestore,
    EarlyStopping,
    IPUConfig,
    IPUModel,
    Optimizer,
    Schedule,
    load_checkpoint,
)
from ipufit.data.random_state import random_state
from ipufit.distributed import get_process_info
from ipufit.errors import ConfigError, OtherLayoutWarning, UnsupportedError
from ipufit.metrics import StreamedFunction
from tests.data.stateful import StatefulLoader
from tests.files.samples import same_tensors
from tests.reference import NUM_CLASSES, NUM_FEATURES, samples

COUNT = 44


class Remembering(torch.nn.Module):
    """Its outputs depend on a buffer, which each process moves by its own samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(NUM_FEATURES))

    def forward(self, x):
        if self.training:
            self.seen.mul_(0.5).add_(x.mean(dim=0) * 0.5)
        return x - self.seen


class Noisy(Dataset):
    """Samples that draw random numbers."""

    def __init__(self):
        self.x, self.y = samples(COUNT)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(NUM_FEATURES)
        return self.x[index] + noise, self.y[index]


def network(*, is_exact, replicas=1):
    layers = [torch.nn.Linear(NUM_FEATURES, 5), torch.nn.Tanh()]
    if not is_exact:
        layers += [torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.3)]
        if replicas == 1:  # of several, the buffers of the first are saved
            layers.insert(0, Remembering())
    return torch.nn.Sequential(*layers, torch.nn.Linear(5, NUM_CLASSES))


class Draws(ipufit.Callback):
    """Draws from the global generators, as a callback of a process may."""

    is_saved = False

    def on_train_batch_begin(self, batch, logs):
        torch.rand(1 + get_process_info().index)
        random.random()


class Stream(IterableDataset):
    """Gives each process its part, in an order that is drawn."""

    is_divided = True

    def __iter__(self):
        info, (x, y) = get_process_info(), samples(COUNT)
        for index in torch.randperm(COUNT).tolist()[info.index :: info.count]:
            yield x[index], y[index]


class StatefulPart(StatefulLoader):
    """Gives each process its part, and the second one less."""

    is_divided = True

    def __init__(self):
        info, (x, y) = get_process_info(), samples(COUNT - 5)
        super().__init__(x[info.index :: info.count], y[info.index :: info.count], 3)


def data(kind):
    x, y = samples(COUNT)
    return {
        "arrays": lambda: {"x": x, "y": y},
        "noisy": lambda: {"x": Noisy()},
        "loader": lambda: {"x": DataLoader(TensorDataset(x, y), 7, shuffle=True)},
        "noisy loader": lambda: {"x": DataLoader(Noisy(), 7, shuffle=True)},
        "stream": lambda: {"x": Stream()},
        "stateful part": lambda: {"x": StatefulPart()},
        "stateful": lambda: {"x": StatefulLoader(x, y, 7)},
    }[kind]()


def train(
    folder,
    resume=None,
    *,
    is_exact=False,
    is_saving=False,
    metrics=(),
    of="noisy",
    **config,
):
    """A run in one of the processes; returns all that it leaves."""
    os.fsync = lambda descriptor: None
    index = get_process_info().index
    torch.manual_seed(1 if resume is None else 2)
    module = network(is_exact=is_exact, replicas=config.get("replicas", 1))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(index + (10 if resume is None else 20))
    settings = {"micro_batch_size": 2, **config}
    model = IPUModel(module, IPUConfig(seed=3, **settings))
    model.compile(
        Optimizer("adam", 0.05, ema_momentum=0.9),
        "cross_entropy",
        metrics=["accuracy", *metrics],
        lr_schedule=Schedule("cosine", total_updates=12),
    )
    stopping = EarlyStopping("loss", patience=9, restore_best_weights=True)
    callbacks = [stopping, Draws()]
    if is_saving:
        backup = BackupAndRestore(
            folder, save_freq=1, delete_checkpoint=False, keep_last=99
        )
        backup.is_saved = backup.resumes = False
        callbacks.append(backup)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OtherLayoutWarning)
        history = model.fit(
            **data(of),
            batch_size=8,
            epochs=2,
            verbose=0,
            drop_last="pad",
            validation_data=samples(10, seed=4),
            callbacks=callbacks,
            resume=resume,
        )
    return {
        "history": history.history,
        "weights": model.module.state_dict(),
        "average": model.checkpoint().tensors["average"],
        "random": random_state(),
        "device": model._executors._trainer.executor.rng_state,
        "samples": model._runs.fit.samples,
        "warnings": [
            str(one.message) for one in caught if one.category is OtherLayoutWarning
        ],
    }


def assert_same(results, expected):
    for one, other in zip(results, expected):
        assert one["history"] == other["history"]
        for group in ("weights", "average", "random"):
            assert same_tensors(one[group], other[group]), group
        assert one["device"] == other["device"]
        assert one["samples"] == other["samples"]
        assert one["warnings"] == []


def saved_in(folder):
    paths = sorted(Path(folder).iterdir())
    assert len(paths) > 9
    return paths


@pytest.mark.filterwarnings("ignore::ipufit.errors.IpufitWarning")
@pytest.mark.parametrize(
    ("of", "replicas"),
    [
        ("noisy", 1),
        pytest.param("noisy", 2, marks=pytest.mark.slow),
        pytest.param("noisy loader", 1, marks=pytest.mark.slow),
        pytest.param("stream", 1, marks=pytest.mark.slow),
        ("stateful part", 1),
        pytest.param("stateful", 1, marks=pytest.mark.slow),
    ],
)
def test_as_many_processes_go_on_bit_by_bit(pool, tmp_path, of, replicas):
    config = {"replicas": replicas, "of": of}
    expected = pool.run(train, tmp_path / "run", is_saving=True, **config)
    assert expected[0]["device"] != expected[1]["device"]
    paths = saved_in(tmp_path / "run")
    saved = load_checkpoint(paths[2]).tensors
    moved = "0.seen" if replicas == 1 else "2.running_mean"
    assert not torch.equal(
        saved["processes"][f"1/model/{moved}"], saved["model"][moved]
    )
    for path in (None, paths[2], paths[8]):  # saving changes nothing either
        resume = {"resume": path} if path else {}
        assert_same(pool.run(train, None, **resume, **config), expected)


LAYOUTS = {
    "one process": (1, {}),
    "replicas of one process": (1, {"replicas": 4, "micro_batch_size": 1}),
    "other micro-batches": (2, {"micro_batch_size": 4}),
    "two processes": (2, {}),
    "four processes": (4, {"micro_batch_size": 1}),
}


def run(pool, layout, *args, of="arrays", **kwargs):
    count, config = LAYOUTS[layout]
    return pool.run(train, *args, count=count, is_exact=True, of=of, **kwargs, **config)


@pytest.mark.filterwarnings("ignore::ipufit.errors.IpufitWarning")
@pytest.mark.parametrize(
    ("before", "after", "of"),
    [
        ("two processes", "one process", "arrays"),
        ("one process", "two processes", "arrays"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("two processes", "other micro-batches", "arrays"),
                ("four processes", "replicas of one process", "arrays"),
                ("two processes", "four processes", "loader"),
                ("two processes", "one process", "stream"),
            ]
        ),
    ],
)
def test_another_layout_goes_on_with_data_optimizer_and_figures(
    pool, tmp_path, before, after, of
):
    expected = run(pool, before, tmp_path / "run", is_saving=True, of=of)[0]
    for path in (saved_in(tmp_path / "run")[i] for i in (1, 8)):
        results = run(pool, after, None, path, of=of)
        for result in results:
            history = result["history"]
            assert history.keys() == expected["history"].keys()
            for name, values in expected["history"].items():
                assert history[name] == pytest.approx(values, rel=1e-4), name
            assert result["samples"] == expected["samples"]
            for name, weight in expected["weights"].items():
                torch.testing.assert_close(result["weights"][name], weight)
        said = [len(result["warnings"]) for result in results]
        assert said == [1] + [0] * (len(results) - 1)
    again = run(pool, after, None, path, of=of)
    for result, other in zip(results, again):  # new random states are always the same
        assert same_tensors(result["random"], other["random"])
        assert result["device"] == other["device"]
    states = {repr(result["random"]["torch"].tolist()) for result in results}
    assert len(states) == len(results)


@pytest.mark.filterwarnings("ignore::ipufit.errors.IpufitWarning")
def test_what_differs_is_said_or_refused(pool, tmp_path):
    run(pool, "two processes", tmp_path / "run", is_saving=True)
    first, *_, last = saved_in(tmp_path / "run")
    (said,) = run(pool, "one process", None, last)[0]["warnings"]
    assert "processes was 2 and is 1" in said
    assert "dropout masks; running statistics" in said
    with pytest.raises(ConfigError, match="device_iterations was 1 and is 2"):
        run(pool, "two processes", None, last, device_iterations=2)
    with pytest.raises(ConfigError, match="update 1, and process 1 from update 12"):
        pool.run(resume_own, str(first), str(last))


def resume_own(*paths):
    index = get_process_info().index
    return train(None, paths[index], is_exact=True, of="arrays")


def spread(outputs, targets):
    return outputs.std()


@pytest.mark.filterwarnings("ignore::ipufit.errors.IpufitWarning")
def test_streamed_metrics_are_refused_by_all_alike(pool, tmp_path):
    with pytest.raises(UnsupportedError, match="streamed metrics can't"):
        run(
            pool,
            "two processes",
            tmp_path / "run",
            is_saving=True,
            metrics=[StreamedFunction(spread)],
        )
