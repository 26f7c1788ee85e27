# SPDX-License-Identifier: Apache-2.0
"""The cache of executables that the emulator hasn't got."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch


@pytest.fixture(autouse=True)
def _hears_info(caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")


def compile_with(options):
    poptorch.inferenceModel(nn.Identity(), options).compile(torch.ones(4))


def test_nothing_is_cached_and_that_is_said(tmp_path, caplog):
    cache = tmp_path / "cache"
    compile_with(poptorch.Options().enableExecutableCaching(str(cache)))
    assert "writes nothing into the cache" in caplog.text
    assert os.listdir(tmp_path) == []


def test_the_environment_turns_it_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    compile_with(poptorch.Options())
    assert "writes nothing into the cache" in caplog.text


def shared_by_two(path):
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    return options if path is None else options.enableExecutableCaching(str(path))


def test_processes_without_a_cache_are_warned(caplog):
    compile_with(shared_by_two(None))
    assert "each of the 2 processes would compile" in caplog.text


@pytest.mark.parametrize("place", [".", "a", "a/b"])
def test_processes_share_a_folder_that_exists_or_can_be_made(tmp_path, caplog, place):
    compile_with(shared_by_two(tmp_path / place))
    assert "would compile" not in caplog.text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["file", "file/cache"])
def test_processes_need_a_folder_to_write_to(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match="can't be written to"):
        compile_with(shared_by_two(tmp_path / place))
