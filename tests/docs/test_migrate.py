# SPDX-License-Identifier: Apache-2.0
"""Both sides of the pages on moving to ipufit run, and end with the same numbers.

A page has code that both sides share, then `## Before` and `## After`. Blocks of
`text` are another library's API, which can't run here.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ipufit
import ipufit.emulator
from examples.ports.count_lines import lines_of_code

PAGES = Path(__file__).parents[2] / "docs" / "migrate"
COUNTED = re.compile(r"^Lines of code: (\d+) before, (\d+) after\.", re.M)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
NEEDS = re.compile(r"<!-- needs: ([\w ,]+) -->")
FLAGS = re.M | re.S
BOTH_RUN = ["pytorch", "poptorch"]


class Page:
    """A page, taken apart at its headings."""

    def __init__(self, name):
        text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        head, *sections = re.split(r"^## (.*)\n", text, flags=re.M)
        self.text = text
        self.sections = dict(zip(sections[::2], sections[1::2]))
        self.shared = self.code(head)
        self.counted = COUNTED.search(text)

    @staticmethod
    def code(text, *kinds):
        """The blocks of some kinds in a text, joined."""
        found = BLOCK.findall(text)
        return "\n".join(
            block for kind, block in found if kind in (kinds or ["python"])
        )

    def before(self, *kinds):
        return self.code(self.sections["Before"], *kinds)

    @property
    def after(self):
        return self.code(self.sections["After"])

    def needs(self, heading):
        """Packages that the code under a heading needs."""
        return [
            name.strip()
            for names in NEEDS.findall(self.sections[heading])
            for name in names.split(",")
        ]


def run(page, side, **names):
    """Run a side of a page after what both share; give the names it leaves."""
    missing = [name for name in page.needs(side) if not has(name)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    code = page.shared + "\n" + (page.before() if side == "Before" else page.after)
    exec(compile(code, side, "exec"), names)
    return names


def has(name):
    return name in sys.modules or importlib.util.find_spec(name) is not None


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, unsynced):
    monkeypatch.chdir(tmp_path)
    if has("tqdm"):  # whose monitor is a thread that stays
        bar = importlib.import_module("tqdm").tqdm
        monkeypatch.setattr(bar, "monitor_interval", 0)


@pytest.fixture
def poptorch(monkeypatch):
    """The emulator under PopTorch's name, unless the real one is there."""
    if not has("poptorch"):
        monkeypatch.setitem(sys.modules, "poptorch", ipufit.emulator)


@pytest.mark.usefixtures("poptorch")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the loop's loader, on its size
@pytest.mark.parametrize("name", BOTH_RUN)
def test_both_sides_end_with_the_same_numbers(name):
    page = Page(name)
    before, after = run(page, "Before"), run(page, "After")
    assert before["accuracy"] == pytest.approx(after["accuracy"], abs=1e-6)
    assert after["accuracy"] > 0.5
    trained = zip(before["network"].parameters(), after["network"].parameters())
    for one, other in trained:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_side_of_ipufit_runs_without_keras():
    page = Page("keras")
    names = run(page, "After")
    assert names["result"]["accuracy"] > 0.8
    others = [h for h in page.sections if h not in ("Before", "After")]
    pieces = [code for h in others if (code := page.code(page.sections[h]))]
    for piece in pieces:  # each asserts what it says
        exec(compile(piece, "keras.md", "exec"), names)
    assert len(pieces) == 5


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_module_of_lightning_trains(monkeypatch):
    if not has("lightning"):  # a base class that does nothing stands in for it
        package, library = (ModuleType(n) for n in ("lightning", "lightning.pytorch"))
        package.pytorch, library.LightningModule = library, torch.nn.Module
        monkeypatch.setitem(sys.modules, "lightning", package)
        monkeypatch.setitem(sys.modules, "lightning.pytorch", library)
    after = run(Page("lightning"), "After")
    assert after["accuracy"] > 0.5
    assert set(after["history"].history) == {"loss", "train_loss", "val_acc"}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_model_of_transformers_trains():
    after = run(Page("optimum"), "After")
    assert after["accuracy"] > 0.8
    assert Path("run/config.json").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_page_on_transformers_runs():
    text = (PAGES.parent / "how-to" / "transformers.md").read_text(encoding="utf-8")
    names, pieces = {}, 0
    for needs, code in re.findall(
        NEEDS.pattern + r"\n```python\n(.*?)^```", text, FLAGS
    ):
        name, _, version = needs.partition(",")[0].partition(" ")
        if not has(name):
            pytest.skip(f"needs {name}")
        if importlib.import_module(name).__version__ >= version:
            exec(compile(code, needs, "exec"), names)
            pieces += 1
    assert pieces >= 2
    assert names["history"].history["accuracy"][-1] > 0.5
    if pieces == 3:
        network, mask = names["network"].eval(), names["mask"]
        with torch.no_grad():
            expected = network(names["tokens"], attention_mask=mask).logits
        torch.testing.assert_close(names["rows"], expected, atol=1e-4, rtol=1e-4)


def every_page():
    return sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")


@pytest.mark.parametrize("name", every_page())
def test_the_lines_of_both_sides_are_counted(name):
    page = Page(name)
    counts = tuple(
        str(lines_of_code(code)) for code in (page.before("python", "text"), page.after)
    )
    assert page.counted is not None
    assert page.counted.groups() == counts
    row = next(
        row
        for row in (PAGES / "index.md").read_text("utf-8").splitlines()
        if f"({name}.md)" in row
    )
    assert f"| {counts[0]} | {counts[1]} |" in row


def test_the_index_has_every_page():
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) >= set(every_page())
    assert len(every_page()) >= 5
