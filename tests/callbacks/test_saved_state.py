# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from a saved state decides as the one that wasn't interrupted."""

import copy
import json
import math
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import Callback, ConfigError
from ipufit.callbacks import (
    CallbackList,
    CSVLogger,
    EarlyStopping,
    History,
    ModelCheckpoint,
    ReduceLROnPlateau,
    Throughput,
    make_progress,
)
from ipufit.state import RunState
from tests.callbacks.driving import ScriptedModel, play

NAN = float("nan")
SERIES = st.lists(
    st.one_of(st.integers(0, 6).map(lambda n: n / 2), st.just(NAN)),
    min_size=2,
    max_size=9,
)


def plain(value):
    """What is comparable: arrays as lists, NaN as text."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return plain(value.tolist())
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def through_json(state):
    """A state as a file would give it back: what isn't JSON must be arrays."""
    arrays = []

    def keep(value):
        assert isinstance(value, (np.ndarray, torch.Tensor))
        arrays.append(copy.deepcopy(value))
        return {"array": len(arrays) - 1}

    def restore(found):
        return arrays[found["array"]] if set(found) == {"array"} else found

    return json.loads(json.dumps(state, default=keep), object_hook=restore)


def assert_goes_on(make, series, **arguments):
    """Interrupt after every epoch; what follows, and what is kept, is the same."""
    model = ScriptedModel((1.0, 0.5))
    whole = play(make(), series, model=model, **arguments)
    for done in range(1, len(whole.epochs)):
        again = ScriptedModel(whole.group_rates[done - 1])  # as a checkpoint has them
        again.weights = [np.array(done - 1)]
        state = through_json(whole.states[done - 1])
        rest = play(
            make(),
            series[done:],
            model=again,
            begin=done,
            state=state,
            **arguments,
        )
        assert rest.epochs == whole.epochs[done:]
        assert plain(rest.logs) == plain(whole.logs[done:])
        assert rest.rates == whole.rates[done:]
        assert again.rates == model.rates
        assert plain(rest.states) == plain(whole.states[done:])
        assert rest.run.stop_reason == whole.run.stop_reason
        assert again.weights == model.weights
        assert again.saved == model.saved[len(model.saved) - len(again.saved) :]
    return whole


@given(SERIES, st.integers(0, 3), st.booleans(), st.sampled_from([None, 1.0]))
def test_early_stopping_goes_on(series, patience, restores, baseline):
    assert_goes_on(
        lambda: EarlyStopping(
            "q",
            mode="min",
            patience=patience,
            restore_best_weights=restores,
            baseline=baseline,
        ),
        series,
    )


@given(SERIES, st.integers(0, 2), st.integers(0, 2))
def test_reduce_lr_on_plateau_goes_on(series, patience, cooldown):
    assert_goes_on(
        lambda: ReduceLROnPlateau(
            "q", mode="min", factor=0.5, patience=patience, cooldown=cooldown
        ),
        series,
    )


@given(SERIES, st.sampled_from(["epoch", 1, 2, 5]), st.booleans(), st.integers(1, 3))
def test_model_checkpoint_goes_on(series, save_freq, best_only, batches):
    whole = assert_goes_on(
        lambda: ModelCheckpoint(
            "e{epoch}.safetensors",
            "q",
            mode="min",
            save_best_only=best_only,
            save_freq=save_freq,
        ),
        series,
        batches=batches,
    )
    assert len(whole.states) == len(series)


def test_throughput_goes_on_inside_an_epoch():
    ticks = iter(range(100))
    first = Throughput(clock=lambda: float(next(ticks)))
    hooks = CallbackList(first)
    hooks.set_run(RunState())
    hooks.on_train_begin({})
    hooks.on_epoch_begin(0, {})  # at 0
    hooks.on_train_batch_begin(0, {})  # 1
    first.run.samples = 10
    hooks.on_train_batch_end(0, {})  # 2
    state = through_json(hooks.state_dict())
    second = Throughput(clock=iter([50.0, 53.0]).__next__)
    again = CallbackList(second)
    again.set_run(RunState())
    again.on_train_begin({})
    again.load_state_dict(state)
    again.on_train_batch_begin(1, {})
    second.run.samples = 15
    again.on_train_batch_end(1, {})
    logs = {}
    again.on_epoch_end(0, logs)
    assert logs == {"samples_per_second": 25 / 5, "latency_ms": 2000.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"beast": 1}, "EarlyStopping has beast, which it doesn't know"),
        ({"wait": None}, "EarlyStopping lacks wait"),
    ],
)
def test_a_state_of_another_kind_is_refused(change, words):
    stopping = EarlyStopping()
    state = {**stopping.state_dict(), **change}
    state = {key: one for key, one in state.items() if change.get(key, 1) is not None}
    state["best"] = 0.5
    with pytest.raises(ConfigError, match=words):
        stopping.load_state_dict(state)
    assert stopping.best is None


