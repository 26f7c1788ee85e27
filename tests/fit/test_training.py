# SPDX-License-Identifier: Apache-2.0
"""Streamed metrics: each real sample once, with its own target; evaluations."""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.engine.rows
from ipufit import (
    Callback,
    ConfigError,
    IPUConfig,
    IPUModel,
    StreamedMetric,
    UnsupportedError,
    poptorch,
)
from ipufit.callbacks import ProgressDisplay
from tests import reference
from tests.strategies import config_for, examples, plans

pytestmark = pytest.mark.looped


class Seen(StreamedMetric):
    """Remembers inputs, targets and weights: the module gives its inputs back."""

    def __init__(self):
        super().__init__("seen")
        self.epochs = []

    def __deepcopy__(self, memo):
        return self  # for the test to look into

    def reset(self):
        self.parts = []
        self.epochs.append(self.parts)

    def update(self, outputs, targets, weights=None):
        self.parts.append((outputs, targets, weights))

    def result(self):
        return float(sum(len(targets) for _, targets, _ in self.parts))


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * self.scale


def numbers(count):
    """Samples that are their own index; targets are the same."""
    x = torch.arange(count, dtype=torch.float32)[:, None]
    return x, x.clone(), torch.arange(count, dtype=torch.float32) / 8


def fitted(metric, config, data, **settings):
    x, y, weights = data
    module = Echo()
    model = IPUModel(module, config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model.compile(optimizer, "mse", weighted_metrics=[metric])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = model.fit(x, y, sample_weight=weights, verbose=0, **settings)
    return history.history


@settings(max_examples=examples(25))
@given(
    st.data(),
    plans(2),
    st.sampled_from([None, "All", "Final", "EveryN"]),
    st.sampled_from([True, "pad"]),
    st.booleans(),
)
def test_each_real_sample_that_comes_back_is_seen_once(
    data, plan, mode, drop_last, shuffle
):
    period = plan.device_iterations
    count = plan.samples_per_call + data.draw(st.integers(0, plan.samples_per_call))
    metric = Seen()
    history = fitted(
        metric,
        config_for(plan, mode, period),
        numbers(count),
        epochs=2,
        shuffle=shuffle,
        drop_last=drop_last,
    )
    real = count if drop_last == "pad" else count - count % plan.samples_per_call
    covered = reference.covered_samples(plan, real, mode, period)
    for parts, told in zip(metric.epochs[-2:], history["seen"]):
        outputs, targets, weights = (
            torch.cat([torch.zeros(0), *(part.flatten() for part in column)])
            for column in zip(*parts)
        )
        assert torch.equal(outputs, targets)  # the right targets
        assert torch.equal(weights, targets / 8)
        assert len(set(targets.tolist())) == len(targets) == int(covered.sum()) == told
        if not shuffle:
            assert torch.equal(targets, torch.arange(real)[covered].float())


def test_outputs_of_asynchronous_loaders_are_copied():
    metric = Seen()
    config = IPUConfig(num_workers=1, device_iterations=2)
    fitted(metric, config, numbers(32), batch_size=4, shuffle=False)
    targets = torch.cat([part[1].flatten() for part in metric.epochs[-1]])
    assert torch.equal(targets, torch.arange(32).float())


def test_sums_of_outputs_are_refused_for_streamed_metrics():
    own = poptorch.Options().outputMode(poptorch.OutputMode.Sum)
    model = IPUModel(Echo(), IPUConfig(training_options=own))
    model.compile("sgd", "mse", metrics=[Seen()])
    x, y, _ = numbers(32)
    with pytest.raises(ConfigError, match=r"OutputMode\.Sum"):
        model.fit(x, y, verbose=0)


# Evaluations ----------------------------------------------------------------------


def options(mode, **settings):
    own = poptorch.Options().deviceIterations(4).replicationFactor(2)
    return own.outputMode(poptorch.OutputMode[mode], **settings)


LOOKS = {
    "plain": (IPUConfig(), None, 1),
    "replicas": (IPUConfig(replicas=2, device_iterations=3), None, 1),
    "final": (IPUConfig(inference_options=options("Final")), "Final", 4),
    "every": (
        IPUConfig(inference_options=options("EveryN", output_return_period=2)),
        "EveryN",
        2,
    ),
}


@pytest.mark.parametrize("count", [1, 13, 24, 33])
@pytest.mark.parametrize("name", LOOKS)
def test_each_sample_that_comes_back_is_seen_once(name, count):
    config, mode, period = LOOKS[name]
    x, y, weights = numbers(count)
    metric = Seen()
    model = reference.compiled(Echo(), config, loss="mse", weighted_metrics=[metric])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figures = model.evaluate(x, y, 4, sample_weight=weights, verbose=0)
    covered = reference.covered_samples(config.inference_plan(4), count, mode, period)
    parts = metric.epochs[-1]
    targets = torch.cat([torch.zeros(0), *(part[1].flatten() for part in parts)])
    outputs = torch.cat([torch.zeros(0), *(part[0].flatten() for part in parts)])
    assert torch.equal(targets, torch.arange(count)[covered].float())
    assert torch.equal(outputs, targets)
    assert figures.get("seen", 0.0) == len(targets)


def test_running_figures_are_those_of_the_samples_so_far():
    x, y = reference.samples(10)
    model = reference.compiled(metrics=["accuracy"])
    recorder = reference.Recorder()
    model.evaluate(x, y, batch_size=4, callbacks=recorder, verbose=0)
    ends = [a for name, a in recorder.calls if name == "on_test_batch_end"]
    assert [batch for batch, _ in ends] == [0, 1, 2]
    for (_, logs), rows in zip(ends, (4, 8, 10)):
        expected = reference.evaluate(model.module, x[:rows], y[:rows])
        assert logs == pytest.approx(expected, rel=1e-5)


def test_an_evaluation_that_is_stopped_reports_what_it_saw():
    class Stop(Callback):
        def on_test_batch_end(self, batch, logs):
            self.model.stop_evaluating = batch == 1

    x, y = reference.samples(20)
    model = reference.compiled(metrics=["accuracy"])
    figures = model.evaluate(x, y, batch_size=4, callbacks=Stop(), verbose=0)
    expected = reference.evaluate(model.module, x[:8], y[:8])
    assert figures == pytest.approx(expected, rel=1e-5)
    expected = reference.evaluate(model.module, x, y)
    figures = model.evaluate(x, y, batch_size=4, verbose=0)
    assert figures == pytest.approx(expected, rel=1e-5)


# Several calls at once ----------------------------------------------------------------


class Hears(Callback):
    """Wants the figures of each call."""

    def on_test_batch_end(self, batch, logs=None):
        self.logs = logs


def compiled(loss="cross_entropy", metrics=("accuracy",), **config):
    model = IPUModel(reference.network(), IPUConfig(**config))
    model.compile("sgd", loss, metrics=list(metrics), weighted_metrics=["accuracy"])
    return model


def bits(figures):
    """Figures as text that tells any two numbers apart, and no NaN from another."""
    return {name: float(value).hex() for name, value in figures.items()}


@settings(max_examples=examples(25))
@given(
    st.integers(1, 60),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1, 64, 2**20]),
)
def test_waiting_changes_no_figure(count, size, iterations, is_weighted, most):
    x, y = reference.samples(count)
    y[::7] = -100  # ignored
    weights = torch.linspace(0, 2, count) if is_weighted else None
    model = compiled(device_iterations=iterations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipufit.engine.rows, "_MOST_BYTES", most)
        # Outputs of folded micro-batches may differ from single ones in the last bit.
        patch.setenv("IPUFIT_EMULATOR_FOLD", "0")
        arguments = {"sample_weight": weights, "verbose": 0}
        waited = model.evaluate(x, y, size, **arguments)
        heard = Hears()
        each = model.evaluate(x, y, size, callbacks=heard, **arguments)
    assert bits(waited) == bits(each)
    assert heard.logs == pytest.approx(each, nan_ok=True)


