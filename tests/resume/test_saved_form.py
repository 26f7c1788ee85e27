# SPDX-License-Identifier: Apache-2.0
"""Right checksums of wrong values: one typed error, and nothing is loaded."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from ipufit import (
    Callback,
    ConfigError,
    DamagedCheckpointError,
    EarlyStopping,
    GradientMonitor,
    IPUConfig,
    IPUModel,
    LearningRateScheduler,
    Optimizer,
    ReduceLROnPlateau,
    Throughput,
)
from ipufit.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from ipufit.data.random_state import random_state
from tests.files.samples import same, same_tensors
from tests.reference import network, samples
from tests.strategies import in_quarters

X, Y = samples(16)
DELETED = object()
EVERY = 80
"""Of so many wrong values one is tried."""
WRONG = [None, True, "x", 1.5, -1, 2**70, [], {}, [1], {"a": 1}, [[1]], [None], DELETED]
LEARNT = ("optimizer", "updates", "average", "tensors")
FOR_PEOPLE = ("config", "versions", "settings")
NOTED = (
    *("history", "epoch", "epochs_of", "sums", "calls"),
    *("latencies_ms", "best", "group_ratios"),
)
WAYS = ("load", "resume")
OPTIONAL = ("best_weights",)  # None if they aren't kept, or there are none yet

pytestmark = [
    pytest.mark.usefixtures("unsynced"),
    pytest.mark.filterwarnings("ignore::ipufit.errors.IpufitWarning"),
]


class Buffered(torch.nn.Module):
    """Has dropout, and a buffer that isn't in its state dict."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(network(), torch.nn.Dropout(0.2))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.body(x) + self.shift


class Saver(Callback):
    """Saves after one call of the second epoch."""

    is_saved = False

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, batch, logs):
        if self.run.updates == 6:
            self.run.after_hooks(
                lambda: write_checkpoint(self.path, self.model.checkpoint())
            )


def cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)


@dataclass
class Scenario:
    optimizer: Any
    schedule: Any = None
    callbacks: Callable[[], list] = list

    def model(self, seed=3):
        model = IPUModel(Buffered(), IPUConfig(seed=seed))
        model.compile(
            self.optimizer,
            "cross_entropy",
            metrics=["accuracy"],
            lr_schedule=self.schedule,
        )
        return model

    def fit(self, model, callbacks=(), **more):
        arguments = {"epochs": 2, "verbose": 0, **more}
        return model.fit(X, Y, 4, callbacks=list(callbacks), **arguments)


SCENARIOS = {
    "averages": Scenario(
        Optimizer("adam", 0.05, ema_momentum=0.9),
        "cosine",
        lambda: [EarlyStopping("loss", patience=9, restore_best_weights=True)],
    ),
    "torch's schedule": Scenario(
        Optimizer("sgd", 0.1, momentum=0.9),
        cycle,
        lambda: [GradientMonitor(["body.0.0.weight"]), Throughput()],
    ),
    "rates": Scenario(
        Optimizer("adamw", 0.05),
        None,
        lambda: [
            ReduceLROnPlateau("loss", patience=0),
            LearningRateScheduler(lambda epoch, rate: rate),
        ],
    ),
}


def paths(value, at=()):
    """Where something is in nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        yield (*at, key)
        if isinstance(one, (dict, list)):
            yield from paths(one, (*at, key))


def found(state, path):
    for key in path:
        state = state[key]
    return state


def changed(state, path, value):
    """A copy with another value, or without it."""
    state = copy.deepcopy(state)
    *outer, last = path
    inside = found(state, outer)
    if value is DELETED:
        del inside[last]
    else:
        inside[last] = value
    return state


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_alike(one, other):
    """Whether a value of one type was merely replaced by another of it."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_alike, one, other))
    if isinstance(one, dict) or isinstance(other, dict):
        return one == other
    return type(one) is type(other) or (is_number(one) and is_number(other))


def confusions(state):
    """The place of each value with others of other types, or with `DELETED`."""
    for path in paths(state):
        now = found(state, path)
        for value in WRONG:
            if not is_alike(value, now) and (path[-1], value) != ("stop_reason", "x"):
                yield path, value


