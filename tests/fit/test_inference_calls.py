# SPDX-License-Identifier: Apache-2.0
"""Calls of `evaluate` and `predict` where `inference_iterations` is left open."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit import (
    Callback,
    DataError,
    IPUConfig,
    IPUModel,
    UnsupportedError,
    poptorch,
)
from ipufit.callbacks import ProgressDisplay
from tests import modes, reference
from tests.strategies import examples

X, Y = reference.samples(128)


class Scaled(torch.nn.Module):
    """Computes element by element, which has the same bits in any mode."""

    def __init__(self, *, logs=False, owns_loss=False, outputs=1):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.0, -0.7, 0.3, 2.1]))
        self.shift = torch.nn.Parameter(torch.tensor([0.1, 0.2, -0.4, 0.0]))
        self.logs, self.owns_loss, self.outputs = logs, owns_loss, outputs

    def forward(self, x, labels=None):
        out = x[:, :1] * self.scale + self.shift
        if self.logs:
            ipufit.log("mean", out.mean())
        if self.owns_loss:
            return out, torch.nn.functional.cross_entropy(out, labels)
        return out if self.outputs == 1 else (out, out * self.scale)


@pytest.fixture
def sizes(monkeypatch):
    """Rows of each call of an inference program."""
    found, executors = [], []
    make, call = poptorch.inferenceModel, poptorch.PoplarExecutor.__call__

    def made(*args, **named):
        executors.append(make(*args, **named))
        return executors[-1]

    def called(executor, *tensors, **named):
        if any(executor is one for one in executors):
            found.append(len([*tensors, *named.values()][0]))
        return call(executor, *tensors, **named)

    monkeypatch.setattr(poptorch, "inferenceModel", made)
    monkeypatch.setattr(poptorch.PoplarExecutor, "__call__", called)
    return found


def taken(sizes):
    found = list(sizes)
    sizes.clear()
    return found


def bits(figures):
    return {name: float(value).hex() for name, value in figures.items()}


def make(module=None, loss="cross_entropy", metrics=("accuracy",), **config):
    model = IPUModel(module or Scaled(), IPUConfig(**{"micro_batch_size": 4, **config}))
    model.compile("sgd", loss, metrics=list(metrics))
    return model


def test_one_call_takes_all_that_fit(sizes):
    model = make()
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    model.fit(X, Y, 4, validation_data=(X, Y), verbose=0)
    assert taken(sizes) == [128, 128, 128]
    model.evaluate(X[:100], Y[:100], verbose=0)
    assert taken(sizes) == [20] * 5  # any more would be padding
    model.evaluate(X[:96], Y[:96], verbose=0)
    assert taken(sizes) == [96]
    model.predict(X[:3], verbose=0)
    assert taken(sizes) == [4]
    model.test_on_batch(X[:8], Y[:8])
    model.predict_on_batch(X[:8])
    assert taken(sizes) == [4] * 4
    make(inference_iterations=5).evaluate(X[:40], Y[:40], verbose=0)
    assert taken(sizes) == [20, 20]  # explicit numbers win
    x = torch.zeros(64, 1).expand(64, 2**20)  # 4 MiB each
    make(micro_batch_size=1).predict(x, verbose=0)
    assert taken(sizes) == [8] * 8


class Hears(Callback):
    def on_test_batch_end(self, batch, logs=None):
        pass

    def on_predict_batch_begin(self, batch, logs=None):
        pass


class Display(ProgressDisplay):
    pass


@pytest.mark.parametrize("given", [1, 2, None])
def test_who_hears_each_batch_gets_each(sizes, given):
    model = make(device_iterations=given)
    rows = 4 * (given or 1)
    x, y = X[:32], Y[:32]
    model.evaluate(x, y, callbacks=Hears(), verbose=0)
    model.predict(x, callbacks=Hears(), verbose=0)
    model.fit(x, y, 4, validation_data=(x, y), callbacks=Hears(), verbose=0)
    list(model.predict(x, stream=True, verbose=0))
    assert taken(sizes) == [rows] * (32 // rows) * 4
    model.evaluate(x, y, callbacks=Display(), verbose=0)
    model.predict(x, callbacks=[Display(), ipufit.Callback()], verbose=0)
    assert taken(sizes) == [32, 32]


def test_other_output_modes_keep_their_calls(sizes):
    def final(options, is_training=False):
        options.outputMode(poptorch.OutputMode.Final)

    def seeded(options, is_training=False):
        options.randomSeed(3)

    own = poptorch.Options().outputMode(poptorch.OutputMode.All)
    own.showCompilationProgressBar(False)  # its thread would be left running
    make(inference_options=own).evaluate(X[:16], Y[:16], verbose=0)
    assert taken(sizes) == [4] * 4
    make(customize=final).evaluate(X[:16], Y[:16], verbose=0)
    assert taken(sizes) == [4] * 4
    make(customize=seeded).evaluate(X[:16], Y[:16], verbose=0)
    assert taken(sizes) == [16]


def test_a_pipeline_gets_a_pass_for_each_stage(sizes):
    layers = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)])
    model = IPUModel(layers, IPUConfig(micro_batch_size=4, pipeline=("0", "1", "2")))
    model.predict(X[:4], verbose=0)
    assert taken(sizes) == [12]
    model.predict(X[:96], verbose=0)
    assert taken(sizes) == [96]


def test_samples_that_are_loaded_begin_small(sizes):
    model, pairs = make(), list(zip(X, Y))
    model.evaluate(reference.Items(pairs), verbose=0)
    assert taken(sizes) == [64] * 2
    model.evaluate(reference.Stream(pairs), verbose=0)
    assert taken(sizes) == [16] * 8
    model.evaluate(((X[i : i + 4], Y[i : i + 4]) for i in range(0, 128, 4)), verbose=0)
    assert taken(sizes) == [16] * 8
    model.evaluate(reference.Stream(pairs), steps=3, batch_size=4, verbose=0)
    assert sum(taken(sizes)) <= 16
    model.evaluate(DataLoader(TensorDataset(X, Y), 4), verbose=0)
    assert max(taken(sizes)) <= 128


def error(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets).sqrt()


def step(module, batch):
    x, y = batch
    outputs = module(x)
    loss = torch.nn.functional.cross_entropy(outputs, y)
    return {"loss": loss, "outputs": outputs, "twice": 2 * loss}


@settings(max_examples=examples(24))
@given(
    st.integers(1, 70),
    st.integers(2, 7),
    st.sampled_from([1, 2]),
    st.sampled_from(["plain", "functions", "logged", "outputs", "own loss", "step"]),
    st.booleans(),
    st.sampled_from([1, 40, 400, 2**20]),
)
def test_no_figure_and_no_output_has_another_bit(
    count, size, replicas, kind, is_weighted, most
):
    x, y = X[:count], Y[:count]
    weights = torch.linspace(0, 2, count) if is_weighted else None
    found = []
    for given_iterations in ({}, {"inference_iterations": 1}):
        config = {"micro_batch_size": size, "replicas": replicas, "seed": 1}
        config.update(given_iterations)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ipufit.engine.rows._MOST_BYTES", most)
            if kind in ("own loss", "logged", "step"):
                # A program's means over rows are rounded otherwise in a fold.
                patch.setenv(*modes.VARIABLES["looped"])
            found.append(run(kind, x, y, weights, config))
    assert found[0] == found[1]


def run(kind, x, y, weights, config):
    """The bits of all that `evaluate`, `predict` and a validation give."""
    module, loss, metrics, steps = Scaled(logs=kind == "logged"), None, [], {}
    if kind in ("plain", "logged"):
        loss, metrics = "cross_entropy", ["accuracy", "top_2_accuracy"]
    if kind == "functions":
        loss, metrics = error, [error, "accuracy"]
    if kind == "outputs":
        module, loss = Scaled(outputs=2), ["cross_entropy", error]
        metrics, y = [[], ["accuracy"]], (y, y)
    if kind == "own loss":
        module, x, y = Scaled(owns_loss=True, logs=True), {"x": x, "labels": y}, None
    if kind == "step":
        steps = {"step": step}
    if kind not in ("plain", "logged"):
        weights = None
    model = reference.compiled(module, **config, loss=loss, metrics=metrics, **steps)
    figures = model.evaluate(x, y, sample_weight=weights, verbose=0)
    outputs = model.predict(x, verbose=0)
    validated = {}
    if kind == "plain":
        given = X[:16], Y[:16], None, 1, 0, None
        data = (x, y) if weights is None else (x, y, weights)
        history = model.fit(*given, validation_data=data, drop_last="pad").history
        validated = {name: column[0] for name, column in history.items()}
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return bits(figures), bits(validated), [one.tolist() for one in outputs]


class Counting(torch.nn.Module):
    """Counts its passes, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes.add_(1.0)
        return x[:, :1] * 0 + self.passes


