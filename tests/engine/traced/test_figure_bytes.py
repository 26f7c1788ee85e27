# SPDX-License-Identifier: Apache-2.0
"""The size of figures is found without touching the module, or telling anybody."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit.data import as_source
from ipufit.engine.host_calls import figure_bytes
from ipufit.engine.objective import Steps, resolve_objective
from ipufit.metrics import AUC, BinaryAccuracy, Metric, RootMeanSquaredError


class Pairs(Metric):
    """How often each class is taken for each other: a matrix of sums."""

    def sums(self, outputs, targets, weights=None):
        size = outputs.shape[-1]
        found = torch.nn.functional.one_hot(outputs.argmax(dim=-1), size).float()
        true = torch.nn.functional.one_hot(targets.long(), size).float()
        return torch.matmul(true.t(), found).reshape(-1)

    def result(self, sums):
        matrix = sums.reshape(2 * [round(sums.numel() ** 0.5)])
        return float(matrix.diagonal().sum() / matrix.sum())


class Called(torch.nn.Module):
    """Remembers that it was called, and returns its own loss if asked for."""

    def __init__(self, layer, owns_loss=False):
        super().__init__()
        self.layer = layer
        self.owns_loss = owns_loss
        self.seen = []

    def __deepcopy__(self, memo):
        copied = type(self)(torch.nn.Linear(3, self.layer.out_features), self.owns_loss)
        copied.seen = self.seen
        return copied

    def forward(self, x):
        self.seen.append(x.shape)
        print("called")  # noqa: T201 - as a user may
        outputs = self.layer(x) + torch.rand(())
        return (outputs, outputs.mean()) if self.owns_loss else outputs


def found(module, metrics, loss="cross_entropy", y=None, **given):
    y = torch.zeros(8, dtype=torch.int64) if y is None else y
    source = as_source(torch.zeros(8, 3), y)
    objective = resolve_objective(loss, metrics=metrics, **given)
    example = source.example(4)
    return figure_bytes(module, objective, source.structure, example)


@given(st.integers(2, 30), st.booleans(), st.booleans())
def test_it_is_12_bytes_for_each_sum(classes, has_two, owns_loss):
    module = Called(torch.nn.Linear(3, classes), owns_loss)
    metrics = [Pairs("pairs"), *(["f1", "accuracy"] if has_two else [])]
    loss = None if owns_loss else "cross_entropy"
    expected = classes**2 + (4 * classes + 2 if has_two else 0)
    assert found(module, metrics, loss) == 12 * expected


def test_nobody_hears_of_it(capsys):
    module = Called(torch.nn.Linear(3, 4)).train()
    before = torch.get_rng_state(), [w.clone() for w in module.parameters()]
    assert found(module, [Pairs("pairs")]) == 12 * 16
    assert module.seen == [(1, 3)]
    assert module.training
    assert not capsys.readouterr().out
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(map(torch.equal, module.parameters(), before[1]))


@pytest.mark.parametrize("metrics", [[], ["accuracy"], ["accuracy", "crossentropy"]])
def test_means_are_not_looked_at(metrics):
    module = Called(torch.nn.Linear(3, 4))
    assert found(module, metrics) == 0
    assert not module.seen


def test_outputs_of_a_step_count():
    def step(module, batch):
        x, y = batch
        outputs = module(x)
        return torch.nn.functional.cross_entropy(outputs, y), outputs

    steps = Steps(step, step)
    module = torch.nn.Linear(3, 5)
    assert found(module, [Pairs("pairs")], None, steps=steps) == 12 * 25


def test_thresholds_count():
    y = torch.zeros(8, 1)
    metrics = [AUC(50), BinaryAccuracy(), RootMeanSquaredError()]
    module = torch.nn.Linear(3, 1)
    assert found(module, metrics, "binary_crossentropy", y) == 12 * (2 * 49 + 2 + 2)


def test_a_module_that_cannot_be_called_has_no_size():
    assert found(torch.nn.Linear(7, 4), [Pairs("pairs")]) == 0
