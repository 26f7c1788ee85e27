# SPDX-License-Identifier: Apache-2.0
"""Every form of `configure_optimizers`, and schedulers as Lightning steps them."""

import pytest
import torch
from torch.optim import lr_scheduler

import ipufit
from ipufit.integrations.lightning import from_lightning
from tests.integrations.modules import Net, X, Y

CONFIG, UNKNOWN = ipufit.ConfigError, ipufit.UnknownNameError
UNSUPPORTED = ipufit.UnsupportedError


def model_with(configure):
    """A model whose optimizer and scheduler a function makes."""

    class Configured(Net):
        def configure_optimizers(self):
            return configure(torch.optim.SGD(self.parameters(), lr=1.0))

    return from_lightning(Configured())


def rate_of(model):
    return model.optimizer.param_groups[0]["lr"]


def trained_with(configure, epochs=4, **arguments):
    """Rates at the beginning of each epoch of four updates."""
    rates = []
    model = model_with(configure)
    hear = ipufit.LambdaCallback(on_epoch_begin=lambda *_: rates.append(rate_of(model)))
    model.fit(X, Y, 16, epochs, callbacks=hear, verbose=0, **arguments)
    return rates


def halved(optimizer):
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize(
    "configure",
    [
        lambda one: one,
        lambda one: [one],
        lambda one: ([one], []),
        lambda one: {"optimizer": one},
        lambda one: [{"optimizer": one}],
    ],
)
def test_one_optimizer_in_every_form(configure):
    assert rate_of(model_with(configure)) == 1.0


@pytest.mark.parametrize(
    "configure",
    [
        lambda one: ([one], [halved(one)]),
        lambda one: [[one], [{"scheduler": halved(one)}]],
        lambda one: {"optimizer": one, "lr_scheduler": halved(one)},
        lambda one: {
            "optimizer": one,
            "lr_scheduler": {"scheduler": halved(one), "name": "rate"},
        },
    ],
)
def test_a_scheduler_is_stepped_per_epoch_unless_it_says_otherwise(configure):
    assert trained_with(configure, 2) == [1.0, 0.5]


def halving(optimizer, **settings):
    return [optimizer], [{"scheduler": halved(optimizer), **settings}]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"interval": "epoch", "frequency": 2}, [1.0, 1.0, 0.5, 0.5]),
        ({"interval": "step"}, [0.5 ** (4 * epoch) for epoch in range(4)]),
        ({"interval": "step", "frequency": 4}, [1.0, 0.5, 0.25, 0.125]),
    ],
)
def test_schedulers_keep_their_interval_and_frequency(settings, expected):
    rates = trained_with(lambda optimizer: halving(optimizer, **settings))
    assert rates == pytest.approx(expected)


def plateau(optimizer, **settings):
    scheduler = lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=10.0
    )
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, **settings},
    }


@pytest.mark.parametrize("monitor", ["val/loss", "train_loss"])
def test_reduce_lr_on_plateau_is_stepped_by_its_figure(monitor):
    # No loss is ten times better than the best, so the rate falls in every epoch but
    # the first.
    rates = trained_with(
        lambda optimizer: plateau(optimizer, monitor=monitor), validation_data=(X, Y)
    )
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.25])


def test_reduce_lr_on_plateau_goes_on_after_an_interruption(tmp_path):
    def run(epochs, folder, **arguments):
        model = model_with(lambda optimizer: plateau(optimizer, monitor="val_loss"))
        saving = ipufit.ModelCheckpoint(str(tmp_path / folder / "{epoch}"))
        given = {"validation_data": (X, Y), "callbacks": saving, "verbose": 0}
        model.fit(X, Y, 16, epochs, **given, **arguments)
        return model

    whole, _ = run(4, "whole"), run(2, "first")
    rest = run(4, "rest", resume=tmp_path / "first" / "2")
    assert rate_of(rest) == rate_of(whole) < 0.5
    assert rest.history.history == whole.history.history


def test_a_figure_that_is_missing_is_named():
    with pytest.raises(ipufit.ConfigError, match=r"'val_f1'.*val_loss"):
        trained_with(
            lambda optimizer: plateau(optimizer, monitor="val_f1"),
            validation_data=(X, Y),
        )
    settings = {"monitor": "val_f1", "strict": False}
    rates = trained_with(lambda optimizer: plateau(optimizer, **settings), 2)
    assert set(rates) == {1.0}


@pytest.mark.parametrize(
    ("configure", "error", "says"),
    [
        (lambda one: [one, one], UNSUPPORTED, "2 optimizers.*parameter groups"),
        (lambda one: [{"optimizer": one}] * 2, UNSUPPORTED, "2 optimizers"),
        (lambda one: ([one], [halved(one)] * 2), UNSUPPORTED, "SequentialLR"),
        (lambda one: None, CONFIG, "no configure_optimizers that returns"),
        (lambda one: "adam", CONFIG, "Return an optimizer"),
        (lambda one: {"lr_scheduler": halved(one)}, CONFIG, "no 'optimizer'"),
        (lambda one: {"optimiser": one}, UNKNOWN, "Did you mean 'optimizer'"),
        (lambda one: ([one], [{"interval": "step"}]), CONFIG, "no 'scheduler'"),
        (lambda one: halving(one, interval="batch"), CONFIG, "'epoch', 'step'"),
        (lambda one: halving(one, frequency=0), CONFIG, "frequency=0"),
        (plateau, CONFIG, "'monitor': 'val_loss'"),
        (
            lambda one: plateau(one, monitor="loss", interval="step"),
            CONFIG,
            "'interval': 'epoch'",
        ),
    ],
)
def test_what_a_program_cant_do_is_refused(configure, error, says):
    with pytest.raises(error, match=says):
        model_with(configure)
