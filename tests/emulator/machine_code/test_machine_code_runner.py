# SPDX-License-Identifier: Apache-2.0
"""Programs as machine code against the same programs, run eagerly.

The graphs that a compiler would be given are interpreted: these tests hold what is
compiled against the device. Those in `test_machine_code.py` compile.
"""

from __future__ import annotations

import logging

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import optim
from ipufit.emulator._ground.switches import COMPILE_VARIABLE, FOLD_VARIABLE
from ipufit.emulator._machine_code import translation as _translation
from tests.modes import Interpreted, is_machine_code, is_old
from tests.strategies import examples

needs_torch = pytest.mark.skipif(
    is_old(), reason="compiled programs need a newer torch"
)


def interpret(monkeypatch):
    """Ask for machine code, and interpret it."""

    monkeypatch.setattr(_translation, "translate_function", Interpreted.of)
    monkeypatch.setattr(_translation, "require_compiler", lambda: None)
    monkeypatch.setenv(COMPILE_VARIABLE, "compiled")


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch)


class Network(nn.Module):
    """Convolution, batch norm, max pooling, an unused and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False),
            nn.BatchNorm2d(3),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12, 4),
        )
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        scores = self.frozen(self.body(x))
        return scores, scores.argmax(1), self.loss(scores, y)


class Perceptron(nn.Module):
    def __init__(self, transform=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        self.transform = transform or (lambda x: x)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        scores = self.body(self.transform(x))
        return scores.sum(), self.loss(scores, y)


def twins(make):
    torch.manual_seed(1)
    module = make()
    twin = make()
    twin.load_state_dict(module.state_dict())
    return module, twin


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def images(count):
    return torch.randn(count, 1, 6, 6), torch.randint(0, 4, (count,))


def vectors(count):
    return torch.randn(count, 5), torch.randint(0, 4, (count,))


OPTIMIZERS = {
    "sgd": lambda w: optim.SGD(w, lr=0.1),
    "sgd, decay, scaled": lambda w: optim.SGD(
        w, lr=0.1, weight_decay=0.1, loss_scaling=8.0
    ),
    "separate": lambda w: optim.SGD(
        w, lr=0.1, momentum=0.9, weight_decay=0.1, use_combined_accum=False
    ),
    "combined": lambda w: optim.SGD(
        w,
        lr=0.1,
        momentum=0.9,
        dampening=0.1,
        weight_decay=0.1,
        use_combined_accum=True,
        loss_scaling=4.0,
    ),
    "nesterov": lambda w: optim.SGD(
        w, lr=0.1, momentum=0.9, nesterov=True, use_combined_accum=False
    ),
    "adam": lambda w: optim.Adam(w, lr=0.01, weight_decay=0.1, loss_scaling=4.0),
    "adamw": lambda w: optim.AdamW(w, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda w: optim.RMSprop(w, lr=0.01),
    "rmsprop, centered": lambda w: optim.RMSprop(
        w, lr=0.01, centered=True, momentum=0.9, weight_decay=0.1
    ),
    "rmsprop, tf": lambda w: optim.RMSprop(
        w, lr=0.01, momentum=0.9, use_tf_variant=True
    ),
    "lamb": lambda w: optim.LAMB(w, lr=0.01, loss_scaling=2.0),
    "lamb, no bias": lambda w: optim.LAMB(w, lr=0.01, bias_correction=False),
    "clipped": lambda w: optim.AdamW(w, lr=0.01, max_grad_norm=0.05),
    "two groups": lambda w: optim.Adam(
        [{"params": w[:1]}, {"params": w[1:], "lr": 0.02}], lr=0.01
    ),
}


def executors(monkeypatch, module_type, make_optimizer, options):
    """One that runs eagerly, and one that is compiled, of equal modules."""
    made = []
    for mode, module in zip(("eager", "compiled"), twins(module_type)):
        monkeypatch.setenv(COMPILE_VARIABLE, mode)
        weights = [p for p in module.parameters() if p.requires_grad]
        optimizer = make_optimizer(weights)
        executor = poptorch.trainingModel(module, options(), optimizer=optimizer)
        made.append((executor, optimizer, mode))
    return made


def call(monkeypatch, made, batch):
    results = []
    for executor, _, mode in made:
        monkeypatch.setenv(COMPILE_VARIABLE, mode)
        results.append(executor(*[tensor.clone() for tensor in batch]))
    assert not is_machine_code(made[0][0])
    assert is_machine_code(made[1][0])
    assert_close(results[1], results[0])


def assert_same_state(made):
    (eager, of_eager, _), (compiled, of_compiled, _) = made
    for executor in (eager, compiled):
        executor.copyWeightsToHost()
    assert_close(compiled.model.state_dict(), eager.model.state_dict())
    one, other = of_eager.state_dict(), of_compiled.state_dict()
    assert one["ipu_state"].keys() == other["ipu_state"].keys()
    assert_close(other["ipu_state"], one["ipu_state"])


@needs_torch
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_optimizers(interpreted, monkeypatch, name, accumulation):
    def options():
        options = poptorch.Options().deviceIterations(3)
        options.Training.gradientAccumulation(accumulation)
        options.outputMode(poptorch.OutputMode.All)
        return options

    made = executors(monkeypatch, Perceptron, OPTIMIZERS[name], options)
    try:
        for lr in (None, 0.003):
            for executor, optimizer, _ in made:
                if lr is not None:
                    optimizer.param_groups[0]["lr"] = lr
                    executor.setOptimizer(optimizer)
            call(monkeypatch, made, vectors(6 * accumulation))
            assert_same_state(made)
    finally:
        for executor, *_ in made:
            executor.destroy()


@needs_torch
@settings(max_examples=examples(15))
@given(data=st.data())
def test_layouts_modes_and_reductions(data):
    draw = data.draw
    iterations, accumulation, replicas = (draw(st.integers(1, 3)) for _ in range(3))
    modes = [m for m in poptorch.OutputMode if m.name != "Default"]
    mode = draw(st.sampled_from(modes))
    kinds = poptorch.ReductionType
    reduction = draw(st.sampled_from([kinds.Mean, kinds.Sum]))
    means = poptorch.MeanReductionStrategy
    strategy = draw(st.sampled_from([means.Running, means.Post]))
    fold = draw(st.sampled_from(["0", "1", ""]))
    module_type, batch = draw(
        st.sampled_from([(Network, images), (Perceptron, vectors)])
    )

    def options():
        options = poptorch.Options().deviceIterations(iterations)
        options.replicationFactor(replicas).autoRoundNumIPUs(True)
        is_periodic = mode is poptorch.OutputMode.EveryN
        options.outputMode(mode, iterations if is_periodic else None)
        options.broadcastBuffers(False)
        training = options.Training
        training.gradientAccumulation(accumulation)
        training.accumulationAndReplicationReductionType(reduction)
        training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
        return options

    with pytest.MonkeyPatch.context() as monkeypatch:
        interpret(monkeypatch)
        monkeypatch.setenv(FOLD_VARIABLE, fold)
        made = executors(monkeypatch, module_type, OPTIMIZERS["sgd"], options)
        try:
            for _ in range(2):
                count = iterations * accumulation * replicas * 2
                call(monkeypatch, made, batch(count))
            assert_same_state(made)
        finally:
            for executor, *_ in made:
                executor.destroy()


@needs_torch
def test_weights_that_move_between_calls(interpreted, monkeypatch):
    made = executors(monkeypatch, Perceptron, OPTIMIZERS["combined"], poptorch.Options)
    for step in range(4):
        call(monkeypatch, made, vectors(4))
        for executor, optimizer, _ in made:
            if step == 0:
                executor.detachFromDevice()
            elif step == 1:
                executor.copyWeightsToHost()
                with torch.no_grad():
                    executor.model.body[0].weight.mul_(0.5)
                executor.copyWeightsToDevice()
            elif step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
    assert_same_state(made)
    for executor, *_ in made:
        executor.destroy()


@needs_torch
def test_a_state_that_parts_a_group_is_run_eagerly(interpreted, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="poptorch::python")
    made = executors(monkeypatch, Perceptron, OPTIMIZERS["adam"], poptorch.Options)
    batch = vectors(4)
    call(monkeypatch, made, batch)
    for _, optimizer, _ in made:
        state = optimizer.state_dict()
        step = next(name for name in state["ipu_state"] if name.startswith("Step"))
        state["ipu_state"][step] = torch.tensor(7.0)
        optimizer.load_state_dict(state)
    assert "isn't run by machine code" not in caplog.text
    call(monkeypatch, made, batch)
    assert "isn't run by machine code" in caplog.text
    assert_same_state(made)
    for executor, *_ in made:
        executor.destroy()


@needs_torch
@pytest.mark.parametrize("fold", ["0", "1"])
@pytest.mark.parametrize("mode", [poptorch.OutputMode.All, poptorch.OutputMode.Sum])
def test_inference(interpreted, monkeypatch, fold, mode):
    monkeypatch.setenv(FOLD_VARIABLE, fold)
    options = poptorch.Options().deviceIterations(3).replicationFactor(2)
    x, y = images(24)
    for make in (lambda: Network().eval(), lambda: nn.Sequential(nn.Identity())):
        module = make()
        batch = (x, y) if isinstance(module, Network) else (x,)
        results = []
        for compile_mode in ("eager", "compiled"):
            monkeypatch.setenv(COMPILE_VARIABLE, compile_mode)
            executor = poptorch.inferenceModel(module, options.clone().outputMode(mode))
            results.append([executor(*batch), executor(*batch)])
            assert is_machine_code(executor) == (compile_mode == "compiled")
            executor.destroy()
        assert_close(results[1], results[0])


@needs_torch
def test_rows_in_another_layout(interpreted):
    double = poptorch.inferenceModel(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    expected = double(x)
    assert_close(double(x.t().contiguous().t()), expected)


@needs_torch
def test_weights_in_another_layout(interpreted, caplog):
    executor = poptorch.inferenceModel(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    expected = executor(x)
    assert "machine code" not in caplog.text
    executor.detachFromDevice()
    weight = executor.model.weight
    weight.data = weight.data.t().contiguous().t()
    assert_close(executor(x), expected)
    assert "memory layout of weights has changed" in caplog.text


@needs_torch
def test_random_programs_draw_from_the_device(interpreted):
    options = poptorch.Options().randomSeed(3)
    x = torch.ones(4, 5)
    results = []
    for _ in range(2):
        executor = poptorch.inferenceModel(nn.Dropout(0.5), options)
        assert executor(x) is not None
        assert is_machine_code(executor)
        results.append(executor(x))
    assert torch.equal(*results)
