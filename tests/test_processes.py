# SPDX-License-Identifier: Apache-2.0
"""The pool of processes that tests use."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist


def total(number):
    value = torch.tensor(number + dist.get_rank())
    dist.all_reduce(value)
    return value.item(), dist.get_rank(), os.getpid()


def fail(index):
    if dist.get_rank() == index:
        raise KeyError(f"process {index}")
    dist.barrier()


def end(index):
    if dist.get_rank() == index:
        os._exit(3)


def variable(name):
    return os.environ.get(name)


def test_results_come_in_order_from_processes_that_stay(pool):
    first, second = pool.run(total, 3), pool.run(total, number=5)
    assert [row[:2] for row in first] == [(7, 0), (7, 1)]
    assert [row[:2] for row in second] == [(11, 0), (11, 1)]
    assert [row[2] for row in first] == [row[2] for row in second]


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_error_is_raised(pool, index):
    with pytest.raises(KeyError, match=f"process {index}") as caught:
        pool.run(fail, index)
    assert "in fail" in str(caught.value.__cause__)
    assert len(pool.run(total, 3)) == 2


def test_a_process_that_ends_is_an_error_and_replaced(pool):
    with pytest.raises(RuntimeError, match="process 1 has ended"):
        pool.run(end, 1)
    assert [row[:2] for row in pool.run(total, 3)] == [(7, 0), (7, 1)]


def test_the_environment_is_that_of_a_run(pool):
    given = {"IPUFIT_A_TEST": "1"}
    assert pool.run(variable, "IPUFIT_A_TEST", environment=given) == ["1", "1"]
    assert pool.run(variable, "IPUFIT_A_TEST") == [None, None]
