# SPDX-License-Identifier: Apache-2.0
"""`fit(synthetic=True)` measures, and `fit(profile_steps=...)` profiles."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.utils.data import TensorDataset

from ipufit import (
    BackupAndRestore,
    Callback,
    ConfigError,
    IPUConfig,
    IPUModel,
    ModelCheckpoint,
    NotCompiledError,
    StreamedMetric,
    SyntheticDataWarning,
    UnsupportedError,
    poptorch,
)
from ipufit.config import Instruments

DATA = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.2)
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(self.drop(self.norm(x)))


class Rows(StreamedMetric):
    """Counts rows that were streamed."""

    def __init__(self):
        super().__init__("rows")
        self.reset()

    def update(self, outputs, targets, weights=None):
        self.count += len(targets)

    def result(self):
        return float(self.count)

    def reset(self):
        self.count = 0


def make(**fields):
    torch.manual_seed(0)
    model = IPUModel(Network(), IPUConfig(seed=3, **fields))
    model.compile("adam", "cross_entropy", metrics=["accuracy", Rows()])
    return model


@pytest.fixture
def options_seen(monkeypatch):
    """Options of the programs that were made, with whether they train."""
    seen = []
    for name in ("trainingModel", "inferenceModel"):
        make_it = getattr(poptorch, name)

        def spy(module, options=None, *args, _make=make_it, _name=name, **kwargs):
            shown = options.toDict()
            seen.append((_name == "trainingModel", shown))
            return _make(module, options, *args, **kwargs)

        monkeypatch.setattr(poptorch, name, spy)
    return seen


def synthetic_fit(model, **arguments):
    with pytest.warns(SyntheticDataWarning, match="Losses and metrics mean nothing"):
        return model.fit(DATA, batch_size=8, synthetic=True, verbose=0, **arguments)


@pytest.mark.filterwarnings("ignore::ipufit.errors.CoverageWarning")
def test_figures_of_synthetic_data_are_no_numbers(options_seen):
    history = synthetic_fit(make(), epochs=2, validation_data=DATA)
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for values in history.history.values():
        assert len(values) == 2
        assert all(math.isnan(value) for value in values)
    assert history.coverage == "synthetic data: these figures mean nothing"
    assert [is_training for is_training, _ in options_seen] == [False, True]
    assert all(shown["syntheticDataMode"] == 2 for _, shown in options_seen)


def test_the_model_goes_on_as_if_there_had_been_no_synthetic_data():
    losses = []
    for is_measured in (False, True):
        model = make()
        model.fit(DATA, batch_size=8, verbose=0)
        if is_measured:
            state = torch.random.get_rng_state()
            synthetic_fit(model, epochs=2)
            torch.random.set_rng_state(state)
            assert model.num_updates == 4
        history = model.fit(DATA, batch_size=8, epochs=2, verbose=0)
        losses.append((history.history, model.get_weights(), model.num_updates))
    assert losses[0][0] == losses[1][0]
    assert all(map(torch.equal, *(map(torch.as_tensor, of[1]) for of in losses)))
    assert losses[0][2] == losses[1][2] == 12


class Seen(Callback):
    def __init__(self):
        self.calls = 0

    def on_train_batch_end(self, batch, logs):
        self.calls += 1
        self.last = self.model


def test_callbacks_get_the_copy():
    model, seen = make(), Seen()
    synthetic_fit(model, callbacks=[seen])
    assert seen.calls == 4
    assert seen.last is not model
    assert seen.last.num_updates == 4
    assert model.num_updates == 0
    assert model.history is None


def test_checkpoints_of_nothing_are_refused(tmp_path):
    model = make()
    for arguments, what in (
        ({"resume": tmp_path}, "resume="),
        ({"callbacks": [BackupAndRestore(tmp_path / "b")]}, "BackupAndRestore"),
        ({"callbacks": [ModelCheckpoint(tmp_path / "m")]}, "ModelCheckpoint"),
    ):
        with pytest.raises(ConfigError, match=f"synthetic=True and {what}: nothing is"):
            model.fit(DATA, batch_size=8, synthetic=True, verbose=0, **arguments)
    with pytest.raises(ConfigError, match="synthetic='yes' is neither True nor False"):
        model.fit(DATA, batch_size=8, synthetic="yes")
    with pytest.raises(NotCompiledError):
        IPUModel(Network()).fit(DATA, synthetic=True)


class Uncopied(Network):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle '_io.TextIOWrapper' object")


@pytest.mark.filterwarnings("ignore::ipufit.errors.SyntheticDataWarning")
def test_a_model_that_cannot_be_copied_is_refused_by_name():
    model = IPUModel(Uncopied())
    model.compile("sgd", "cross_entropy")
    with pytest.raises(UnsupportedError, match=r"runs on a copy .*TextIOWrapper"):
        model.fit(DATA, batch_size=8, synthetic=True)


# Profiles ---------------------------------------------------------------------


def runs_of(shown):
    options = shown.get("engineOptions", {})
    return options.get("autoReport.executionProfileProgramRunCount")


def test_a_profiled_fit_has_a_program_of_its_own_and_the_same_numbers(options_seen):
    plain = make().fit(DATA, batch_size=8, verbose=0).history
    options_seen.clear()
    model = make()
    profiled = model.fit(DATA, batch_size=8, verbose=0, profile_steps=2).history
    assert profiled == plain
    model.fit(DATA, batch_size=8, verbose=0)
    assert [runs_of(shown) for _, shown in options_seen] == ["2", None]
    model.fit(DATA, batch_size=8, verbose=0, profile_steps=2)
    assert len(options_seen) == 2  # the first program again


def test_validation_is_not_profiled(options_seen, tmp_path):
    fit = {"batch_size": 8, "verbose": 0, "profile_steps": 1, "validation_data": DATA}
    make(profile_dir=str(tmp_path)).fit(DATA, **fit)
    assert [(train, runs_of(shown)) for train, shown in options_seen] == [
        (False, None),
        (True, "1"),
    ]
    engine_options = options_seen[1][1]["engineOptions"]
    assert engine_options["autoReport.directory"] == str(tmp_path)


def test_a_profile_of_no_calls_is_refused_before_anything():
    model = make()
    before = copy.deepcopy(model.get_weights())
    with pytest.raises(ConfigError, match="profile_steps=0 is not a whole number"):
        model.fit(DATA, batch_size=8, profile_steps=0)
    assert len(before) == len(model.get_weights())
    assert Instruments(profiled_calls=1).profiled_calls == 1
