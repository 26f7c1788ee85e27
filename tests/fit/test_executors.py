# SPDX-License-Identifier: Apache-2.0
"""Two programs, one module: weights, devices, and what is left behind."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch

from ipufit import Callback, IPUConfig, IPUModel, poptorch
from tests import reference
from tests.reference import AtEpochEnd

IPUS = "IPUFIT_EMULATOR_IPUS"


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.01)


def make_model(module=None, config=None, optimizer=adam):
    module = reference.network() if module is None else module
    model = IPUModel(module, config or IPUConfig(replicas=2))
    model.compile(
        optimizer(module) if callable(optimizer) else optimizer,
        "cross_entropy",
        metrics=["accuracy"],
    )
    return model


def train_twin(twin, optimizer, epochs, x, y, batch_size=32):
    for _ in range(epochs):
        trained = reference.train(twin, optimizer, x, y, batch_size)
    return trained.figures()


def fit(model, x, y, epochs=1, **settings):
    settings = {"batch_size": 32, "shuffle": False, "verbose": 0, **settings}
    return model.fit(x, y, epochs=epochs, **settings)


X, Y = reference.samples(64)
adam(reference.network())  # torch's first optimizer keeps its caller's frame alive


@pytest.fixture
def scarce(monkeypatch):
    """Have so many IPUs, and no more."""

    def set_ipus(count):
        gc.collect()  # what other tests left
        monkeypatch.setenv(IPUS, str(count))

    return set_ipus


# Scarce IPUs ----------------------------------------------------------------------


@pytest.mark.parametrize("ipus", [2, 3])
def test_training_and_validation_take_turns_if_ipus_are_scarce(scarce, ipus):
    expected = fit(make_model(), X, Y, 3, validation_data=(X[:40], Y[:40])).history
    scarce(ipus)  # a program needs 2
    model = make_model()
    assert fit(model, X, Y, 3, validation_data=(X[:40], Y[:40])).history == expected
    assert model.evaluate(X[:40], Y[:40], batch_size=32, verbose=0) == {
        "accuracy": expected["val_accuracy"][-1],
        "loss": expected["val_loss"][-1],
    }
    assert len(set(expected["loss"])) == 3


def test_programs_take_turns_from_the_start_if_poptorch_waits(scarce, monkeypatch):
    expected = fit(make_model(), X, Y, 2, validation_data=(X, Y)).history
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    attached = []

    class Watch(reference.Recorder):
        def on_test_begin(self, logs):
            programs = self.model._executors
            attached.append(
                (
                    programs._trainer.executor.isAttachedToDevice(),
                    programs._inferences[-1].executor.isAttachedToDevice(),
                )
            )

    for is_scarce in (False, True):
        if is_scarce:
            scarce(2)
        history = fit(make_model(), X, Y, 2, validation_data=(X, Y), callbacks=Watch())
        assert history.history == expected
    assert attached == [(False, True)] * 4


def test_too_few_ipus_for_one_program_are_poptorchs_error(scarce):
    scarce(1)
    model = make_model()
    before = reference.weights(model.module)
    with pytest.raises(poptorch.Error, match="acquire"):
        fit(model, X, Y)
    assert_untouched(model.module, before)
    scarce(2)
    assert len(fit(model, X, Y).history["loss"]) == 1


def test_models_that_are_gone_hold_no_ipus(monkeypatch):
    """PopTorch's executors refer to themselves, so they wait for the collector.

    The emulator's pod collects when it is short; PopTorch's front end doesn't.
    """
    is_emulated = poptorch.__name__ == "ipufit.emulator"
    monkeypatch.setenv(IPUS, "4")
    gc.disable()
    try:
        for _ in range(6 if is_emulated else 70):
            model = reference.compiled()
            fit(model, X, Y)
    finally:
        gc.enable()


def test_detach_gives_all_ipus_back_and_the_next_run_takes_them_again(scarce):
    scarce(2)
    first, second = make_model(), make_model()
    expected = fit(make_model(), X, Y, 2).history["loss"]
    losses = fit(first, X, Y).history["loss"]
    with pytest.raises(poptorch.Error, match="acquire"):
        fit(second, X, Y)
    first.detach()
    fit(second, X, Y)
    second.detach()
    losses += fit(first, X, Y).history["loss"]
    assert losses == pytest.approx(expected, rel=1e-6)  # Adam's state was kept


# The user's module ----------------------------------------------------------------


def assert_untouched(module, before):
    after = reference.weights(module)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def hooks_of(module):
    return [
        hooks
        for child in module.modules()
        for hooks in (child._forward_hooks, child._forward_pre_hooks)
        if hooks
    ]


@pytest.mark.parametrize("is_training", [True, False])
def test_modes_flags_and_hooks_are_left_as_they_were(is_training):
    module = reference.network().train(is_training)
    module[1].train(not is_training)
    before = [child.training for child in module.modules()]
    names = list(module.state_dict())
    model = make_model(
        module, IPUConfig(pipeline=("0", "2"), gradient_accumulation=4, replicas=2)
    )
    fit(model, X, Y, validation_data=(X, Y))
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert [child.training for child in module.modules()] == before
    assert hooks_of(module) == []
    assert list(module.state_dict()) == names


def test_weights_trained_in_a_fit_are_in_the_module_after_it_and_during_callbacks():
    seen = []
    model = make_model()
    look = AtEpochEnd(
        lambda callback, _: seen.append(reference.weights(callback.model.module))
    )
    fit(model, X, Y, 2, callbacks=look)
    twin, optimizer = reference.network(), None
    optimizer = adam(twin)
    for at_end in seen:
        train_twin(twin, optimizer, 1, X, Y)
        for name, value in reference.weights(twin).items():
            torch.testing.assert_close(at_end[name], value, rtol=1e-5, atol=1e-6)
    assert len(seen) == 2
    reference.assert_same_weights(model.module, twin)


# Interrupted and repaired ---------------------------------------------------------


def test_an_interrupt_leaves_the_weights_that_were_trained_and_frees_the_ipus(scarce):
    def interrupt(*_):
        raise KeyboardInterrupt

    model = make_model()
    with pytest.raises(KeyboardInterrupt):
        fit(model, X, Y, 5, callbacks=[AtEpochEnd(interrupt, epoch=1)])
    twin = reference.network()
    train_twin(twin, adam(twin), 2, X, Y)
    reference.assert_same_weights(model.module, twin)
    scarce(2)
    other = make_model()
    fit(other, X, Y)
    other.detach()
    assert len(fit(model, X, Y).history["loss"]) == 1


class WeightedLoss(torch.nn.Module):
    """A loss with a buffer of its own, which the program takes with it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, outputs, targets):
        each = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        return each * self.weight[targets]