def python_calls(function):
    """How many functions Python calls: the same on any machine, other than seconds."""
    counts = Counter()
    sys.setprofile(lambda frame, event, value: counts.update([event]))
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts["call"]


def test_an_evaluation_makes_few_python_calls_per_device_call():
    x, y = reference.samples(800)
    model = compiled(inference_iterations=1)

    def evaluate(count):
        model.evaluate(x[:count], y[:count], 2, verbose=0)

    evaluate(800)
    few = python_calls(lambda: evaluate(200))
    many = python_calls(lambda: evaluate(800))
    assert (many - few) / 300 <= 150


def test_a_heard_evaluation_costs_as_much_at_each_call():
    x, y = reference.samples(60)
    model = compiled(inference_iterations=1)

    def evaluate(count):
        model.evaluate(x[:count], y[:count], 1, verbose=0, callbacks=Hears())

    evaluate(60)
    few, more, most = (python_calls(lambda n=n: evaluate(n)) for n in (20, 40, 60))
    assert most - more < 1.1 * (more - few)  # 1.6 if each call joins all before it


def test_a_display_does_not_change_the_figures(monkeypatch):
    x, y = reference.samples(40)
    model = compiled(inference_iterations=1)
    expected = model.evaluate(x, y, batch_size=2, verbose=0)
    shown = []

    class Display(ProgressDisplay):
        @property
        def is_due(self):
            return True

        def on_test_batch_end(self, batch, logs=None):
            shown.append(dict(logs))

    figures = model.evaluate(x, y, batch_size=2, callbacks=Display(), verbose=0)
    assert figures == expected
    assert len(shown) == 20
    assert shown[4] == pytest.approx(
        model.evaluate(x[:10], y[:10], batch_size=2, verbose=0), rel=1e-5
    )


