# SPDX-License-Identifier: Apache-2.0
"""The pages' code runs and prints what they say; their links and lists hold."""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import sys
import types
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ipufit
import ipufit.emulator
from ipufit import IPUConfig, IPUModel
from tests.callbacks.trackers import (
    MLflowDouble,
    PyplotDouble,
    TensorBoardDouble,
    WandbDouble,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.M | re.S)
LANGUAGES = {"python", "sh", "text", "json", "{eval-rst}", "{glossary}", "{toctree}"}
TEXTS = {
    str(path.relative_to(DOCS)): path.read_text("utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if {"_build", "examples"}.isdisjoint(path.parts[len(DOCS.parts) :])
}


def blocks(page, language):
    """The blocks of a language in a page, without the indentation of a list."""
    return [
        re.sub(rf"^{indent}", "", code, flags=re.M)
        for indent, name, code in BLOCK.findall(TEXTS[page])
        if name == language
    ]


PAGES = [page for page in TEXTS if blocks(page, "python")]
try:  # here, because it keeps the frames of its first import, and all names in them
    import optuna
except ModuleNotFoundError:
    optuna = None

TUTORIAL, ERRORS, BY_HAND = "tutorial.md", "reference/errors.md", "reference/by-hand.md"
ELSEWHERE = {  # pages whose code another test runs, which also looks at its results
    TUTORIAL,
    ERRORS,
    "how-to/transformers.md",  # tests/docs/test_migrate.py, as pages of `migrate`
    *(page for page in PAGES if page.startswith("migrate/")),
}
for (
    page
) in PAGES:  # tests/docs/test_screens_of_pages.py, which needs matplotlib for pictures
    has_picture = re.search(r"^!\[.*\.svg\)$", TEXTS[page], re.M)
    if "<!-- prints" in TEXTS[page] and (not has_picture or find_spec("matplotlib")):
        ELSEWHERE.add(page)
# Page -> what has to be so after its code has run, by its names and what it printed.
RESULTS = {
    "concepts/traced.md": lambda names, _: names["model"].module.beta == 1.0,
    "how-to/notebooks.md": lambda _, out: out.endswith("torch.Size([40, 4])\n"),
    "how-to/compare.md": lambda _, out: "tensor" in out,
    "how-to/compile-ahead.md": lambda names, _: (
        names["built"].programs[-1].name == "training"
    ),
    BY_HAND: lambda *_: len(os.listdir("run")) == 3,
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
        monkeypatch.setattr("ipufit.planning.pictures._drawn", lambda *_: b"")
    for name, double in doubles.items():
        monkeypatch.setitem(sys.modules, name, double)


@pytest.mark.usefixtures("services", "unsynced")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    if page == "how-to/notebooks.md" and find_spec("poptorch") is not None:
        pytest.skip("PopTorch is installed")
    if "import optuna" in TEXTS[page] and optuna is None:
        pytest.skip("Optuna isn't installed")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}  # a page imports what it needs
    try:
        for piece in blocks(page, "python"):
            if "model.onnx" not in piece:  # needs packages, and a newer torch than 2.0
                exec(compile(piece, page, "exec"), names)
    finally:
        ipufit.emulator.uninstall()
        if "Graphs" in names:  # its parser would keep all that the page has made
            ipufit.poptorch.registerCustomArgParser(names["Graphs"], None)
    if page in RESULTS:
        assert RESULTS[page](names, capsys.readouterr().out)


def test_the_tutorial_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pieces = re.findall(
        r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", TEXTS[TUTORIAL], re.S
    )
    assert sum(bool(expected) for _, expected in pieces) >= 7
    names, number = {"__name__": "__main__"}, re.compile(r"\d+\.\d+")
    for code, expected in pieces:
        with contextlib.redirect_stdout(io.StringIO()) as file:
            exec(compile(code, TUTORIAL, "exec"), names)
        printed = file.getvalue()
        assert number.sub("#", printed) == number.sub("#", expected)
        # Decimals may differ as rounding on another machine makes them.
        seen, said = (
            [float(n) for n in number.findall(t)] for t in (printed, expected)
        )
        assert seen == pytest.approx(said, abs=0.03)
    assert os.listdir() == ["spirals.safetensors"]


# Errors -------------------------------------------------------------------------------

PRELUDE, *SECTIONS = re.split(r"^## ", TEXTS[ERRORS], flags=re.M)


def run(code, names):
    exec(compile(code, ERRORS, "exec"), names)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_an_error_comes_as_the_page_says_and_its_fix_works(
    section, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if "import pandas" in section:
        pytest.importorskip("pandas")
    names = {}
    run(BLOCK.search(PRELUDE)[3], names)
    (_, _, fails), (_, _, message), *fixes = BLOCK.findall(section)
    name, _, words = " ".join(message.split()).partition(": ")  # wrapped on the page
    kind = ipufit.poptorch.Error if name == "Error" else getattr(ipufit, name)
    if issubclass(kind, Warning):
        with pytest.warns(kind, match=re.escape(words)):
            run(fails, names)
    else:
        with pytest.raises(kind) as raised:
            run(fails, names)
        assert type(raised.value) is kind
        assert words in " ".join(str(raised.value).split())
    with warnings.catch_warnings():
        warnings.simplefilter("error", ipufit.IpufitWarning)
        for _, _, code in fixes:
            run(code, names)


# What scripts write by hand -----------------------------------------------------------

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXTS[BY_HAND].splitlines()
    if re.match(r"\| \d+ \|", line)
]


def test_the_readme_has_the_number_of_concerns():
    assert f"[{len(ROWS)} concerns]" in (ROOT / "README.md").read_text("utf-8")


def public(name):
    """A public name, or a method of the model without its class."""
    owner, _, own = name.rpartition(".")
    if owner in ("", "IPUModel") and name not in ipufit.__all__:
        return getattr(IPUModel, own)
    return getattr(ipufit, name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_arguments_and_tests_of_a_concern_exist(row):
    _, _, by_hand, lines, cell, test = row
    assert re.search(r": `[\w/]+\.py`$", by_hand)
    assert re.fullmatch(r"\d+(\+|-\d+)?|-|all over", lines)
    calls = re.findall(r"`([A-Za-z_.]+)(?:\(([^`]*)\))?`", cell)
    names = [call for call in calls if call[0] != "requires_grad"]
    for name, inside in names:
        arguments = re.findall(r"(\w+)=", inside)
        assert set(arguments) <= set(inspect.signature(public(name)).parameters)
    assert names or "requires_grad" in cell
    file, function = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", test).groups()
    assert re.search(rf"^def {function}\(", (ROOT / file).read_text("utf-8"), re.M)


# Languages and links ------------------------------------------------------------------


def test_no_code_hides_from_the_tests():
    """A block has a language that is run or looked at, and none is left open."""
    for page, text in TEXTS.items():
        found = BLOCK.findall(text)
        assert {language for _, language, _ in found} <= LANGUAGES, page
        assert len(re.findall(r"^ *```", text, re.M)) == 2 * len(found), page
        assert "~~~" not in text, page
        for one in blocks(page, "json"):
            json.loads(one)


COLUMNS = 100


def test_no_screen_is_wider_than_its_page():
    """Of what is printed: blocks of text, and indented ones, but not lists."""
    wide = [
        (page, line)
        for page, text in TEXTS.items()
        for line in [
            *(line for code in blocks(page, "text") for line in code.splitlines()),
            *re.findall(r"^ {4}.*", BLOCK.sub("", text), re.M),
        ]
        if len(line) > COLUMNS
    ]
    assert wide == []
    assert sum(len(blocks(page, "text")) for page in TEXTS) > 20


LINKED = [
    *ROOT.glob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *map(DOCS.joinpath, TEXTS),
]


def anchors(page):
    """The anchors of a page's headings, as Markdown's sites make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", text, re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


def test_links_lead_to_files_and_headings():
    for page in LINKED:
        text = page.read_text("utf-8")
        for file, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)]+)?\)", text):
            target = page.parent / file if file else page
            assert target.exists(), (page, file)
            assert not anchor or anchor[1:] in anchors(target), (page, file, anchor)


# Commands -----------------------------------------------------------------------------

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
EXTRAS = re.findall(
    r"^(\w+) = \[",
    re.search(r"^\[project.optional-.*?(?=^\[)", PYPROJECT, re.M | re.S)[0],
    re.M,
)


@pytest.mark.parametrize("page", [page for page in TEXTS if blocks(page, "sh")])
def test_what_commands_name_is_there(page):
    for command in blocks(page, "sh"):
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= TARGETS
        for extras in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(extras.split(",")) <= set(EXTRAS)
        for module in re.findall(r"-m (benchmarks\.\w+)", command):
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
        for script in re.findall(r"\bexamples/[\w/]+\.py", command):
            assert (ROOT / script).exists()


# Pages that list all there are --------------------------------------------------------


def first_cells(text, form="(`.*?) "):
    """Names in the first cells of the rows of a table."""
    rows = re.findall(rf"^\| {form}\|", text, re.M)
    return sorted(name for row in rows for name in re.findall(r"`(\w+)`", row))


def test_pages_have_every_field_extra_and_loss():
    fields = sorted(one.name for one in dataclasses.fields(IPUConfig))
    form = r"(`.*?) (?:\([TI]\) )?"
    assert first_cells(TEXTS["reference/config.md"], form) == fields
    table = TEXTS["reference/versions.md"].partition("| extra |")[2]
    assert first_cells(table) == sorted(EXTRAS)
    with pytest.raises(ipufit.UnknownNameError) as raised:
        IPUModel(torch.nn.Linear(1, 1)).compile("adam", "no such loss")
    losses = re.findall(r"\w+", str(raised.value).partition("Known: ")[2])
    table = TEXTS["reference/losses.md"].partition("## Names")[2]
    assert first_cells(table) == sorted(losses)


def test_the_page_on_callbacks_has_every_one():
    page = TEXTS["how-to/callbacks.md"]
    sections = set(re.findall(r"^### (\w+)$", page, re.M))
    rows = set(re.findall(r"^\| \[`(\w+)`\]", page, re.M))
    classes = {
        name
        for name in ipufit.__all__
        if isinstance(getattr(ipufit, name), type)
        and issubclass(getattr(ipufit, name), ipufit.Callback)
    }
    assert sections == rows == classes - {"Callback"}
    assert len(classes) > 15
