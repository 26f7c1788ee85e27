# SPDX-License-Identifier: Apache-2.0
"""Several sets to validate on: `validation_data={"in": a, "out": b}`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ipufit
from ipufit import (
    Callback,
    ConfigError,
    DataError,
    EarlyStopping,
    IPUConfig,
    ModelCheckpoint,
    Optimizer,
    ReduceLROnPlateau,
    SwapEMAWeights,
)
from tests.processes import runs
from tests.reference import assert_same_weights, compiled, samples, weights
from tests.strategies import examples

X, Y = samples(24)


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(zip(*self.rows))


FORMS = {
    "pair": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "weights": lambda x, y: (x, y, torch.arange(1.0, len(x) + 1)),
    "dataset": TensorDataset,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), 5),
    "stream": lambda x, y: Stream((x, y)),
}


def evaluated(model, form, rows):
    made = form(*rows)
    x, y, weight = (
        (*made, None)[:3] if isinstance(made, (tuple, list)) else (made, None, None)
    )
    return model.evaluate(x, y, sample_weight=weight, verbose=0)


@settings(max_examples=examples(32))
@given(
    sets=st.dictionaries(
        st.sampled_from(["in", "out", "out_of", "ünlike/set", "loss"]),
        st.tuples(st.sampled_from(sorted(FORMS)), st.integers(1, 23)),
        min_size=1,
        max_size=3,
    ),
    size=st.sampled_from([None, 2, 6]),
    iterations=st.sampled_from([None, 2]),
)
def test_each_set_has_the_metrics_that_evaluate_gives_of_it(sets, size, iterations):
    config = IPUConfig(micro_batch_size=2, inference_iterations=iterations, seed=1)
    model, alone = (compiled(config=config, metrics=["accuracy"]) for _ in range(2))
    data = {n: FORMS[form](X[:count], Y[:count]) for n, (form, count) in sets.items()}
    history = model.fit(
        X, Y, 4, validation_data=data, validation_batch_size=size, verbose=0
    )
    own = alone.fit(X, Y, 4, verbose=0)
    assert_same_weights(model.module, alone.module, rtol=0, atol=0)
    expected = {name: values[-1] for name, values in own.history.items()}
    for name, (form, count) in sets.items():
        logs = evaluated(model, FORMS[form], (X[:count], Y[:count]))
        expected.update({f"val_{name}_{key}": value for key, value in logs.items()})
    found = {name: values[-1] for name, values in history.history.items()}
    assert found == pytest.approx(expected, rel=1e-6)
    assert list(found) == sorted(found)


class Told(Callback):
    def __init__(self):
        self.ends, self.batches = [], []

    def on_test_batch_end(self, batch, logs):
        self.batches.append(sorted(logs))

    def on_test_end(self, logs):
        self.ends.append(sorted(logs))


def test_hooks_of_a_validation_tell_which_set_it_is():
    told = Told()
    sets = {"in": (X, Y), "out": (X[:4], Y[:4])}
    run = {"validation_data": sets, "callbacks": told, "verbose": 0}
    compiled().fit(X, Y, 4, epochs=2, validation_steps=1, **run)
    assert told.ends == 2 * [["in_loss"], ["out_loss"]]
    assert told.batches == told.ends


def test_all_sets_share_one_program_that_build_makes_ahead(monkeypatch):
    sets = {"in": (X, Y), "out": TensorDataset(X[:5], Y[:5]), "one": (X[:1], Y[:1])}
    made, make = [], ipufit.poptorch.inferenceModel
    spy = lambda *given, **how: made.append(given) or make(*given, **how)  # noqa: E731
    monkeypatch.setattr(ipufit.poptorch, "inferenceModel", spy)
    compiled().fit(X, Y, 4, validation_data=sets, verbose=0)
    assert len(made) == 1
    model = compiled(config=IPUConfig(micro_batch_size=2))
    model.build(X, Y, 4, validation_data=sets, verbose=0)
    made.clear()
    model.fit(X, Y, 4, validation_data=sets, verbose=0)
    assert not made


def test_monitors_take_the_names_and_know_which_way_is_better(tmp_path):
    model = compiled(metrics=["accuracy"], optimizer=Optimizer("sgd", 1.0))
    stop = EarlyStopping("val_in_accuracy", patience=1, min_delta=2.0)
    save = ModelCheckpoint(
        tmp_path / "{epoch}-{val_out_loss:.3f}", "val_out_loss", save_best_only=True
    )
    best = ModelCheckpoint(tmp_path / "kept", "val_in_accuracy", keep=1)
    rate = ReduceLROnPlateau("val_out_loss", patience=1, min_delta=9.0)
    history = model.fit(
        X,
        Y,
        4,
        epochs=4,
        validation_data={"in": (X, Y), "out": (X[:6], Y[:6])},
        callbacks=[stop, save, best, rate],
        verbose=0,
    )
    assert stop.direction == best.store.mode == "max"
    assert "val_in_accuracy hasn't improved" in stop.run.stop_reason
    losses = history.history["val_out_loss"]
    assert save.best == min(losses)
    assert model.optimizer.param_groups[0]["lr"] < 1.0
    first = tmp_path / f"1-{losses[0]:.3f}"
    assert first.exists()


def test_a_monitor_of_a_set_that_is_not_there_is_refused_with_the_names():
    stop = EarlyStopping("val_loss")
    run = {"validation_data": {"in": (X, Y)}, "callbacks": stop, "verbose": 0}
    with pytest.raises(ConfigError, match=r"val_loss'.*Known: .*val_in_loss"):
        compiled().fit(X, Y, 4, **run)


# What a mapping is taken for ----------------------------------------------------------


class Sum(torch.nn.Module):
    """Takes inputs by name, and returns its own loss."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, a, b):
        a = a[0] if isinstance(a, (tuple, list)) else a
        b = b[0] if isinstance(b, (tuple, list)) else b
        outputs = (a * self.weight + b).sum(1)
        return outputs, ipufit.poptorch.identity_loss(outputs.square(), "mean")


