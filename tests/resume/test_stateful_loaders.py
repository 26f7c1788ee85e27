# SPDX-License-Identifier: Apache-2.0
"""Loaders that keep a state: a resumed run draws nothing twice, and ends the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from ipufit import DamagedCheckpointError, DataError, load_checkpoint
from ipufit.checkpoint import write_checkpoint
from ipufit.data.place import LoaderState
from tests.data.stateful import StatefulLoader
from tests.reference import samples
from tests.resume.test_resume import (
    Saver,
    Scenario,
    Watcher,
    assert_same,
    resumed,
    seeded,
    unbroken,
)
from tests.strategies import in_quarters

COUNT = 22
pytestmark = [
    pytest.mark.usefixtures("unsynced"),
    pytest.mark.filterwarnings("ignore::ipufit.errors.IpufitWarning"),
]


class Made:
    """Makes loaders, and keeps them."""

    def __init__(self, make):
        self.make = make
        self.loaders = []

    def __call__(self):
        self.loaders.append(self.make())
        return {"x": self.loaders[-1]}


def scenario_of(make, **fitted):
    return Scenario(data=Made(make), fitted={"batch_size": 4, **fitted})


def double(batch_size, **settings):
    return lambda: StatefulLoader(*samples(COUNT), batch_size, **settings)


SCENARIOS = {
    "batches of an update": scenario_of(double(4)),
    "batches that are larger": scenario_of(double(7)),
    "batches that are smaller": scenario_of(double(3)),
    "padding": scenario_of(double(5), drop_last="pad"),
    "passes that end within epochs": scenario_of(
        double(5), steps_per_epoch=3, epochs=4
    ),
    "a fixed order": scenario_of(double(6, shuffle=False)),
    "validation": Scenario(
        data=Made(double(6)),
        fitted={"validation_data": samples(10, seed=5), "validation_updates": 2},
    ),
}


class OfBoth(Made):
    """Makes loaders of training, and of validation data beside them."""

    def __call__(self):
        return {**super().__call__(), "validation_data": self.make()}


@in_quarters
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_resumed_run_is_the_unbroken_one(name, quarter, tmp_path):
    scenario = SCENARIOS[name]
    saver = Saver.of_some(tmp_path, list(SCENARIOS).index(name) + 2 * quarter)
    expected, seen = unbroken(scenario, saver)
    drawn = scenario.data.loaders[-1].drawn
    assert saver.saved
    for path, at in saver.saved:
        result, rest = resumed(scenario, path)
        assert_same(result, expected)
        assert repr(rest) == repr(seen[len(seen) - len(rest) :])
        loader = scenario.data.loaders[-1]
        # one more to see what samples look like
        calls = sum(entry[0] == "call" for entry in seen[:at])
        rows = 4 * calls
        assert len(loader.loaded) == 1
        assert loader.drawn <= 1 + drawn - rows // (loader.batch_size + 1) // 2


class CountsBegun(StatefulLoader):
    """Counts passes as they begin, not as they end, and adds their number to `x`."""

    begun = 0

    def _batches(self):
        if not self.given:
            self.begun += 1
        for x, y in super()._batches():
            yield x + self.begun, y

    def state_dict(self):
        return {**super().state_dict(), "begun": self.begun}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.begun = state["begun"]


@pytest.mark.parametrize("batch_size", [4, 7])
@pytest.mark.parametrize("loader", [StatefulLoader, CountsBegun])
def test_validation_goes_on_where_it_was(loader, batch_size, tmp_path):
    """Before the first validation, too: the loader has returned a batch by then."""
    scenario = Scenario(
        data=OfBoth(lambda: loader(*samples(COUNT), batch_size)),
        fitted={"batch_size": 4, "epochs": 2},
    )
    saver = Saver(tmp_path)
    expected, seen = unbroken(scenario, saver)
    assert "val_loss" in expected.history
    for path, _ in saver.saved:
        result, rest = resumed(scenario, path)
        assert_same(result, expected)
        assert repr(rest) == repr(seen[len(seen) - len(rest) :])


def test_no_batch_is_drawn_twice(tmp_path):
    scenario = scenario_of(double(4), epochs=1)
    saver = Saver(tmp_path)
    unbroken(scenario, saver)
    assert scenario.data.loaders[-1].drawn == 6
    for calls in (1, 3, 5):
        resumed(scenario, saver.saved[calls - 1][0])
        assert scenario.data.loaders[-1].drawn == 1 + 6 - calls


@in_quarters
def test_the_state_is_kept_on_and_on(quarter, tmp_path):
    scenario = SCENARIOS["batches that are larger"]
    saver = Saver(tmp_path)
    expected, _ = unbroken(scenario, saver)
    seeded(3)
    second = Saver(tmp_path / "second")
    (tmp_path / "second").mkdir()
    model = scenario.model()
    watcher = second.recorder = Watcher()
    scenario.fit(model, [second, watcher], resume=saver.saved[2][0])
    for path, _ in second.saved[1 + quarter :: 4]:
        result, _ = resumed(scenario, path)
        assert_same(result, expected)


@pytest.fixture(scope="module")
def third(tmp_path_factory):
    """The checkpoint after the third call of a run, and what the run left."""
    saver = Saver(tmp_path_factory.mktemp("third"))
    expected, _ = unbroken(scenario_of(double(5, shuffle=False)), saver)
    return saver.saved[2][0], expected


def test_a_checkpoint_without_a_state_repeats_the_stream(third, tmp_path):
    """From before loaders kept theirs, or of a loader that kept none."""
    scenario = scenario_of(double(5, shuffle=False))
    path, expected = third
    checkpoint = load_checkpoint(path)
    group = checkpoint.tensors["random"]
    for name in [name for name in group if name.startswith("loader/")]:
        del group[name], checkpoint.state["tensors"]["random"][name]
    write_checkpoint(tmp_path / "old", checkpoint)
    result, _ = resumed(scenario, tmp_path / "old")
    assert not scenario.data.loaders[-1].loaded
    assert result.history == expected.history


def test_a_loader_that_can_not_take_the_state_is_named(third):
    class Other(StatefulLoader):
        def load_state_dict(self, state):
            raise KeyError("worker_0")

    scenario = scenario_of(lambda: Other(*samples(COUNT), 5))
    with pytest.raises(
        DataError, match=r"`x` can't go on from .*worker_0.*Pass a load"
    ):
        resumed(scenario, third[0])


def test_a_damaged_state_is_refused(third, tmp_path):
    scenario = scenario_of(double(5, shuffle=False))
    for number, damage in enumerate((b"{", b"[]", b'{"state": {"$": 1}}')):
        checkpoint = load_checkpoint(third[0])
        content = torch.tensor(list(damage), dtype=torch.uint8)
        checkpoint.tensors["random"]["loader/json"] = content
        words = f"uint8 [{len(damage)}]"
        checkpoint.state["tensors"]["random"]["loader/json"] = words
        write_checkpoint(tmp_path / f"bad{number}", checkpoint)
        with pytest.raises(DamagedCheckpointError, match="the state of its loader"):
            resumed(scenario, tmp_path / f"bad{number}")


def test_a_state_that_no_checkpoint_can_hold_is_named(tmp_path):
    class Odd(StatefulLoader):
        def state_dict(self):
            return {"dataset": {"seen": {1, 2}}}

    scenario = scenario_of(lambda: Odd(*samples(COUNT), 5))
    with pytest.raises(DataError, match=r"\['dataset'\]\['seen'\] in it is a set"):
        unbroken(scenario, Saver(tmp_path))


def test_packed_states_are_whole():
    state = [1, (2.5, "a"), {"b": None, 3: b"c"}, torch.arange(3), {"$": "tuple"}]
    kept = LoaderState(state, [torch.rand(4, 2)], 3, 9)
    back = LoaderState.of(kept.tensors())
    assert repr(back) == repr(kept)


# The real one -----------------------------------------------------------------


class Noisy(Dataset):
    def __init__(self):
        self.x, self.y = samples(COUNT)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        noise = random.random() + np.random.rand()
        return self.x[index] + noise, self.y[index]


class Counted(IterableDataset):
    """Goes on where it was, and knows its pass."""

    def __init__(self):
        self.x, self.y = samples(COUNT)
        self.at = self.passes = 0

    def __iter__(self):
        while self.at < COUNT:
            at, self.at = self.at, self.at + 1
            yield self.x[at] + self.passes + random.random(), self.y[at]
        self.at = 0
        self.passes += 1

    def state_dict(self):
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state):
        self.at, self.passes = state["at"], state["passes"]


def real(dataset, **settings):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset(), **settings)


REAL = {
    "indices in order": (Noisy, {"batch_size": 4}),
    "indices at random": (Noisy, {"batch_size": 3, "shuffle": True}),
    "larger batches": (Noisy, {"batch_size": 7, "shuffle": True}),
    "a stream": (Counted, {"batch_size": 5}),
    "in order, in two processes": (
        Noisy,
        {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"},
    ),
}


@in_quarters
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:.*fork")
@pytest.mark.parametrize("name", REAL)
def test_torchdata_goes_on_exactly(name, quarter, tmp_path):
    pytest.importorskip("torchdata.stateful_dataloader")
    dataset, settings = REAL[name]
    if "num_workers" in settings:
        dataset = Plain
    scenario = scenario_of(lambda: real(dataset, **settings))
    saver = Saver(tmp_path)
    expected, seen = unbroken(scenario, saver)
    assert len(saver.saved) > 5
    several = "num_workers" in settings
    for path, _ in saver.saved[2:6:3] if several else saver.saved[quarter::4]:
        result, rest = resumed(scenario, path)
        assert_same(result, expected)
        assert repr(rest) == repr(seen[len(seen) - len(rest) :])


class Plain(Noisy):
    """Draws nothing, as processes that load draw what they like."""

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def test_the_state_of_validation_data_is_named_where_it_can_not_be_kept(tmp_path):
    class Odd(StatefulLoader):
        def state_dict(self):
            return {"worker": object()}

    scenario = scenario_of(
        double(4), validation_data=Odd(*samples(8), 4), validation_steps=1
    )
    with pytest.raises(
        DataError, match=r"A loader keeps a state, .*\['worker'\] in it"
    ):
        unbroken(scenario, Saver(tmp_path))
