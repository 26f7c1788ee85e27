# SPDX-License-Identifier: Apache-2.0
"""An IterableDataset in several loading processes gives each sample once."""

from __future__ import annotations

import gc
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ipufit import BatchPlan, DataError
from ipufit.data.calls import TrainingBatches
from ipufit.data.loaders import IterableRows
from ipufit.data.sources import as_source
from tests import reference
from tests.data.test_division import options_for

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(IterableDataset):
    """Doesn't ask: each copy would give every number."""

    def __iter__(self):
        return iter(range(23))


class Looking(Numbers):
    """Looks whether it is in a worker, and doesn't ask which."""

    def __iter__(self):
        assert get_worker_info() is not None
        return super().__iter__()


class Asking(IterableDataset):
    """Divides itself, in blocks."""

    def __iter__(self):
        info = get_worker_info()
        assert isinstance(info.dataset, Asking)
        assert info.seed
        return itertools.islice(range(23), info.id, None, info.num_workers)


class AskingLate(IterableDataset):
    """Divides itself when it has given samples already."""

    def __iter__(self):
        for number in range(23):
            if number < 5 or number % 2 == get_worker_info().id:
                yield number


class Noise(IterableDataset):
    """Draws random numbers."""

    def __iter__(self):
        for number in range(23):
            yield torch.tensor(float(number)) + torch.rand(())


def numbers_of(dataset, num_workers):
    source = as_source(dataset, num_workers=num_workers)
    return [number for block in source.blocks() for number in block[0].tolist()]


@pytest.mark.parametrize(
    ("kind", "num_workers"), [(Numbers, 2), (Looking, 3), (Asking, 2)]
)
def test_each_sample_comes_once(kind, num_workers):
    assert sorted(numbers_of(kind(), num_workers)) == list(range(23))


@pytest.mark.slow  # torch waits for the processes that load
def test_a_dataset_that_asks_late_is_refused():
    with pytest.raises(DataError, match="only after its first sample") as caught:
        numbers_of(AskingLate(), 2)
    del caught  # its traceback has the processes that load
    gc.collect()


@pytest.mark.slow
def test_it_holds_where_processes_are_spawned():
    loader = DataLoader(
        IterableRows(Numbers()), 4, num_workers=2, multiprocessing_context="spawn"
    )
    assert sorted(n for batch in loader for n in batch.tolist()) == list(range(23))


def test_a_run_goes_on_in_the_middle_of_a_pass():
    plan = BatchPlan(4)

    def batches(**given):
        source = as_source(Noise(), num_workers=2)
        return TrainingBatches(source, plan, options_for(plan), shuffle=False, **given)

    first = batches()
    calls = iter(first)
    begun = [next(calls) for _ in range(2)]
    place = first.state_dict()
    rest = [call.batch[0].tolist() for call in calls]
    assert len(begun) == 2
    resumed = batches()
    resumed.load_state_dict(place)
    assert [call.batch[0].tolist() for call in resumed] == rest


class Broken(Dataset):
    """Sample 5 can't be read."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("sample 5 is broken")
        return torch.zeros(3), torch.tensor(0)


def test_the_cause_is_shown_and_no_file_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = reference.compiled(loader_mode="async")
    with pytest.raises(DataError, match="could not be loaded") as caught:
        model.fit(Broken(), batch_size=2, shuffle=False, verbose=0)
    assert "ValueError: sample 5 is broken" in str(caught.value)
    assert list(Path(tmp_path).glob("ipufit-*.txt")) == []
