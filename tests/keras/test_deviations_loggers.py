# SPDX-License-Identifier: Apache-2.0
"""Where loggers and the averages of weights differ from Keras's; rows as the others."""

import sys

import keras
import numpy as np
import pytest
import torch

from ipufit import ConfigError, IpufitWarning, IPUModel, Optimizer
from ipufit.callbacks import CSVLogger, LambdaCallback, SwapEMAWeights, TensorBoard
from tests.callbacks.driving import play
from tests.callbacks.trackers import TensorBoardDouble
from tests.keras.scenarios import KerasScriptedModel, play_keras
from tests.keras.summary_double import Summary
from tests.keras.twins import compiled, data, networks

THEIRS = keras.callbacks


@pytest.fixture
def files(tmp_path):
    return tmp_path / "mine.csv", tmp_path / "theirs.csv"


def play_both(files, series, **arguments):
    play(CSVLogger(files[0], **arguments), series)
    theirs = THEIRS.CSVLogger(files[1], **arguments)
    play_keras(theirs, series, model=KerasScriptedModel())


def lines(files):
    return [file.read_text().splitlines() for file in files]


# CSVLogger --------------------------------------------------------------------------


def test_appended_rows_follow_the_header_that_is_there(files):
    play_both(files, [{"loss": 1.0, "val_loss": 2.0}])
    with pytest.warns(IpufitWarning, match="leaves out accuracy"):
        play_both(files, [{"accuracy": 0.5, "loss": 3.0}], append=True)
    mine, theirs = lines(files)
    assert mine == ["epoch,loss,val_loss", "0,1.0,2.0", "0,3.0,NA"]
    assert theirs == ["epoch,loss,val_loss", "0,1.0,2.0", "0,0.5,3.0,NA,NA"]


def test_figures_without_a_column_are_said(files):
    series = [{"loss": 1.0}, {"loss": 2.0, "late": 3.0}]
    with pytest.warns(IpufitWarning, match="leaves out late") as caught:
        play_both(files, series)
    assert sum(issubclass(one.category, IpufitWarning) for one in caught) == 1
    mine, theirs = lines(files)
    assert mine == theirs == ["epoch,loss,val_loss", "0,1.0,NA", "1,2.0,NA"]


def test_an_old_log_is_kept_until_the_first_row(files):
    for file in files:
        file.write_text("precious\n")
    play_both(files, [])
    assert lines(files) == [["precious"], []]


def test_nothing_is_appended_to_what_is_no_log(files):
    for file in files:
        file.write_text("a,b\n")
    theirs = THEIRS.CSVLogger(files[1], append=True)
    play_keras(theirs, [{"loss": 1.0}], model=KerasScriptedModel())
    assert lines(files)[1] == ["a,b", "0,1.0,NA"]
    with pytest.raises(ConfigError, match="doesn't begin with the header"):
        play(CSVLogger(files[0], append=True), [{"loss": 1.0}])


# LambdaCallback ---------------------------------------------------------------------


def test_a_hook_that_is_none_is_refused():
    THEIRS.LambdaCallback(on_epoch_ends=print)
    with pytest.raises(ConfigError, match="no hook on_epoch_ends"):
        LambdaCallback(on_epoch_ends=print)


# TensorBoard ------------------------------------------------------------------------


def test_epochs_are_written_whatever_the_frequency(monkeypatch):
    double, summary = TensorBoardDouble(), Summary()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", double)
    model, ipu = compiled(networks())
    theirs = THEIRS.TensorBoard("logs", update_freq=3, write_graph=False)
    theirs._summary_module = summary
    mine = TensorBoard("logs", update_freq=3)
    x, y = data(8)
    for fitted, callback in ((model, theirs), (ipu, mine)):
        fitted.fit(x, y, batch_size=4, epochs=3, callbacks=[callback], verbose=0)
    losses = [(tag, step) for _, tag, _, step in double.scalars if tag == "epoch_loss"]
    assert losses == [("epoch_loss", 0), ("epoch_loss", 1), ("epoch_loss", 2)]
    # After 2, 4 and 6 batches: Keras writes at multiples of 3.
    assert [key for key in summary.written if key[1] == "epoch_loss"] == [
        ("train", "epoch_loss", 2)
    ]


