# SPDX-License-Identifier: Apache-2.0
"""Processes that call different methods, or with other arguments, are told at once."""

from __future__ import annotations

import re

import pytest
import torch

import ipufit
from ipufit import DataError, ProcessError
from ipufit.distributed import get_process_info, processes
from tests.processes.runs import model_of, samples

X, Y, _ = samples(32)
FIT = {"x": X, "y": Y, "batch_size": 8, "epochs": 1, "verbose": 0}
STOP = ipufit.EarlyStopping("loss")

# Method and arguments of process 0, of process 1, and words of the message.
DIFFERENT = {
    "methods": (
        ("fit", FIT),
        ("evaluate", {"x": X, "y": Y, "verbose": 0}),
        "process 0 is at fit.*process 1 is at evaluate",
    ),
    "batch sizes": (("fit", FIT), ("fit", {**FIT, "batch_size": 16}), "size=16"),
    "epochs": (("fit", FIT), ("fit", {**FIT, "epochs": 2}), "epochs=2"),
    "arrays": (("fit", FIT), ("fit", {**FIT, "x": X[:30], "y": Y[:30]}), "samples=30"),
    "callbacks": (("fit", FIT), ("fit", {**FIT, "callbacks": [STOP]}), "EarlyStopping"),
    "validation": (
        ("fit", FIT),
        ("fit", {**FIT, "validation_data": (X, Y)}),
        "validation_samples=32",
    ),
    "batches": (
        ("train_on_batch", {"x": X, "y": Y}),
        ("test_on_batch", {"x": X, "y": Y}),
        "process 0 is at train_on_batch.*process 1 is at test_on_batch",
    ),
    "rows to predict": (("predict", {"x": X}), ("predict", {"x": X[:30]}), "samples=3"),
}


def told(calls):
    method, arguments = calls[get_process_info().index]
    try:
        getattr(model_of(), method)(**arguments)
    except ProcessError as error:
        return str(error)


@pytest.mark.parametrize("name", DIFFERENT)
def test_processes_that_do_different_things_are_told_what_each_does(pool, name):
    *calls, words = DIFFERENT[name]
    for message in pool.run(told, calls):
        assert message is not None
        assert "The processes don't do the same: process 0 is at " in message
        assert re.search(words, message)


def told_of_rows(validates):
    """What a process is told that makes or splits its arrays without a common seed."""
    own = torch.Generator().manual_seed(get_process_info().index)
    train, rest = torch.utils.data.random_split(
        torch.utils.data.TensorDataset(X, Y), [24, 8], own
    )
    data = {"x": X, "y": Y, "validation_data": rest} if validates else {"x": train}
    try:
        model_of().fit(**{**FIT, "y": None, **data})
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("validates", [False, True])
def test_arrays_that_are_not_the_same_everywhere_are_refused(pool, validates):
    for message in pool.run(told_of_rows, validates):
        name = "validation_data" if validates else "x"
        assert f"arrays of `{name}` have other rows in some processes" in message
        assert "manual_seed(0)" in message


def exchanged(kinds):
    """Exchange in another way in each process, and then in the same way in all."""
    everyone = processes()
    ways = {
        "sum": lambda: everyone.summed(X[0]),
        "longer sum": lambda: everyone.summed(X),
        "gather": lambda: everyone.gathered("a"),
        "first": lambda: everyone.first("a"),
        "tensors": lambda: everyone.broadcast([X]),
        "barrier": everyone.barrier,
    }
    try:
        ways[kinds[everyone.index]]()
    except ProcessError as error:
        return str(error), everyone.gathered(everyone.index)


@pytest.mark.parametrize(
    "kinds",
    [
        ("sum", "longer sum"),
        ("sum", "gather"),
        ("first", "tensors"),
        ("gather", "barrier"),
    ],
)
def test_an_exchange_is_never_taken_for_another(pool, kinds):
    for message, after in pool.run(exchanged, kinds):
        assert message.startswith("The processes don't do the same")
        assert after == [0, 1]