def test_a_mapping_of_arrays_is_an_input_as_before():
    model = compiled(Sum(), loss=None)
    x = {"a": X, "b": X}
    history = model.fit(x, batch_size=4, validation_data=x, verbose=0)
    assert "val_loss" in history.history
    named = model.fit(x, batch_size=4, validation_data={"all": x}, verbose=0)
    assert "val_all_loss" in named.history
    pairs = {"a": (X, X), "b": (X, X)}
    history = model.fit(pairs, batch_size=4, validation_data=pairs, verbose=0)
    assert "val_loss" in history.history


def test_what_is_neither_named_sets_nor_an_input_is_refused():
    model = compiled()
    run = {"batch_size": 4, "verbose": 0}
    for sets, words in (
        ({"in": (X, Y), "out": X}, "under 'out' a torch.Tensor: give.*tuple .x, y."),
        ({"in": TensorDataset(X, Y), "out": {"x": X}}, "under 'out'.*give each set"),
        ({"": (X, Y)}, "the name ''"),
        ({1: (X, Y)}, "the name 1"),
        ({"in": (X, Y), "out": TensorDataset(X)}, r"validation_data\['out'\]|targets"),
    ):
        with pytest.raises(DataError, match=words):
            model.fit(X, Y, validation_data=sets, **run)


def own_step(names):
    def step(module, batch):
        loss = torch.nn.functional.cross_entropy(module(batch[0]), batch[1])
        return {"loss": loss, **dict.fromkeys(names, loss)}

    return step


@pytest.mark.parametrize(
    ("names", "sets", "words"),
    [
        (["in_loss"], ["in"], "'loss' of validation_data.'in'. .*like a metric of the"),
        (["of_loss"], ["out", "out_of"], "validation_data.'out_of'.*'val_out_of_loss'"),
    ],
)
def test_names_that_clash_are_refused(names, sets, words):
    model = compiled(loss=None, step=own_step(names))
    data = dict.fromkeys(sets, (X, Y))
    with pytest.raises(ConfigError, match=words):
        model.fit(X, Y, 4, validation_data=data, verbose=0)


def test_a_generator_gives_only_one_validation():
    def once():
        yield X, Y

    model = compiled()
    for epochs in (1, 2):
        sets = {"in": (X, Y), "out": once()}
        arguments = {"epochs": epochs, "validation_data": sets, "verbose": 0}
        if epochs == 1:
            assert "val_out_loss" in model.fit(X, Y, 4, **arguments).history
            continue
        with pytest.raises(
            DataError, match=r"validation_data\['out'\]. is a generator"
        ):
            model.fit(X, Y, 4, **arguments)


# With the rest ------------------------------------------------------------------------


def test_averages_of_weights_are_validated_on_each_set():
    model = compiled(optimizer=Optimizer("sgd", 0.5, ema_momentum=0.9))
    sets = {"in": (X, Y), "out": (X[:8], Y[:8])}
    history = model.fit(
        X, Y, 4, validation_data=sets, callbacks=SwapEMAWeights(), verbose=0
    )
    for name, data in sets.items():  # fit leaves the averages
        expected = model.evaluate(*data, verbose=0)["loss"]
        assert history.history[f"val_{name}_loss"] == pytest.approx(
            [expected], rel=1e-6
        )


