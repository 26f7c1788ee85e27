# SPDX-License-Identifier: Apache-2.0
"""`__all__` is exactly what users can see."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import ipufit
from tests.interpreters import run_python

pytestmark = pytest.mark.floor

PACKAGES = [*Path(ipufit.__file__).parent.rglob("__init__.py*")]

# Module -> the modules that are part of its surface, as `poptorch.optim` is.
SURFACES = {
    "ipufit": {"poptorch"},
    "ipufit.emulator": {
        "enums",
        "ops",
        "optim",
        "options",
        "poptorch_core",
        "profiling",
    },
}


def undeclared(module):
    """Names `dir` shows that are public, are no modules and aren't in `__all__`."""
    return {
        name
        for name in dir(module)
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    } - {*module.__all__, "annotations"}  # `from __future__ import annotations`


@pytest.mark.parametrize("name", SURFACES)
def test_what_is_declared_is_what_is_there_and_public(name):
    module = importlib.import_module(name)
    declared = module.__all__
    assert undeclared(module) == set()
    assert len(set(declared)) == len(declared) > 0
    modules = {one for one in declared if inspect.ismodule(getattr(module, one))}
    assert modules <= SURFACES[name]
    assert {one for one in declared if one.startswith("_")} <= {"__version__"}


LAZY = ["ipufit", "ipufit.callbacks", "ipufit.metrics", "ipufit.model"]


@pytest.mark.parametrize("name", LAZY)
def test_names_that_are_imported_later_are_there_when_they_are_used(name):
    package = importlib.import_module(name)
    assert len(set(package.__all__)) == len(package.__all__) > 0
    assert set(package.__all__) <= set(dir(package))
    assert all(hasattr(package, declared) for declared in dir(package))


@pytest.mark.parametrize(
    "path",
    [
        "callbacks.EarlyStopping",
        "distributed.get_process_info",
        "emulator.trainingModel",
        "errors.SharedRateWarning",
        "losses.resolve_loss",
        "metrics.AUC",
        "optimizers.Optimizer",
    ],
)
def test_import_ipufit_is_enough_for_the_names_of_its_packages(path):
    package, name = path.split(".")
    code = (
        "import ipufit\n"
        f"assert {package!r} in dir(ipufit)\n"
        f"assert {name!r} in dir(ipufit.{package})\n"
        f"assert ipufit.{path}.__name__ == {name!r}\n"
    )
    run_python("-c", code).check_returncode()


def test_help_lists_the_packages_and_the_names():
    shown = run_python("-c", "import ipufit; help(ipufit)").stdout
    for name in ("callbacks", "emulator", "class IPUModel", "class EarlyStopping"):
        assert name in shown


WARNINGS = [
    name
    for name, value in vars(ipufit.errors).items()
    if inspect.isclass(value) and issubclass(value, ipufit.IpufitWarning)
]


def test_five_warnings_are_at_the_top_and_the_others_say_where_they_are():
    moved = sorted(set(WARNINGS) - set(ipufit.__all__))
    assert len(WARNINGS) - len(moved) == 5
    for name in moved:
        with pytest.warns(DeprecationWarning, match=rf"ipufit\.errors\.{name}"):
            assert getattr(ipufit, name) is getattr(ipufit.errors, name)
        assert name not in dir(ipufit)
    with pytest.raises(AttributeError, match="DropedRowsWarning"):
        ipufit.DropedRowsWarning  # noqa: B018


def test_no_public_package_has_a_star_import():
    # The emulator's are PopTorch's, whose modules list what they export.
    packages = {path for path in PACKAGES if "emulator" not in path.parts}
    assert len(packages) > 10
    for path in packages:
        names = [
            alias.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        assert "*" not in names, path


def test_the_emulator_lists_and_finds_what_it_has_not_imported_yet():
    code = (
        "import ipufit.emulator as emulator\n"
        "assert 'PoplarExecutor' not in vars(emulator)\n"
        "assert set(emulator.__all__) <= set(dir(emulator))\n"
        "from ipufit.emulator import *\n"
        "assert PoplarExecutor is vars(emulator)['PoplarExecutor']\n"
        "assert not hasattr(emulator, 'PoplarExceutor')\n"
    )
    run_python("-c", code).check_returncode()


def test_the_emulator_alone_imports_nothing_else_of_ipufit():
    code = (
        "import sys, ipufit.emulator\n"
        "print(sorted(m for m in sys.modules if m.startswith('ipufit.')"
        " and not m.startswith('ipufit.emulator')))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "['ipufit._lazy']"  # of the package around it
    assert done.stderr == ""


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="IPUModle"):
        ipufit.IPUModle  # noqa: B018


@pytest.mark.parametrize("package", ["callbacks", "losses", "metrics", "optimizers"])
def test_help_begins_with_code_that_runs(package):
    text = importlib.import_module(f"ipufit.{package}").__doc__
    model = ipufit.IPUModel(torch.nn.Linear(2, 3))
    names = {"ipufit": ipufit, "compile": model.compile, "fit": dict}
    calls = re.findall(r"`((?:compile|fit|ipufit)[^`]*\))`", text)
    assert calls
    for call in calls:
        eval(call, names)


def test_the_error_of_an_unknown_name_lists_all_names():
    model = ipufit.IPUModel(torch.nn.Linear(2, 3))
    for kind, known in (("metrics", "acc, "), ("loss", "bce, "), ("optimizer", "adam")):
        with pytest.raises(ipufit.UnknownNameError, match=f"Known: {known}"):
            model.compile(**{kind: ["?"] if kind == "metrics" else "?"})
