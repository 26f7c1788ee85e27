# SPDX-License-Identifier: Apache-2.0
"""Whatever holds samples becomes one kind of dataset."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from ipufit import DataError, IPUConfig, IPUModel, poptorch
from ipufit.data import (
    StreamSource,
    as_batch,
    as_source,
    fit_sources,
)
from ipufit.data.sources import split_validation
from tests import reference
from tests.strategies import Pair

X, Y = reference.samples(10)


def rows(source):
    return [source.dataset[index] for index in range(source.num_samples)]


def assert_same_rows(source, other):
    assert source.num_samples == other.num_samples > 0
    for mine, theirs in zip(rows(source), rows(other)):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


class Items(Dataset):
    """A dataset of the items of a list."""

    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


SAME = {
    "tensors": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "doubles": (X.double(), Y),
    "double arrays": (X.numpy().astype(np.float64), Y.numpy()),
    "a strided array": (np.asfortranarray(X.numpy()), Y.numpy()),
    "a gradient's leaf": (X.clone().requires_grad_(), Y),
    "a tensor dataset": (TensorDataset(X, Y), None),
    "a dataset of tensors": (Items(list(zip(X, Y))), None),
    "a dataset of lists": (Items([[x, y] for x, y in zip(X, Y)]), None),
    "a dataset of numbers": (Items([(x, int(y)) for x, y in zip(X, Y)]), None),
    "a dataset of arrays": (
        Items([(x.numpy(), np.int64(y)) for x, y in zip(X, Y)]),
        None,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_samples_are_the_same_in_every_container(name):
    assert_same_rows(as_source(*SAME[name]), as_source(X, Y))


@pytest.mark.parametrize("name", SAME)
def test_a_fit_is_the_same_from_every_container(name):
    losses = []
    for x, y in (SAME["tensors"], SAME[name]):
        model = IPUModel(reference.network(), IPUConfig(seed=4))
        model.compile("adam", "cross_entropy")
        history = model.fit(x, y, batch_size=5, epochs=3, verbose=0)
        losses.append(history.history["loss"])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


@pytest.mark.parametrize("target", [1.5, True, np.float64(1.5), np.bool_(1), 7])
def test_numbers_are_targets(target):
    source = as_source(Items([(X[0], target)] * 4))
    (_, tensor) = source.dataset[0]
    assert tensor.dim() == 0
    assert float(tensor) == float(target)
    assert tensor.dtype != torch.float64


def test_an_array_of_one_number_is_a_number():
    assert as_source(Items([(X[0], np.array(3))] * 4)).dataset[0][1].dim() == 0


def test_read_only_memory_is_read_as_it_is():
    array = np.frombuffer(X.numpy().tobytes(), dtype=np.float32).reshape(X.shape)
    assert not array.flags.writeable
    source = as_source(array, Y)
    assert_same_rows(source, as_source(X, Y))
    assert source.dataset.tensors[0].data_ptr() == array.ctypes.data


@pytest.mark.parametrize(
    "array", [np.zeros(10, dtype=object), np.zeros(10, ">f4"), np.zeros(10, complex)]
)
def test_an_array_that_torch_cannot_hold_is_refused(array):
    with pytest.raises(DataError, match=r"`x` has an array of .* Convert it"):
        as_source(array, Y)


def test_names_and_nests_are_remembered():
    source = as_source({"a": X, "b": (X, X)}, Pair(Y, [Y]))
    assert source.structure.inputs.num_leaves == 3
    assert source.structure.targets.rebuild([1, 2]) == Pair(1, [2])
    assert len(source.dataset[0]) == 5


def test_a_dataset_of_inputs_has_no_targets():
    for source in (
        as_source(X),
        as_source(Items(list(X))),
        as_source(TensorDataset(X)),
    ):
        assert not source.structure.has_targets
        assert source.structure.inputs.num_leaves == 1


def test_a_subclass_of_a_tensor_dataset_keeps_what_it_adds():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return 2 * x, y

    source = as_source(Doubled(X, Y))
    assert torch.equal(source.dataset[3][0], 2 * X[3])


def test_the_users_tensors_are_not_copied_nor_changed():
    before = X.clone()
    source = as_source(X, Y)
    assert source.dataset.tensors[0].data_ptr() == X.data_ptr()
    assert torch.equal(X, before)


def test_samples_that_nest_differently_are_refused_by_their_index():
    source = as_source(Items([((X[0], X[1]), 1), ((X[0],), 1)]))
    with pytest.raises(DataError, match=r"Sample 1 .* nests differently from sample 0"):
        source.dataset[1]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (((), {}), "holds no arrays"),
        (Items([]), "has no samples"),
        (X[:0], "has no samples"),
        (torch.tensor(3.0), "holds an array without axes"),
    ],
)
def test_data_without_samples_is_refused_by_its_name(x, message):
    with pytest.raises(DataError, match=f"`validation_data` {message}"):
        as_source(x, name="validation_data")


def test_an_example_is_the_first_sample_repeated():
    source = as_source(X, Y)
    x, y = source.example(4)
    assert torch.equal(x, X[:1].repeat(4, 1))
    assert torch.equal(y, Y[:1].repeat(4))
    assert len(source.example(4, inputs_only=True)) == 1


# Validation -----------------------------------------------------------------------


@given(st.integers(2, 200), st.floats(0.01, 0.99))
def test_a_split_takes_the_last_samples_as_keras_does(count, fraction):
    numbers = torch.arange(count)
    at = math.floor(count * (1.0 - fraction))
    if not 0 < at < count:
        with pytest.raises(DataError, match="validation_split="):
            split_validation(numbers, numbers, fraction)
        return
    train, validation = split_validation(numbers, 10 * numbers, fraction)
    assert [int(x) for x, _ in rows(train)] == list(range(at))
    assert [int(y) for _, y in rows(validation)] == list(range(10 * at, 10 * count, 10))


@pytest.mark.parametrize("fraction", [float("nan"), float("inf"), 1, -0.1, True, "0.2"])
def test_a_fraction_that_leaves_nothing_to_one_part_is_refused(fraction):
    with pytest.raises(DataError, match="validation_split="):
        split_validation(X, Y, fraction)


@pytest.mark.parametrize(
    "validation", [(X[:3], Y[:3]), [X[:3], Y[:3]], TensorDataset(X[:3], Y[:3])]
)
def test_validation_data_goes_before_a_split(validation):
    train, test = fit_sources(X, Y, None, 0.5, validation)
    assert train.num_samples == 10
    assert test.num_samples == 3


def test_a_split_validates_on_the_last_rows_of_a_fit():
    model = IPUModel(reference.network())
    model.compile("sgd", "cross_entropy")
    dataset_free = model.fit(X, Y, batch_size=7, validation_split=0.3, verbose=0)
    expected = reference.evaluate(model.module, X[7:], Y[7:])
    assert dataset_free.history["val_loss"] == [
        pytest.approx(expected["loss"], rel=1e-5)
    ]
    assert dataset_free.dropped_samples == 0


# Which kind of source --------------------------------------------------------------


def test_a_source_stays_as_it_is():
    source = as_source(X, Y)
    assert as_source(source) is source


def test_what_a_loader_gives_is_counted_if_it_tells():
    dataset = TensorDataset(X, Y)
    counted = {
        10: DataLoader(dataset, 4),
        8: DataLoader(dataset, 4, drop_last=True),
        6: DataLoader(dataset, 4, sampler=SubsetRandomSampler(range(6))),
        None: DataLoader(dataset, batch_sampler=[[0, 1], [2]]),
    }
    for count, loader in counted.items():
        source = as_source(loader)
        assert isinstance(source, StreamSource)
        assert source.num_samples == count


def test_the_batch_size_is_the_loaders_own():
    dataset = TensorDataset(X, Y)
    assert as_source(DataLoader(dataset, 4)).batch_size == 4
    assert as_source(DataLoader(dataset, batch_sampler=[[0, 1], [2]])).batch_size == 2
    assert as_source(iter([(X[:3], Y[:3])])).batch_size == 3
    assert as_source(X, Y).batch_size is None
    options = poptorch.Options().deviceIterations(2).replicationFactor(2)
    options.Training.gradientAccumulation(1)
    loader = poptorch.DataLoader(options, dataset, batch_size=2)
    assert loader.combinedBatchSize == 8
    assert as_source(loader).batch_size == 4


def test_a_fit_takes_the_loaders_batch_size_for_an_update():
    model = IPUModel(reference.network())
    model.compile("sgd", "cross_entropy")
    history = model.fit(DataLoader(TensorDataset(X, Y), 5), verbose=0)
    assert history.params["steps"] == 2


def test_one_batch_is_taken_as_it_is():
    source = as_batch({"a": X}, Y)
    assert source.rows_of_first == 10
    (block,) = source.blocks()
    assert torch.equal(block[0], X)
    for x in (TensorDataset(X, Y), iter([X]), None, "x"):
        with pytest.raises(DataError, match="the arrays of one batch"):
            as_batch(x)


def test_a_list_of_numbers_is_refused_by_the_name_of_its_argument():
    with pytest.raises(DataError, match=r"`y` holds a single number .* torch.tensor"):
        as_source(X, Y.tolist())
    with pytest.raises(DataError, match="`sample_weight` holds a single number"):
        as_source(X, Y, [1.0] * 10)


def test_one_loader_for_both_is_one_source():
    loader = DataLoader(TensorDataset(X, Y), 5)
    train, validation = fit_sources(loader, None, None, 0.0, loader)
    assert validation is train
    dataset = TensorDataset(X, Y)
    train, validation = fit_sources(dataset, None, None, 0.0, dataset)
    assert_same_rows(train, validation)


def test_columns_are_targets_of_validation_data_too():
    x = {"input": X, "label": Y}
    train, validation = fit_sources(x, "label", None, 0.0, (x, "label"))
    assert_same_rows(train, validation)
    assert validation.structure.has_targets
    rows_of = Items([{"input": x, "label": int(y)} for x, y in zip(X, Y)])
    _, validation = fit_sources(rows_of, "label", None, 0.0, rows_of)
    assert_same_rows(train, validation)


def test_weights_are_the_third_part():
    weights = torch.arange(10.0)
    for source in (
        as_source(X, Y, weights),
        as_source(TensorDataset(X, Y, weights)),
        as_source(Items(list(zip(X, Y, weights.tolist())))),
    ):
        assert source.structure.has_weights
        assert [float(row[2]) for row in rows(source)] == list(range(10))


def test_an_iterable_of_samples_with_weights_and_no_targets_keeps_its_parts():
    class Stream(IterableDataset):
        def __iter__(self):
            return ((x, None, 2.0) for x in X)

    source = as_source(Stream())
    assert source.structure.has_weights
    assert not source.structure.has_targets


def test_a_frame_is_a_matrix_and_a_series_a_vector():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": [0.5, 1.5], "c": [True, False]})
    source = as_source(frame, frame["a"])
    x, y = source.dataset[1]
    assert x.tolist() == [2.0, 1.5, 0.0]
    assert x.dtype == torch.float32
    assert int(y) == 2
    inputs, target = as_source(frame, "b").dataset[0]
    assert inputs.tolist() == [1.0, 1.0]
    assert float(target) == 0.5
    with pytest.raises(DataError, match="columns that hold no numbers: d"):
        as_source(frame.assign(d=["x", "y"]))
    with pytest.raises(DataError, match="`y` is a series of"):
        as_source(X[:2], pandas.Series(["x", "y"]))


@pytest.mark.parametrize("place", [0, 1])
def test_a_list_of_rows_is_told_from_a_list_of_inputs(place):
    parts = [torch.zeros(32, 3), torch.zeros(32)]
    parts[place] = [np.zeros(3) for _ in range(32)]
    match = r"\[3, 3, 3, \.\.\. 32 in all\].* one array, as with numpy\.stack"
    with pytest.raises(DataError, match=match):
        as_source(*parts)


def test_several_loaders_are_refused_with_a_way_out():
    loader = DataLoader(TensorDataset(X, Y), 2)
    with pytest.raises(DataError, match=r"`y` is a loader, .* by its own evaluate\(\)"):
        as_source(loader, loader)
