# SPDX-License-Identifier: Apache-2.0
"""Streams: drawn once, begun anew, and held to their first batch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ipufit import DataError, poptorch
from ipufit.data import StreamSource, as_source
from ipufit.data.structure import same_rows
from tests.emulator._datasets import preload_fork_server

preload_fork_server()


def stream(batches, **settings):
    return StreamSource(batches, lambda batch: batch, name="x", **settings)


def numbers(*sizes):
    return [(part,) for part in torch.arange(sum(sizes)).split(list(sizes))]


def seen(source):
    return [number for block in source.blocks() for number in block[0].tolist()]


def test_the_first_batch_is_drawn_once_and_given_first():
    drawn = []

    def batches():
        for index, batch in enumerate(numbers(2, 3)):
            drawn.append(index)
            yield batch

    source = stream(batches())
    assert drawn == [0]
    assert source.is_one_shot
    assert [int(t) for t in source.first()] == [0]
    assert source.rows_of_first == 2
    assert seen(source) == [0, 1, 2, 3, 4]
    assert drawn == [0, 1]
    assert seen(source) == []


def test_what_can_be_begun_anew_is():
    source = stream(numbers(2, 3))
    assert not source.is_one_shot
    for _ in range(3):
        assert seen(source) == [0, 1, 2, 3, 4]


def test_a_pass_that_was_left_does_not_shift_the_next():
    source = stream(numbers(2, 3))
    next(source.blocks())
    assert seen(source) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda dataset: DataLoader(dataset, 2),
        lambda dataset: DataLoader(dataset, 2, num_workers=1, persistent_workers=True),
        lambda dataset: poptorch.DataLoader(poptorch.Options(), dataset, 2),
        lambda dataset: poptorch.DataLoader(
            poptorch.Options(), dataset, 2, mode=poptorch.DataLoaderMode.Async
        ),
    ],
)
def test_no_loader_gives_a_batch_twice(make):
    # PopTorch's asynchronous loader begins anew whenever its iterator is asked for.
    loader = make(TensorDataset(torch.arange(6)))
    try:
        source = as_source(loader)
        for _ in range(3):
            assert seen(source) == [0, 1, 2, 3, 4, 5]
    finally:
        if hasattr(loader, "terminate"):
            loader.terminate()


def test_an_accessor_of_poptorchs_is_no_generator():
    accessor = poptorch.AsynchronousDataAccessor([torch.arange(2), torch.arange(2)])
    source = StreamSource(accessor, lambda batch: (batch,), name="x")
    assert not source.is_one_shot
    assert seen(source) == seen(source) == [0, 1, 0, 1]
    accessor.terminate()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "`x` has no samples"),
        ([(torch.zeros(0),)], "first batch of `x` has no rows"),
        ([("word",)], "A batch of `x` holds no arrays"),
        ([(1.0,)], "A batch of `x` holds a single number"),
        ([(torch.zeros(2), torch.zeros(3))], r"different numbers of samples: \[2, 3\]"),
        ([(torch.tensor(1.0),)], "an array without axes"),
    ],
)
def test_a_first_batch_that_cannot_be_used_is_refused_at_once(batches, message):
    with pytest.raises(DataError, match=message):
        stream(batches)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(2, 4), 1), r"shape \(4,\), and the first had"),
        ((torch.zeros(2, 3).int(), 1), "torch.int32"),
        ((torch.zeros(2, 3),), "nests differently from the first"),
        ((torch.zeros(2, 3), "word"), "nests differently|a str"),
    ],
)
def test_a_later_batch_unlike_the_first_is_refused(batch, message):
    source = stream([(torch.zeros(2, 3), 1), batch])
    with pytest.raises(DataError, match=message):
        list(source.blocks())


def test_a_number_stands_for_every_row():
    source = stream([(torch.zeros(2), 0.5), (torch.zeros(3), 1.5)])
    rows = torch.cat([block[1] for block in source.blocks()])
    assert rows.tolist() == [0.5, 0.5, 1.5, 1.5, 1.5]
    assert same_rows([torch.zeros(2), True], "`x`")[1].tolist() == [True, True]


def test_targets_and_weights_must_be_numbers():
    for parts, message in (
        ((torch.zeros(1),), "`x` has no targets to train with"),
        ((torch.zeros(1), "word"), "targets of `x` are no numbers: .* 'word'"),
        ((torch.zeros(1), 1, "word"), "weights of `x` are no numbers: .* 'word'"),
    ):
        with pytest.raises(DataError, match=message):
            stream([parts]).require_targets("x", "train")
