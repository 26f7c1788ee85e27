# SPDX-License-Identifier: Apache-2.0
"""The documentation's site: built without a warning, complete, and searchable.

These tests need Sphinx: tox's environment `docs` runs them.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ipufit

pytest.importorskip("sphinx", reason="the environment docs has Sphinx")

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "ipufit",
    "ipufit.callbacks",
    "ipufit.distributed",
    "ipufit.emulator",
    "ipufit.emulator.enums",
    "ipufit.emulator.ops",
    "ipufit.emulator.optim",
    "ipufit.emulator.options",
    "ipufit.errors",
    "ipufit.losses",
    "ipufit.integrations.lightning",
    "ipufit.metrics",
    "ipufit.optimizers",
]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site, IPUFIT_SITE if that is set.

    A warning is an error.
    """
    named = os.environ.get("IPUFIT_SITE")
    folder = Path(named) if named else tmp_path_factory.mktemp("site")
    options = ["-q", "-E", "-W", "--keep-going", "-n", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options]
    environment = {**os.environ, "IPUFIT_BACKEND": "emulator"}
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def entries(site):
    """The full names that the site's inventory has entries of."""
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, uri: uri)
    return {
        name
        for kind, objects in inventory.items()
        if kind.startswith("py:")
        for name in objects
    }


# Complete -----------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_entry(entries, package):
    methods = {name for name in vars(ipufit.IPUModel) if not name.startswith("_")}
    assert {f"ipufit.IPUModel.{name}" for name in methods} <= entries
    module = importlib.import_module(package)
    classes = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == package
    ]
    names = getattr(module, "__all__", classes)
    # One that another package exports, too, has its entry there.
    homes = {package, "ipufit", "ipufit.emulator"}
    missing = [n for n in names if not {f"{home}.{n}" for home in homes} & entries]
    assert missing == [], "add them to a page in docs/reference/api"
    assert names


# Links --------------------------------------------------------------------------------


def test_no_link_within_the_site_is_dead(site):
    pages = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    anchors = {
        path: set(re.findall(r'\b(?:id|name)="([^"]+)"', text))
        for path, text in pages.items()
    }
    dead, count = [], 0
    for path, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]*)"', text):
            if re.match(r"[a-z]+:|$", link):
                continue
            count += 1
            file, _, anchor = link.partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            if target.is_dir():
                target /= "index.html"
            known = anchors.get(target, {anchor})
            if not target.exists() or (anchor and anchor not in known):
                dead.append((path.name, link))
    assert dead == []
    assert count > 1000


def test_each_example_has_a_card(site):
    cards = re.findall(
        r'class="sd-stretched-link [^"]*" href="examples/(\w+)\.html"',
        (site / "examples.html").read_text("utf-8"),
    )
    table = (ROOT / "examples" / "README.md").read_text("utf-8")
    assert cards == re.findall(r"^\| \[(\w+)\.py\]", table, re.M)


# Search -------------------------------------------------------------------------------


KEYWORDS = {
    "available callbacks": "how-to/callbacks",
    "available metrics": "reference/metrics",
    "batch size": "concepts/batch",
    "callbacks": "how-to/callbacks",
    "changelog": "changelog",
    "categorical": "how-to/tables",
    "continue training": "how-to/resume",
    "custom loss": "questions/own-loss",
    "data": "how-to/data",
    "dataloader": "how-to/data",
    "early stopping": "how-to/callbacks",
    "float16": "how-to/precision",
    "glossary": "glossary",
    "gradient accumulation": "reference/config",
    "huggingface": "how-to/transformers",
    "hydra": "how-to/hyperparameters",
    "hyperparameter": "how-to/hyperparameters",
    "install": "install",
    "learning rate": "reference/optimizers",
    "list of losses": "reference/losses",
    "list of metrics": "reference/metrics",
    "loss": "reference/losses",
    "metrics": "reference/metrics",
    "multi-node": "how-to/pods",
    "optimizer": "reference/optimizers",
    "optuna": "how-to/hyperparameters",
    "out of memory": "questions/out-of-memory",
    "pandas": "how-to/tables",
    "pipeline": "how-to/pipelines",
    "precision": "how-to/precision",
    "predict": "tutorial",
    "quick start": "tutorial",
    "quickstart": "tutorial",
    "replicas": "how-to/pods",
    "resume": "how-to/resume",
    "save": "questions/save-and-load",
    "trainable, but not among the optimizer's parameters": "reference/errors",
    "U-Net": "how-to/segmentation",
    "unet": "how-to/segmentation",
    "verbose": "how-to/callbacks",
    "which optimizers": "reference/optimizers",
}
"""Words that people look for, and the page that the first three results must have."""


def results_of(site, queries):
    """The addresses of each query's results, best first, by the site's own scripts."""
    script = Path(__file__).with_name("site_search.js")
    done = subprocess.run(
        ["node", str(script), str(site), *queries],
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def first_results(site, queries):
    """The address of the first result of each query."""
    results = results_of(site, queries)
    return [addresses[0] if addresses else None for addresses in results]


@pytest.mark.skipif(shutil.which("node") is None, reason="node isn't installed")
def test_a_keyword_leads_to_its_page(site):
    results = zip(KEYWORDS.items(), results_of(site, [*KEYWORDS]))
    wrong = {
        word: (page, addresses[:3])
        for (word, page), addresses in results
        if page not in [address.partition("#")[0] for address in addresses[:3]]
    }
    assert wrong == {}


@pytest.mark.skipif(shutil.which("node") is None, reason="node isn't installed")
def test_the_first_result_answers_the_question(site):
    pages = [p for p in (ROOT / "docs/questions").glob("*.md") if p.stem != "index"]
    titles = [page.read_text("utf-8").partition("\n")[0].lstrip("# ") for page in pages]
    found = [(one or "").partition("#")[0] for one in first_results(site, titles)]
    assert found == [f"questions/{page.stem}" for page in pages]


@pytest.mark.skipif(shutil.which("node") is None, reason="node isn't installed")
def test_a_message_leads_to_the_page_on_errors_whatever_names_it_has(site):
    text = (ROOT / "docs/reference/errors.md").read_text("utf-8")
    messages = re.findall(r"^```text\n(.*?)```", text, flags=re.M | re.S)
    mine = [re.sub(r"'x'|'cubed'|city|\b\d+\b", "mynamexyz", m) for m in messages]
    long = [message for message in mine if len(message.split()) > 14]
    assert len(long) > 10
    results = results_of(site, long)
    assert [m for m, r in zip(long, results) if "reference/errors" not in r[:2]] == []


@pytest.mark.skipif(shutil.which("node") is None, reason="node isn't installed")
def test_a_name_leads_to_its_entry(site):
    results = first_results(site, ["IPUConfig", "EarlyStopping", "xyzzyqwv"])
    assert results[:2] == [
        "reference/api/config#ipufit.IPUConfig",
        "reference/api/callbacks#ipufit.EarlyStopping",
    ]
    assert results[2] is None
