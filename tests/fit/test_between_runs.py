# SPDX-License-Identifier: Apache-2.0
"""What users change between runs, and what errors leave behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ipufit import Callback, IPUConfig, IPUModel, poptorch
from tests import reference
from tests.reference import compiled

X, Y = reference.samples(32)


# The module -------------------------------------------------------------------


def test_submodules_that_somebody_put_in_eval_mode_stay_so():
    # With weights, which a gradient reaches through it, PopART refuses its eval mode.
    module = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 4))
    module[0].eval()
    model = compiled(module)
    model.fit(X, Y, verbose=0)
    assert torch.equal(module[0].running_mean, torch.zeros(3))
    module.eval()  # all of it: as predictions leave it, say
    model.fit(X, Y, verbose=0, batch_size=16)
    assert not torch.equal(module[0].running_mean, torch.zeros(3))


# Orders and steps -------------------------------------------------------------


def test_each_fit_has_orders_of_its_own_and_a_seed_repeats_them_all():
    def orders():
        dataset = reference.Recorded(X, Y)
        model = compiled(config=IPUConfig(seed=3))
        seen = []
        for _ in range(3):
            dataset.asked.clear()
            model.fit(dataset, batch_size=32, verbose=0)
            seen.append(tuple(dataset.asked[-32:]))
        return seen

    first = orders()
    assert len(set(first)) == 3
    assert first == orders()


def test_steps_count_batches_of_the_loader_or_of_the_training_and_go_on():
    model = compiled(config=IPUConfig(micro_batch_size=2))
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.0), "cross_entropy")
    loader = DataLoader(TensorDataset(X, Y), batch_size=10)
    figures = model.evaluate(loader, steps=2, verbose=0)
    expected = reference.evaluate(model.module, X[:20], Y[:20])
    assert figures["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert len(model.predict(loader, steps=2, verbose=0)) == 20
    drawn = []

    def batches():
        for start in range(0, 32, 8):
            drawn.append(start)
            yield X[start : start + 8], Y[start : start + 8]

    fit = {"batch_size": 8, "epochs": 2, "validation_steps": 2, "verbose": 0}
    history = model.fit(X, Y, validation_data=batches(), **fit).history
    assert drawn == [0, 8, 16, 24]
    halves = (slice(0, 16), slice(16, 32))
    losses = [reference.evaluate(model.module, X[h], Y[h])["loss"] for h in halves]
    assert history["val_loss"] == pytest.approx(losses, rel=1e-5)


def test_steps_per_execution_may_be_another_each_time():
    model = compiled(steps_per_execution=2)
    model.compile("sgd", "cross_entropy", steps_per_execution=4)
    assert model.config.device_iterations == 4
    model.compile("sgd", "cross_entropy")
    assert model.config.device_iterations is None


def test_a_sum_is_a_sum_under_own_options_too():
    own = poptorch.Options()
    own.Training.gradientAccumulation(4)
    module, twin = reference.network(), reference.network()
    model = IPUModel(module, IPUConfig(micro_batch_size=8, training_options=own))
    model.compile(
        torch.optim.SGD(module.parameters(), lr=0.01),
        nn.CrossEntropyLoss(reduction="sum"),
    )
    model.fit(X, Y, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    reference.train(twin, optimizer, X, Y, 32, is_sum=True)
    reference.assert_same_weights(module, twin)


# Errors -----------------------------------------------------------------------


class Fails(Callback):
    def on_train_batch_end(self, batch, logs):
        raise ZeroDivisionError

    on_test_begin = on_train_begin = lambda self, logs: 1 / 0


@pytest.mark.parametrize("run", ["fit", "evaluate"])
def test_an_error_frees_the_ipus(monkeypatch, run):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "1")
    model = compiled()
    with pytest.raises(ZeroDivisionError):
        getattr(model, run)(X, Y, verbose=0, callbacks=Fails())
    assert compiled().predict(X, verbose=0).shape == (32, 4)
    model.fit(X, Y, verbose=0)
    model.detach()


# Losses of the module's own ---------------------------------------------------


class TokenLoss(nn.Module):
    """A mean over the tokens that count, as language models have it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x, labels):
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_an_own_loss_that_is_no_mean_over_rows_is_never_extrapolated(micro):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, 5, 3, generator=generator)
    labels = torch.randint(0, 4, (11, 5), generator=generator)
    labels[-1, 1:] = -100
    model = compiled(TokenLoss(), micro_batch_size=micro, loss=None)

    @torch.no_grad()
    def loss_of(begin, size):
        rows = slice(begin, begin + size)
        return float(model.module(x[rows], labels[rows])["loss"])

    sizes = {begin: min(micro, 11 - begin) for begin in range(0, 11, micro)}
    expected = sum(loss_of(begin, size) * size for begin, size in sizes.items()) / 11
    loss = model.evaluate({"x": x, "labels": labels}, verbose=0)["loss"]
    assert loss == pytest.approx(expected, rel=1e-5)
