# SPDX-License-Identifier: Apache-2.0
"""`lr_find`: a learning-rate range test that leaves the model as it is."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit import (
    ConfigError,
    DataError,
    IPUConfig,
    IPUModel,
    LearningRateCurve,
    NotCompiledError,
    Optimizer,
    Schedule,
)
from ipufit.engine import Executors
from ipufit.model.rate_curve import Divergence, steepest_descent
from tests.distributed.runs import model_of, samples
from tests.strategies import examples

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(2))
Y = (X[:, 0] > X[:, 1]).long()


class Network(torch.nn.Module):
    """A network whose forward is counted: PopTorch runs it once per compilation."""

    traces = 0

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.2)
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x):
        Network.traces += 1
        return self.linear(self.drop(self.norm(x)))


def make(optimizer="adam", lr_schedule=None, **config):
    torch.manual_seed(0)
    model = IPUModel(Network(), IPUConfig(**config))
    model.compile(
        optimizer, "cross_entropy", metrics=["accuracy"], lr_schedule=lr_schedule
    )
    return model


@pytest.fixture
def sent(monkeypatch):
    """The rates of the parameter groups at each call of a training program."""
    rates = []
    train = Executors.train

    def trained(executors, batch):
        optimizer = executors._training.optimizer
        rates.append([group["lr"] for group in optimizer.param_groups])
        return train(executors, batch)

    monkeypatch.setattr(Executors, "train", trained)
    return rates


# The suggestion -----------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]), max_size=60)
)
def test_a_suggestion_is_a_rate_at_which_the_loss_was_finite(losses):
    rates = [10 ** (-6 + at / 10) for at in range(len(losses))]
    found = steepest_descent(rates, losses)
    finite = [math.isfinite(loss) for loss in losses]
    count = finite.index(False) if False in finite else len(finite)
    assert found is None or found in rates[:count]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("middle", [30, 50, 70])
def test_it_is_where_a_curve_falls_most_steeply(middle, noise):
    generator = random.Random(middle)
    rates = [10 ** (-7 + at * 8 / 99) for at in range(100)]
    falling = [2 - 1.5 / (1 + math.exp((middle - at) / 4)) for at in range(100)]
    losses = [
        (loss if at < middle + 18 else 40.0) + generator.uniform(-noise, noise)
        for at, loss in enumerate(falling)
    ]
    losses[12] = 30.0  # an outlier, after which nothing has fallen
    found = steepest_descent(rates, losses)
    assert abs(rates.index(found) - middle) <= 4


def test_the_first_losses_alone_suggest_nothing():
    rates = [10 ** (-7 + at * 8 / 99) for at in range(100)]
    losses = [2 - 1.5 / (1 + math.exp((60 - at) / 4)) for at in range(100)]
    losses[:2] = [5.0, 4.0]  # noise that no neighbours before it even out
    assert abs(rates.index(steepest_descent(rates, losses)) - 60) <= 4


@pytest.mark.parametrize("losses", [[], [3.0, 2.0], [1.0] * 9, list(range(9))])
def test_without_a_fall_there_is_none(losses):
    rates = [10.0**at for at in range(len(losses))]
    assert steepest_descent(rates, [float(loss) for loss in losses]) is None
    if losses:
        text = str(LearningRateCurve.of(rates, losses, "the loss diverged"))
        why = "the loss never fell" if len(losses) > 4 else "no suggestion, which needs"
        assert f"(the loss diverged): {why}" in text


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_losses_diverge_from_their_lowest_mean(sign):
    divergence = Divergence(4.0)
    assert not any(divergence.has_come(sign * 2.0) for _ in range(20))
    assert not divergence.has_come(sign * 2.0 + 5)  # one is smoothed away
    assert any(divergence.has_come(40.0) for _ in range(5))
    lasting = Divergence(None)
    assert not any(lasting.has_come(2.0**at) for at in range(100))


# The test -----------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [1, 3])
def test_losses_are_those_of_plain_torch_at_the_same_rates(updates):
    x, y = torch.ones(12, 2), torch.full((12, 1), 3.0)  # in any order the same
    torch.manual_seed(1)
    module = torch.nn.Linear(2, 1)
    plain = torch.nn.Linear(2, 1)
    plain.load_state_dict(module.state_dict())
    groups = [
        {"params": [module.weight], "lr": 0.1},
        {"params": [module.bias], "lr": 0.01},
    ]
    model = IPUModel(module, IPUConfig(device_iterations=updates))
    model.compile(torch.optim.SGD(groups, lr=0.1), "mse")
    curve = model.lr_find(x, y, 4, min_lr=1e-3, max_lr=0.3, num_rates=12, verbose=0)
    expected = []
    for rate in np.geomspace(1e-3, 0.3, 12):
        total = 0.0
        for _ in range(updates):
            loss = torch.nn.functional.mse_loss(plain(x), y)
            plain.zero_grad()
            loss.backward()
            with torch.no_grad():
                plain.weight -= rate * plain.weight.grad
                plain.bias -= rate / 10 * plain.bias.grad  # groups keep their ratio
            total += loss.item()
        expected.append(total / updates)
    assert curve.rates == pytest.approx(np.geomspace(1e-3, 0.3, 12).tolist())
    assert curve.losses == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert curve.stop_reason is None


def test_each_call_has_one_rate_and_nothing_is_compiled_again(sent):
    def traces(num_rates):
        sent.clear()
        before = Network.traces
        model = make(device_iterations=2)
        model.lr_find(X, Y, 4, max_lr=0.1, num_rates=num_rates, verbose=0)
        assert [rate for (rate,) in sent] == pytest.approx(
            np.geomspace(1e-7, 0.1, num_rates)
        )
        return Network.traces - before

    assert traces(2) == traces(25) > 0  # over several passes through the data


def test_the_model_stays_as_it_is():
    model, other = make(seed=3), make(seed=3)
    for one in (model, other):
        one.fit(X, Y, 8, verbose=0)
    generators = random.getstate(), np.random.get_state()[1].tolist()
    drawn = torch.get_rng_state()
    before = {n: t.clone() for n, t in model.module.state_dict().items()}
    rate = model.optimizer.learning_rate
    model.lr_find(X, Y, 8, verbose=0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators
    assert torch.equal(torch.get_rng_state(), drawn)
    after = model.module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert (model.optimizer.learning_rate, model.num_updates) == (rate, 6)
    assert model.history.history == other.history.history
    histories = [
        one.fit(X, Y, 8, epochs=2, verbose=0).history for one in (model, other)
    ]
    assert histories[0] == histories[1]
    for own, its in zip(model.get_weights(), other.get_weights()):
        assert np.array_equal(own, its)


def test_orders_drawn_without_a_seed_stay_too():
    def fitted(finds):
        torch.manual_seed(4)
        model = make()
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(X, Y), batch_size=8, shuffle=True
        )
        if finds:
            model.lr_find(loader, num_rates=9, verbose=0)
        return model.fit(loader, verbose=0).history

    assert fitted(finds=True) == fitted(finds=False)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_run_at_the_suggested_rate_learns(optimizer):
    model = make(optimizer, seed=1)
    curve = model.lr_find(X, Y, 8, verbose=0)
    assert 1e-7 <= curve.suggestion <= curve.rates[-1] <= 10
    model.compile(Optimizer(optimizer, curve.suggestion), "cross_entropy")
    before = model.evaluate(X, Y, verbose=0)["loss"]
    model.fit(X, Y, 8, epochs=8, verbose=0)
    assert model.evaluate(X, Y, verbose=0)["loss"] < 0.75 * before


@pytest.mark.parametrize("schedule", [Schedule("linear", warmup_updates=3), "cosine"])
def test_a_schedule_does_not_count(schedule, sent):
    model = make("sgd", lr_schedule=schedule)
    model.fit(X, Y, 8, verbose=0)  # the schedule has brought the rate to its end
    sent.clear()
    model.lr_find(X, Y, 8, max_lr=0.1, num_rates=5, verbose=0)
    assert [rate for (rate,) in sent] == pytest.approx(np.geomspace(1e-7, 0.1, 5))


def test_it_ends_when_the_loss_diverges():
    x = torch.randn(16, 3)

    def found(threshold):
        model = IPUModel(torch.nn.Linear(3, 1))
        model.compile("sgd", "mse")
        limits = {"max_lr": 1e6, "early_stop_threshold": threshold}
        return model.lr_find(x, x.sum(1, keepdim=True), 4, **limits, verbose=0)

    early, late = found(4.0), found(None)
    assert early.stop_reason == "the loss diverged"
    assert len(early.rates) == len(early.losses) < len(late.rates) < 100
    assert late.stop_reason in ("the loss became inf", "the loss became nan")
    assert early.suggestion < early.rates[-1]


def test_a_generator_ends_it():
    def batches(count):
        return ((X[:8], Y[:8]) for _ in range(count))

    curve = make().lr_find(batches(7), verbose=0)
    assert (len(curve.rates), curve.stop_reason) == (7, "the data ran out")
    with pytest.raises(DataError, match=r"not one call"):
        make().lr_find(iter([(X[:4], Y[:4])]), batch_size=8, verbose=0)


def test_averages_of_weights_are_not_made(monkeypatch):
    model = make(Optimizer("adam", ema_momentum=0.9))
    average = type(model.weight_average)
    monkeypatch.setattr(average, "update", lambda *_: pytest.fail("an average"))
    assert len(model.lr_find(X, Y, 8, num_rates=5, verbose=0).rates) == 5


def test_it_tells_what_it_suggests(capsys):
    model = make()
    curve = model.lr_find(X, Y, 8, num_rates=20)
    assert capsys.readouterr().out.splitlines()[-1] == str(curve)
    model.lr_find(X, Y, 8, num_rates=5, verbose=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_lr": 0}, "min_lr=0 is no number above 0"),
        ({"max_lr": math.inf}, "max_lr=inf is no number above 0"),
        ({"min_lr": 1.0, "max_lr": 1e-3}, "no range: min_lr=1.0, max_lr=0.001"),
        ({"num_rates": 1}, "no range: .*num_rates=1"),
        ({"num_rates": 2.5}, "num_rates=2.5"),
        ({"early_stop_threshold": 1.0}, "early_stop_threshold=1.0 is neither"),
        ({"early_stop_threshold": True}, "early_stop_threshold=True is neither"),
    ],
)
def test_what_makes_no_range_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        make().lr_find(X, Y, 8, **given)


def test_the_model_must_be_compiled():
    with pytest.raises(NotCompiledError):
        IPUModel(torch.nn.Linear(4, 2)).lr_find(X, Y)


def test_it_draws_itself():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    losses = [2.0, 1.9, 1.0, 0.9, 1e9, math.nan]
    curve = LearningRateCurve.of([10.0**at for at in range(-5, 1)], losses)
    figure = curve.plot()
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "learning rate")
    assert axes.get_ylim()[1] < 3  # what diverged doesn't hide the rest
    assert axes.get_legend().get_texts()[0].get_text() == "suggested 0.0001"
    assert curve.plot(axes=axes) is figure
    LearningRateCurve.of([0.1], [1.0]).plot()
    pyplot.close("all")


# Several processes --------------------------------------------------------------------


def found_together():
    model = model_of()
    x, y, _ = samples(64)
    curve = model.lr_find(x, y, batch_size=16, num_rates=30, verbose=0)
    return curve.rates, curve.losses, curve.suggestion, model.num_updates


def test_several_processes_find_the_same(pool):
    first, second = pool.run(found_together)
    assert first == second
    assert first[2] in first[0]
    assert len(first[1]) > 10
