# SPDX-License-Identifier: Apache-2.0
"""Listeners hear the parts of calls, and numbers are the same."""

from __future__ import annotations

import pytest
import torch

from ipufit.emulator import Options, inferenceModel, optim, trainingModel
from ipufit.emulator._device.listening import heard_as, heard_by, is_heard
from ipufit.emulator._layout.layout import Inputs, Outputs

X, Y = torch.arange(24.0).view(12, 2) / 24, torch.ones(12, 1)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(2, 4)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x, y):
        y_hat = self.last(torch.relu(self.first(x)))
        return y_hat, torch.nn.functional.mse_loss(y_hat, y)


class Recording:
    """Notes what begins; a part must end before the next one begins.

    Segments of modules begin and end within parts, one after the other.
    """

    def __init__(self, *, is_on=True):
        self.is_on = is_on
        self.heard, self.inside, self.open = [], [], []

    def begin(self, name, phase):
        if self.open:
            assert len(self.open) == 1
            self.inside.append((name, phase))
        else:
            self.heard.append((name, phase))
        self.open.append(len(self.heard) + len(self.inside))
        return self.open[-1]

    def end(self, span):
        assert self.open.pop() == span

    @property
    def names(self):
        assert self.open == []
        return [name for name, _ in self.heard]

    def modules(self, phase):
        return [name for name, of in self.inside if of == phase]


def training(iterations, accumulation, network=None):
    options = Options().deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    network = network or Network()
    sgd = optim.SGD(network.parameters(), lr=0.1)
    return trainingModel(network, options, sgd)


def call(model, count):
    rows = len(X) // count * count
    return model(X[:rows], Y[:rows])


@pytest.mark.parametrize(("iterations", "accumulation"), [(3, 1), (2, 3), (1, 1)])
def test_each_update_is_heard(iterations, accumulation):
    model, recording = training(iterations, accumulation), Recording()
    call(model, iterations * accumulation)  # folds are verified in the first call
    with heard_by(recording):
        call(model, iterations * accumulation)
    assert recording.names.count("update") == iterations
    assert iterations <= recording.names.count("backward") <= iterations * accumulation
    first, *parts, last = recording.names
    assert (first, last) == ("upload", "download")
    assert {"upload", "download"}.isdisjoint(parts)
    assert parts[0] == parts[-1] == "forward"
    backward = recording.names.index("backward")
    assert 1 < backward < recording.names.index("update")
    assert all(name == phase for name, phase in recording.heard)


def test_numbers_are_the_same_and_nothing_is_heard_afterwards():
    plain, heard, recording = training(3, 2), training(3, 2), Recording()
    before = [call(plain, 6) for _ in range(3)]
    after = [call(heard, 6)]
    with heard_by(recording):
        assert is_heard()
        after.append(call(heard, 6))
    assert not is_heard()
    count = len(recording.heard)
    after.append(call(heard, 6))
    assert len(recording.heard) == count > 0
    for (one, _), (other, _) in zip(before, after):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("iterations", "accumulation"), [(3, 1), (2, 3), (1, 1)])
def test_modules_are_heard_forward_and_backward(iterations, accumulation):
    model, recording = training(iterations, accumulation), Recording()
    with heard_by(recording):
        call(model, iterations * accumulation)
        recording.heard.clear()
        recording.inside.clear()
        call(model, iterations * accumulation)
    forward, backward = recording.modules("forward"), recording.modules("backward")
    order = ["first", "", "last", ""]  # the activation and the loss are of no child
    num_passes = recording.names.count("backward")
    assert forward == order * num_passes
    assert backward == order[::-1] * num_passes
    assert recording.modules("update") == []


def test_whoever_is_not_on_hears_nothing_and_nothing_is_marked():
    model, recording = training(3, 1), Recording(is_on=False)
    with heard_by(recording):
        assert not is_heard()
        call(model, 3)
        recording.is_on = True
        call(model, 3)
        recording.is_on = False
        count = len(recording.heard)
        call(model, 3)
    assert len(recording.heard) == count > 0


def test_several_listeners_hear_inference():
    model = inferenceModel(torch.nn.Linear(2, 1), Options().deviceIterations(3))
    recordings = Recording(), Recording()
    with heard_by(recordings[0]), heard_by(recordings[1]):
        model(X)
    assert recordings[0].names == recordings[1].names
    assert len(recordings[0].names) == 3


def test_a_call_that_fails_ends_its_part():
    class Lookup(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(3, 1)

        def forward(self, index):
            return self.table(index)

    model, recording = inferenceModel(Lookup()), Recording()
    model(torch.tensor([1]))
    with heard_by(recording), pytest.raises((IndexError, RuntimeError)):
        model(torch.tensor([7]))
    assert len(recording.names) == 2  # no download
    with heard_by(recording), pytest.raises(ZeroDivisionError):
        heard_as("upload", lambda by: 1 / by)(0)
    assert recording.names[2:] == ["upload"]


def test_what_a_part_contains_is_done_in_it(monkeypatch):
    done, recording = [], Recording()

    def noting(method):
        def call(self, *arguments):
            done.append((method.__name__, recording.heard[-1][0], bool(recording.open)))
            return method(self, *arguments)

        return call

    model = inferenceModel(torch.nn.Linear(2, 1), Options().deviceIterations(3))
    model(X)
    for owner, name in ((Inputs, "__init__"), (Outputs, "tensors")):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    with heard_by(recording):
        model(X)
    assert done == [("__init__", "upload", True), ("tensors", "download", True)]
