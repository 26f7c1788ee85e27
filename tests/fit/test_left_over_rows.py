# SPDX-License-Identifier: Apache-2.0
"""Rows that don't fill a micro-batch, where a loss or a scalar depends on it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, normalize

import ipufit
from ipufit import IPUConfig, IPUModel, LambdaCallback
from tests import reference
from tests.strategies import examples

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Z = X + torch.randn(40, 6, generator=torch.Generator().manual_seed(1))


def info_nce(first, second):
    """A loss of pairs within the micro-batch: ln(rows) for copies of one row."""
    logits = normalize(first, dim=1) @ normalize(second, dim=1).T / 0.1
    return cross_entropy(logits, torch.arange(len(first), device=first.device)), logits


class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = torch.nn.Linear(6, 5), torch.nn.Linear(5, 4)

    def embed(self, x):
        return self.last(self.first(x))

    def forward(self, x, z):
        return self.embed(torch.cat((x, z))).split(len(x))


class OwnLoss(Pairs):
    def forward(self, x, z):
        outputs, second = super().forward(x, z)
        ipufit.log("spread", outputs.std(0, unbiased=False).mean())
        return {"loss": info_nce(outputs, second)[0], "outputs": outputs}


class Logged(Pairs):
    def forward(self, x):
        outputs = self.embed(x)
        ipufit.log("spread", outputs.std(0, unbiased=False).mean())
        return outputs


def step(module, batch):
    """Its outputs have a column for each row of the micro-batch."""
    first, second = module(*batch)
    loss, logits = info_nce(first, second)
    spread = first.std(0, unbiased=False).mean()
    return {"loss": loss, "outputs": logits, "spread": spread}


def largest(outputs, targets=None):
    return outputs.amax(dim=1)


def compiled(kind, config):
    if kind == "step":
        model = reference.compiled(Pairs(), config, step=step, loss=None)
    elif kind == "step and metrics":
        model = IPUModel(Pairs(), config)
        model.compile("sgd", step=step, metrics=[largest])
    elif kind == "own loss":
        model = reference.compiled(OwnLoss(), config, loss=None)
    else:
        model = reference.compiled(Logged(), config, loss="mse")
    return model


def data_of(kind, x, z):
    """Inputs and targets, or inputs with everything."""
    if kind == "own loss":
        return {"x": x, "z": z}, None
    return x, z[:, :4] if kind == "logged" else z


def expected(kind, module, count, size):
    """Means over micro-batches of plain torch, the last one with fewer rows."""
    sums = {}
    with torch.no_grad():
        for x, z in zip(X[:count].split(size), Z[:count].split(size)):
            first = module.embed(x)
            loss, logits = info_nce(first, module.embed(z))
            if kind == "logged":
                loss = torch.nn.functional.mse_loss(first, z[:, :4])
            found = {"loss": loss, "spread": first.std(0, unbiased=False).mean()}
            if kind == "step and metrics":
                found["largest"] = logits.amax(dim=1).mean()
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(x)
    return {name: value / count for name, value in sums.items()}


KINDS = "step", "step and metrics", "own loss", "logged"


CONFIGS = (
    {},
    {"replicas": 2},
    {"inference_iterations": 3},
    {"pipeline": ("first", "last")},
    {"replicas": 2, "pipeline": ("first", "last"), "inference_iterations": 4},
)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from(CONFIGS),
    st.sampled_from(["arrays", "hooks", "stream", "steps", "validation"]),
)
def test_figures_are_those_of_a_short_last_micro_batch(kind, count, size, config, way):
    model = compiled(kind, IPUConfig(**config))
    per_pass = size * config.get("replicas", 1)
    arguments = {"batch_size": per_pass, "verbose": 0}
    if way == "hooks":
        arguments["callbacks"] = LambdaCallback(on_test_batch_end=lambda *_: None)
    if way == "steps":
        arguments["steps"] = -(-count // per_pass)
        count = min(40, arguments["steps"] * per_pass)
    if way == "stream":
        parts = zip(*(one.split(7) for one in (X[:count], Z[:count])))
        batches = (data_of(kind, *pair) for pair in parts)
        batches = (x if y is None else (x, y) for x, y in batches)
        found = model.evaluate(batches, **arguments)
    elif way == "validation":
        history = model.fit(
            *data_of(kind, X, Z),
            batch_size=20,
            validation_data=data_of(kind, X[:count], Z[:count]),
            validation_batch_size=per_pass,
            verbose=0,
        ).history
        marked = {n: one[0] for n, one in history.items() if n.startswith("val_")}
        found = {name[4:]: value for name, value in marked.items()}
    else:
        rows = 40 if way == "steps" else count
        found = model.evaluate(*data_of(kind, X[:rows], Z[:rows]), **arguments)
    assert found == pytest.approx(expected(kind, model.module, count, size), rel=1e-4)
    model.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_alone_is_one_micro_batch_or_those_of_the_replicas(kind):
    for replicas, size in ((1, 11), (2, 6)):
        model = compiled(kind, IPUConfig(replicas=replicas))
        found = model.test_on_batch(*data_of(kind, X[:11], Z[:11]))
        assert found == pytest.approx(expected(kind, model.module, 11, size), rel=1e-4)


class Fixed(Pairs):
    """Needs micro-batches of 4 rows."""

    def forward(self, x, z):
        outputs = self.embed(x).view(4, 4)
        return {"loss": (outputs - z[:, :4]).square().mean()}


def test_a_module_that_needs_whole_micro_batches_is_told_of_batch_sizes():
    model = reference.compiled(Fixed(), loss=None)
    model.evaluate({"x": X, "z": Z}, batch_size=4, verbose=0)
    with pytest.raises(
        ipufit.DataError, match="2 of the samples don't fill a micro-batch of 4"
    ):
        model.evaluate({"x": X[:10], "z": Z[:10]}, batch_size=4, verbose=0)
