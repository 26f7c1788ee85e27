# SPDX-License-Identifier: Apache-2.0
"""Runs in the hooks of other runs: each has its own program, metrics and schedule."""

from __future__ import annotations

import copy
import signal
from signal import SIGTERM

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from ipufit import (
    BackupAndRestore,
    Callback,
    ConfigError,
    IPUConfig,
    IPUModel,
    LambdaCallback,
    Optimizer,
    Schedule,
)
from tests import reference
from tests.strategies import examples

X, Y = reference.samples(24)
X2, Y2 = reference.samples(8, seed=1)
VALIDATED = {"validation_data": (X2, Y2)}
SIZES = (2, 3, 4, 6, 12)
HOOKS = (
    *("on_train_begin", "on_epoch_begin", "on_train_batch_begin"),
    *("on_train_batch_end", "on_epoch_end", "on_test_begin", "on_test_batch_begin"),
    *("on_test_batch_end", "on_test_end", "on_train_end"),
)


class Twin:
    """Plain torch that does what the model does."""

    def __init__(self, module):
        self.module = copy.deepcopy(module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.1, 0.9)

    def update(self, x, y):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.module(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def loss(self, x, y):
        with torch.no_grad():
            return cross_entropy(self.module(x), y).item()

    def fit(self, size, hook=lambda name: None):
        """An epoch over X, with a validation on X2 in batches of 4."""
        hook("on_train_begin")
        hook("on_epoch_begin")
        losses, tested = [], []
        for rows in torch.arange(24).split(size):
            hook("on_train_batch_begin")
            losses.append(self.update(X[rows], Y[rows]))
            hook("on_train_batch_end")
        hook("on_test_begin")
        for rows in torch.arange(8).split(4):
            hook("on_test_batch_begin")
            tested.append(self.loss(X2[rows], Y2[rows]))
            hook("on_test_batch_end")
        hook("on_test_end")
        hook("on_epoch_end")
        hook("on_train_end")
        return sum(losses) / len(losses), sum(tested) / len(tested)


class Nested(Callback):
    """Runs the model once in each of some hooks, and notes what it reports."""

    def __init__(self, actions, act):
        self.actions, self.act, self.results = list(actions), act, []


def _hook(name):
    def hook(self, *_):
        for at, action in self.actions:
            if at == name:
                self.results.append(self.act(self, *action))

    return hook


for _name in HOOKS:
    setattr(Nested, _name, _hook(_name))


def act_on(model, shared):
    """Return a function that runs the model, or another one that shares its weights."""

    def act(callback, kind, size):
        x, y = X[:size], Y[:size]
        if kind == "train_on_batch":
            return model.train_on_batch(x, y)["loss"]
        if kind == "test_on_batch":
            return model.test_on_batch(x, y)["loss"]
        if kind == "evaluate":
            return model.evaluate(X, Y, batch_size=size, verbose=0)["loss"]
        if kind == "predict":
            return model.predict(x, verbose=0).sum().item()
        if kind == "stream":
            parts = model.predict(X, batch_size=size, stream=True, verbose=0)
            first = next(parts).sum().item()
            model.train_on_batch(x, y)
            return first + sum(part.sum().item() for part in parts)
        if kind == "build":
            model.build(x, y, batch_size=size, verbose=0)
            return 0.0
        if kind == "set_weights":
            model.set_weights([weight * 0.9 for weight in model.get_weights()])
            return 0.0
        if kind == "shared":
            return shared.evaluate(X, Y, batch_size=size, verbose=0)["loss"]
        settings = {"shuffle": False, "verbose": 0, "validation_batch_size": 4}
        history = model.fit(
            X, Y, batch_size=size, validation_data=(X2, Y2), **settings
        ).history
        return history["loss"][0] + history["val_loss"][0]

    return act


def act_on_twin(twin, kind, size):
    x, y = X[:size], Y[:size]
    if kind == "train_on_batch":
        return twin.update(x, y)
    if kind in ("evaluate", "shared"):
        return twin.loss(X, Y)
    if kind == "test_on_batch":
        return twin.loss(x, y)
    if kind == "predict":
        with torch.no_grad():
            return twin.module(x).sum().item()
    if kind == "stream":
        total = 0.0
        for number, rows in enumerate(torch.arange(24).split(size)):
            with torch.no_grad():
                total += twin.module(X[rows]).sum().item()
            if not number:
                twin.update(x, y)
        return total
    if kind == "build":
        return 0.0
    if kind == "set_weights":
        with torch.no_grad():
            for weight in twin.module.parameters():
                weight.mul_(0.9)
        return 0.0
    return sum(twin.fit(size))


KINDS = (
    *("train_on_batch", "test_on_batch", "evaluate", "predict", "stream", "fit"),
    *("build", "set_weights", "shared"),
)
ACTIONS = st.tuples(
    st.sampled_from(HOOKS), st.tuples(st.sampled_from(KINDS), st.sampled_from(SIZES))
)


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(ACTIONS, min_size=1, max_size=4), st.sampled_from(SIZES), st.booleans())
def test_runs_in_hooks_of_others_are_those_of_a_plain_loop(actions, size, is_scarce):
    with pytest.MonkeyPatch.context() as patch:
        if is_scarce:
            patch.setenv("IPUFIT_EMULATOR_IPUS", "1")
        module = reference.network()
        config = IPUConfig(device_iterations=1, inference_iterations=1)
        model, twin = IPUModel(module, config), Twin(module)
        model.compile(Optimizer("sgd", 0.1, momentum=0.9), "cross_entropy")
        shared = model if is_scarce else copy.copy(model)
        callback = Nested(actions, act_on(model, shared))
        history = model.fit(
            *(X, Y, size),
            validation_data=(X2, Y2),
            validation_batch_size=4,
            shuffle=False,
            callbacks=callback,
            verbose=0,
        ).history
        expected = []

        def hook(name):
            for at, action in actions:
                if at == name:
                    expected.append(act_on_twin(twin, *action))

        losses = twin.fit(size, hook)
    found = history["loss"][0], history["val_loss"][0]
    assert found == pytest.approx(losses, rel=1e-4, abs=1e-5)
    assert callback.results == pytest.approx(expected, rel=1e-3, abs=1e-4)
    reference.assert_same_weights(module, twin.module, rtol=1e-4, atol=1e-5)
    model.detach()
    shared.detach()