class Watched:
    """A model that has trained, and everything that a refusal must leave alone."""

    def __init__(self, scenario):
        self.scenario = scenario
        self.model = scenario.model(seed=8)
        scenario.fit(self.model, scenario.callbacks())
        self.settle()

    def settle(self):
        """Take what is now for what must stay."""
        self.callbacks = self.scenario.callbacks()
        self.before = self.seen()

    def seen(self):
        model, trainer = self.model, self.model._executors._trainer
        return (
            model.checkpoint(),
            random_state(),
            None if trainer is None else trainer.executor.rng_state,
            repr(
                [[vars(o).get(n) for n in o.saved_attributes] for o in self.callbacks]
            ),
        )

    def is_unchanged(self):
        now = self.seen()
        return (
            same(now[0], self.before[0])
            and same_tensors(now[1], self.before[1])
            and now[2:] == self.before[2:]
        )

    def load(self, path):
        self.model.load(path)
        return self.model.checkpoint(), {}

    def resume(self, path):
        history = self.scenario.fit(self.model, self.callbacks, resume=path).history
        times = ("samples_per_second", "latency_ms")
        return self.model.checkpoint(), {
            name: values for name, values in history.items() if name not in times
        }


def is_harmless(way, at):
    """Whether a run or a model gets the same weights whatever is there.

    `config` and `versions` are for people, `settings` are compared where they are
    there, and figures and epochs that a callback has noted are only shown. What only a
    run needs, `load` doesn't look at.
    """
    if at[0] in FOR_PEOPLE or (way == "load" and at[0] not in LEARNT):
        return True
    is_noted = at[0] == "callbacks" and (
        (at[2:3] and at[2] in NOTED) or at[2:] == OPTIONAL
    )
    return is_noted or at == ("tensors", "callbacks")  # a group without tensors


class Trial:
    """A checkpoint in the middle of an epoch, and what becomes of it when changed."""

    def __init__(self, scenario, path, known=WAYS):
        self.path = path
        scenario.fit(scenario.model(), [*scenario.callbacks(), Saver(path)])
        self.checkpoint = load_checkpoint(path)
        self.watched = Watched(scenario)
        self.expected = {way: getattr(self.watched, way)(path) for way in known}
        self.watched.settle()

    def outcomes(self, at, tensors=None, state=None, ways=WAYS):
        """In a word what comes of it, by each way, with other tensors or state."""
        tensors, state = tensors or self.checkpoint.tensors, state or self.state
        write_checkpoint(self.path, Checkpoint(tensors, state))
        return [self._outcome(way, at) for way in ways]

    @property
    def state(self):
        return self.checkpoint.state

    def _outcome(self, way, at):
        watched = self.watched
        try:
            weights, history = getattr(watched, way)(self.path)
        except (DamagedCheckpointError, ConfigError):
            return "refused" if watched.is_unchanged() else "refused, and changed"
        except Exception as error:  # noqa: BLE001 - that is what must not happen
            watched.__init__(watched.scenario)
            return f"{type(error).__name__}: {error}"
        watched.settle()
        expected = self.expected.get(way)
        is_same = expected and same(weights, expected[0])
        is_known = is_same and (history == expected[1] or is_harmless(way, at))
        return "the same" if is_known else "other numbers"


@pytest.fixture(scope="module", params=SCENARIOS)
def _trial(request, tmp_path_factory):
    return Trial(SCENARIOS[request.param], tmp_path_factory.mktemp("trial") / "saved")


@pytest.fixture
def trial(_trial):
    _trial.watched.settle()  # random numbers begin anew in each test
    return _trial


