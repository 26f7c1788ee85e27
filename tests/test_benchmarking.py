# SPDX-License-Identifier: Apache-2.0
"""`benchmark` measures what it says, and leaves the model as it is."""

from __future__ import annotations

import dataclasses
import random
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ipufit
from ipufit import (
    BenchmarkResult,
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
from ipufit.engine import Executors
from ipufit.model import benchmarking
from ipufit.model.benchmark_result import Spread
from tests.distributed.runs import model_of, samples

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


class Counting(Dataset):
    """Counts samples that are loaded."""

    def __init__(self):
        self.loaded = 0

    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        self.loaded += 1
        return DATA[index]


class Clock:
    """Each call of a training takes a second, and each batch a quarter of one."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(benchmarking, "perf_counter", lambda: self.now)
        train, infer = Executors.train, Executors.infer
        load = benchmarking._endless

        def trained(executors, batch):
            self.now += 1.0
            return train(executors, batch)

        def inferred(executors, batch):
            self.now += 0.5
            return infer(executors, batch)

        def loaded(subject):
            for call in load(subject):
                self.now += 0.25
                yield call

        latencies = iter(range(1, 100))

        def latency(executors, *, is_training):
            self.now += 10.0  # the clock stands meanwhile
            least = next(latencies)
            return 1e-3 * least, 5e-3, 3e-3

        monkeypatch.setattr(Executors, "train", trained)
        monkeypatch.setattr(Executors, "infer", inferred)
        monkeypatch.setattr(Executors, "latency", latency)
        monkeypatch.setattr(benchmarking, "_endless", loaded)


# Figures ----------------------------------------------------------------------


def test_figures_are_those_of_the_calls_without_the_first(monkeypatch):
    Clock(monkeypatch)
    model = make(replicas=2, device_iterations=2)
    result = model.benchmark(DATA, batch_size=4, **QUICK)
    assert dataclasses.replace(result, build_seconds=0.0) == BenchmarkResult(
        mode="training",
        data="real",
        samples_per_second=8 / 1.25,
        repeats=(8 / 1.25, 8 / 1.25),
        call_ms=Spread(1000.0, 1000.0, 1000.0),
        latency_ms=Spread(1.0, pytest.approx(3.0), 5.0),
        loader_samples_per_second=8 / 0.25,
        build_seconds=0.0,
        calls=3,
        samples_per_call=8,
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.calls = 4


@pytest.mark.parametrize(("data", "seconds"), [("generated", 0.75), ("synthetic", 0.5)])
def test_no_loader_is_measured_without_the_data(monkeypatch, data, seconds):
    Clock(monkeypatch)
    counting = Counting()
    model = IPUModel(Network())  # inference needs no compile()
    result = model.benchmark(
        counting, batch_size=8, mode="inference", data=data, **QUICK
    )
    assert counting.loaded <= 4  # looks at the first one
    assert result.samples_per_second == pytest.approx(8 / seconds)
    assert result.call_ms == Spread(500.0, 500.0, 500.0)
    assert result.loader_samples_per_second is None
    assert (result.latency_ms is None) == (data == "synthetic")


def test_the_latency_is_poptorch_s_own(monkeypatch):
    executor = type(poptorch.inferenceModel(torch.nn.ReLU()))
    monkeypatch.setattr(executor, "getLatency", lambda self: (0.001, 0.004, 0.002))
    for mode in ("training", "inference"):
        result = make().benchmark(DATA, batch_size=8, mode=mode, **QUICK)
        assert result.latency_ms == Spread(1.0, pytest.approx(2.0), 4.0)


def test_all_passes_over_the_data_count_their_real_samples():
    model = make()
    result = model.benchmark(DATA, batch_size=16, mode="inference", **QUICK)
    assert result.samples_per_call == 16
    stream = DataLoader(DATA, batch_size=5)
    result = model.benchmark(stream, batch_size=10, **{**QUICK, "calls": 9})
    assert result.calls == 9
    assert result.loader_samples_per_second > 0


def test_a_generator_is_not_loaded_twice_and_may_end_too_early():
    model = make()
    batches = (DataLoader(DATA, batch_size=5),)
    result = model.benchmark(
        (batch for loader in batches for batch in loader), batch_size=5, **QUICK
    )
    assert result.loader_samples_per_second is None
    with pytest.raises(
        DataError, match=r"`x` has ended after 8 calls of .*fewer calls"
    ):
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
@pytest.mark.parametrize("data", ["real", "generated", "synthetic"])
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


@pytest.mark.parametrize("data", ["generated", "synthetic"])
@pytest.mark.parametrize("targets", ["probabilities", "one-hot"])
def test_generated_targets_are_some_of_the_data(targets, data):
    y = torch.nn.functional.one_hot(torch.arange(16) % 3, 3)
    given = y.float().softmax(dim=1) if targets == "probabilities" else y
    loss = "cross_entropy" if targets == "probabilities" else "bce"
    model = make()
    model.compile("sgd", loss, augment=ipufit.Mixing(mixup=0.2))
    result = model.benchmark(torch.rand(16, 4), given, 8, data=data, **QUICK)
    assert result.samples_per_call == 16  # two updates, as fit would choose


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_whose_layers_wait_for_data_still_waits():
    model = IPUModel(torch.nn.LazyLinear(3))
    model.compile("sgd", "cross_entropy")
    model.benchmark(DATA, batch_size=8, **QUICK)
    assert isinstance(model.module.weight, torch.nn.UninitializedParameter)


def test_a_call_in_a_callback_leaves_the_run_as_it_is():
    class Measures(ipufit.Callback):
        def on_epoch_end(self, epoch, logs):
            self.result = self.model.benchmark(DATA, batch_size=8, **QUICK)

    measures = Measures()
    plain = make().fit(DATA, batch_size=8, epochs=2, verbose=0).history
    fit = {"batch_size": 8, "epochs": 2, "verbose": 0, "callbacks": measures}
    assert make().fit(DATA, **fit).history == plain
    assert measures.result.samples_per_call == 40


def test_nothing_holds_ipus_afterwards():
    model = make()
    model.fit(DATA, batch_size=8, verbose=0)
    model.benchmark(DATA, batch_size=8, **QUICK)
    assert not model._executors._ipus.attached()


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


def test_synthetic_data_are_called_so_and_have_no_latency(capsys):
    make().benchmark(DATA, batch_size=8, data="synthetic", **{**QUICK, "verbose": 1})
    printed = capsys.readouterr().out
    assert "NOTE: with synthetic data only times count" in printed
    assert printed.startswith("training, synthetic data, made on the device: 3 calls")
    assert not any(re.findall(pattern, printed) for pattern in LATENCY)
    assert len(re.findall(THROUGHPUT[0], printed)) == 2


# Refusals, options and processes ------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"mode": "train"}, UnknownNameError, "mode.*'train'.*mean 'training'"),
        ({"data": "synth"}, UnknownNameError, "data.*'synth'.*mean 'synthetic'"),
        ({"calls": 0}, ConfigError, "calls=0 is not a whole number of 1 or more"),
        ({"repeats": 1.5}, ConfigError, "repeats=1.5 is not a whole number"),
        ({"warmup": -1}, ConfigError, "warmup=-1 is not a whole number of 0 or more"),
        ({"batch_size": 41}, DataError, "has 40 samples, but one training call"),
    ],
)
def test_arguments_that_are_none_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        make().benchmark(DATA, **{**QUICK, **arguments})


def test_training_needs_compile():
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


def test_samples_of_processes_add_up_in_the_time_of_the_slowest():
    one = benchmarking._Times(
        1.0, (40, 2.0), [(8, 1.0), (8, 4.0)], [0.1, 0.2], [(1e-3, 4e-3, 2e-3)] * 2
    )
    other = benchmarking._Times(
        3.0, (40, 1.0), [(8, 2.0), (6, 2.0)], [0.3, 0.4], [(2e-3, 9e-3, 4e-3)] * 2
    )
    plan = IPUConfig().training_plan(8)
    result = benchmarking._result([one, other], "training", "real", plan, 2)
    assert result.repeats == (16 / 2.0, 14 / 4.0)
    assert result.samples_per_second == 30 / 6.0
    assert result.loader_samples_per_second == 80 / 2.0
    assert result.call_ms == Spread(100.0, pytest.approx(250.0), 400.0)
    assert result.latency_ms == Spread(1.0, pytest.approx(3.0), 9.0)
    assert result.build_seconds == 3.0


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


@pytest.mark.parametrize("data", ["real", "synthetic"])
def test_several_processes_give_one_result(pool, data):
    first, second = pool.run(measured, data)
    assert first == second
    assert first[0] == 16
    assert first[2]