@pytest.mark.parametrize("more", [{"validation_freq": 2}, {"validation_updates": 2}])
def test_sets_are_validated_when_one_set_would_be(more):
    sets = {"in": (X, Y), "out": (X[:8], Y[:8])}
    histories = []
    for data in (sets, sets["in"], sets["out"]):
        run = {"epochs": 4, "validation_data": data, "verbose": 0, **more}
        config = IPUConfig(device_iterations=2, seed=1)
        histories.append(compiled(config=config).fit(X, Y, 4, **run).history)
    named, of_in, of_out = histories
    assert named["val_in_loss"] == pytest.approx(of_in["val_loss"], rel=1e-6)
    assert named["val_out_loss"] == pytest.approx(of_out["val_loss"], rel=1e-6)
    assert named["loss"] == of_in["loss"]


def fitted():
    x, y, _ = runs.samples(32)
    model = runs.model_of()
    sets = {"in": (x, y), "out": TensorDataset(x[:10], y[:10])}
    history = model.fit(x, y, 16, epochs=2, validation_data=sets, verbose=0)
    return history.history, weights(model.module)


def test_processes_report_the_metrics_of_all_rows_of_each_set(pool):
    (history, _), (other, _) = pool.run(fitted)
    assert history == other
    assert {"val_in_loss", "val_out_loss"} <= set(history)
    alone, _ = fitted()
    assert history["val_out_loss"] == pytest.approx(alone["val_out_loss"], rel=1e-4)


MISTAKES = {  # what is validated on, and the words of the error
    "inputs": (lambda: (X[:, :2], Y), r"failed with inputs .*\(In `validation_data`"),
    "targets": (lambda: (X, X), r"^`validation_data` doesn't fit: The loss"),
    "numbers": (lambda: (X, Y / 2), r"^`validation_data` doesn't fit: .*y\.long"),
    "weights": (lambda: (X, Y, X), r"^`validation_data` doesn't fit: .*Sample weights"),
    "objects": (lambda: (X, Y.numpy().astype("O")), "^`y` of `validation_data` has"),
    "a set": (lambda: {"b": (X, X)}, r"^`validation_data\['b'\]` doesn't fit"),
    "a loader": (
        lambda: DataLoader(TensorDataset(X, X), 4),
        r"^`validation_data` does",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_validation_data_that_does_not_fit_is_named_before_training(name):
    make, words = MISTAKES[name]
    model = compiled()
    before = weights(model.module)
    with pytest.raises(DataError, match=words):
        model.fit(X, Y, batch_size=4, validation_data=make(), verbose=0)
    after = weights(model.module)
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.raises(DataError, match=r"^(?!.*validation_data)"):  # both are wrong
        model.fit(X, X, batch_size=4, validation_data=(X, X[:, :1]), verbose=0)


SPLIT = {
    "a class that isn't there": (
        "cross_entropy",
        9,
        r"out of bounds.*\(In row 20 of `validation_split`\.\)$",
    ),
    "a number that is no label": (
        "bce",
        255,
        "a target of `validation_split` is 255, in row 20",
    ),
}


@pytest.mark.parametrize("name", SPLIT)
def test_errors_of_a_split_have_its_name_and_rows_of_the_whole(name):
    loss, value, words = SPLIT[name]
    model, y = compiled(loss=loss), Y.clone()
    if loss == "bce":
        y = torch.nn.functional.one_hot(y, 4)
    y[20] = value
    with pytest.raises(DataError, match=words):
        model.fit(X, y, batch_size=4, validation_split=1 / 3, verbose=0)


def test_a_class_that_only_validation_data_has_is_said_to_be_there():
    with pytest.raises(DataError, match=r"bounds.*\(In row . of `validation_data`"):
        compiled().fit(X, Y, batch_size=4, validation_data=(X, Y + 9), verbose=0)


def test_validation_data_of_other_shapes_that_fits_is_taken():
    model = compiled(loss="mse", metrics=["mae"])
    targets = torch.rand(24, model.predict(X, verbose=0).shape[1])
    sets = {"double": (X, targets.double()), "weighed": (X, targets, torch.ones(24))}
    history = model.fit(X, targets, batch_size=4, validation_data=sets, verbose=0)
    double, weighed = (history.history[f"val_{s}_loss"] for s in sets)
    assert double == pytest.approx(weighed)