def fitted(model, size=6, **settings):
    return model.fit(X, Y, size, shuffle=False, verbose=0, **settings)


NESTED = {
    "train_on_batch": lambda model: model.train_on_batch(X[:8], Y[:8]),
    "fit": lambda model: fitted(model, 8, epochs=2),
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_schedule_counts_the_updates_of_its_own_fit(nested, name):
    rates = []
    for act in (lambda model: None, NESTED[nested]):
        model = reference.compiled(
            optimizer=Optimizer("sgd", 0.1),
            lr_schedule=Schedule(name, warmup_updates=2),
        )
        seen = []

        def note(batch, logs, model=model, act=act, seen=seen):
            seen.append(model.optimizer.learning_rate)
            act(model)

        fitted(model, epochs=2, callbacks=LambdaCallback(on_train_batch_end=note))
        rates.append(seen)
        assert model.num_updates >= len(seen) == 8
    assert rates[0] == pytest.approx(rates[1])


def test_programs_that_other_runs_displace_are_built_again():
    model, module = reference.compiled(), reference.network()
    twin = torch.optim.SGD(module.parameters(), lr=0.01)
    sizes = range(1, 8)

    def act(epoch, logs):
        for size in sizes:
            model.train_on_batch(X[:size], Y[:size])
            model.test_on_batch(X[:size], Y[:size])

    callbacks = LambdaCallback(on_epoch_end=act)
    fitted(model, epochs=2, validation_data=(X2, Y2), callbacks=callbacks)
    for _ in range(2):
        reference.train(module, twin, X, Y, 6)
        for size in sizes:
            reference.train(module, twin, X[:size], Y[:size], size)
    reference.assert_same_weights(model.module, module)


def test_a_checkpoint_may_be_loaded_in_a_hook(tmp_path):
    model = reference.compiled(optimizer="adam")
    fitted(model)
    model.save(tmp_path / "run")
    again = LambdaCallback(on_epoch_end=lambda *_: model.load(tmp_path / "run"))
    losses = fitted(model, epochs=3, callbacks=again).history["loss"]
    assert losses[1] == losses[2]


@pytest.mark.parametrize("way", ["load", "load_weights", "set_weights"])
def test_weights_that_a_hook_of_predict_sets_count_in_the_next_call(tmp_path, way):
    module = torch.nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(5.0)
    model = IPUModel(module, IPUConfig(micro_batch_size=4, inference_iterations=1))
    model.compile("sgd", "mse")
    model.save(tmp_path / "run")
    model.save_weights(tmp_path / "weights.safetensors")
    argument = {
        "load": tmp_path / "run",
        "load_weights": tmp_path / "weights.safetensors",
        "set_weights": model.get_weights(),
    }[way]
    module.weight.data.fill_(1.0)

    def change(batch, logs):
        if batch == 1:
            getattr(model, way)(argument)

    hook = LambdaCallback(on_predict_batch_end=change)
    outputs = model.predict(torch.ones(16, 1), verbose=0, callbacks=hook)
    assert outputs.flatten().tolist() == [1.0] * 8 + [5.0] * 8


def test_the_outer_fit_keeps_its_state_history_and_flags():
    model, seen = reference.compiled(), []

    def stop(*_):
        model.stop_training = True

    def act(epoch, logs):
        inner = fitted(model, epochs=4, callbacks=LambdaCallback(on_epoch_end=stop))
        seen.append((len(inner.epoch), model.stop_training))
        seen.append(model.checkpoint().state["run"]["epoch"])
        if epoch:
            stop()

    outer = fitted(model, epochs=3, callbacks=LambdaCallback(on_epoch_end=act))
    assert seen == [(1, False), 0, (1, False), 1]
    assert model.history is outer
    assert outer.epoch == [0, 1]
    assert model.stop_training


def test_compile_is_refused_while_a_run_uses_its_settings():
    model = reference.compiled()
    again = LambdaCallback(on_test_end=lambda _: model.compile("sgd", "cross_entropy"))
    for run in (fitted, lambda model, **given: model.evaluate(X, Y, **given)):
        with pytest.raises(ConfigError, match="was called while fit"):
            run(model, callbacks=again, **({} if run is not fitted else VALIDATED))
    model.compile("sgd", "cross_entropy")


def test_streams_of_predictions_may_take_turns():
    model = reference.compiled()
    expected = model.predict(X, verbose=0)
    streams = [
        model.predict(X, batch_size=size, stream=True, verbose=0) for size in (4, 6)
    ]
    parts = [[next(stream)] for stream in streams]
    model.compile("sgd", "cross_entropy")  # no code of a run is executed now
    model.evaluate(X2, Y2, verbose=0)
    for stream, own in zip(streams, parts):
        own += stream
        torch.testing.assert_close(torch.cat(own), expected)
    assert not model.stop_predicting


def test_gradients_of_another_run_are_refused():
    class Watch(Callback):
        def watched_gradients(self, module):
            return ["0.weight"]

        def on_train_batch_end(self, batch, logs):
            if self is not inner:
                fitted(self.model, callbacks=inner)
                self.model.gradients()

    inner = Watch()
    with pytest.raises(ConfigError, match="before anything else is trained"):
        fitted(reference.compiled(), callbacks=Watch())


def test_a_process_that_is_told_to_end_ends_all_its_runs(tmp_path):
    model = reference.compiled()

    def act(batch, logs):
        end = LambdaCallback(on_epoch_begin=lambda *_: signal.raise_signal(SIGTERM))
        inner = fitted(model, epochs=2, callbacks=[end, backup("inner")])
        assert not inner.epoch

    def backup(name):
        return BackupAndRestore(tmp_path / name)

    outer = LambdaCallback(on_train_batch_end=act)
    assert not fitted(model, epochs=2, callbacks=[outer, backup("outer")]).epoch
    assert model.num_updates == 1 + 4
