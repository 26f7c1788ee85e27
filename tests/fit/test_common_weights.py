# SPDX-License-Identifier: Apache-2.0
"""Models that have weights in common, trained in turns, against loops of torch."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from ipufit import IPUConfig, IPUModel, Optimizer

ROWS = 8


class Pair:
    """Two models and the same modules in torch, with an optimizer for each."""

    def __init__(self, form, **settings):
        torch.manual_seed(0)
        encoder, norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        heads = nn.Linear(3, 1), nn.Linear(3, 1)
        first = nn.Sequential(encoder, norm, heads[0])
        second = {
            "same module": first,
            "common encoder": nn.Sequential(encoder, norm, heads[1]),
            "submodule": nn.Sequential(encoder, norm),
        }[form]
        self.modules = nn.ModuleList([first, second])
        self.torchs = copy.deepcopy(self.modules)
        self.steps = [
            torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.5)
            for one in self.torchs
        ]
        self.models = []
        for module in self.modules:
            model = IPUModel(module, IPUConfig(**settings))
            model.compile(Optimizer("sgd", learning_rate=0.1, momentum=0.5), "mse")
            self.models.append(model)

    def data(self, index):
        width = 3 if self.modules[index][-1] is self.modules[0][1] else 1
        return torch.randn(ROWS, 4), torch.randn(ROWS, width)

    def train(self, index):
        x, y = self.data(index)
        self.models[index].train_on_batch(x, y)
        self.follow(index, x, y)

    def follow(self, index, x, y):
        """Make the same update with torch; trains one model with a momentum."""
        self.steps[index].zero_grad()
        nn.functional.mse_loss(self.torchs[index].train()(x), y).backward()
        self.steps[index].step()

    def check(self):
        x, _ = self.data(0)
        for model, module in zip(self.models, self.torchs):
            torch.testing.assert_close(model.predict(x), module.eval()(x).detach())
        for ours, theirs in zip(self.modules.parameters(), self.torchs.parameters()):
            torch.testing.assert_close(ours, theirs)


FORMS = ["same module", "common encoder", "submodule"]


@pytest.mark.parametrize("form", FORMS)
def test_weights_set_in_one_model_count_in_the_other(form):
    pair = Pair(form)
    for turn in (0, 1):
        pair.train(turn)
    weights = [weight + 1.0 for weight in pair.models[0].get_weights()]
    pair.models[0].set_weights(weights)
    for weight in pair.torchs[0].state_dict().values():
        if weight.is_floating_point():
            weight.add_(1.0)
    pair.torchs[0][1].num_batches_tracked.add_(1)
    pair.check()
    for turn in (1, 0, 1):
        pair.train(turn)
    pair.check()


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_is_gone_leaves_its_weights(form):
    pair = Pair(form)
    pair.train(0)
    pair.train(1)
    del pair.models[1]
    gc.collect()
    pair.train(0)
    x, _ = pair.data(0)
    expected = pair.torchs[0].eval()(x).detach()
    torch.testing.assert_close(pair.models[0].predict(x), expected)


def test_a_third_model_leaves_the_weights_that_it_does_not_have():
    first, second, third = (nn.Linear(3, 3) for _ in range(3))
    x, y = torch.randn(ROWS, 3), torch.randn(ROWS, 3)
    modules = nn.Sequential(first, second), nn.Sequential(second, third), first
    models = [IPUModel(module) for module in modules]
    for model in models:
        model.compile(Optimizer("sgd", learning_rate=0.1), "mse")
    models[0].train_on_batch(x, y)
    before = second.weight.detach().clone()
    models[1].train_on_batch(x, y)
    models[2].evaluate(x, y, verbose=0)  # shares weights with the first model only
    assert not torch.equal(second.weight, before)
