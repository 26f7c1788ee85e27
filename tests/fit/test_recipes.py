# SPDX-License-Identifier: Apache-2.0
"""Recipes of training that are an argument: groups, schedules, validations, scaling."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ipufit import (
    Callback,
    ConfigError,
    DataError,
    IPUConfig,
    IPUModel,
    LambdaCallback,
    LossScaleRamp,
    Optimizer,
    PerEpoch,
    Schedule,
    SwapEMAWeights,
)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def data(rows=32):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 4, generator=generator)
    return x, (x.sum(1) > 0).long()


def model_of(optimizer="sgd", config=None, **settings):
    model = IPUModel(network(), config or IPUConfig(seed=7))
    if callable(optimizer):
        optimizer = optimizer(model.module)
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"], **settings)
    return model


# Parameter groups ---------------------------------------------------------------------


def test_fit_says_once_how_many_parameters_each_group_has(capsys):
    model = model_of(Optimizer("adamw", weight_decay=0.1, no_decay="bias_and_norm"))
    model.fit(*data(), batch_size=8, verbose=2)
    expected = (
        "Optimizer groups: weight_decay 0.1: 2 parameters (36 values); "
        "weight_decay 0: 4 parameters (20 values)\n"
    )
    shown = capsys.readouterr().out
    assert shown.startswith(expected)
    model.fit(*data(), batch_size=8, verbose=2)
    assert "groups" not in capsys.readouterr().out


# Schedules ----------------------------------------------------------------------------


def values_of(model, name, epochs=3, rows=32, **fitted):
    """The value of the first parameter group at each call."""
    seen = []

    def look(batch, logs):
        seen.append(model.optimizer.param_groups[0][name])

    callbacks = [LambdaCallback(on_train_batch_end=look)]
    arguments = {"batch_size": 8, "verbose": 0, "callbacks": callbacks, **fitted}
    model.fit(*data(rows), epochs=epochs, **arguments)
    return seen


def test_lengths_in_epochs_are_those_in_updates():
    in_epochs = Schedule(
        "step", warmup_epochs=0.5, boundary_epochs=(1, 2.25), gamma=0.5
    )
    in_updates = Schedule("step", warmup_updates=2, boundaries=(4, 9), gamma=0.5)
    found, expected = (
        values_of(model_of("sgd", lr_schedule=one), "lr")
        for one in (in_epochs, in_updates)
    )
    assert found == expected
    assert found[:5] == [0.0, 0.005, 0.01, 0.01, 0.005]


def test_epochs_of_all_fits_stay_epochs_with_another_batch_size():
    model = model_of("sgd", lr_schedule=Schedule("linear", total_epochs=4))
    first = values_of(model, "lr", epochs=2)  # 4 updates each
    then = values_of(model, "lr", epochs=2, batch_size=16)  # 2 updates each
    torch.testing.assert_close(first, [0.01 * (1 - k / 16) for k in range(8)])
    torch.testing.assert_close(then, [0.01 * (1 - k / 8) for k in range(4, 8)])


def test_a_scheduler_of_torch_may_be_stepped_per_epoch():
    schedule = PerEpoch(lambda sgd: lr_scheduler.MultiStepLR(sgd, [1, 2], gamma=0.5))
    found = values_of(model_of("sgd", lr_schedule=schedule), "lr")
    assert found == [0.01] * 4 + [0.005] * 4 + [0.0025] * 4


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("constant", warmup_epochs=1),
        PerEpoch(lambda sgd: lr_scheduler.StepLR(sgd, 1)),
    ],
)
def test_loops_of_batches_have_no_epochs(schedule):
    model = model_of("sgd", lr_schedule=schedule)
    with pytest.raises(ConfigError, match="epoch"):
        model.train_on_batch(*data(8))


def test_epochs_of_a_stream_need_their_number_of_updates():
    model = model_of("sgd", lr_schedule=Schedule("constant", warmup_epochs=1))
    x, y = data()
    stream = list(zip(x.split(8), y.split(8)))
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        model.fit(iter(stream), batch_size=8, verbose=0)
    model.fit(iter(stream), batch_size=8, steps_per_epoch=2, verbose=0)
    assert model.optimizer.learning_rate == 0.005


def test_one_cycle_of_epochs_ends_after_as_many():
    schedule = PerEpoch(lambda sgd: lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=2))
    model = model_of(Optimizer("sgd", momentum=0.5), lr_schedule=schedule)
    with pytest.raises(ConfigError, match="after 2 epochs, of which 0 are made, and 3"):
        model.fit(*data(), batch_size=8, epochs=3, verbose=0)


def test_other_values_follow_schedules_and_numbers_are_torchs():
    """The weight decay grows from 0.1 to 0.3, as in training by self-distillation."""
    optimizer = Optimizer("adamw", 0.05, weight_decay=0.1)
    schedule = Schedule("linear", final=3.0)
    spared = Optimizer("adamw", 0.05, weight_decay=0.1, no_decay="bias")
    other = model_of(spared, schedules={"weight_decay": schedule})
    other.fit(*data(), batch_size=8, verbose=0)
    assert [g["weight_decay"] > 0 for g in other.optimizer.param_groups] == [
        True,
        False,
    ]
    model = model_of(optimizer, schedules={"weight_decay": schedule, "beta1": "linear"})
    model.fit(*data(), batch_size=8, epochs=2, shuffle=False, verbose=0)

    twin = network()
    adamw = torch.optim.AdamW(twin.parameters(), 0.05, weight_decay=0.1)
    x, y = data()
    updates = [*zip(x.split(8), y.split(8))] * 2
    for number, (inputs, targets) in enumerate(updates):
        group = adamw.param_groups[0]
        group["weight_decay"] = 0.1 * (1 + 2 * number / 8)
        group["betas"] = (0.9 * (1 - number / 8), 0.999)
        adamw.zero_grad()
        nn.functional.cross_entropy(twin(inputs), targets).backward()
        adamw.step()
    mine = dict(model.module.named_parameters())
    for name, theirs in twin.named_parameters():
        if name != "0.bias":  # its gradients are rounding errors, before a batch norm
            torch.testing.assert_close(mine[name], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "schedules", "message"),
    [
        ("adamw", "cosine", "must be a dict"),
        ("adamw", {"lr": "cosine"}, r"compile\(lr_schedule"),
        ("adamw", {"loss_scaling": "cosine"}, "LossScaleRamp"),
        ("adamw", {"weight_decay": 0.5}, "has 0.5 for 'weight_decay'"),
        ("adamw", {"weight_decai": "cosine"}, "did you mean 'weight_decay'"),
        ("sgd", {"momentum": "cosine"}, "is 0 in every parameter group"),
        ("sgd", {"beta1": "cosine"}, "'beta1'"),
    ],
)
def test_unusable_schedules_are_refused(optimizer, schedules, message):
    with pytest.raises(ValueError, match=f"(?i){message}"):
        model_of(optimizer, schedules=schedules)
    with pytest.raises(ConfigError, match=r"final=1\.5"):
        model_of("sgd", lr_schedule=Schedule("linear", final=1.5))
    with pytest.raises(ConfigError, match=r"boundary_epochs=\(30, 60\)"):
        model_of("sgd", lr_schedule=PerEpoch("cosine"))


# Validations within epochs ------------------------------------------------------------


class Heard(Callback):
    """The calls of an epoch and its validations, in order, with what these found."""

    def __init__(self):
        self.events = []
        self.figures = []

    def on_train_batch_end(self, batch, logs):
        self.events.append(batch)

    def on_test_begin(self, logs):
        self.events.append("test")

    def on_test_end(self, logs):
        self.figures.append(logs["loss"])

    def on_epoch_end(self, epoch, logs):
        self.events.append("end")
        self.figures.append(logs.get("val_loss"))


def validated_fit(model, *callbacks, **fitted):
    arguments = {"batch_size": 8, "verbose": 0, "validation_data": data(12), **fitted}
    return model.fit(*data(), callbacks=[*callbacks], **arguments)


@pytest.mark.parametrize(
    ("updates", "freq", "expected"),
    [
        (None, 1, [0, 1, 2, 3, "test", "end"]),
        (3, 1, [0, 1, 2, "test", 3, "test", "end"]),
        (3, 2, [0, 1, 2, "test", 3, "end"]),
        (2, 1, [0, 1, "test", 2, 3, "test", "end"]),
        (1, 2, [0, "test", 1, "test", 2, "test", 3, "test", "end"]),
        (9, 2, [0, 1, 2, 3, "end"]),
    ],
)
def test_validations_come_between_calls_and_not_twice(updates, freq, expected):
    heard = Heard()
    validated_fit(model_of(), heard, validation_updates=updates, validation_freq=freq)
    assert heard.events == expected
    # The epoch's row has the figures of its last validation.
    tests = heard.figures[:-1]
    assert heard.figures[-1] == (tests[-1] if tests else None)
    assert len(set(tests)) == len(tests)  # each of other weights


@pytest.mark.parametrize("kinds", [[], [SwapEMAWeights]])
def test_validations_within_epochs_do_not_change_the_training(kinds):
    plain, often = (model_of(Optimizer("sgd", ema_momentum=0.9)) for _ in "12")
    plain.fit(*data(), batch_size=8, epochs=2, verbose=0)
    history = validated_fit(
        often, *(kind() for kind in kinds), epochs=2, validation_updates=1
    )
    assert len(history.history["val_loss"]) == 2
    assert history.history["val_loss"][0] != history.history["val_loss"][1]
    for mine, theirs in zip(plain.module.parameters(), often.module.parameters()):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("config", "fitted", "error", "message"),
    [
        ({}, {"validation_updates": 0}, ConfigError, "validation_updates"),
        ({}, {"validation_updates": 1.5}, ConfigError, "validation_updates"),
        (
            {"device_iterations": 2},
            {"validation_updates": 3},
            ConfigError,
            "a multiple of the 2 updates",
        ),
        (
            {},
            {"validation_updates": 2, "validation_data": None},
            ConfigError,
            "nothing to validate on",
        ),
        (
            {},
            {"validation_updates": 2, "validation_data": iter([data(8)])},
            DataError,
            "gone through once",
        ),
    ],
)
def test_unusable_validations_within_epochs_are_refused(config, fitted, error, message):
    with pytest.raises(error, match=message):
        validated_fit(model_of(config=IPUConfig(seed=7, **config)), **fitted)


# Loss scaling -------------------------------------------------------------------------


HALF = {"precision": "float16", "seed": 7}


def fitted_scaling(optimizer, **config):
    model = model_of(optimizer, IPUConfig(**{**HALF, **config}))
    model.fit(*data(), batch_size=8, verbose=2)
    return model.optimizer.loss_scaling


@pytest.mark.parametrize(
    ("optimizer", "config"),
    [
        ("sgd", {}),
        (Optimizer("adamw"), {"precision": "16.32"}),
        (Optimizer("lamb"), {}),
    ],
)
def test_float16_has_a_loss_scaling_and_says_so(optimizer, config, capsys):
    assert fitted_scaling(optimizer, **config) == 128.0
    expected = (
        "Loss scaling: 128, for float16; Optimizer(..., loss_scaling=1.0) turns it off"
    )
    assert capsys.readouterr().out.count(expected) == 1


@pytest.mark.parametrize(
    ("optimizer", "config", "scaling"),
    [
        ("sgd", {"precision": "32.32"}, 1.0),
        (lambda module: torch.optim.SGD(module.parameters(), lr=0.1), {}, 1.0),
        (Optimizer("sgd", loss_scaling=4.0), {}, 4.0),
        (Optimizer("sgd", loss_scaling=LossScaleRamp(2, 2, 9, 8)), {}, 2.0),
        (Optimizer("sgd", loss_scaling="auto"), {}, 1.0),
    ],
)
def test_what_was_chosen_stays(optimizer, config, scaling, capsys):
    assert fitted_scaling(optimizer, **config) == scaling
    assert "Loss scaling" not in capsys.readouterr().out


def test_the_reported_loss_is_not_scaled_and_small_gradients_are_kept():
    """Gradients of 2e-8 are lost in float16 unless the loss is scaled."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return (x * self.weight).sum(1, keepdim=True) * 1e-5

    x, y = torch.full((8, 4), 1e-3), torch.ones(8, 1)
    losses, moved = [], []
    for scaling in (1.0, None):
        model = IPUModel(Small(), IPUConfig(**HALF))
        spec = Optimizer("sgd", 1e6, loss_scaling=scaling)
        model.compile(spec, "mse")
        history = model.fit(x, y, batch_size=8, verbose=0)
        losses.append(history.history["loss"][0])
        moved.append(model.module.weight.detach().float())
    assert losses == [1.0, 1.0]
    expected = torch.full((4,), 0.02)
    # Scaled, a gradient is 43 of the smallest steps, and may be rounded down to 42.
    torch.testing.assert_close(moved[1], expected, rtol=0.025, atol=0)
    assert (moved[0] - expected).abs().max() > 0.01


