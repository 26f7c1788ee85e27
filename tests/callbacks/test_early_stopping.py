# SPDX-License-Identifier: Apache-2.0
"""`EarlyStopping`, driven by scripted figures; the series are Keras's answers."""

from __future__ import annotations

import pytest
import torch

from ipufit import IPUModel
from ipufit.callbacks import EarlyStopping
from ipufit.metrics import StreamedMetric
from tests.callbacks.driving import ScriptedModel, play
from tests.reference import AtEpochEnd

NAN = float("nan")


@pytest.mark.parametrize(
    ("series", "arguments", "epochs", "best_epoch"),
    [
        ([3, 2, 2, 1], {}, 3, 1),
        ([3, 4, 1], {}, 2, 0),
        ([3, 4, 1], {"patience": 1}, 2, 0),  # Keras too takes 0 for 1
        ([3, 4, 2, 3, 4, 5, 6], {"patience": 2}, 5, 2),
        ([3, 2.6, 2.2], {"min_delta": 0.5, "patience": 1}, 2, 0),
        ([3, 2, 2.5, 1.9], {"baseline": 1, "patience": 2}, 3, 1),
        ([5, 4, 3, 2], {"baseline": 1}, 4, 3),  # improving, never good enough
        ([1, 2, 3, 4, 5], {"start_from_epoch": 3}, 5, 3),
        ([1, 1, 1], {"patience": 3}, 3, 0),
        ([NAN, 3, 2, 4], {}, 4, 2),
        ([NAN, NAN, 1], {}, 2, 0),
        ([NAN, NAN, 1], {"patience": 3}, 3, 2),
    ],
)
def test_it_stops_when_the_figure_stops_improving(
    series, arguments, epochs, best_epoch
):
    stopping = EarlyStopping("q", mode="min", **arguments)
    played = play(stopping, series)
    assert len(played.epochs) == epochs
    assert stopping.best_epoch == best_epoch


def test_the_run_hears_why():
    played = play(EarlyStopping("q", mode="min", patience=2), [1, 2, 3])
    assert played.run.stop_reason == ("q hasn't improved for 2 epochs (EarlyStopping)")


@pytest.mark.parametrize("epochs", [4, 10])
def test_the_best_weights_come_back_whether_or_not_it_stopped(epochs, capsys):
    model = ScriptedModel()
    stopping = EarlyStopping(
        "q", mode="max", patience=3, restore_best_weights=True, verbose=1
    )
    played = play(stopping, [1, 3, 2, 2, 2, 2, 2, 2][:epochs], model=model)
    assert len(played.epochs) == min(epochs, 5)
    assert model.weights == [1]
    stopped = "Epoch 5: early stopping\n" if epochs > 4 else ""
    assert capsys.readouterr().out == (
        f"{stopped}Restoring model weights from the end of the best epoch: 2.\n"
    )


def test_it_is_silent_and_fetches_no_weights_unless_asked(capsys):
    class NoWeights(ScriptedModel):
        def get_weights(self):
            raise AssertionError("fetched")

    play(EarlyStopping("q", mode="min"), [1, 2], model=NoWeights())
    assert capsys.readouterr().out == ""


def test_a_figure_that_is_missing_warns_and_counts_nothing():
    stopping = EarlyStopping("q", mode="min", patience=1)
    with pytest.warns(UserWarning, match="Available metrics are: loss,mae$"):
        played = play(stopping, [1, {"loss": 1.0, "mae": 2.0}, 0.5])
    assert len(played.epochs) == 3
    assert stopping.wait == 0


def test_later_epochs_count_from_where_fit_began():
    assert len(play(EarlyStopping("q", mode="min"), [NAN, 1], begin=7).epochs) == 1
    assert len(play(EarlyStopping("q", mode="min"), [NAN, 1], begin=0).epochs) == 2


def test_a_fit_stops_and_ends_with_its_best_weights():
    model = IPUModel(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    seen = []

    def script(callback, logs):
        logs["q"] = [3.0, 1.0, 2.0, 2.0, 0.0][len(seen)]
        seen.append([weight.copy() for weight in callback.model.get_weights()])

    stopping = EarlyStopping("q", mode="min", patience=2, restore_best_weights=True)
    history = model.fit(
        x,
        y,
        batch_size=4,
        epochs=9,
        callbacks=[AtEpochEnd(script), stopping],
        verbose=0,
    )
    assert history.history["q"] == [3.0, 1.0, 2.0, 2.0]
    assert (seen[1][0] != seen[3][0]).any()
    for mine, best in zip(model.get_weights(), seen[1]):
        assert (mine == best).all()
    expected = torch.nn.functional.linear(
        x, *(torch.from_numpy(weight) for weight in seen[1])
    )
    torch.testing.assert_close(model.predict(x, verbose=0), expected)


class Largest(StreamedMetric):
    """The largest output."""

    direction = "max"

    def reset(self):
        self.value = float("-inf")

    def update(self, outputs, targets, weights=None):
        self.value = max(self.value, float(outputs.max()))

    def result(self):
        return self.value


@pytest.mark.parametrize("prefix", ["", "val_"])
def test_streamed_metrics_say_which_way_is_better(prefix):
    model = IPUModel(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse", metrics=[Largest("largest")])
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    stopping = EarlyStopping(f"{prefix}largest", patience=9)
    validation_data = (x, y) if prefix else None
    model.fit(
        x,
        y,
        batch_size=4,
        validation_data=validation_data,
        callbacks=stopping,
        verbose=0,
    )
    assert stopping.direction == "max"