@in_quarters
def test_a_state_of_other_types_is_refused_and_nothing_of_it_is_loaded(trial, quarter):
    counts = Counter()
    for at, value in islice(confusions(trial.state), EVERY // 4 * quarter, None, EVERY):
        state = changed(trial.state, at, value)
        for way, seen in zip(WAYS, trial.outcomes(at, state=state)):
            counts[way, seen] += 1
            is_fine = seen == "the same" and is_harmless(way, at)
            assert seen == "refused" or is_fine, (way, at, value, seen)
    assert counts["load", "refused"] > 240 // EVERY
    assert counts["resume", "refused"] > 840 // EVERY


def other_tensors(tensors):
    """Groups of tensors that are emptied, lack one, or have another shape or dtype."""
    for group, named in tensors.items():
        for name, tensor in named.items():
            rest = {n: t for n, t in named.items() if n != name}
            yield group, {**tensors, group: rest}
            for other in (
                tensor.unsqueeze(0),
                torch.cat([tensor.reshape(-1)] * 2),
                tensor.to(
                    torch.float64 if tensor.dtype == torch.int32 else torch.int32
                ),
                tensor.to(torch.float16),
            ):
                yield group, {**tensors, group: {**named, name: other}}
        if named:
            yield group, {**tensors, group: {}}
            yield group, {n: t for n, t in tensors.items() if n != group}
        yield group, {**tensors, group: {**named, "more": torch.zeros(1)}}
    yield "more", {**tensors, "more": {"x": torch.zeros(1)}}


@in_quarters
def test_other_tensors_than_the_state_names_are_refused(trial, quarter):
    seen = Counter()
    for group, tensors in list(other_tensors(trial.checkpoint.tensors))[quarter::4]:
        seen.update(trial.outcomes((group,), tensors))
    assert set(seen) == {"refused"}
    assert seen["refused"] > 50


def in_words(tensors):
    """The dtype and shape of each tensor, as a state has them."""
    return {
        group: {
            name: f"{str(one.dtype)[len('torch.') :]} {list(one.shape)}"
            for name, one in named.items()
        }
        for group, named in tensors.items()
    }


def is_older(tensors, others):
    """Whether others lack all averages of buffers and nothing else: they are read."""
    mine, theirs = tensors.get("average", {}), others.get("average", {})
    return {*mine} - {*theirs} == {"shift"} and {*theirs} < {*mine}


def test_tensors_of_another_module_are_refused_though_the_state_names_them(trial):
    before, seen = trial.checkpoint.tensors, Counter()
    for group, tensors in other_tensors(before):
        is_of_module = group in ("model", "buffers", "average")
        if is_of_module and not is_older(before, tensors):
            state = {**trial.state, "tensors": in_words(tensors)}
            seen.update(trial.outcomes((group,), tensors, state))
    assert set(seen) == {"refused"}
    assert seen["refused"] > 50


def test_an_optimizer_s_state_of_another_shape_is_refused(trial):
    state, optimizer = trial.state, trial.checkpoint.tensors["optimizer"]
    forged = {**state, "optimizer": {**state["optimizer"], "loss_scaling": 1e308}}
    seen = Counter(trial.outcomes(("optimizer",), state=forged, ways=["resume"]))
    for key, tensor in optimizer.items():
        for other in (tensor.reshape(-1)[:0], tensor.reshape(1, 1, 1, -1)):
            if other.numel() != 1:
                named = {**optimizer, key: other}
                tensors = {**trial.checkpoint.tensors, "optimizer": named}
                forged = {**state, "tensors": in_words(tensors)}
                seen.update(
                    trial.outcomes(("optimizer",), tensors, forged, ways=["resume"])
                )
    assert set(seen) <= {"refused", "the same"}
    assert seen["refused"] > len(optimizer) // 3


@pytest.mark.parametrize(
    ("schedule", "setting", "value"),
    [
        (lambda optimizer: lr_scheduler.StepLR(optimizer, 3), ("step_size",), 0),
        (
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
            ("T_max",),
            0,
        ),
        (
            lambda optimizer: lr_scheduler.SequentialLR(
                optimizer, [cycle(optimizer), cycle(optimizer)], [40]
            ),
            ("_schedulers", 0, "_schedule_phases", 0, "start_lr"),
            "x",
        ),
        (cycle, ("last_epoch",), float("nan")),
        (cycle, ("last_epoch",), 10**6),
    ],
)
def test_a_setting_that_torch_s_scheduler_fails_with_is_refused(
    tmp_path, schedule, setting, value
):
    scenario = Scenario(Optimizer("sgd", 0.1), schedule)
    trial = Trial(scenario, tmp_path / "saved", known=())
    at = ("updates", "rates", "scheduler", *setting)
    found = trial.outcomes(at, state=changed(trial.state, at, value))
    assert found == ["refused"] * 2


class OfMomentum(lr_scheduler.LRScheduler):
    """A scheduler of a user's, which looks at what the optimizer has learnt."""

    def get_lr(self):
        assert isinstance(self.optimizer.state, dict)
        return [group["lr"] * 0.5 for group in self.optimizer.param_groups]


class Falling:
    """Rates of an object that counts its calls and copies."""

    calls = 0

    def __deepcopy__(self, memo):
        self.calls += 1
        return self

    def rate(self, update):
        self.calls += 1
        return 1 / (1 + update)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer, rate: OfMomentum(optimizer),
        lr_scheduler.LambdaLR,
        lambda optimizer, rate: lr_scheduler.ChainedScheduler(
            [cycle(optimizer), lr_scheduler.LambdaLR(optimizer, rate)]
        ),
        lambda optimizer, rate: lr_scheduler.CyclicLR(
            optimizer, 0.1, 0.2, cycle_momentum=False, scale_fn=rate
        ),
    ],
)
def test_a_users_code_is_not_run_to_check_a_state(tmp_path, scheduler):
    falling, path = Falling(), tmp_path / "saved"
    scenario = Scenario(
        Optimizer("sgd", 0.1), lambda optimizer: scheduler(optimizer, falling.rate)
    )
    model = scenario.model()
    scenario.fit(model)
    model.save(path)
    weights, calls = model.checkpoint(), falling.calls
    model.load(path)
    assert same(model.checkpoint(), weights)
    assert falling.calls == calls