@pytest.mark.parametrize("where", ["loss", "metrics"])
@pytest.mark.parametrize("iterations", [None, 1, 2, 8])
def test_functions_of_the_users_see_one_pass_at_a_time(where, iterations):
    sizes = []

    def error(outputs, targets):
        sizes.append(len(outputs))
        return torch.nn.functional.cross_entropy(outputs, targets)

    x, y = reference.samples(18)
    given = {"loss": error} if where == "loss" else {"metrics": [error]}
    model = compiled(inference_iterations=iterations, **given)
    model.evaluate(x, y, batch_size=4, verbose=0)  # with a check that it is no sum
    assert sizes[-5:] == [4, 4, 4, 4, 2]
    sizes.clear()
    model.evaluate(x, y, batch_size=4, verbose=0)
    assert sizes == [4, 4, 4, 4, 2]


def test_targets_that_do_not_fit_fail_at_the_first_call():
    x, _ = reference.samples(12)
    model = compiled(inference_iterations=1)
    with pytest.raises(ipufit.DataError, match=r"float32 \[4, "):
        model.evaluate(x, torch.zeros(12, 1, 5), batch_size=4, verbose=0)


class Auxiliary(nn.Module):
    """Returns an auxiliary output in training only."""

    def __init__(self, form):
        super().__init__()
        self.head, self.aux, self.form = nn.Linear(3, 4), nn.Linear(3, 4), form

    def forward(self, x):
        out, aux = self.head(x), self.aux(x) if self.training else None
        if self.form == "dict":
            return {"out": out} if aux is None else {"out": out, "aux": aux}
        if self.form == "tuple" and aux is None:
            return out
        return out, aux


@pytest.mark.parametrize("run", ["fit", "evaluate"])
@pytest.mark.parametrize("form", ["tuple", "None", "dict"])
@pytest.mark.parametrize("is_one", [True, False])
def test_a_loss_of_an_output_that_only_training_has_is_refused(form, run, is_one):
    model, (x, y) = IPUModel(Auxiliary(form)), reference.samples(64)
    names = ["out", "aux"] if form == "dict" else ["output_1", "output_2"]
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    loss = "cross_entropy"
    model.compile("sgd", loss if is_one else dict.fromkeys(names, loss))
    targets = dict.fromkeys(names, y)
    if form != "dict":
        targets = (y, y)
    what = "returns 2 outputs in training .*, and in eval mode 1: .*" + names[1]
    more = {"validation_data": (x, targets)} if run == "fit" else {}
    with pytest.raises(UnsupportedError, match=what):
        getattr(model, run)(x, targets, verbose=0, **more)
    for name, value in model.module.state_dict().items():  # nothing was trained
        assert torch.equal(value, before[name])


def loss_of_pair(outputs, targets):
    loss = nn.functional.cross_entropy
    return loss(outputs[0], targets) + 0.3 * loss(outputs[1], targets)


def loss_of_names(outputs, targets):
    return loss_of_pair((outputs["out"], outputs["aux"]), targets)


def errors_of_pair(outputs, targets):
    targets = nn.functional.one_hot(targets, 4)
    return sum((out - targets).square().mean() for out in outputs)


def errors_of_either(outputs, targets):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return errors_of_pair(outputs, targets)


@pytest.mark.parametrize("run", ["fit", "evaluate"])
@pytest.mark.parametrize(
    ("form", "loss"),
    [("tuple", loss_of_pair), ("tuple", errors_of_pair), ("dict", loss_of_names)],
)
def test_a_function_that_takes_outputs_of_training_alone_is_refused(form, loss, run):
    model, (x, y) = IPUModel(Auxiliary(form)), reference.samples(64)
    model.compile("sgd", loss)
    more = {"validation_data": (x, y)} if run == "fit" else {}
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"2 outputs in .* eval mode 1: "):
            getattr(model, run)(x, y, verbose=0, **more)


def test_a_function_that_unpacks_an_only_output_is_told_that_it_gets_it():
    class Named(nn.Linear):
        def forward(self, x):
            return {"out": super().forward(x)}

    x, y = reference.samples(64)
    model = IPUModel(Named(3, 4))
    model.compile("sgd", lambda o, y: nn.functional.cross_entropy(o["out"], y))
    with pytest.raises(ipufit.DataError, match="the only output of a dict or tuple"):
        model.fit(x, y, verbose=0)
    model.compile("sgd", lambda o, y: nn.functional.cross_entropy(o, y))
    model.fit(x, y, verbose=0)


def test_a_function_of_the_outputs_of_either_mode_is_evaluated():
    model, (x, y) = IPUModel(Auxiliary("tuple")), reference.samples(64)
    model.compile("sgd", errors_of_either)
    model.fit(x, y, validation_data=(x, y), verbose=0)
    loss = errors_of_either(model.module.eval()(x), y).item()
    assert model.evaluate(x, y, verbose=0)["loss"] == pytest.approx(loss)


def test_a_loss_of_the_output_that_both_modes_have_is_evaluated():
    model, (x, y) = IPUModel(Auxiliary("tuple")), reference.samples(64)
    model.compile("sgd", ["cross_entropy", None])
    model.fit(x, y, validation_data=(x, y), verbose=0)
    loss = nn.functional.cross_entropy(model.module.eval()(x), y).item()
    assert model.evaluate(x, y, verbose=0)["loss"] == pytest.approx(loss)
