# SPDX-License-Identifier: Apache-2.0
"""Where runs differ from Keras's; each is a row of the page."""

import copy
import re
import warnings

import keras
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ipufit import Callback, ConfigError, IPUModel, poptorch
from ipufit.errors import DataError, DroppedRowsWarning
from tests.keras.twins import (
    NUM_FEATURES,
    IpufitRecorder,
    KerasRecorder,
    compiled,
    copy_weights,
    data,
    networks,
    two_heads,
    without_times,
)
from tests.reference import Recorded

# Runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", ["on_epoch_end", "on_train_batch_end"])
def test_ctrl_c_ends_the_run_in_order(stop_at):
    pair = compiled(networks())
    ended = []
    for fitted, base in zip(pair, (keras.callbacks.Callback, Callback)):

        def interrupt(self, index, logs=None):
            if self.epoch == 2:
                raise KeyboardInterrupt

        hooks = {
            "on_epoch_begin": lambda self, epoch, logs=None: setattr(
                self, "epoch", epoch
            ),
            "on_train_end": lambda self, logs=None, fitted=fitted: ended.append(fitted),
            stop_at: interrupt,
        }
        x, y = data(8)
        with pytest.raises(KeyboardInterrupt):
            fitted.fit(
                x,
                y,
                batch_size=4,
                epochs=5,
                callbacks=[type("Interrupting", (base,), hooks)()],
                verbose=0,
            )
    ipu = pair[1]
    assert ended == [ipu]
    assert ipu.history.epoch == [0, 1]


def test_evaluate_gives_a_dict_unless_told_otherwise():
    model, ipu = compiled(networks(), metrics=["mse", "mae"])
    x, y = data(8)
    theirs = model.evaluate(x, y, verbose=0)
    assert isinstance(theirs, list)
    assert list(ipu.evaluate(x, y, verbose=0)) == ["loss", "mae", "mse"]
    mine = ipu.evaluate(x, y, verbose=0, return_dict=False)
    assert mine == pytest.approx(theirs)


def test_an_index_of_keras_s_list_says_which_names_there_are():
    _, ipu = compiled(networks(), metrics=["mse"])
    x, y = data(8)
    for run in (ipu.evaluate, ipu.train_on_batch, ipu.test_on_batch):
        results = run(x, y)
        words = r"no 1: .* results\['loss'\] and results\['mse'\]\. .*return_dict=False"
        with pytest.raises(KeyError, match=words):
            results[1]
        with pytest.raises(KeyError, match=r"^'mae'$"):
            results["mae"]
        assert copy.deepcopy(results) == dict(results)
        assert results.get(1) is None


def test_predict_gives_tensors():
    model, ipu = compiled(networks())
    x, _ = data(8)
    assert isinstance(model.predict(x, verbose=0), np.ndarray)
    assert isinstance(ipu.predict(x, verbose=0), torch.Tensor)


def test_samples_that_fill_no_call_are_left_out_and_said():
    model, ipu = compiled(networks())
    x, y = data(10)
    theirs, mine = KerasRecorder(), IpufitRecorder()
    model.fit(x, y, batch_size=4, callbacks=[theirs], verbose=0)
    with pytest.warns(DroppedRowsWarning, match="leaves out 2 of 10"):
        history = ipu.fit(x, y, batch_size=4, callbacks=[mine], verbose=0)
    assert history.dropped_samples == 2
    assert count(theirs, "on_train_batch_end") == 3
    assert count(mine, "on_train_batch_end") == 2


def count(recorder, name):
    return sum(event[0] == name for event in recorder.events)


