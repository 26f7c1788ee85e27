# SPDX-License-Identifier: Apache-2.0
"""Buffers of whole numbers, which PopTorch compiles in."""

from __future__ import annotations

import pytest
import torch

from ipufit import IPUConfig, IPUModel, LambdaCallback, UnsupportedError
from ipufit.errors import ConstantBuffersWarning
from tests.reference import compiled

X, Y = torch.randn(24, 3), torch.randn(24, 2)


class Counting(torch.nn.Module):
    """A linear layer, and a buffer to which a test does something in `forward`."""

    def __init__(self, act, start=0):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.act = act
        self.register_buffer("count", torch.tensor(start))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        result = self.act(self, self.layer(x))
        return result if isinstance(result, torch.Tensor) else self.layer(x)


def fitted(module, **config):
    model = compiled(module, micro_batch_size=2, **config, loss="mse")
    model.fit(X, Y, batch_size=None, epochs=2, shuffle=False, verbose=0)
    return model


def add(module, _):
    module.count += 1


def add_twice(module, _):
    module.count.add_(2)
    module.count.add_(1)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"device_iterations": 3},
        {"gradient_accumulation": 2, "device_iterations": 2},
        {"replicas": 2},
    ],
)
def test_counters_count_what_a_replica_has_seen(config):
    module = Counting(add_twice, start=5)
    model = fitted(module, **config)
    micro_batches = 2 * 24 // 2 // config.get("replicas", 1)
    assert module.count.item() == 5 + 3 * micro_batches
    assert model.module.state_dict()["count"].dtype == torch.int64


def test_a_counter_is_right_in_mid_fit():
    seen = []
    module = Counting(add)
    model = compiled(module, micro_batch_size=2, device_iterations=3, loss="mse")
    watch = LambdaCallback(on_train_batch_end=lambda *_: seen.append(int(module.count)))
    model.fit(X, Y, shuffle=False, callbacks=[watch], verbose=0)
    assert seen == [3, 6, 9, 12]


def test_batch_norm_that_computes_with_its_count_is_refused():
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, momentum=None)
    )
    with pytest.raises(
        UnsupportedError, match=r"'1\.num_batches_tracked'.*set a momen"
    ):
        fitted(module)
    module[1].eval()
    module.requires_grad_(False)
    fitted(torch.nn.Sequential(*module, torch.nn.Linear(2, 2)))


def use_before(module, hidden):
    result = hidden + module.count
    module.count.add_(1)
    return result


def use_a_view(module, hidden):
    module.counts[0] += 1
    return hidden * module.counts[0]


@pytest.mark.parametrize("act", [use_before, use_a_view])
def test_a_changed_buffer_that_is_computed_with_is_refused(act):
    name = "counts" if act is use_a_view else "count"
    with pytest.raises(UnsupportedError, match=f"changes the buffer '{name}'"):
        fitted(Counting(act))


def test_a_changed_buffer_that_is_returned_is_refused():
    class Returning(Counting):
        def forward(self, x):
            super().forward(x)
            return self.count

    model = IPUModel(Returning(add), IPUConfig(micro_batch_size=2))
    with pytest.raises(UnsupportedError, match="changes the buffer 'count'"):
        model.predict(X, verbose=0)


def test_what_a_prediction_would_count_is_said():
    model = IPUModel(Counting(add), IPUConfig(micro_batch_size=2))
    with pytest.warns(ConstantBuffersWarning, match="forward changes count"):
        model.predict(X, verbose=0)
    assert model.module.count == 0


def accumulate(module, hidden):
    module.count += (hidden > 0).sum()


def add_to_one(module, _):
    module.counts[0] += 1


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (accumulate, "count"),
        (add_to_one, "counts"),
    ],
)
def test_what_is_lost_is_said_by_name(act, name):
    with pytest.warns(ConstantBuffersWarning, match=f"forward changes {name}: PopT"):
        fitted(Counting(act))
