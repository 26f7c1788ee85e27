# SPDX-License-Identifier: Apache-2.0
"""Where our callbacks differ from Keras's; each is a row of the page."""

import io
import warnings
from contextlib import redirect_stdout

import keras
import numpy as np
import pytest
import torch

from ipufit import Callback, ConfigError, IPUModel, load_checkpoint
from ipufit.callbacks import (
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
)
from tests.callbacks.driving import ScriptedModel, play
from tests.keras.scenarios import KerasScriptedModel, play_keras
from tests.keras.twins import assert_same_weights, compiled, data, networks

pytestmark = pytest.mark.usefixtures("in_tmp_path")

NAN = float("nan")
THEIRS = keras.callbacks


def play_theirs(callback, series, **arguments):
    model = KerasScriptedModel()
    figures = [one if isinstance(one, dict) else {"q": one} for one in series]
    return play_keras(callback, figures, model=model, **arguments), model


def keras_checkpoint(path="x.weights.h5", **arguments):
    return THEIRS.ModelCheckpoint(path, "q", save_weights_only=True, **arguments)


def test_a_first_nan_does_not_stop_early():
    series = [NAN, 3.0, 2.0, 1.0]
    arguments = {"monitor": "q", "mode": "min", "patience": 2}
    theirs, _ = play_theirs(THEIRS.EarlyStopping(**arguments), series)
    assert theirs.epochs == [0, 1, 2]
    assert play(EarlyStopping(**arguments), series).epochs == [0, 1, 2, 3]


def test_a_first_nan_does_not_reduce_the_rate():
    series = [NAN, 3.0, 2.0, 1.0]
    arguments = {"monitor": "q", "mode": "min", "patience": 2, "factor": 0.5}
    theirs, _ = play_theirs(THEIRS.ReduceLROnPlateau(**arguments), series)
    assert theirs.rates == [1.0, 1.0, 0.5, 0.5]
    assert play(ReduceLROnPlateau(**arguments), series).rates == [1.0] * 4


def test_a_first_nan_is_not_saved_as_the_best():
    series = [NAN, 3.0, 4.0]
    _, theirs = play_theirs(keras_checkpoint(mode="min", save_best_only=True), series)
    assert len(theirs.saved) == 1
    assert theirs.weights == [2]
    model = ScriptedModel()
    mine = ModelCheckpoint("{epoch}.safetensors", "q", mode="min", save_best_only=True)
    play(mine, series, model=model)
    assert model.saved == ["2.safetensors"]


def test_auto_knows_the_figures_of_several_outputs():
    series = [{"val_left_mae": 2.0}, {"val_left_mae": 1.0}]
    with pytest.raises(ValueError, match="automatically determine"):
        play_theirs(THEIRS.EarlyStopping("val_left_mae"), series)
    mine = EarlyStopping("val_left_mae")
    assert play(mine, series, directions={"left_mae": "min"}).epochs == [0, 1]


def test_a_missing_figure_of_unknown_direction_warns():
    series = [{"loss": 1.0}]
    with pytest.raises(ValueError, match="automatically determine"):
        play_theirs(THEIRS.EarlyStopping("val_q"), series)
    with pytest.warns(UserWarning, match="val_q"):
        play(EarlyStopping("val_q"), series)
    with pytest.raises(ConfigError, match=r"val_q.*mode='min'"):
        play(EarlyStopping("val_q"), [{"loss": 1.0, "val_q": 1.0}])


def test_a_direction_is_not_needed_to_save_every_epoch():
    with pytest.raises(ValueError, match="automatically determine"):
        play_theirs(keras_checkpoint(), [1.0])
    model = ScriptedModel()
    play(ModelCheckpoint("x.safetensors", "q"), [1.0], model=model)
    assert model.saved == ["x.safetensors"]


