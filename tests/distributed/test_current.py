# SPDX-License-Identifier: Apache-2.0
"""Which process this is, as a config says it, and as processes that load hear it."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch
from torch import distributed

from ipufit import ConfigError, _env
from ipufit.distributed import ProcessInfo, configure, get_process_info
from tests.distributed.asking import Answers

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def _by_the_launcher_again():
    yield
    configure(None)


def heard(**settings):
    """What a dataset hears in a process that loads."""
    loader = torch.utils.data.DataLoader(Answers(), None, num_workers=1, **settings)
    return [tuple(answer) for answer in loader]


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("variables", [{}, LAUNCHED, {"RANK": "0"}])
def test_processes_that_load_hear_the_number_of_a_config(monkeypatch, start, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    configure(ProcessInfo(1, 4, 1, "config"))
    assert heard(multiprocessing_context=start) == [(1, 4)]


def test_processes_that_load_hear_the_number_of_a_group(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert get_process_info().launcher == "group"
        assert os.environ[_env.PROCESS] == "0/1:0/1"
    finally:
        distributed.destroy_process_group()
    get_process_info()
    assert _env.PROCESS not in os.environ


def test_a_number_that_is_taken_back_is_told_to_nobody():
    configure(ProcessInfo(1, 4, 1, "config"))
    configure(None)
    assert _env.PROCESS not in os.environ
    assert get_process_info() == ProcessInfo()


@pytest.fixture
def child(monkeypatch):
    """This process as one that another has started."""
    parent = multiprocessing.current_process()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)


@pytest.mark.usefixtures("child")
def test_a_process_launched_by_itself_since_has_its_launchers_number(monkeypatch):
    monkeypatch.setenv(_env.PROCESS, "1/4:0/1")
    assert get_process_info() == ProcessInfo(1, 4, 1, "config")
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert get_process_info() == ProcessInfo(0, 2, 0, "torchrun")


def test_a_script_that_is_no_child_has_its_own_number(monkeypatch):
    monkeypatch.setenv(_env.PROCESS, "1/4:0/1")
    assert get_process_info() == ProcessInfo()
    assert _env.PROCESS not in os.environ  # its own children are told nothing


@pytest.mark.usefixtures("child")
@pytest.mark.parametrize("text", ["1", "4/4:0/1", "a/b"])
def test_a_number_that_ipufit_did_not_tell_is_refused(monkeypatch, text):
    monkeypatch.setenv(_env.PROCESS, text)
    with pytest.raises(ConfigError, match="was not set by ipufit"):
        get_process_info()