def test_a_state_of_an_earlier_version_with_rates_is_loaded():
    reduce = ReduceLROnPlateau()
    reduce.load_state_dict({**reduce.state_dict(), "rates": [1.0, 0.5], "wait": 2})
    assert reduce.wait == 2


def test_states_are_found_by_position_and_class():
    hooks = CallbackList(
        [EarlyStopping(), make_progress(1), EarlyStopping(), History()]
    )
    state = hooks.state_dict()
    assert list(state) == [
        "0:EarlyStopping(val_loss)",
        "1:EarlyStopping(val_loss)",
        "2:History",
    ]
    state["1:EarlyStopping(val_loss)"]["wait"] = 7
    shuffled = dict(random.Random(3).sample(sorted(state.items()), 3))
    hooks.load_state_dict(shuffled)
    assert [one.wait for one in (hooks.callbacks[0], hooks.callbacks[2])] == [0, 7]


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ([History], r"EarlyStopping\(val_loss\) \(number 0\) is missing\. Pass"),
        ([EarlyStopping], r"History \(number 1\) is missing\. Pass"),
        (
            [EarlyStopping, Throughput, History],
            r"callbacks: Throughput \(number 1\) is new\. Pass",
        ),
        ([], r"\(val_loss\) \(number 0\), History \(number 1\) are missing"),
    ],
)
def test_other_callbacks_are_refused(present, words):
    state = CallbackList([EarlyStopping(), History()]).state_dict()
    with pytest.raises(ConfigError, match=words):
        CallbackList([make() for make in present]).load_state_dict(state)


@pytest.mark.parametrize(
    "make", [EarlyStopping, ReduceLROnPlateau, lambda q: ModelCheckpoint("a", q)]
)
def test_callbacks_of_other_figures_are_refused(make):
    def hooks(*figures):
        made = CallbackList([make(figure) for figure in figures])
        made.set_model(ScriptedModel())
        return made

    state = hooks("loss", "val_loss").state_dict()
    hooks("loss", "val_loss").load_state_dict(state)
    with pytest.raises(ConfigError, match=r"\(val_loss\) \(number 0\) is new"):
        hooks("val_loss", "loss").load_state_dict(state)
    with pytest.raises(ConfigError, match=r"\(loss\) \(number 0\) is missing"):
        hooks("accuracy", "val_loss").load_state_dict(state)


@given(SERIES)
def test_a_log_goes_on(series):
    """Rows of epochs that are trained anew are written once, and none is lost."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "log.csv")
        whole = play(CSVLogger(file), series)
        expected = file.read_bytes()
        for done, state in enumerate(whole.states, 1):
            file.write_bytes(expected)  # the killed process had gone further
            play(CSVLogger(file), series[done:], begin=done, state=through_json(state))
            assert file.read_bytes() == expected


class Stateless(Callback):
    """Has no state to save."""


@given(
    st.lists(st.booleans(), max_size=4),
    st.lists(st.booleans(), max_size=4),
)
def test_callbacks_without_a_state_come_and_go(before, now):
    def hooks(kinds):
        make = {True: lambda: EarlyStopping("loss"), False: Stateless}
        return CallbackList([make[has_state]() for has_state in kinds])

    def stopping(hooks):
        return [c for c in hooks.callbacks if isinstance(c, EarlyStopping)]

    old, new = hooks(before), hooks(now)
    for wait, callback in enumerate(stopping(old)):
        callback.wait = wait
    if sum(before) == sum(now):
        new.load_state_dict(through_json(old.state_dict()))
        assert [c.wait for c in stopping(new)] == list(range(sum(now)))
    else:
        with pytest.raises(ConfigError, match="was saved with other callbacks"):
            new.check_state(through_json(old.state_dict()))


class OwnState(Callback):
    """Returns no state until there is something to save."""

    kept = None

    def state_dict(self):
        return {} if self.kept is None else {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state.get("kept", 0)


def test_an_empty_state_of_a_callback_with_a_state_is_found():
    state = CallbackList([Stateless(), OwnState()]).state_dict()
    hooks = CallbackList([OwnState()])
    hooks.load_state_dict(state)
    assert hooks.callbacks[0].kept == 0