@pytest.mark.parametrize("given", [None, 3.0])
def test_the_velocity_scaling_follows_a_ramp_unless_it_was_given(given):
    """In float16 it is scaled like the loss."""
    ramp = LossScaleRamp(4, factor=2, every_updates=2, maximum=64)
    settings = {} if given is None else {"velocity_scaling": given}
    spec = Optimizer(
        "sgd", momentum=0.9, use_combined_accum=True, loss_scaling=ramp, **settings
    )
    found = values_of(model_of(spec), "velocity_scaling", epochs=1)
    assert found == ([4.0, 4.0, 8.0, 8.0] if given is None else [3.0] * 4)
    spec = Optimizer("sgd", momentum=0.9, use_combined_accum=True, **settings)
    half = model_of(spec, IPUConfig(**HALF))
    assert half.optimizer.param_groups[0]["velocity_scaling"] == (given or 128.0)


def test_a_ramp_may_count_epochs():
    def scalings(**every):
        ramp = LossScaleRamp(4, factor=2, maximum=32, **every)
        model, seen = model_of(Optimizer("adam", loss_scaling=ramp)), []
        look = LambdaCallback(
            on_train_batch_end=lambda *_: seen.append(model.optimizer.loss_scaling)
        )
        model.fit(*data(), batch_size=8, epochs=2, verbose=0, callbacks=look)
        return seen

    assert scalings(every_epochs=0.75) == scalings(every_updates=3)
    assert scalings(every_epochs=1) == [4.0] * 4 + [8.0] * 4
    for wrong in ({}, {"every_epochs": 0}, {"every_epochs": 1, "every_updates": 3}):
        with pytest.raises(ConfigError, match="every_"):
            scalings(**wrong)


# Several processes --------------------------------------------------------------------


def fit_of_a_process():
    spec = Optimizer("sgd", 0.2, momentum=0.9, weight_decay=0.1)
    schedules = {"weight_decay": Schedule("linear", final=2.0)}
    model = IPUModel(nn.Linear(4, 2), IPUConfig(seed=7))
    with torch.no_grad():
        model.module.weight.fill_(0.1)
        model.module.bias.zero_()
    rates = Schedule("step", boundary_epochs=(1,), gamma=0.5)
    model.compile(spec, "cross_entropy", lr_schedule=rates, schedules=schedules)
    heard = Heard()
    fitted = {"epochs": 2, "validation_updates": 1, "shuffle": False}
    history = validated_fit(model, heard, **fitted)
    return history.history, heard.events, model.optimizer.param_groups[0]["lr"]


def test_processes_share_schedules_and_validations(pool):
    (history, events, rate), *others = pool.run(fit_of_a_process)
    assert others == [(history, events, rate)]
    alone, own_events, own_rate = fit_of_a_process()
    assert (events, rate) == (own_events, own_rate)
    assert rate == 0.1
    for name, values in alone.items():
        torch.testing.assert_close(history[name], values, rtol=1e-4, atol=1e-5)
