# SPDX-License-Identifier: Apache-2.0
"""What `compile()` counts anew: values that nobody looks at."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from ipufit import IPUModel
from ipufit.engine import resolve_objective
from ipufit.engine.seen_code import is_all_seen
from tests import reference

X, Y = reference.samples(16)
FACTOR = 1.0
FIT = {"batch_size": 16, "shuffle": False, "verbose": 0}


class Plain(torch.nn.Module):
    def __init__(self, scale=2.0):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.scale = scale

    def forward(self, x):
        return self.helped(F.relu(self.layer(x)))

    def helped(self, h):
        return torch.tanh(h) * self.scale


class Child(Plain):
    def forward(self, x):
        return super().forward(x).to(torch.float32)


class OfAGlobal(Plain):
    def forward(self, x):
        return self.layer(x) * FACTOR


class OfAClass(Plain):
    factor = 1.0

    def forward(self, x):
        return self.layer(x) * self.factor


class OfAnObject(Plain):
    def __init__(self):
        super().__init__()
        self.settings = {"factor": 1.0}

    def forward(self, x):
        return self.layer(x) * self.settings["factor"]


def hooked():
    module = Plain()
    module.register_forward_hook(lambda module, inputs, outputs: outputs * FACTOR)
    return module


def by_helper(outputs, targets):
    return FACTOR * F.cross_entropy(outputs, targets)


def by_itself(outputs, targets):
    return 2.0 * F.cross_entropy(outputs, targets)


def in_a_closure(factor):
    return lambda outputs, targets: factor * F.cross_entropy(outputs, targets)


@pytest.mark.parametrize("module", [Plain(), Child(), reference.network()])
@pytest.mark.parametrize("loss", ["cross_entropy", torch.nn.MSELoss(), by_itself])
def test_code_of_its_own_values_is_seen(module, loss):
    assert is_all_seen(module, resolve_objective(loss, None, ["accuracy", by_itself]))


@pytest.mark.parametrize(
    ("module", "loss", "metric"),
    [
        (OfAGlobal(), "mse", "mae"),
        (OfAClass(), "mse", "mae"),
        (OfAnObject(), "mse", "mae"),
        (hooked(), "mse", "mae"),
        (Plain(), by_helper, "mae"),
        (Plain(), in_a_closure(0.5), "mae"),
        (Plain(), "mse", by_helper),
        (Plain(), lambda outputs, targets: by_helper(outputs, targets), "mae"),
    ],
)
def test_code_of_other_values_is_not(module, loss, metric):
    assert not is_all_seen(module, resolve_objective(loss, None, [metric]))


def test_compile_counts_a_global_that_was_changed(monkeypatch):
    losses = []
    for factor in (1.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        if factor == 1.0:
            model = IPUModel(reference.network())
        model.compile("sgd", by_helper)
        model.optimizer.param_groups[0]["lr"] = 0.0
        losses += model.fit(X, Y, **FIT).history["loss"]
    assert losses[1] == pytest.approx(3 * losses[0], rel=1e-6)