def test_no_pass_is_padding_where_a_buffer_moves(sizes):
    model = IPUModel(Counting(), IPUConfig())
    for first in (1, 38):
        outputs = model.predict(X[:74], batch_size=2, verbose=0)
        assert outputs[::2, 0].tolist() == list(range(first, first + 37))
    assert set(sizes) == {2}


class Own(torch.nn.Module):
    """Has what a call on the host might change, and notes how it was called."""

    def __init__(self, seen):
        super().__init__()
        self.recurrent = torch.nn.LSTM(3, 6, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 200)
        self.calls, self.kept, self.note = 0, [], seen.append

    def forward(self, x):
        if len(x) == 1:  # for the size alone
            self.calls += 1
            self.kept.append(x)
            self.last = self.recurrent.weight_hh_l0
            self.note(bool(self.last.any()) or self.training)
            torch.rand(3)
        return self.head(self.norm(self.recurrent(x[:, None])[0][:, 0]))


def remembered(module):
    own = {name: value.clone() for name, value in module.state_dict().items()}
    return own, module.calls, len(module.kept), hasattr(module, "last"), module.training


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_the_call_for_a_size_leaves_the_module_as_it_was(sizes, precision):
    seen = []
    module = Own(seen)
    model = make(module, precision=precision, metrics=["f1", "accuracy"])
    module = model.module
    before, state = remembered(module), torch.get_rng_state()
    model.predict(X, verbose=0)
    assert taken(sizes) == [128]
    model.batch_plan(X, Y, batch_size=4)
    assert seen == [False, False]
    after = remembered(module)
    assert after[1:] == before[1:]
    assert all(map(torch.equal, after[0].values(), before[0].values()))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("use", ["predict", "evaluate", "batch_plan", "plan"])