def test_tensorboard_takes_figures_and_histograms_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", TensorBoardDouble())
    assert TensorBoard("logs", histogram_freq=2).histogram_freq == 2
    for argument in ("write_graph", "write_images", "profile_batch"):
        THEIRS.TensorBoard("logs", **{argument: 0})
        with pytest.raises(TypeError, match=argument):
            TensorBoard("logs", **{argument: 0})


# SwapEMAWeights ---------------------------------------------------------------------


def with_averages(momentum=0.8):
    model, module = networks()
    model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=momentum), "mse")
    ipu = IPUModel(module)
    ipu.compile(Optimizer("sgd", 0.1, ema_momentum=momentum), "mse")
    return model, ipu


def is_same(some, others):
    return all(np.array_equal(one, other) for one, other in zip(some, others))


def test_the_weights_are_back_after_predict():
    x, y = data(16)
    outcomes = []
    for fitted, swap in zip(
        with_averages(), (THEIRS.SwapEMAWeights(), SwapEMAWeights())
    ):
        fitted.fit(x, y, batch_size=4, verbose=0)
        fitted.set_weights([weight + 1 for weight in fitted.get_weights()])
        before = [weight.copy() for weight in fitted.get_weights()]
        fitted.predict(x, callbacks=[swap], verbose=0)
        outcomes.append(is_same(before, fitted.get_weights()))
    theirs, mine = outcomes
    assert not theirs
    assert mine


def test_the_weights_are_back_after_an_error():
    x, y = data(16)
    outcomes = []
    kinds = (
        (THEIRS.SwapEMAWeights, THEIRS.LambdaCallback),
        (SwapEMAWeights, LambdaCallback),
    )
    for fitted, (swap, function) in zip(with_averages(), kinds):
        fitted.fit(x, y, batch_size=4, verbose=0)
        fitted.set_weights([weight + 1 for weight in fitted.get_weights()])
        before = [weight.copy() for weight in fitted.get_weights()]
        failing = function(on_test_end=lambda logs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fitted.evaluate(x, y, callbacks=[failing, swap()], verbose=0)
        outcomes.append(is_same(before, fitted.get_weights()))
    assert outcomes == [False, True]


def test_averages_that_are_missing_are_found_when_fit_begins():
    x, y = data(8)
    model, ipu = compiled(networks())
    common = {"batch_size": 4, "verbose": 0}
    model.fit(x, y, callbacks=[THEIRS.SwapEMAWeights()], **common)  # nobody looked
    with pytest.raises(ValueError, match="use_ema"):
        model.evaluate(x, y, callbacks=[THEIRS.SwapEMAWeights()], verbose=0)
    with pytest.raises(ConfigError, match="no running average"):
        ipu.fit(x, y, callbacks=[SwapEMAWeights()], **common)


def test_statistics_of_batch_norm_are_averaged():
    x, y = data(16)
    common = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    theirs, mine = [], []
    for momentum in (None, 0.5):
        model = keras.Sequential(
            [
                keras.Input((x.shape[1],)),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        average = {} if momentum is None else {"ema_momentum": momentum}
        use = {**average, "use_ema": momentum is not None}
        model.compile(keras.optimizers.SGD(0.1, **use), "mse")
        model.fit(x, y, **common)
        theirs.append(keras.ops.convert_to_numpy(model.layers[0].moving_mean))
        module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        ipu = IPUModel(module)
        ipu.compile(Optimizer("sgd", 0.1, **average), "mse")
        ipu.fit(x, y, **common)
        mine.append(module[0].running_mean.numpy().copy())
    assert np.array_equal(*theirs)
    assert not np.allclose(*mine)


def test_before_the_first_update_the_average_is_the_weights():
    x, y = data(8)
    model, ipu = with_averages()
    model.optimizer.build(model.trainable_variables)
    model.evaluate(x, y, verbose=0)
    plain = ipu.evaluate(x, y, verbose=0)["loss"]
    mine = ipu.evaluate(x, y, callbacks=[SwapEMAWeights()], verbose=0)["loss"]
    theirs = model.evaluate(x, y, callbacks=[THEIRS.SwapEMAWeights()], verbose=0)
    assert mine == plain
    assert theirs == pytest.approx(float((y**2).mean()))  # its averages are zeros
