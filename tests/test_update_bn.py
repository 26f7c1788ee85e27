# SPDX-License-Identifier: Apache-2.0
"""`update_bn`: statistics of batch norm, beside torch's own function."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.swa_utils import update_bn
from torch.utils.data import TensorDataset

from ipufit import SWA, DataError, IPUConfig, IPUModel, Optimizer
from tests.reference import samples

X = torch.randn(48, 3, 6, 6, generator=torch.Generator().manual_seed(0)) * 2 + 1


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 5),
        torch.nn.BatchNorm1d(5, affine=False),
        torch.nn.Linear(5, 2),
    )


def assert_like_torch(module, before, batches):
    update_bn(batches, before)
    expected = before.state_dict()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"device_iterations": 3},
        {"replicas": 2, "device_iterations": 2},
        {"pipeline": ("0", "4")},
    ],
)
def test_statistics_are_those_of_torch(config):
    model = IPUModel(network(), IPUConfig(micro_batch_size=4, **config))
    before = copy.deepcopy(model.module)
    old = model.predict(X, verbose=0)
    assert model.update_bn(X) == 12
    assert_like_torch(model.module, before, X.split(4))
    expected = before.eval()(X)
    torch.testing.assert_close(
        model.predict(X, verbose=0), expected, rtol=1e-4, atol=1e-5
    )
    assert (expected - old).abs().max() > 0.1
    assert not model.module[1]._forward_hooks


def test_samples_that_do_not_fill_a_micro_batch_do_not_count():
    model = IPUModel(network(), IPUConfig(micro_batch_size=5, device_iterations=4))
    before = copy.deepcopy(model.module)
    assert model.update_bn(TensorDataset(X, torch.zeros(48))) == 9
    assert_like_torch(model.module, before, X[:45].split(5))
    assert model.update_bn(X, steps=2) == 2
    with pytest.raises(DataError, match="fewer samples than the 5"):
        model.update_bn(X[:4])


def test_a_layer_that_is_called_twice_and_one_that_is_not():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)
            self.unused = torch.nn.BatchNorm1d(4)

        def forward(self, first, second):
            return self.norm(first) - self.norm(second)

    first, second = samples(8)[0], samples(8)[0] * 3 + 1
    first, second = (torch.cat([x, x[:, :1]], 1)[:, :4] for x in (first, second))
    model = IPUModel(Twice(), IPUConfig(micro_batch_size=4))
    assert model.update_bn({"first": first, "second": second}) == 2
    norm, parts = model.module.norm, [*first.split(4), *second.split(4)]
    means = torch.stack([part.mean(0) for part in parts])
    variances = torch.stack([part.var(0) for part in parts])
    torch.testing.assert_close(norm.running_mean, means.mean(0))
    torch.testing.assert_close(norm.running_var, variances.mean(0))
    assert norm.num_batches_tracked == 4
    assert model.module.unused.running_mean.tolist() == [0.0] * 4


def test_a_module_without_statistics_is_left_alone():
    model = IPUModel(
        torch.nn.Sequential(
            torch.nn.BatchNorm1d(3, track_running_stats=False), torch.nn.Linear(3, 1)
        )
    )
    assert model.update_bn(samples(8)[0]) == 0


def test_one_value_per_channel_has_no_variance():
    model = IPUModel(torch.nn.BatchNorm1d(3), IPUConfig(micro_batch_size=1))
    with pytest.raises(DataError, match="more than one value per channel"):
        model.update_bn(torch.rand(4, 3))


def test_half_precision_measures_in_single():
    x = X * 100 + 300  # squares are more than float16 holds
    model = IPUModel(network(), IPUConfig(micro_batch_size=6, precision="float16"))
    before = network()
    assert model.update_bn(x) == 8
    update_bn(x.split(6), before)
    for index, places in ((1, 1e-2), (5, 5e-2)):
        norm, expected = model.module[index], before[index]
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(
                getattr(norm, name).float(),
                getattr(expected, name),
                rtol=places,
                atol=places,
            )


def test_after_averaging_a_run_goes_on():
    model = IPUModel(network(), IPUConfig(micro_batch_size=4))
    optimizer = Optimizer("sgd", 0.05, momentum=0.9, swa=SWA(start_epoch=1))
    model.compile(optimizer, "mse")
    y = torch.zeros(48, 2)
    model.fit(X, y, batch_size=4, epochs=3, verbose=0)
    weights, optimizer = model.get_weights()[0], model.checkpoint().tensors["optimizer"]
    before = copy.deepcopy(model.module)
    model.update_bn(X)
    assert_like_torch(model.module, before, X.split(4))
    assert (model.get_weights()[0] == weights).all()
    now = model.checkpoint().tensors["optimizer"]
    assert optimizer
    assert all(torch.equal(now[name], one) for name, one in optimizer.items())
    expected = torch.nn.functional.mse_loss(before.eval()(X), y).item()
    assert model.evaluate(X, y, verbose=0)["loss"] == pytest.approx(expected, rel=1e-4)