class Moody(lr_scheduler.StepLR):
    """A user's scheduler that loads a state, and then fails with some of them."""

    mood = "good"

    def state_dict(self):
        return {**super().state_dict(), "mood": self.mood}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.mood != "good":
            raise RuntimeError("I don't like it")


@pytest.mark.parametrize("way", WAYS)
def test_what_a_users_scheduler_refuses_leaves_the_model_as_it_was(tmp_path, way):
    scenario = Scenario(Optimizer("adam", 0.1, ema_momentum=0.9), lambda o: Moody(o, 2))
    model, path = scenario.model(), tmp_path / "saved"
    scenario.fit(model, [Saver(path)])
    saved = load_checkpoint(path)
    saved.state["updates"]["rates"]["scheduler"]["mood"] = "bad"
    write_checkpoint(path, saved)
    scenario.fit(model)
    before, rates = model.checkpoint(), model.optimizer.param_groups[0]["lr"]
    with pytest.raises(DamagedCheckpointError, match=r"saved'.*I don't like it"):
        model.load(path) if way == "load" else scenario.fit(model, resume=path)
    assert same(model.checkpoint(), before)
    assert model.optimizer.param_groups[0]["lr"] == rates


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_checkpoint_is_loaded_while_averages_are_in_the_module(tmp_path, is_damaged):
    scenario = Scenario(Optimizer("sgd", 0.1, ema_momentum=0.5), lambda o: Moody(o, 2))
    model, path = scenario.model(), tmp_path / "saved"
    scenario.fit(model)
    saved = model.checkpoint()
    if is_damaged:
        saved.state["updates"]["rates"]["scheduler"]["mood"] = "bad"
    write_checkpoint(path, saved)
    scenario.fit(model)
    trained = model.checkpoint()
    model.swap_weights(is_average=True)
    swapped = copy.deepcopy(model.get_weights())
    if is_damaged:
        with pytest.raises(DamagedCheckpointError):
            model.load(path)
        assert all(map(np.array_equal, model.get_weights(), swapped))
    else:
        model.load(path)
    model.swap_weights(is_average=False)
    assert same(model.checkpoint(), trained if is_damaged else saved)
