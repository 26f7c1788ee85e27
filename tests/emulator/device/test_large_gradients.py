# SPDX-License-Identifier: Apache-2.0
"""Large models that accumulate: the same bits in less memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ipufit.emulator as poptorch
from ipufit.emulator._device import large_gradients
from ipufit.emulator._device.large_gradients import Room
from ipufit.emulator._device.listening import heard_by
from ipufit.emulator._update.device_optimizer import DeviceOptimizer

pytestmark = pytest.mark.not_in_mode(
    "compiled", reason="machine code keeps gradients in its own way"
)

ROWS, WIDTH = 64, 8


class Network(nn.Module):
    """Two tables, one of which is read once; a weight that the loss doesn't reach."""

    def __init__(self, padding=None, rows=ROWS, width=WIDTH, is_tied=True):
        super().__init__()
        self.tokens = nn.Embedding(rows, width, padding_idx=padding)
        self.tied = nn.Embedding(9, width) if is_tied else None
        self.norm = nn.LayerNorm(width)
        self.aside = nn.Linear(width, 3)
        self.last = nn.Linear(width, 5)

    def forward(self, x, y):
        features = self.norm(self.tokens(x).mean(1))
        aside = self.aside(features.detach()).detach()
        if self.tied is not None:
            features = features + self.tied(x % 9).sum(1)
            aside = aside.sum() + features @ self.tied.weight.t()
        scores = self.last(torch.tanh(features))
        return aside, nn.functional.cross_entropy(scores, y)


class Listener:
    is_on = True

    def begin(self, name, phase):
        return name

    def end(self, span):
        pass


@pytest.fixture(autouse=True)
def in_a_loop(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "0")


def executor(network, *, accumulation, replicas=1, iterations=1, clip=None):
    options = poptorch.Options().deviceIterations(iterations)
    options.replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    optimizer = poptorch.optim.AdamW(
        network.parameters(), lr=0.1, weight_decay=0.1, max_grad_norm=clip
    )
    return poptorch.trainingModel(network, options, optimizer)


def trained(*, padding=None, calls=2, is_heard=False, **settings):
    """The bits of all weights, and of the optimiser's state, after some calls."""
    torch.manual_seed(0)
    training = executor(Network(padding), **settings)
    count = 2 * settings["accumulation"]
    count *= settings.get("replicas", 1) * settings.get("iterations", 1)
    generator = torch.Generator().manual_seed(1)
    for call in range(calls):
        x = torch.randint(ROWS, (count, 4), generator=generator)
        y = torch.randint(5, (count,), generator=generator)
        if is_heard and call % 2:
            with heard_by(Listener()):
                training(x, y)
        else:
            training(x, y)
    state = training._optimizer.state_dict()["ipu_state"]
    training.copyWeightsToHost()
    values = {**dict(training.model.named_parameters()), **state}
    result = {
        name: value.detach().clone().view(torch.int32) for name, value in values.items()
    }
    training.destroy()
    return result


def as_large():
    return mock.patch.multiple(large_gradients, _LEAST_BYTES=1, _LEAST_TABLE_BYTES=1)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"accumulation": 3},
        {"accumulation": 2, "replicas": 2, "iterations": 2},
        {"accumulation": 3, "clip": 0.5},
        {"accumulation": 12, "is_heard": True},
    ],
)
def test_no_bit_changes(padding, settings):
    expected = trained(padding=padding, **settings)
    with as_large(), mock.patch.object(
        Room, "accumulating", autospec=True, side_effect=Room.accumulating
    ) as accumulating:
        actual = trained(padding=padding, **settings)
    assert accumulating.call_count == 2 * settings.get("iterations", 1)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_a_call_that_fails_leaves_nothing():
    class Fails(Listener):
        def begin(self, name, phase):
            if phase == "backward" and name:
                calls.append(name)
                if len(calls) == 3:
                    raise ValueError("stop")
            return name

    x, y = torch.arange(24).view(6, 4), torch.arange(6) % 5
    results = []
    with as_large():
        for fails in (False, True):
            torch.manual_seed(0)
            training = executor(Network(), accumulation=3)
            training.compile(x, y)
            calls = []
            if fails:
                with heard_by(Fails()), pytest.raises(ValueError, match="stop"):
                    training(x + 30, y)
            training(x, y)
            training.copyWeightsToHost()
            results.append([p.detach().clone() for p in training.model.parameters()])
            training.destroy()
    assert all(map(torch.equal, *results))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that were made while it is on, and still live."""

    def __init__(self):
        super().__init__()
        self._live = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        for tensor in results:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._live[storage.data_ptr()] = StorageWeakRef(storage), len(storage)
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def peak_of_passes():
    """Bytes that a call takes besides weights and state, at most, but for updates."""
    network = Network(rows=4096, width=64, is_tied=False)
    training = executor(network, accumulation=3)
    x, y = torch.arange(24).view(6, 4), torch.arange(6) % 5
    training(x, y)
    # Its temporary tensors depend on the version of torch.
    with LiveBytes() as live, mock.patch.object(DeviceOptimizer, "step"):
        training(x, y)
    training.destroy()
    return live.peak


def test_it_holds_one_gradient_of_a_large_table_instead_of_two():
    table = 4 * 4096 * 64
    assert 2 * table < peak_of_passes() < 2.1 * table
    with as_large():
        assert table < peak_of_passes() < 1.1 * table


def test_small_models_and_updates_of_one_micro_batch_have_no_room():
    with mock.patch.object(Room, "__init__", side_effect=AssertionError):
        trained(accumulation=3)
        with as_large():
            trained(accumulation=1)
