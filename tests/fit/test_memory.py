# SPDX-License-Identifier: Apache-2.0
"""Memory that data, checkpoints and models take."""

from __future__ import annotations

import gc
import linecache
import tracemalloc

import pytest
import torch

from tests import reference


class Rows(torch.utils.data.Dataset):
    """Two million rows that are made when they are read."""

    def __len__(self):
        return 2_000_000

    def __getitem__(self, index):
        return torch.ones(2), torch.ones(1)


def compiled():
    return reference.compiled(torch.nn.Linear(2, 1), optimizer="adam", loss="mse")


@pytest.mark.parametrize("shuffle", [False, True])
def test_indices_of_rows_are_not_listed(shuffle):
    model = compiled()
    tracemalloc.start()
    try:
        model.fit(Rows(), batch_size=4, steps_per_epoch=2, shuffle=shuffle, verbose=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32e6  # a list of two million numbers has 80e6 bytes


def test_checkpoint_is_copied_unless_it_is_written_at_once():
    model = compiled()
    x = torch.rand(8, 2)
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    copy, view = model.checkpoint(), model.checkpoint(copied=False)
    weight = dict(model.module.named_parameters())["weight"]
    assert view.tensors["model"]["weight"].data_ptr() == weight.data_ptr()
    before = {
        group: {name: tensor.clone() for name, tensor in tensors.items()}
        for group, tensors in copy.tensors.items()
    }
    assert before["optimizer"]
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    model.checkpoint()
    assert not torch.equal(before["model"]["weight"], weight)
    for group, tensors in before.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, copy.tensors[group][name])


def test_nothing_is_left_of_a_model():
    def use_a_model():
        x = torch.rand(8, 2)
        model = compiled()
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
        model.evaluate(x, x[:, :1], verbose=0)

    def left():
        gc.collect()
        return len(gc.get_objects()), len(linecache.cache)

    for _ in range(3):
        use_a_model()
    objects, sources = left()
    for _ in range(10):
        use_a_model()
    objects_after, sources_after = left()
    assert objects_after - objects < 100  # 10 of each model
    assert sources_after == sources
