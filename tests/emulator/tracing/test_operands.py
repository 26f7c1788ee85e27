# SPDX-License-Identifier: Apache-2.0
"""Tensors are found and replaced wherever torch nests them."""

from __future__ import annotations

import collections

import torch

from ipufit.emulator._tracing.operation import (
    has_tensors,
    map_leaves,
    map_tensors,
    tensors_in,
)


def make_nested():
    a, b, c, d = (torch.tensor(i) for i in range(4))
    return ((a, [b, "text"]), {"k": slice(c, None, 2), "n": 3}, d), [a, b, c, d]


def test_every_tensor_is_found_in_order():
    nested, tensors = make_nested()
    found = list(tensors_in(nested))
    assert len(found) == 4
    assert all(left is right for left, right in zip(found, tensors))
    assert has_tensors(nested)


def test_nothing_is_found_where_there_is_nothing():
    assert not has_tensors((1, [None, {"k": slice(1, 2)}], "text"))


def test_tensors_are_replaced_and_the_rest_is_kept():
    nested, _ = make_nested()
    assert map_tensors(nested, int) == (
        (0, [1, "text"]),
        {"k": slice(2, None, 2), "n": 3},
        3,
    )


def test_what_does_not_change_stays_the_same_object():
    result = torch.ones(3).max(0)
    assert map_tensors(result, lambda tensor: tensor) is result


def test_named_results_keep_their_class():
    pair = collections.namedtuple("pair", ["left", "right"])
    result = map_tensors(pair(torch.tensor(1), "kept"), lambda tensor: tensor + 1)
    assert isinstance(result, pair)
    assert result == (2, "kept")


def test_results_of_torch_can_be_replaced():
    result = map_tensors(torch.ones(3).max(0), lambda tensor: tensor + 1)
    assert [int(value) for value in result] == [2, 1]


def test_leaves_are_everything_and_containers_become_plain():
    size = torch.Size([2, 3])
    mapped = map_leaves((size, {"k": slice(1, None)}), str)
    assert mapped == (("2", "3"), {"k": slice("1", "None", "None")})
    assert type(mapped[0]) is tuple
