# SPDX-License-Identifier: Apache-2.0
"""`benchmark` measures what it says, and leaves the model as it is."""

from __future__ import annotations

import dataclasses
import random
import re
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ipufit import (
    ConfigError,
    DataError,
    IPUConfig,
    IPUModel,
    NotCompiledError,
    Optimizer,
    Schedule,
    UnknownNameError,
    poptorch,
)
from tests.processes.runs import model_of, samples

DATA = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
QUICK = {"calls": 3, "repeats": 2, "warmup": 1, "verbose": 0}


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.3)
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(self.drop(self.norm(x)))


def make(optimizer="adam", schedule=None, **fields):
    torch.manual_seed(0)
    model = IPUModel(Network(), IPUConfig(seed=3, **fields))
    model.compile(
        optimizer, "cross_entropy", metrics=["accuracy"], lr_schedule=schedule
    )
    return model


class Slow(Dataset):
    """Takes 2 ms to load a sample, and counts what is loaded."""

    def __init__(self):
        self.loaded = 0

    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        self.loaded += 1
        time.sleep(0.002)
        return DATA[index]


@pytest.fixture
def _slow_calls(monkeypatch):
    """Each call takes 20 ms more, and the first of all a quarter of a second."""
    executor, seen = type(poptorch.inferenceModel(torch.nn.ReLU())), []
    call = executor.__call__

    def slowly(self, *tensors, **named):
        time.sleep(0.02 if seen else 0.25)
        seen.append(self)
        return call(self, *tensors, **named)

    monkeypatch.setattr(executor, "__call__", slowly)
    monkeypatch.setattr(executor, "getLatency", lambda self: (0.001, 0.005, 0.003))


# Figures ----------------------------------------------------------------------


@pytest.mark.usefixtures("_slow_calls")
def test_figures_are_those_of_the_calls_without_the_first():
    model = make(replicas=2, device_iterations=2)
    result = model.benchmark(Slow(), batch_size=4, **QUICK)
    told = result.mode, result.data, result.calls, result.samples_per_call
    assert told == ("training", "real", 3, 8)
    assert result.latency_ms == (1.0, pytest.approx(3.0), 5.0)
    assert 20 <= result.call_ms.min <= result.call_ms.mean <= result.call_ms.max
    assert 0 < result.loader_samples_per_second <= 1 / 0.002
    assert len(result.repeats) == 2
    assert max(result.repeats) <= 8 / (0.02 + 8 * 0.002)
    assert min(result.repeats) <= result.samples_per_second <= max(result.repeats)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.calls = 4


@pytest.mark.usefixtures("_slow_calls")
@pytest.mark.parametrize("data", ["generated", "synthetic"])
def test_no_loader_is_measured_without_the_data(data):
    slow = Slow()
    model = IPUModel(Network())  # inference needs no compile()
    result = model.benchmark(slow, batch_size=8, mode="inference", data=data, **QUICK)
    assert slow.loaded <= 4  # looks at the first one
    assert 0 < result.samples_per_second <= 8 / 0.02
    assert result.call_ms.min >= 20
    assert result.loader_samples_per_second is None
    assert (result.latency_ms is None) == (data == "synthetic")


def test_a_generator_is_not_loaded_twice_and_may_end_too_early():
    model = make()
    batches = (DataLoader(DATA, batch_size=5),)
    result = model.benchmark(
        (batch for loader in batches for batch in loader), batch_size=5, **QUICK
    )
    assert result.loader_samples_per_second is None
    with pytest.raises(DataError, match=r"`x` has ended after 8 calls, .*fewer calls"):
        model.benchmark(
            (batch for loader in batches for batch in loader),
            batch_size=5,
            **{**QUICK, "calls": 4},
        )


# The model --------------------------------------------------------------------


