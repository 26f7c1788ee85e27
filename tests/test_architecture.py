# SPDX-License-Identifier: Apache-2.0
"""Imports only go down: the floors of the package, read from its source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = "ipufit"
SEAM = "ipufit._poptorch"
EMULATOR = "ipufit.emulator"
ROOT = Path(__file__).parent.parent

# A module imports its own package and lower floors only. Floors are named by the
# module or package right under `ipufit`; the package itself is the top.
FLOORS = {
    "": 7,
    "model": 6,
    "testing": 6,
    "resume": 5.5,
    "engine": 5,
    "callbacks": 4,
    "checkpoint": 3,
    "data": 3,
    "summary": 3,
    "blocks": 2,
    "config": 2,
    "distributed": 2,
    "losses": 3,  # some are means of what metrics compute
    "metrics": 2,
    "optimizers": 2,
    "planning": 2,
    "scalars": 2,
    "state": 2,
    "_poptorch": 1,
    "batching": 1,
    "_env": 0,
    "_failures": 0,
    "_files": 0,
    "_kinds": 0,
    "_lazy": 0,
    "_tree": 0,
    "_version": 0,
    "emulator": 0,
    "errors": -1,  # the ground under floor 0: `_env` and `_tree` raise our errors
    "types": -1,
}
# What the package needs; `poptorch` has a rule of its own. Nothing here may become
# torchvision: the core is pure torch, and examples bring their own data.
THIRD_PARTY = {"numpy", "poptorch", "rich", "safetensors", "torch"}


def read_modules():
    """Name -> source, and whether it is a package, of every module of `ipufit`."""
    modules = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        *parents, last = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parents if last == "__init__" else [*parents, last])
        modules[name] = (path.read_text(encoding="utf-8"), last == "__init__")
    return modules


MODULES = read_modules()


def imports(name, source, *, is_package=False, known=frozenset(MODULES)):
    """Absolute names of the modules that a module imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = node.module or ""
            if node.level:
                up = node.level - is_package
                base = name.split(".")[: len(name.split(".")) - up]
                parent = ".".join([*base, parent] if parent else base)
            for alias in node.names:
                submodule = f"{parent}.{alias.name}"
                found.add(submodule if submodule in known else parent)
    return found


def is_inside(name, package):
    return name == package or name.startswith(package + ".")


def home(name):
    """The module or package right under `ipufit` that a module belongs to."""
    return name.partition(".")[2].partition(".")[0]


def goes_up(importer, imported):
    """Whether an import inside the package breaks the rule of the floors."""
    if home(importer) == home(imported):
        return False
    return FLOORS[home(imported)] >= FLOORS[home(importer)]


IMPORTS = {
    name: imports(name, source, is_package=is_package)
    for name, (source, is_package) in MODULES.items()
}
PAIRS = [(name, target) for name, targets in IMPORTS.items() for target in targets]


def test_the_modules_were_seen():
    assert PACKAGE in MODULES
    assert SEAM in MODULES
    assert any(is_inside(name, EMULATOR) for name in MODULES)
    assert any(is_inside(target, PACKAGE) for _, target in PAIRS)


def test_every_module_has_a_floor():
    assert {home(name) for name in MODULES} - set(FLOORS) == set()


def test_imports_only_go_down():
    inside = [pair for pair in PAIRS if is_inside(pair[1], PACKAGE)]
    assert [pair for pair in inside if goes_up(*pair)] == []


def test_only_the_seam_imports_poptorch():
    assert {name for name, target in PAIRS if is_inside(target, "poptorch")} == {SEAM}


def test_only_the_seam_chooses_the_emulator():
    outside = [pair for pair in PAIRS if not is_inside(pair[0], EMULATOR)]
    assert {name for name, target in outside if is_inside(target, EMULATOR)} == {SEAM}


def test_the_emulator_imports_nothing_from_the_rest_of_ipufit():
    own = [pair for pair in PAIRS if is_inside(pair[0], EMULATOR)]
    strangers = [
        (name, target)
        for name, target in own
        if is_inside(target, PACKAGE) and not is_inside(target, EMULATOR)
    ]
    assert own
    assert strangers == []


@pytest.mark.skipif(
    sys.version_info < (3, 10), reason="3.10 is the first to list its standard library"
)
def test_the_package_imports_what_it_declares_and_the_emulator_torch_and_numpy():
    foreign = {
        (name, target.partition(".")[0])
        for name, target in PAIRS
        if target.partition(".")[0] not in {PACKAGE, *sys.stdlib_module_names}
    }
    undeclared = {pair for pair in foreign if pair[1] not in THIRD_PARTY}
    emulator = {top for name, top in foreign if is_inside(name, EMULATOR)}
    assert undeclared == set()
    assert emulator <= {"numpy", "torch"}
    assert "torch" in emulator


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import ipufit.model", "ipufit.model"),
        ("from ipufit import model", "ipufit.model"),
        ("from ipufit import IPUModel", "ipufit"),
        ("from ipufit.model import IPUModel", "ipufit.model"),
        ("from . import base", "ipufit.metrics.base"),
        ("from .base import Metric", "ipufit.metrics.base"),
        ("from .. import model", "ipufit.model"),
        ("from ..model import IPUModel", "ipufit.model"),
        ("if TYPE_CHECKING:\n    import ipufit.model", "ipufit.model"),
        ("def late():\n    import poptorch.optim as o", "poptorch.optim"),
    ],
)
def test_every_way_to_import_is_read(statement, expected):
    known = {"ipufit", "ipufit.model", "ipufit.metrics", "ipufit.metrics.base"}
    importer = "ipufit.metrics.regression"
    assert imports(importer, statement, known=known) == {expected}


def test_a_package_imports_relative_to_itself():
    assert imports("ipufit.metrics", "from .base import Metric", is_package=True) == {
        "ipufit.metrics.base"
    }


@pytest.mark.parametrize(
    ("importer", "imported", "expected"),
    [
        ("ipufit.metrics.base", "ipufit.model", True),
        ("ipufit.metrics.base", "ipufit", True),
        ("ipufit.metrics.base", "ipufit.config", True),  # beside is not below
        ("ipufit.metrics.base", "ipufit.metrics.regression", False),
        ("ipufit.metrics.base", "ipufit._tree", False),
        ("ipufit", "ipufit.model", False),
    ],
)
def test_what_goes_up(importer, imported, expected):
    assert goes_up(importer, imported) is expected