def test_a_forward_that_is_a_closure_over_its_module_changes_no_buffer(use):
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))
    module.forward = lambda x: module[1](module[0](x))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = make(module, metrics=["f1"])
    given = (X,) if use == "predict" else (X, Y)
    getattr(model, use)(*given, **({} if "plan" in use else {"verbose": 0}))
    after = module.state_dict()
    assert all(map(torch.equal, after.values(), before.values()))
    assert module[0].training


@pytest.mark.parametrize("kind", ["half precision", "deepcopy"])
def test_a_copy_of_such_a_module_computes_with_its_own_weights(kind):
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))
    before = module.forward
    module.forward = lambda x: before(x) + module[1].bias
    model = make(module, precision="16.16" if kind == "half precision" else "float32")
    model = copy.deepcopy(model) if kind == "deepcopy" else model
    with torch.no_grad():
        model.module[1].weight.zero_()
        model.module[1].bias.fill_(2.0)
    assert model.predict(X[:8], verbose=0).eq(4).all()
    assert not module[1].bias.eq(2).any()


class Pairs(ipufit.metrics.Metric):
    """How often each class is taken for each other: a matrix of sums."""

    def sums(self, outputs, targets, weights=None):
        size = outputs.shape[-1]
        found = torch.nn.functional.one_hot(outputs.argmax(dim=-1), size).float()
        true = torch.nn.functional.one_hot(targets.long(), size).float()
        return torch.matmul(true.t(), found).reshape(-1)

    def result(self, sums):
        matrix = sums.reshape(2 * [round(sums.numel() ** 0.5)])
        return float(matrix.diagonal().sum() / matrix.sum())


def step_with_outputs(module, batch):
    outputs = module(batch[0])
    return torch.nn.functional.cross_entropy(outputs, batch[1]), outputs


@pytest.mark.parametrize("step", [None, step_with_outputs])
@pytest.mark.parametrize(
    ("metrics", "expected"), [(["accuracy"], 32), (["f1"], 32), ([Pairs("pairs")], 4)]
)
def test_large_sums_of_metrics_make_calls_of_training_small(step, metrics, expected):
    model = IPUModel(torch.nn.Linear(3, 1000), IPUConfig(micro_batch_size=4))
    loss = "cross_entropy" if step is None else None
    model.compile("sgd", loss, metrics=metrics, step=step)
    plan = model.batch_plan(X, Y, batch_size=4)
    assert plan.batch.device_iterations == expected


class TimeFirst(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):  # [samples, steps, 3]
        return self.layer(x).transpose(0, 1)


@pytest.mark.parametrize("samples", [5, 16])
def test_an_axis_as_long_as_a_micro_batch_is_no_axis_of_samples(samples):
    model = IPUModel(TimeFirst())
    with pytest.raises(UnsupportedError, match=r"\(8, 1, 2\) for one sample"):
        model.predict(torch.randn(samples, 8, 3), batch_size=8)