def state_of(model):
    checkpoint = model.checkpoint()
    tensors = {
        f"{group}.{name}": tensor
        for group, named in checkpoint.tensors.items()
        for name, tensor in named.items()
    }
    return tensors, checkpoint.state["updates"], checkpoint.state["optimizer"]


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("data", ["real", "synthetic"])
def test_the_model_and_all_random_states_stay_as_they_are(mode, data):
    schedule = Schedule("cosine", warmup_updates=3)
    optimizer = Optimizer("adamw", lr=0.05, ema_momentum=0.9)
    runs = []
    for is_measured in (False, True):
        model = make(optimizer, schedule)
        own = torch.Generator().manual_seed(4)
        loader = DataLoader(DATA, batch_size=8, shuffle=True, generator=own)
        model.fit(loader, verbose=0)
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        if is_measured:
            history = model.history
            model.benchmark(loader, mode=mode, data=data, **QUICK)
            assert model.history is history
            assert model.num_updates == 5
        drawn = random.random(), np.random.rand(), float(torch.rand(()))
        before = state_of(model)
        model.fit(loader, verbose=0)
        runs.append((drawn, own.get_state().tolist(), before, state_of(model)))
    plain, measured = runs
    assert plain[:2] == measured[:2]
    for one, other in zip(plain[2:], measured[2:]):
        assert one[1:] == other[1:]
        assert one[0].keys() == other[0].keys()
        assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_whose_layers_wait_for_data_still_waits():
    model = IPUModel(torch.nn.LazyLinear(3))
    model.compile("sgd", "cross_entropy")
    model.benchmark(DATA, batch_size=8, **QUICK)
    assert isinstance(model.module.weight, torch.nn.UninitializedParameter)


# The lines --------------------------------------------------------------------

# Of benchmarks.yml files of PyTorch applications in graphcore/examples: CNNs, BERT,
# CLIP, MAE; CNN inference, GPT-2, YOLO; Triton; and the guide of examples-utils.
THROUGHPUT = (
    r"throughput: *(.*?) samples\/sec",
    r"throughput: *(.*?) samples/sec",
    r"throughput:?[ \t]*(\d+)",
)
LATENCY = (
    r"latency avg: *(.*?) ms",
    r"latency: *(.*?) ms \(mean\)",
    r"latency: *(.*?) ms",
)


@pytest.mark.usefixtures("quick")
def test_benchmark_files_find_the_figures(capsys):
    model = make()
    result = model.benchmark(DATA, batch_size=8, **{**QUICK, "verbose": 1})
    printed = capsys.readouterr().out
    assert printed == f"{result}\n"
    for pattern in THROUGHPUT:
        found = [float(text) for text in re.findall(pattern, printed)]
        assert found == pytest.approx(result.repeats, rel=0.01, abs=1)
        assert len(found) == 2  # `skip: 1` needs two
    for pattern in LATENCY:
        [found] = re.findall(pattern, printed)
        assert float(found) == pytest.approx(result.latency_ms.mean, abs=1e-3)


# Refusals, options and processes ------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"mode": "train"}, UnknownNameError, "mode.*'train'.*mean 'training'"),
        ({"data": "synth"}, UnknownNameError, "data.*'synth'.*mean 'synthetic'"),
        ({"calls": 0}, ConfigError, "calls=0: use a whole number of 1 or more"),
        ({"repeats": 1.5}, ConfigError, "repeats=1.5: use a whole number"),
        ({"warmup": -1}, ConfigError, "warmup=-1: use a whole number of 0 or more"),
        ({"batch_size": 41}, DataError, "has 40 samples, but one training call"),
    ],
)
def test_arguments_that_are_none_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        make().benchmark(DATA, **{**QUICK, **arguments})
    with pytest.raises(NotCompiledError):
        IPUModel(Network()).benchmark(DATA, **QUICK)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_synthetic_data_are_asked_for_by_the_option(mode, monkeypatch):
    seen = []
    enable = poptorch.Options.enableSyntheticData

    def spy(options, enabled):
        seen.append(enabled)
        return enable(options, enabled)

    monkeypatch.setattr(poptorch.Options, "enableSyntheticData", spy)
    for data, expected in (("real", []), ("generated", []), ("synthetic", [True])):
        make().benchmark(DATA, batch_size=8, mode=mode, data=data, **QUICK)
        assert seen == expected


def measured(data):
    model = model_of()
    x, y, _ = samples(64)
    before = model.module.last.weight.detach().clone()
    result = model.benchmark(x, y, batch_size=16, data=data, **QUICK)
    return (
        result.samples_per_call,
        result.repeats,
        bool((model.module.last.weight == before).all()),
    )


def test_several_processes_give_one_result(pool):
    first, second = pool.run(measured, "real")
    assert first == second
    assert first[0] == 16
    assert first[2]