def test_a_loader_s_first_batch_is_drawn_once():
    asked = []
    for fitted in compiled(networks()):
        dataset = Recorded(*map(torch.from_numpy, data(8)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Keras: shuffle is ignored
            fitted.fit(DataLoader(dataset, batch_size=4), verbose=0)
        asked.append(dataset.asked)
    assert asked == [[*range(4), *range(8)], [*range(8)]]


def test_a_loader_keeps_its_order_without_a_warning():
    model, ipu = compiled(networks())
    loader = DataLoader(Recorded(*map(torch.from_numpy, data(8))), batch_size=4)
    with pytest.warns(UserWarning, match="shuffle"):
        model.fit(loader, shuffle=True, verbose=0)
    ipu.fit(loader, shuffle=True, verbose=0)


def test_a_call_of_several_updates_ends_with_its_last():
    model, _ = networks()
    model.compile("sgd", "mse", steps_per_execution=2)
    with pytest.raises(ValueError, match="steps_per_execution"):
        model.fit(*data(24), batch_size=4, verbose=0)
    _, module = networks()
    ipu = IPUModel(module)
    ipu.compile("sgd", "mse", steps_per_execution=2)
    recorder = IpufitRecorder()
    ipu.fit(*data(24), batch_size=4, callbacks=[recorder], verbose=0)
    calls = [event[:2] for event in recorder.events if "batch" in event[0]]
    assert calls == [
        (f"on_train_batch_{when}", index)
        for first in (0, 2, 4)
        for when, index in (("begin", first), ("end", first + 1))
    ]


def test_classes_are_weighted_with_loaders_too():
    x, _ = data(8)
    y = np.arange(8) % 2
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    model, ipu = compiled(networks(num_outputs=2))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    weights = {0: 1.0, 1: 3.0}
    loader = DataLoader(dataset, batch_size=4)
    with pytest.raises(ValueError, match="class_weight"):
        model.fit(loader, class_weight=weights, verbose=0)
    common = {"batch_size": 4, "class_weight": weights, "shuffle": False, "verbose": 0}
    expected = model.fit(x, y, **common)
    ipu.compile(torch.optim.SGD(ipu.module.parameters(), lr=0.1), "cross_entropy")
    history = ipu.fit(loader, class_weight=weights, verbose=0)
    assert history.history["loss"] == pytest.approx(expected.history["loss"])


def batches(count):
    x, y = data(4 * count)
    return ((x[4 * n : 4 * n + 4], y[4 * n : 4 * n + 4]) for n in range(count))


def test_a_spent_generator_ends_the_training():
    epochs = []
    for fitted in compiled(networks()):
        with pytest.warns(UserWarning, match="ran out"):
            history = fitted.fit(
                batches(3), epochs=4, steps_per_epoch=2, shuffle=False, verbose=0
            )
        epochs.append(history.epoch)
    assert epochs == [[0, 1, 2, 3], [0, 1]]


def test_a_generator_for_several_epochs_is_refused():
    model, ipu = compiled(networks())
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(batches(3), epochs=2, shuffle=False, verbose=0)
    with pytest.raises(DataError, match="gone through once"):
        ipu.fit(batches(3), epochs=2, verbose=0)


@pytest.mark.parametrize("argument", ["run_eagerly", "jit_compile", "auto_scale_loss"])
def test_what_only_keras_s_backends_have_is_no_argument(argument):
    model, module = networks()
    model.compile("sgd", "mse", **{argument: False})
    with pytest.raises(TypeError, match=argument):
        IPUModel(module).compile("sgd", "mse", **{argument: False})


def test_a_model_that_is_set_untrainable_is_refused():
    model, module = networks()
    model.trainable = False
    assert model.trainable_weights == []
    fitted = IPUModel(module)
    with pytest.raises(AttributeError, match=r"model\.module\.requires_grad_\(False\)"):
        fitted.trainable = False


def test_evaluations_are_without_label_smoothing():
    logits, y = torch.tensor([[0.5], [-2.0]]), torch.tensor([[1.0], [0.0]])
    smooth = keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1)
    plain = keras.losses.BinaryCrossentropy(from_logits=True)
    model = keras.Sequential([keras.layers.Identity()])
    model.compile("sgd", smooth)
    expected = pytest.approx(float(smooth(y, logits)), rel=1e-5)
    assert model.evaluate(logits, y, verbose=0) == expected
    ipu = IPUModel(torch.nn.Identity())
    ipu.compile("sgd", "binary_crossentropy", label_smoothing=0.1)
    value = ipu.evaluate(logits, y, verbose=0)["loss"]
    assert value == pytest.approx(float(plain(y, logits)), rel=1e-5)
    line = torch.nn.Linear(1, 1)  # and trains with it, as Keras does
    torch.nn.init.ones_(line.weight)
    torch.nn.init.zeros_(line.bias)
    ipu = IPUModel(line)
    ipu.compile("sgd", "binary_crossentropy", label_smoothing=0.1)
    history = ipu.fit(logits, y, batch_size=2, verbose=0).history
    assert history["loss"] == [expected]


# Several outputs ---------------------------------------------------------------------


class Halves(torch.nn.Module):
    """A list of two outputs, which have no names."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(NUM_FEATURES, 1)
        self.second = torch.nn.Linear(NUM_FEATURES, 1)

    def forward(self, x):
        return [self.first(x), self.second(x)]


class KerasHalves(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(1)
        self.second = keras.layers.Dense(1)

    def call(self, x):
        return [self.first(x), self.second(x)]


def test_outputs_without_names_are_numbered():
    x, y = data(8)
    targets = [y, -y]
    model, module = KerasHalves(), Halves()
    model(x)  # builds it
    copy_weights(module, model)
    model.compile("sgd", "mse", metrics=[["mae"], ["mae"]])
    ipu = IPUModel(module)
    ipu.compile("sgd", "mse", metrics=[["mae"], ["mae"]])
    theirs = model.evaluate(x, targets, verbose=0, return_dict=True)
    mine = ipu.evaluate(x, targets, verbose=0)
    assert list(theirs) == ["loss", "mae", "mae_1", "mse_loss"]  # of the second output
    assert list(mine) == [
        "loss",
        "output_1_loss",
        "output_1_mae",
        "output_2_loss",
        "output_2_mae",
    ]
    assert mine["loss"] == pytest.approx(theirs["loss"])
    assert mine["output_2_loss"] == pytest.approx(theirs["mse_loss"])
    assert mine["output_1_mae"] == pytest.approx(theirs["mae"])
    assert mine["output_2_mae"] == pytest.approx(theirs["mae_1"])


def two_targets(rows=8):
    x, left = data(rows)
    return x, {"left": left, "right": data(rows, num_targets=2, seed=1)[1]}


def test_one_loss_may_have_a_weight_for_each_output():
    model, module = two_heads()
    x, targets = two_targets()
    weights = {"left": 1.0, "right": 3.0}
    model.compile("sgd", "mse", loss_weights=weights)
    with pytest.raises(ValueError, match="loss_weights"):
        model.evaluate(x, targets, verbose=0)
    model.compile("sgd", {"left": "mse", "right": "mse"}, loss_weights=weights)
    ipu = IPUModel(module)
    ipu.compile("sgd", "mse", loss_weights=weights)
    expected = model.evaluate(x, targets, verbose=0, return_dict=True)
    assert ipu.evaluate(x, targets, verbose=0) == pytest.approx(expected)


def test_weights_by_position_need_losses_by_position():
    model, module = two_heads()
    arguments = {"loss": {"left": "mse", "right": "mae"}, "loss_weights": [1.0, 2.0]}
    model.compile("sgd", **arguments)
    model.evaluate(*two_targets(), verbose=0)
    with pytest.raises(ConfigError, match="loss_weights"):
        IPUModel(module).compile("sgd", **arguments)


class Reversed(torch.nn.Module):
    """Named outputs that aren't in the order of the alphabet."""

    def __init__(self):
        super().__init__()
        self.right = torch.nn.Linear(NUM_FEATURES, 1)
        self.left = torch.nn.Linear(NUM_FEATURES, 2)

    def forward(self, x):
        return {"right": self.right(x), "left": self.left(x)}


def test_lists_follow_the_order_of_the_outputs():
    inputs = keras.Input((NUM_FEATURES,))
    outputs = {
        "right": keras.layers.Dense(1)(inputs),
        "left": keras.layers.Dense(2)(inputs),
    }
    model, ipu = keras.Model(inputs, outputs), IPUModel(Reversed())
    x, left = data(8, num_targets=2)
    metrics = []
    for fitted in (model, ipu):
        fitted.compile("sgd", ["mse", "mse"], metrics=[["mse"], ["mae"]])
        targets = {"right": left[:, :1], "left": left}
        figures = fitted.evaluate(x, targets, verbose=0, return_dict=True)
        metrics.append([name for name in figures if "loss" not in name])
    assert metrics == [["left_mse", "right_mae"], ["left_mae", "right_mse"]]


def test_evaluate_lists_metrics_as_they_were_given():
    pair = compiled(
        two_heads(),
        loss={"left": "mse", "right": "mae"},
        metrics={"right": ["mse", "mae"], "left": ["mse", "mae"]},
    )
    x, targets = two_targets()
    orders = []
    for fitted in pair:
        values = fitted.evaluate(x, targets, verbose=0, return_dict=False)
        figures = fitted.evaluate(x, targets, verbose=0, return_dict=True)
        left_mae, left_mse = figures["left_mae"], figures["left_mse"]
        after_losses = values[3:]
        orders.append(closest(after_losses, left_mae) < closest(after_losses, left_mse))
    assert orders == [True, False]


def closest(values, value):
    return int(np.abs(np.array(values) - value).argmin())


# What is printed ---------------------------------------------------------------------


def negative_mean(outputs, targets):
    return -abs(outputs - targets).mean(-1)


def last_figures(capsys, metric):
    """What both print of a metric."""
    printed = []
    for fitted in compiled(networks(), metrics=[metric]):
        fitted.evaluate(*data(8), batch_size=8, verbose=2)
        printed.append(capsys.readouterr().out.splitlines()[-1].split()[-1])
    return printed


def test_negative_figures_have_four_decimals(capsys):
    theirs, mine = last_figures(capsys, negative_mean)
    assert theirs.endswith("e-01")
    assert float(mine) == pytest.approx(float(theirs), abs=1e-4)
    assert "e" not in mine


def tiny(outputs, targets):
    return 0 * negative_mean(outputs, targets) + 2**-15


def vast(outputs, targets):
    return 0 * negative_mean(outputs, targets) + 12345.25


def test_small_and_large_figures_have_six_digits(capsys):
    assert last_figures(capsys, tiny) == ["3.0518e-05", "3.05176e-05"]
    assert last_figures(capsys, vast) == ["12345.2500", "12345.2"]


def test_an_epoch_cut_short_shows_the_steps_it_made(capsys):
    pair = compiled(networks())
    printed = []
    for fitted, base in zip(pair, (keras.callbacks.Callback, Callback)):

        def stop(self, batch, logs=None):
            self.model.stop_training = True

        callback = type("Stopping", (base,), {"on_train_batch_end": stop})()
        x, y = data(20)
        fitted.fit(x, y, batch_size=4, callbacks=[callback], verbose=2)
        printed += without_times(capsys.readouterr().out)
    assert [line.split(" ")[0] for line in printed] == ["5/5", "1/5"]


def test_without_a_terminal_bars_leave_only_their_lines(capsys):
    shown = []
    for fitted in compiled(networks()):
        fitted.evaluate(*data(8), batch_size=8, verbose="auto")
        shown.append(capsys.readouterr().out)
    assert "\x1b[" in shown[0]
    assert re.match(r"Evaluated [\d.]+m?s  loss \d", shown[1])
    assert "\x1b[" not in shown[1]


def test_a_prediction_of_less_than_a_second_leaves_no_line(capsys, monkeypatch):
    x, _ = data(8)
    shown = []
    for fitted in compiled(networks()):
        fitted.predict(x, batch_size=8, verbose=1)
        shown.append(capsys.readouterr().out)
        monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    assert "1/1" in shown[0]
    assert shown[1] == ""


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_compilations_of_a_second_are_said(capsys, monkeypatch, seconds):
    compile_, now = poptorch.PoplarExecutor.compile, [0.0]

    def slowly(*args):
        now[0] += seconds
        return compile_(*args)

    monkeypatch.setattr(poptorch.PoplarExecutor, "compile", slowly)
    pair = compiled(networks())
    pair[0].evaluate(*data(8), batch_size=8, verbose=2)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    pair[1].evaluate(*data(8), batch_size=8, verbose=2)
    assert capsys.readouterr().out.count("Compiled in 1.0 s") == seconds
