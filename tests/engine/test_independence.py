# SPDX-License-Identifier: Apache-2.0
"""How a batch is divided among calls, replicas and workers changes no figure."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch

from ipufit import EmptyUpdatesWarning, IPUConfig, IPUModel, StreamedMetric, poptorch
from tests import reference
from tests.strategies import spread

COUNT, BATCH = 101, 12
FACTORINGS = [
    (replicas, micro, BATCH // replicas // micro)
    for replicas, micro in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 6, 12))
    if BATCH % (replicas * micro) == 0
]


class Margin(StreamedMetric):
    """The median of the highest score, which is no function of sums."""

    def __init__(self):
        super().__init__("margin")

    def reset(self):
        self.seen = []

    def update(self, outputs, targets, weights=None):
        self.seen.append(outputs.max(dim=1).values)

    def result(self):
        return float(torch.cat(self.seen).median())


def draws(count=50):
    """Random factorings; workers are slow to start, so few have some."""
    chance = random.Random(4)
    for index in range(count):
        replicas, micro, accumulation = chance.choice(FACTORINGS)
        workers = 1 if index % 24 == 0 else 0
        yield {
            "replicas": replicas,
            "micro": micro,
            "accumulation": accumulation,
            "iterations": chance.choice((1, 1, 2, 3, 5)),
            "workers": workers,
            "loader": chance.choice(("async", "async_rebatched"))
            if index % 24 == 6
            else "sync",
            "mode": chance.choice((None, "All")),
            "looks": chance.choice((5, 12, 16, 101)),
        }


def config_for(how):
    shared = {
        "num_workers": how["workers"],
        "loader_mode": how["loader"],
        "replicas": how["replicas"],
        "device_iterations": how["iterations"],
    }
    if how["mode"] is None:
        return IPUConfig(
            micro_batch_size=how["micro"],
            gradient_accumulation=how["accumulation"],
            **shared,
        )
    own = poptorch.Options().deviceIterations(how["iterations"])
    own.replicationFactor(how["replicas"])
    own.Training.gradientAccumulation(how["accumulation"])
    own.outputMode(poptorch.OutputMode[how["mode"]])
    return IPUConfig(micro_batch_size=how["micro"], training_options=own, **shared)


def run(how):
    """Figures of training, validation and evaluation; weights and predictions."""
    x, y = reference.samples(COUNT)
    weights = torch.linspace(0.0, 2.0, COUNT)
    test_x, test_y = reference.samples(37, seed=1)
    module = reference.network()
    model = IPUModel(module, config_for(how))
    model.compile(
        torch.optim.SGD(module.parameters(), lr=0.2),
        "cross_entropy",
        metrics=["accuracy", Margin()],
        weighted_metrics=["accuracy"],
    )
    looks = how["looks"] * how["replicas"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyUpdatesWarning)
        history = model.fit(
            x,
            y,
            BATCH,
            epochs=2,
            sample_weight=weights,
            validation_data=(test_x, test_y, torch.linspace(0.5, 1.0, 37)),
            validation_batch_size=looks,
            shuffle=False,
            drop_last="pad",
            verbose=0,
        )
    figures = model.evaluate(x, y, batch_size=looks, sample_weight=weights, verbose=0)
    predicted = model.predict(test_x, batch_size=looks, verbose=0)
    kept = reference.weights(module)
    model.detach()
    return history.history, figures, predicted, kept


ONE = {
    "replicas": 1,
    "micro": BATCH,
    "accumulation": 1,
    "iterations": 1,
    "workers": 0,
    "loader": "sync",
    "mode": None,
    "looks": COUNT,
}


@pytest.fixture(scope="module")
def one():
    """What one IPU gives that takes a whole batch at once."""
    return run(ONE)


@pytest.mark.spread
@pytest.mark.parametrize(
    "how", spread(list(draws())), ids=lambda how: "-".join(map(str, how.values()))
)
def test_a_factoring_changes_nothing(one, how):
    history, figures, predicted, weights = run(how)
    expected_history, expected_figures, expected_predicted, expected_weights = one
    assert history.keys() == expected_history.keys()
    for name, values in expected_history.items():
        assert history[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name
    assert figures == pytest.approx(expected_figures, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(predicted, expected_predicted, rtol=1e-5, atol=1e-5)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5)


def test_one_ipu_gives_what_plain_torch_does(one):
    history, figures, predicted, _ = one
    x, y = reference.samples(COUNT)
    weights = torch.linspace(0.0, 2.0, COUNT)
    twin = reference.network()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.2)
    for epoch in range(2):
        total, hits, highest = 0.0, [], []
        for rows in torch.arange(COUNT).split(BATCH):
            outputs = twin(x[rows])
            each = torch.nn.functional.cross_entropy(outputs, y[rows], reduction="none")
            optimizer.zero_grad()
            (each * weights[rows]).mean().backward()
            optimizer.step()
            total += (each * weights[rows]).sum().item()
            hits.append(outputs.argmax(dim=1).eq(y[rows]).double())
            highest.append(outputs.max(dim=1).values.detach())
        assert history["loss"][epoch] == pytest.approx(total / COUNT, rel=1e-5)
        hit = torch.cat(hits)
        assert history["accuracy"][epoch] == pytest.approx(float(hit.mean()))
        weighted = float((hit * weights).sum() / weights.sum())
        assert history["weighted_accuracy"][epoch] == pytest.approx(weighted, rel=1e-5)
        margin = float(torch.cat(highest).median())
        assert history["margin"][epoch] == pytest.approx(margin, rel=1e-5)
    evaluated = reference.evaluate(twin, x, y)
    assert figures["accuracy"] == pytest.approx(evaluated["accuracy"], rel=1e-5)
    test_x, _ = reference.samples(37, seed=1)
    with torch.no_grad():
        torch.testing.assert_close(predicted, twin(test_x), rtol=1e-5, atol=1e-5)


BINARY = {**ONE, "micro": 2, "accumulation": 3, "replicas": 2, "iterations": 2}


@pytest.mark.parametrize("how", [ONE, BINARY, {**BINARY, "mode": "All", "workers": 1}])
def test_the_area_under_the_curve_is_that_of_all_samples(how):
    x, classes = reference.samples(COUNT)
    y = classes.gt(1).float()[:, None]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 1)
    model = IPUModel(module, config_for(how))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model.compile(optimizer, "binary_cross_entropy", metrics=["AUC"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyUpdatesWarning)
        history = model.fit(
            x, y, BATCH, shuffle=False, drop_last="pad", verbose=0
        ).history
    figures = model.evaluate(x, y, verbose=0)
    assert history["AUC"] == [pytest.approx(figures["AUC"], abs=1e-6)]
    scores = module(x).detach()[:, 0]
    better = (scores[y[:, 0] == 1][:, None] > scores[y[:, 0] == 0]).double().mean()
    assert figures["AUC"] == pytest.approx(float(better), abs=0.01)  # by thresholds
    model.detach()
