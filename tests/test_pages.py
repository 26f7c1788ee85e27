# SPDX-License-Identifier: Apache-2.0
"""The code in the documentation's pages runs: each block of each page."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ipufit
from ipufit import IPUConfig
from tests.callbacks.trackers import (
    MLflowDouble,
    PyplotDouble,
    TensorBoardDouble,
    WandbDouble,
)

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.M | re.S)
LANGUAGES = {"python", "sh", "text", "json", "{eval-rst}", "{toctree}"}
TEXTS = {
    str(path.relative_to(DOCS)): path.read_text("utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if "_build" not in path.parts
}


def blocks(page, language):
    """The blocks of a language in a page, without the indentation of a list."""
    return [
        re.sub(rf"^{indent}", "", code, flags=re.M)
        for indent, name, code in BLOCK.findall(TEXTS[page])
        if name == language
    ]


PAGES = [page for page in TEXTS if blocks(page, "python")]
ELSEWHERE = {  # pages whose code another test runs, which also looks at its results
    "how-to/check.md": "test_screens_of_pages.py::test_a_page_shows",
    "how-to/compare.md": "test_compare.py::test_the_code_of_the_page",
    "how-to/notebooks.md": "test_notebooks.py::test_the_code_of_the_page_runs",
    "how-to/compile-ahead.md": "test_build.py::test_the_code_of_the_page",
    "how-to/transformers.md": "test_migrate.py::test_the_page_on_transformers_runs",
    "reference/errors.md": "test_errors_page.py::test_a_section_says_what_happens",
    "tutorial.md": "test_tutorial.py::test_every_piece_prints_what_the_page_says",
    **{
        page: "test_migrate.py::test_"  # side by side, with what each needs
        for page in PAGES
        if page.startswith("migrate/")
    },
    "reference/by-hand.md": "test_by_hand.py::test_the_code_of_the_page_runs",
}


@pytest.fixture
def services(monkeypatch):
    """Doubles of the services that figures are passed on to."""
    doubles = {
        "torch.utils.tensorboard": TensorBoardDouble(),
        "wandb": WandbDouble(),
        "mlflow": MLflowDouble(),
    }
    if find_spec("torchdata") is None:
        doubles["torchdata"] = types.ModuleType("torchdata")
        loaders = types.SimpleNamespace(StatefulDataLoader=torch.utils.data.DataLoader)
        doubles["torchdata.stateful_dataloader"] = loaders
    if find_spec("matplotlib") is None:
        doubles["matplotlib.pyplot"] = PyplotDouble()
        monkeypatch.setattr("ipufit.planning.pictures._draw", lambda *_: None)
    for name, double in doubles.items():
        monkeypatch.setitem(sys.modules, name, double)


@pytest.mark.usefixtures("services")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    names = {"__name__": "__main__"}  # a page imports what it needs
    for piece in blocks(page, "python"):
        exec(compile(piece, page, "exec"), names)
    if page == "concepts/traced.md":
        assert names["model"].module.beta == 1.0


def test_there_are_pages_with_code():
    assert len(PAGES) > 15
    assert set(PAGES) >= set(ELSEWHERE)


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_a_test_elsewhere_exists(test):
    file, _, name = test.partition("::")
    assert f"def {name}" in (ROOT / "tests" / file).read_text("utf-8")


@pytest.mark.parametrize("page", TEXTS)
def test_no_code_hides_from_the_tests(page):
    """A block has a language that is run or looked at, and none is left open."""
    assert {language for _, language, _ in BLOCK.findall(TEXTS[page])} <= LANGUAGES
    fences = re.findall(r"^ *```", TEXTS[page], re.M)
    assert len(fences) == 2 * len(BLOCK.findall(TEXTS[page]))
    assert "~~~" not in TEXTS[page]


@pytest.mark.parametrize("page", [page for page in TEXTS if blocks(page, "json")])
def test_json_is_json(page):
    for text in blocks(page, "json"):
        json.loads(text)


# Links --------------------------------------------------------------------------------

TRACKED = [*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@pytest.mark.parametrize(
    "path", [*TRACKED, *(DOCS / page for page in TEXTS)], ids=lambda path: path.name
)
def test_links_lead_to_files(path):
    for link in LINK.findall(path.read_text("utf-8")):
        assert (path.parent / link).exists(), link


# Commands -----------------------------------------------------------------------------

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
EXTRAS = set(
    re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
)


@pytest.mark.parametrize("page", [page for page in TEXTS if blocks(page, "sh")])
def test_what_commands_name_is_there(page):
    for command in blocks(page, "sh"):
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= TARGETS
        for extras in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(extras.split(",")) <= EXTRAS
        for module in re.findall(r"-m (benchmarks\.\w+)", command):
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
        for script in re.findall(r"\bexamples/[\w/]+\.py", command):
            assert (ROOT / script).exists()


# Pages that list all there are --------------------------------------------------------


def test_the_page_on_the_config_has_every_field():
    page = TEXTS["reference/config.md"]
    rows = re.findall(r"^\| (`.*?) (?:\([TI]\) )?\|", page, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(one.name for one in dataclasses.fields(IPUConfig))


def test_the_page_on_versions_has_every_extra():
    table = TEXTS["reference/versions.md"].partition("| extra |")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    section = re.findall(r"^\[project.optional-.*?(?=^\[)", text, re.M | re.S)
    assert sorted(named) == sorted(re.findall(r"^(\w+) = \[", section[0], re.M))


def test_the_page_on_losses_has_every_name():
    table = TEXTS["reference/losses.md"].partition("## Names")[2]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    with pytest.raises(ipufit.UnknownNameError) as raised:
        ipufit.IPUModel(torch.nn.Linear(1, 1)).compile("adam", "no such loss")
    listed = re.findall(r"\w+", str(raised.value).partition("Known: ")[2])
    assert sorted(named) == sorted(listed)


def test_the_page_on_callbacks_has_every_one():
    page = TEXTS["how-to/callbacks.md"]
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