def test_the_best_can_be_saved_by_updates():
    arguments = {"mode": "min", "save_best_only": True, "save_freq": 1}
    with pytest.raises(TypeError, match="NoneType"):
        play_theirs(keras_checkpoint(**arguments), [3.0], batches=2)
    model = ScriptedModel()
    mine = ModelCheckpoint("{epoch}-{batch}.safetensors", "q", **arguments)
    play(mine, [3.0, 2.0], model=model, batches=2)
    assert model.saved == ["1-1.safetensors", "2-1.safetensors"]


def test_checkpoints_are_directories_or_safetensors():
    theirs = THEIRS.ModelCheckpoint("x.keras", "q", mode="min")
    play_theirs(theirs, [1.0])
    with pytest.raises(ConfigError, match="safetensors"):
        ModelCheckpoint("x.keras")
    with pytest.raises(ValueError, match="keras"):
        THEIRS.ModelCheckpoint("x")
    play(ModelCheckpoint("x"), [1.0])
    assert load_checkpoint("x").state == {"epoch": 0}


def test_the_suffix_says_whether_weights_are_saved():
    assert not THEIRS.ModelCheckpoint("x.keras").save_weights_only
    assert ModelCheckpoint("x.safetensors").save_weights_only
    assert not ModelCheckpoint("x").save_weights_only
    for path, given in (("x.safetensors", False), ("x", True)):
        with pytest.raises(ConfigError, match="save_weights_only"):
            ModelCheckpoint(path, save_weights_only=given)


def test_an_unknown_field_of_a_path_is_a_config_error():
    with pytest.raises(KeyError, match="Failed to format this callback filepath"):
        play_theirs(keras_checkpoint("{v}.weights.h5", mode="min"), [1.0])
    mine = ModelCheckpoint("{v}.safetensors", "q", mode="min")
    with pytest.raises(ConfigError, match="Failed to format this callback filepath"):
        play(mine, [1.0])


@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize(
    "callback",
    [
        lambda monitor: EarlyStopping(monitor, mode="max"),
        lambda monitor: ReduceLROnPlateau(monitor, mode="max"),
        lambda monitor: ModelCheckpoint("best", monitor, 0, True, mode="max"),
        lambda monitor: ModelCheckpoint(f"{{epoch}}-{{{monitor}:.2f}}"),
    ],
)
def test_a_metric_that_a_run_lacks_is_refused_when_it_begins(callback, validates):
    x, y = torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)
    model = IPUModel(torch.nn.Linear(2, 3))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])

    def fit(monitor, *others, before=()):
        callbacks = [*before, callback(monitor), *others]
        data = {"validation_data": (x, y)} if validates else {}
        return model.fit(x, y, 4, callbacks=callbacks, verbose=0, **data)

    class Begun(Callback):
        def on_train_batch_begin(self, batch, logs):
            raise AssertionError("it trains")

    class Adds(Callback):
        def on_epoch_end(self, epoch, logs):
            logs["val_acc"] = 1.0

    with pytest.raises(ConfigError, match=r"val_acc.*accuracy, (epoch, )?loss") as one:
        fit("val_acc", Begun())
    assert ("val_accuracy" in str(one.value)) is validates
    assert fit("val_accuracy" if validates else "accuracy").epoch == [0]
    assert fit("val_acc", before=[Adds()]).epoch == [0]


def test_saving_every_zero_updates_is_refused():
    _, theirs = play_theirs(keras_checkpoint(mode="min", save_freq=0), [1.0], batches=2)
    assert len(theirs.saved) == 2
    with pytest.raises(ConfigError, match="save_freq"):
        ModelCheckpoint("x.safetensors", save_freq=0)


def test_a_type_error_of_a_schedule_is_not_hidden():
    def schedule(epoch, lr=1.0):
        if lr != 1.0:
            raise TypeError("a mistake of the schedule's own")
        return 0.5

    theirs, _ = play_theirs(THEIRS.LearningRateScheduler(schedule), [1.0, 1.0])
    assert theirs.rates == [0.5, 0.5]
    with pytest.raises(TypeError, match="a mistake of the schedule's own"):
        play(LearningRateScheduler(schedule), [1.0, 1.0])