# One run after another ------------------------------------------------------------


def test_the_optimizers_state_survives_a_new_compilation():
    """Another batch size needs another program; Adam goes on where it was."""
    model, twin = make_model(), reference.network()
    optimizer = adam(twin)
    for batch_size in (32, 16, 32):
        fit(model, X, Y, batch_size=batch_size)
        train_twin(twin, optimizer, 1, X, Y, batch_size)
    reference.assert_same_weights(model.module, twin)


class BeforeEachCall(Callback):
    """Does something with the model's optimizer before each call."""

    def __init__(self, action):
        super().__init__()
        self.action = action

    def on_train_batch_begin(self, batch, logs):
        self.action(self.model.optimizer)


def test_the_optimizer_is_sent_only_when_it_changed(monkeypatch):
    sent = []
    original = poptorch.PoplarExecutor.setOptimizer

    def spy(self, optimizer):
        sent.append(optimizer.param_groups[0]["lr"])
        original(self, optimizer)

    monkeypatch.setattr(poptorch.PoplarExecutor, "setOptimizer", spy)
    x, y = reference.samples(128)
    model = make_model(config=IPUConfig(device_iterations=1), optimizer="sgd")
    fit(model, x, y, epochs=2)
    fit(model, x, y)
    assert sent == []
    rates = iter([0.01, 0.02, 0.02, 0.03])

    def change(optimizer):
        optimizer.param_groups[0]["lr"] = next(rates)

    fit(model, x, y, callbacks=[BeforeEachCall(change)])
    assert sent == [0.02, 0.03]