class Stateful(torch.nn.Module):
    """Holds a state for each sample of a micro-batch of two."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("state", torch.zeros(2, 1))

    def forward(self, x):
        hidden = self.layer(x) + 0.5 * self.state
        self.state.copy_(hidden.detach())
        return hidden


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_state_for_each_sample_is_an_axis_of_samples(replicas):
    module, x = Stateful(), torch.randn(16, 3)
    config = IPUConfig(micro_batch_size=2, replicas=replicas)
    model = IPUModel(copy.deepcopy(module), config)
    rows, states = [], [torch.zeros(2, 1)] * replicas
    with torch.no_grad():
        for index, batch in enumerate(x.split(2)):
            states[index % replicas] = (
                module.layer(batch) + 0.5 * states[index % replicas]
            )
            rows.append(states[index % replicas])
    torch.testing.assert_close(model.predict(x, verbose=0), torch.cat(rows))


class OfOneSize(torch.nn.Module):
    """Takes micro-batches of so many rows only: of nodes, say."""

    def __init__(self, rows):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.register_buffer("adjacency", torch.rand(rows, rows))

    def forward(self, x):
        return self.adjacency @ self.layer(x)


@pytest.mark.parametrize("rows", [1, 20])
def test_data_that_was_one_batch_of_fit_is_evaluated_as_one(rows):
    model, x, y = IPUModel(OfOneSize(rows)), X[:rows], Y[:rows]
    model.compile("sgd", "cross_entropy")
    model.fit(x, y, batch_size=rows, epochs=2, verbose=0)
    outputs = model.module(x).detach()
    loss = torch.nn.functional.cross_entropy(outputs, y).item()
    assert model.evaluate(x, y, verbose=0)["loss"] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(model.predict(x, verbose=0), outputs)


def test_an_error_of_shapes_names_the_batch_size_of_fit():
    model = reference.compiled(OfOneSize(8))
    model.fit(X, Y, batch_size=8, verbose=0)
    for run in (partial(model.evaluate, X, Y), partial(model.predict, X)):
        with pytest.raises(DataError, match=r"failed .* ones of 32: .* batch_size=8"):
            run(verbose=0)
        run(verbose=0, batch_size=8)


def test_an_error_of_other_sizes_does_not_name_the_batch_size_of_fit():
    model = reference.compiled(torch.nn.Linear(3, 4))
    model.fit(X, Y, batch_size=8, verbose=0)
    with pytest.raises(
        DataError, match=r"failed with inputs of float32 \[32\]"
    ) as error:
        model.predict(X[0].repeat(20), verbose=0)
    assert "micro-batches of 8" not in str(error.value)


class States(torch.nn.Module):
    """Returns the outputs and the last state of a recurrent layer, as torch does."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.GRU(3, 5, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, None])


def test_a_state_with_samples_on_axis_1_is_to_be_transposed():
    model = IPUModel(States())
    for run in (model.predict_on_batch, partial(model.predict, verbose=0)):
        with pytest.raises(UnsupportedError, match=r"\(1, .*, 5\) .*transpose\(0, 1\)"):
            run(X[:4])
    flat = IPUModel(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Flatten(0)))
    with pytest.raises(UnsupportedError, match="return batched tensors only"):
        flat.predict_on_batch(X[:4])
    x = X.repeat(4, 1)  # several micro-batches in a call
    with pytest.raises(UnsupportedError, match=r"transpose\(0, 1\)"):
        model.predict(x, batch_size=8, verbose=0)


class Decoder(torch.nn.Module):
    """Adds tokens until all are ends, which zeros in place of weights never are."""

    def __init__(self, is_end, steps):
        super().__init__()
        self.layer, self.is_end, self.steps = torch.nn.Linear(3, 3), is_end, steps

    def forward(self, x):
        while not self.is_end(self.layer(x)) and next(self.steps) < 9999:
            pass
        return x


@pytest.mark.parametrize(
    "is_end", [lambda x: (x == 1).all(), lambda x: x.sum().item() == 1]
)
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_a_loop_until_a_value_is_refused_and_not_waited_for(is_end, method):
    steps = itertools.count()
    model = IPUModel(Decoder(is_end, steps))
    model.compile("sgd", "mse")
    x = torch.rand(400, 3)
    data = (x,) if method == "predict" else (x, x)
    with pytest.raises(poptorch.Error, match="needs the value of a tensor"):
        getattr(model, method)(*data, verbose=0)
    assert 0 < next(steps) < 9999