def test_what_is_no_schedule_is_refused_at_once():
    THEIRS.LearningRateScheduler(lambda: 0.5)
    THEIRS.LearningRateScheduler(0.5)
    for schedule in (lambda: 0.5, 0.5):
        with pytest.raises(ConfigError, match="schedule"):
            LearningRateScheduler(schedule)


def test_rates_keep_their_digits():
    said = []
    for player, scheduler in (
        (play_theirs, THEIRS.ReduceLROnPlateau),
        (play, ReduceLROnPlateau),
    ):
        reducing = scheduler("q", patience=0, mode="min", verbose=1, min_delta=0)
        with redirect_stdout(io.StringIO()) as out:
            player(reducing, [1.0, 1.0, 1.0])
        said.append(out.getvalue().split()[-1])
    assert said == ["0.010000000149011612.", "0.010000000000000002."]


def test_momentum_is_torch_s_when_the_rate_changes():
    rates = [0.1, 0.01]
    x, y = data(8)
    model, ipu = compiled(networks(), "momentum")
    common = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    for fitted, kind in (
        (model, THEIRS.LearningRateScheduler),
        (ipu, LearningRateScheduler),
    ):
        fitted.fit(x, y, callbacks=[kind(lambda epoch: rates[epoch])], **common)
    with pytest.raises(AssertionError):
        assert_same_weights(ipu.module, model)
    model, ipu = compiled(networks(), "momentum")
    for fitted, kind in (
        (model, THEIRS.LearningRateScheduler),
        (ipu, LearningRateScheduler),
    ):
        fitted.fit(x, y, callbacks=[kind(lambda epoch: 0.1)], **common)
    assert_same_weights(ipu.module, model)


def test_a_schedule_and_a_callback_are_refused_before_the_first_epoch():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model, _ = compiled(networks())
    model.compile(keras.optimizers.SGD(decay), "mse")
    x, y = data(8)
    theirs = THEIRS.LearningRateScheduler(lambda epoch: 0.1)
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        model.fit(x, y, callbacks=[theirs], verbose=0)
    scheduled = ScriptedModel(has_lr_schedule=True)
    mine = LearningRateScheduler(lambda epoch: 0.1)
    with pytest.raises(ConfigError, match="schedule that compile"):
        play(mine, [1.0], model=scheduled)


def test_misspelt_arguments_are_refused():
    THEIRS.ReduceLROnPlateau(epsilon=1e-4)
    with pytest.raises(TypeError, match="epsilon"):
        ReduceLROnPlateau(epsilon=1e-4)


# What stays as it is in Keras, on purpose --------------------------------------------


def test_patience_0_and_1_stop_at_the_same_epoch():
    for series in ([3.0, 4.0, 5.0], [3.0, 2.0, 2.0, 1.0]):
        epochs = set()
        for patience in (0, 1):
            arguments = {"monitor": "q", "mode": "min", "patience": patience}
            theirs, _ = play_theirs(THEIRS.EarlyStopping(**arguments), series)
            mine = play(EarlyStopping(**arguments), series)
            epochs |= {len(theirs.epochs), len(mine.epochs)}
        assert len(epochs) == 1


def test_comparisons_are_made_in_float32():
    for series in ([1.0, 1.0 - 1e-9], [0.8, 0.7]):
        arguments = {"monitor": "q", "mode": "min", "min_delta": 0.1}
        if series[0] == 1.0:
            arguments["min_delta"] = 0
        theirs = THEIRS.EarlyStopping(**arguments)
        mine = EarlyStopping(**arguments)
        play_theirs(theirs, series)
        play(mine, series)
        assert mine.best == theirs.best == series[0]
        assert np.float64(series[1]) + arguments["min_delta"] < series[0]


def test_an_unknown_mode_is_auto_with_a_warning():
    said = []
    for kind in (THEIRS.EarlyStopping, EarlyStopping):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert kind("loss", mode="less").mode == "auto"
        said += [str(warning.message) for warning in caught]
    assert said[0] == said[1]
