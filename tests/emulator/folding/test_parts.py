# SPDX-License-Identifier: Apache-2.0
"""Training programs in parts: the same bits as whole."""

# ruff: noqa: N803 - D, G and R are the letters of the user guide
from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import OutputMode, optim
from ipufit.emulator._folding import parts_runner as _parts_runner
from tests.modes import parts_of

F = nn.functional
ROWS, FEATURES, CLASSES = 3, 5, 4
MODES = (OutputMode.All, OutputMode.Sum, OutputMode.Final, OutputMode.EveryN)

pytestmark = pytest.mark.not_in_mode(
    *("compiled", "folded", "looped"),
    reason="parts are of eager programs that may be folded, of updates that aren't",
)


class Counting(nn.Module):
    """A loss by its own divisor, and what is counted beside it."""

    def __init__(self, body, counts):
        super().__init__()
        self.body, self.counts = body, counts

    def forward(self, x, y):
        scores = self.body(x)
        valid = y.ne(0).to(torch.float32).sum().clamp(min=1)
        total = F.cross_entropy(scores, y, reduction="sum")
        loss = poptorch.identity_loss(total.div(valid), reduction="sum")
        return (*self.counts(scores, y, total), loss)


def hits(scores, y, total):
    """Counts as ipufit has them: in one vector."""
    right = scores.detach().argmax(dim=-1).eq(y)
    counted = torch.stack([right, y.ne(0)]).to(torch.float32).sum(dim=1)
    count = torch.full((1,), float(ROWS), device=scores.device)
    return (torch.cat([count, total.detach().reshape(1), counted]),)


def of_all_shapes(scores, y, total):
    """Counts of no, one and two dimensions, and others that aren't exact."""
    right = scores.argmax(dim=1).eq(y)
    seen = right.sum()
    squares = scores.detach().sub(1.0).square().sum()
    return right, seen, seen.reshape(1), squares, scores.detach(), right.unsqueeze(1)


def mlp():
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def random():
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(), nn.Linear(8, CLASSES))


def normalised():
    norm = nn.BatchNorm1d(8)
    return nn.Sequential(nn.Linear(FEATURES, 8), norm, nn.Linear(8, CLASSES))


def train(body, counts, D=4, G=1, R=1, mode=OutputMode.All, calls=2):
    """All that training leaves, and the parts it ran in."""
    torch.manual_seed(5)
    module = Counting(body(), counts)
    options = poptorch.Options().deviceIterations(D).replicationFactor(R)
    options.Training.gradientAccumulation(G)
    options.randomSeed(1)
    options.outputMode(mode, *((2,) if mode is OutputMode.EveryN else ()))
    optimizer = optim.AdamW(module.parameters(), lr=0.1)
    executor = poptorch.trainingModel(module, options, optimizer)
    total = D * G * R * ROWS
    outputs = []
    for _ in range(calls):
        x, y = torch.randn(total, FEATURES), torch.randint(CLASSES, (total,))
        outputs += [tensor.clone() for tensor in executor(x, y)]
    executor.copyWeightsToHost()
    state = optimizer.state_dict()["ipu_state"]
    return [*outputs, *module.state_dict().values(), *state.values()], executor


def is_same(ones, others):
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", [hits, of_all_shapes])
@pytest.mark.parametrize(("D", "G", "R"), [(4, 1, 1), (2, 3, 1), (2, 1, 2)])
def test_parts_change_no_bit(mode, counts, D, G, R, monkeypatch):
    # Random numbers keep micro-batches of an update from being folded.
    parted, executor = train(random, counts, D, G, R, mode)
    assert parts_of(executor) is not None
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "0")
    whole, executor = train(random, counts, D, G, R, mode)
    assert parts_of(executor) is None
    assert is_same(parted, whole)


@pytest.mark.parametrize("body", [mlp, normalised])
def test_other_networks_have_parts_too(body, monkeypatch):
    parted, executor = train(body, hits)
    assert parts_of(executor) is not None
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "0")
    assert is_same(parted, train(body, hits)[0])


def test_a_core_has_only_what_updates_need():
    _, executor = train(mlp, hits)
    names = [node.name for node in parts_of(executor).core.__self__.graph.nodes]
    operations = [name for name in names if not name.startswith("given")]
    assert operations == [
        *("linear", "relu", "linear_1", "cross_entropy", "reshape_1", "div"),
        "output",
    ]


def test_what_depends_on_weights_is_counted_at_its_update(monkeypatch):
    def counts(scores, y, total):
        weight = network.body[0].weight
        return *hits(scores, y, total), weight.detach().gt(0.0).sum()

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def __getitem__(self, index):
            return self.layers[index]

        def forward(self, x):
            return self.layers(x)

    network = Counting(Body(), counts)
    results = []
    for fold in ("1", "0"):
        monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", fold)
        torch.manual_seed(5)
        network.body = Body()
        options = poptorch.Options().deviceIterations(6).outputMode(OutputMode.All)
        optimizer = optim.SGD(network.parameters(), lr=5.0)
        executor = poptorch.trainingModel(network, options, optimizer)
        x, y = torch.randn(6 * ROWS, FEATURES), torch.randint(CLASSES, (6 * ROWS,))
        results.append([tensor.clone() for tensor in executor(x, y)])
        executor.destroy()
    assert len(set(results[0][1].tolist())) > 1  # the weights do change
    assert is_same(*results)


def test_what_is_kept_is_bounded(monkeypatch):
    whole, _ = train(random, hits, D=7)
    one = (ROWS * CLASSES + 3) * 4 + 16
    monkeypatch.setattr(_parts_runner, "_MOST_KEPT", 3 * one)
    parted, executor = train(random, hits, D=7)
    assert parts_of(executor) is not None
    assert is_same(parted, whole)
    monkeypatch.setattr(_parts_runner, "_MOST_KEPT", one)
    assert parts_of(train(random, hits, D=7)[1]) is None


def test_large_networks_run_whole(monkeypatch):
    monkeypatch.setattr(_parts_runner, "_MOST_WEIGHTS", 100)
    assert parts_of(train(mlp, hits)[1]) is None


def test_a_part_that_gives_something_else_is_given_up(monkeypatch, caplog):
    whole, _ = train(random, hits, calls=3)
    monkeypatch.setattr(_parts_runner, "_are_equal", lambda one, other: False)
    with caplog.at_level("WARNING"):
        parted, executor = train(random, hits, calls=3)
    assert parts_of(executor) is None
    assert "run for each micro-batch" in caplog.text
    assert is_same(parted, whole)
