# SPDX-License-Identifier: Apache-2.0
"""`ipufit.log`: what is logged is averaged over all samples, everywhere."""

import copy

import pytest
import torch
from torch import nn

from ipufit import (
    ConfigError,
    IPUConfig,
    IPUModel,
    StreamedMetric,
    UnsupportedError,
    log,
    poptorch,
)
from tests import reference


class Logging(nn.Module):
    """Logs from its middle and its end; the first layer is a stage of its own."""

    def __init__(self):
        super().__init__()
        self.net = reference.network()

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        log("activity", hidden.square().mean())
        outputs = self.net[2](hidden)
        log("largest", outputs.max(dim=1).values.mean().reshape(1))
        return outputs


def expected_of(module, x):
    """The same on the host, over all samples."""
    with torch.no_grad():
        hidden = torch.tanh(module.net[0](x))
        outputs = module.net[2](hidden)
    return {
        "activity": float(hidden.square().mean()),
        "largest": float(outputs.max(dim=1).values.mean()),
    }


def compiled(module, config=None, *, lr=0.0, **settings):
    model = IPUModel(module, config or IPUConfig())
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    model.compile(optimizer, "cross_entropy", **{"metrics": ["accuracy"], **settings})
    return model


CONFIGS = {
    "one IPU": IPUConfig(),
    "replicas": IPUConfig(replicas=2, device_iterations=2),
    "a pipeline": IPUConfig(pipeline=("net.0", "net.2"), gradient_accumulation=3),
    "a sharded pipeline": IPUConfig(
        pipeline=("net.0", "net.2"), execution="sharded", replicas=2
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_exact_mean_over_all_samples_is_logged(monkeypatch, name):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "8")
    x, y = reference.samples(48)
    module = Logging()
    model = compiled(module, CONFIGS[name])
    history = model.fit(
        x, y, batch_size=12, validation_data=(x[:7], y[:7]), epochs=2, verbose=0
    )
    assert sorted(history.history) == sorted(
        prefix + figure
        for prefix in ("", "val_")
        for figure in ("accuracy", "activity", "largest", "loss")
    )
    for prefix, rows in (("", 48), ("val_", 7)):
        for figure, value in expected_of(module, x[:rows]).items():
            logged = history.history[prefix + figure]
            assert logged == pytest.approx([value] * 2, rel=1e-5)
    rows = CONFIGS[name].inference_plan(4).samples_per_call
    for count in (1, 2, rows - 1, rows, rows + 1, 2 * rows + 1):
        x, y = reference.samples(count, seed=count)
        figures = model.evaluate(x, y, batch_size=4, verbose=0)
        expected = {**reference.evaluate(model.module.net, x, y)}
        expected.update(expected_of(model.module, x))
        assert figures == pytest.approx(expected, rel=1e-4, abs=1e-6), count
    with torch.no_grad():  # without what is logged
        torch.testing.assert_close(model.predict(x, verbose=0), model.module(x))
    model.detach()


def test_what_is_logged_changes_while_training():
    x, y = reference.samples(24)
    module = Logging()
    twin = copy.deepcopy(module)
    model = compiled(module, lr=0.5)
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    values = []
    for rows in torch.arange(24).split(8):
        values.append(expected_of(twin, x[rows])["activity"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(twin(x[rows]), y[rows]).backward()
        optimizer.step()
    assert history.history["activity"] == [pytest.approx(sum(values) / 3, rel=1e-5)]
    reference.assert_same_weights(module, twin)  # logging has no gradient


def test_a_list_of_figures_ends_with_what_is_logged():
    x, y = reference.samples(8)
    model = compiled(Logging())
    named = model.evaluate(x, y, verbose=0)
    listed = model.evaluate(x, y, verbose=0, return_dict=False)
    assert listed == [named[n] for n in ("loss", "accuracy", "activity", "largest")]


# Errors -----------------------------------------------------------------------------


class Wrong(nn.Module):
    """Logs what an argument says."""

    def __init__(self, *logged):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self._logged = logged

    def forward(self, x):
        outputs = self.layer(x)
        for name, value in self._logged:
            log(name, value(outputs))
        return outputs


class Highest(StreamedMetric):
    def reset(self):
        self.value = float("nan")

    def update(self, outputs, targets, weights=None):
        self.value = float(outputs.max())

    def result(self):
        return self.value


def mean(outputs):
    return outputs.mean()


WRONG = {
    "a number": ([("size", lambda _: 3.5)], r"log\('size'\) got 3\.5: a float"),
    "several elements": ([("size", lambda o: o[0])], r"shape \(4,\)"),
    "twice": ([("size", mean), ("size", mean)], "twice"),
    "no name": ([("", mean)], "needs a name"),
    "the loss": ([("loss", mean)], "'loss'"),
    "a metric": ([("accuracy", mean)], "'accuracy'"),
    "a streamed metric": ([("highest", mean)], "'highest'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_logged_is_refused(name):
    logged, message = WRONG[name]
    model = compiled(Wrong(*logged), metrics=["accuracy", Highest("highest")])
    x, y = reference.samples(32)
    for run in (model.fit, model.evaluate):
        with pytest.raises(ConfigError, match=message):
            run(x, y, verbose=0)


@pytest.mark.parametrize("place", ["loss", "metrics"])
def test_what_a_loss_or_metric_logs_is_refused_and_not_lost(place):
    def logging(outputs, targets):
        log("size", outputs.square().mean())
        return nn.functional.cross_entropy(outputs, targets)

    model = IPUModel(reference.network())
    model.compile("sgd", **{"loss": "cross_entropy", place: logging})
    with pytest.raises(ConfigError, match=r"log\('size'\) was called in a loss"):
        model.fit(*reference.samples(32), verbose=0)


def test_scalars_need_every_micro_batch_back():
    own = poptorch.Options().deviceIterations(2)
    own.outputMode(poptorch.OutputMode.Final)
    model = compiled(Logging(), IPUConfig(inference_options=own))
    x, y = reference.samples(32)
    with pytest.warns(UserWarning, match="a part"), pytest.raises(
        UnsupportedError, match=r"logs scalars.*OutputMode\.All"
    ):
        model.evaluate(x, y, verbose=0)


# Outside of runs --------------------------------------------------------------------


def test_outside_of_runs_nothing_is_logged_and_nothing_refused():
    log("anything", 3)
    assert Logging()(torch.zeros(2, 3)).shape == (2, 4)