def test_compiling_anew_takes_the_new_optimizer_loss_and_metrics():
    x, y = reference.samples(64)
    onehot = torch.nn.functional.one_hot(y, 4).float()
    model, twin = make_model(), reference.network()
    fit(model, x, y)
    train_twin(twin, adam(twin), 1, x, y)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    model.compile(optimizer, "mse", metrics=["mae"])
    history = fit(model, x, onehot).history
    assert sorted(history) == ["loss", "mae"]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for rows in torch.arange(64).split(32):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(twin(x[rows]), onehot[rows]).backward()
        optimizer.step()
    reference.assert_same_weights(model.module, twin)


def test_a_loss_with_weights_of_its_own_is_forgotten_when_another_is_compiled():
    model = make_model()
    model.compile("sgd", WeightedLoss())
    fit(model, X, Y)
    twin = copy.deepcopy(model.module)
    model.compile("sgd", "cross_entropy")
    losses = fit(model, X, Y).history["loss"]
    figures = train_twin(twin, torch.optim.SGD(twin.parameters(), lr=0.01), 1, X, Y)
    assert losses == [pytest.approx(figures["loss"], rel=1e-5)]
    reference.assert_same_weights(model.module, twin)


@pytest.mark.parametrize("ipus", [None, 2])
def test_a_callback_may_evaluate_and_predict_in_mid_fit(scarce, ipus):
    if ipus is not None:
        scarce(ipus)
    expected = fit(make_model(), X, Y, 2, validation_data=(X, Y)).history
    seen = []

    class Nosy(reference.Recorder):
        def on_train_batch_end(self, batch, logs):
            figures = self.model.evaluate(X[:9], Y[:9], batch_size=4, verbose=0)
            seen.append(figures["loss"])
            self.model.predict(X[:3], verbose=0)

    model = make_model()
    history = fit(model, X, Y, 2, validation_data=(X, Y), callbacks=Nosy()).history
    assert set(history) == set(expected)
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-6)
    assert len(set(seen)) == 4


# The optimiser's state in other programs ----------------------------------------------


OPTIMIZERS = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), 0.05),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), 0.05, 0.9),
    "rmsprop": lambda module: torch.optim.RMSprop(module.parameters(), 0.05),
    "groups": lambda module: torch.optim.AdamW(
        [
            {"params": module[0].parameters(), "lr": 0.02, "weight_decay": 0.3},
            {"params": module[2].parameters(), "lr": 0.05},
        ],
        lr=0.01,
    ),
}


def freeze(layer, is_frozen):
    for parameter in layer.parameters():
        parameter.requires_grad_(not is_frozen)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_layer_that_was_frozen_is_trained_as_in_torch(optimizer, caplog):
    """Its state begins with zeros, and that of the others goes on."""
    torch.manual_seed(0)
    module = reference.network()
    twin = copy.deepcopy(module)
    model = IPUModel(module, IPUConfig(micro_batch_size=4))
    model.compile(OPTIMIZERS[optimizer](module), "cross_entropy")
    plain = OPTIMIZERS[optimizer](twin)
    with caplog.at_level(logging.WARNING):
        for is_frozen in (True, False):
            freeze(module[0], is_frozen)
            freeze(twin[0], is_frozen)
            model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            for _ in range(2):
                reference.train(twin, plain, X, Y, 8)
            reference.assert_same_weights(module, twin, rtol=1e-4, atol=1e-5)
    assert [record.getMessage() for record in caplog.records] == []
    model.detach()


def test_freezing_and_unfreezing_says_nothing(caplog):
    module = reference.network()
    model = IPUModel(module)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # the second time with programs that are kept
            model.compile("lamb", "cross_entropy")
            for frozen in ((0,), (), (2,)):
                for index in (0, 2):
                    freeze(module[index], index in frozen)
                model.fit(X, Y, batch_size=8, verbose=0)
    assert [record.getMessage() for record in caplog.records] == []
    model.detach()
