# SPDX-License-Identifier: Apache-2.0
"""`__all__` is exactly what users can see."""

import ast
import importlib
import inspect

import pytest

import ipufit
from tests.interpreters import run_python

pytestmark = pytest.mark.floor

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


LAZY = {
    "ipufit": {"__version__"},
    "ipufit.callbacks": set(),
}


@pytest.mark.parametrize("name", LAZY)
def test_what_type_checkers_see_is_what_there_is(name):
    package = importlib.import_module(name)
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(package))):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = {alias.name for alias in node.names}
            if names == {"*"}:
                module = importlib.import_module(f".{node.module}", name)
                names = {*getattr(module, "__all__", vars(module))}
                assert not names.isdisjoint(package.__all__)
                names &= {*package.__all__}
            imported |= names
    assert imported | LAZY[name] == set(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    assert all(hasattr(package, declared) for declared in package.__all__)


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
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="IPUModle"):
        ipufit.IPUModle  # noqa: B018
