# SPDX-License-Identifier: Apache-2.0
"""The code in the documentation's pages runs."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import ipufit
from ipufit import IPUConfig
from tests.callbacks.trackers import MLflowDouble, TensorBoardDouble, WandbDouble

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {
    "how-to/augmentation.md": 2,
    "how-to/benchmarking.md": 4,
    "how-to/callbacks.md": 14,
    "reference/config.md": 4,
    "how-to/memory.md": 1,
    "how-to/pipelines.md": 5,
    "how-to/precision.md": 5,
    "reference/optimizers.md": 8,
    "concepts/traced.md": 2,
    "how-to/weights.md": 3,
}
"""Pages whose code runs from top to bottom, with the number of its pieces."""


@pytest.fixture
def services(monkeypatch):
    """Doubles of the services that figures are passed on to."""
    doubles = TensorBoardDouble(), WandbDouble(), MLflowDouble()
    for name, double in zip(("torch.utils.tensorboard", "wandb", "mlflow"), doubles):
        monkeypatch.setitem(sys.modules, name, double)


@pytest.mark.usefixtures("services")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    pieces = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.S)
    assert len(pieces) >= PAGES[page]
    names = {"torch": torch, "types": types, "ipufit": ipufit, "x": torch.rand(64, 8)}
    for piece in pieces:
        exec(compile(piece, page, "exec"), names)
    if page == "concepts/traced.md":
        assert names["model"].module.beta == 1.0


def test_the_page_on_the_config_has_every_field():
    page = (DOCS / "reference" / "config.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) (?:\([TI]\) )?\|", page, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(one.name for one in dataclasses.fields(IPUConfig))


def test_the_page_on_callbacks_has_every_one():
    page = (DOCS / "how-to" / "callbacks.md").read_text("utf-8")
    sections = set(re.findall(r"^### (\w+)$", page, re.M))
    rows = set(re.findall(r"^\| \[`(\w+)`\]", page, re.M))
    public = {
        name
        for name in ipufit.__all__
        if isinstance(getattr(ipufit, name), type)
        and issubclass(getattr(ipufit, name), ipufit.Callback)
    }
    assert sections == rows == public - {"Callback"}
    assert len(public) > 15
