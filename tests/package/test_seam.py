# SPDX-License-Identifier: Apache-2.0
"""The seam: which PopTorch runs, seen from fresh interpreters.

Fake installations of `poptorch` stand in for the one of the Poplar SDK.
"""

import os
from pathlib import Path

import pytest

from tests.interpreters import run_python

pytestmark = pytest.mark.floor

ROOT = Path(__file__).parents[2]
WORKING = "from ipufit.emulator import *\n__version__ = '3.4.0'\n"
# What each broken installation does, and how the last line begins that it ends in.
BROKEN = {
    "missing library": (
        "raise ImportError('libpoplar.so: cannot open shared object file')\n",
        "ImportError: libpoplar.so: cannot open shared object file",
    ),
    "missing module": (
        "import poptorch_core_that_is_not_there\n",
        "ModuleNotFoundError: No module named 'poptorch_core_that_is_not_there'",
    ),
    "missing part": (
        "from poptorch import poptorch_core\n",
        "ImportError: cannot import name 'poptorch_core' from partially initialized",
    ),
    "wrong torch": (
        "raise RuntimeError('built for torch 1.13')\n",
        "RuntimeError: built for torch 1.13",
    ),
}


@pytest.fixture
def python(tmp_path):
    """Run code in a new interpreter, with `poptorch` made of a source if any."""

    def run(code, *, poptorch=None, backend=None, **variables):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        environment.pop("IPUFIT_BACKEND", None)
        if poptorch is not None:
            package = tmp_path / "poptorch"
            package.mkdir()
            (package / "__init__.py").write_text(poptorch, encoding="utf-8")
            environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
        if backend is not None:
            environment["IPUFIT_BACKEND"] = backend
        return run_python("-c", code, cwd=tmp_path, env=environment)

    return run


WHICH = "from ipufit import poptorch; print(poptorch.__name__, poptorch.__version__)"
LOGGED = "import logging; logging.basicConfig(level=logging.INFO)\n"


def last_line(done):
    return done.stderr.strip().splitlines()[-1]


def test_an_installed_poptorch_is_used(python):
    done = python(LOGGED + WHICH, poptorch="__version__ = '3.4.0'\n")
    assert done.stdout.split() == ["poptorch", "3.4.0"]
    assert done.stderr.splitlines() == ["INFO:ipufit:Running on PopTorch 3.4.0."]


def test_the_emulator_is_not_imported_beside_poptorch_unless_asked_for(python):
    code = (
        "import sys, ipufit\n"
        "from ipufit import poptorch\n"
        "ipufit.callbacks.EarlyStopping(), ipufit.errors, ipufit.metrics.AUC\n"
        "dir(ipufit), ipufit.__all__\n"
        "before = 'ipufit.emulator' in sys.modules\n"
        "print(before, 'emulator' in ipufit.__all__, ipufit.emulator.__name__)\n"
    )
    done = python(code, poptorch="__version__ = '3.4.0'\n")
    assert done.stdout == "False False ipufit.emulator\n", done.stderr


def test_without_one_the_emulator_says_once_that_it_is_the_emulator(python):
    code = LOGGED + "import ipufit\nipufit.IPUModel, ipufit.IPUConfig\n" + WHICH
    done = python(code)
    assert done.stdout.split()[0] == "ipufit.emulator"
    (line,) = done.stderr.splitlines()
    assert line.startswith("WARNING:ipufit:")
    assert "emulator" in line
    assert "ipufit doctor" in line
    assert python(code, RANK="1").stderr == ""


@pytest.mark.parametrize(
    "name",
    [
        "POPLAR_SDK_ENABLED",
        "IPUOF_VIPU_API_PARTITION_ID",
        "IPUOF_CONFIG_PATH",
        "POPDIST_NUM_TOTAL_REPLICAS",
    ],
)
def test_a_host_with_ipus_is_not_emulated(python, name):
    done = python(WHICH, **{name: "1"})
    assert done.returncode == 1
    assert last_line(done).startswith(
        f"ipufit.errors.ConfigError: This host has IPUs ({name}), but the Python"
    )
    assert "IPUFIT_BACKEND=emulator" in last_line(done)
    assert python(WHICH, backend="emulator", **{name: "1"}).returncode == 0


def test_a_folder_of_that_name_is_no_poptorch(python, tmp_path):
    (tmp_path / "poptorch").mkdir()
    assert python(WHICH).stdout.startswith("ipufit.emulator ")


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("backend", [None, "auto", "poptorch"])
def test_a_broken_poptorch_raises_its_own_error(python, kind, backend):
    source, message = BROKEN[kind]
    done = python(WHICH, poptorch=source, backend=backend)
    assert done.returncode == 1
    assert done.stdout == ""
    assert last_line(done).startswith(message)


@pytest.mark.parametrize("kind", ["missing library", None])
def test_the_emulator_can_be_insisted_on(python, kind):
    source = BROKEN[kind][0] if kind else "__version__ = '3.4.0'"
    done = python(LOGGED + WHICH, poptorch=source, backend="emulator")
    assert done.stdout.split()[0] == "ipufit.emulator"
    (line,) = done.stderr.splitlines()
    assert line.startswith("INFO:ipufit:")


def test_poptorch_can_be_insisted_on(python):
    done = python(WHICH, backend="poptorch")
    assert done.returncode == 1
    assert "IPUFIT_BACKEND=poptorch asks for PopTorch, but" in last_line(done)


def test_an_unknown_backend_is_refused(python):
    done = python(WHICH, backend="nonsense")
    assert done.returncode == 1
    assert "ConfigError" in last_line(done)
    assert "'nonsense'" in last_line(done)
    assert "auto, poptorch, emulator" in last_line(done)


def test_the_emulator_alone_does_not_mind_a_broken_poptorch(python):
    code = "import ipufit.emulator as poptorch; print(poptorch.__name__)"
    done = python(code, poptorch=BROKEN["missing library"][0])
    assert (done.stdout.strip(), done.stderr) == ("ipufit.emulator", "")


CHECKED = """
import poptorch, torch
from ipufit import IPUModel, poptorch as seam
assert poptorch is seam
model = IPUModel(torch.nn.Linear(4, 3))
model.compile("adamw", "cross_entropy")
model.fit(torch.rand(8, 4), torch.randint(3, (8,)), batch_size=2)
"""


@pytest.mark.parametrize(
    "source", ["__version__ = '3.4.0'", *BROKEN["wrong torch"][:1]]
)
@pytest.mark.parametrize("backend", [None, "poptorch"])
def test_the_emulator_checks_where_poptorch_is_installed(
    python, tmp_path, source, backend
):
    (tmp_path / "script.py").write_text(CHECKED, encoding="utf-8")
    script = "['ipufit', 'check', 'script.py']"
    code = f"import sys; from ipufit.cli import main; sys.argv = {script}; main()"
    done = python(code, poptorch=source, backend=backend)
    assert done.returncode == 0, done.stderr
    assert "Nothing is refused" in done.stdout


def test_models_train_through_the_one_installed_module(python):
    code = """
import sys, torch, poptorch, ipufit
from ipufit import IPUModel
from ipufit import config
from ipufit.model import calls
from ipufit.optimizers import optimizer as optimizers
assert ipufit.poptorch is poptorch is sys.modules["poptorch"]
for module in (config, calls, optimizers):
    assert module.poptorch is poptorch, module
made = []
original = poptorch.trainingModel
poptorch.trainingModel = lambda *a, **k: made.append(1) or original(*a, **k)
model = IPUModel(torch.nn.Linear(2, 1))
model.compile("sgd", "mse")
model.fit(torch.zeros(4, 2), torch.zeros(4), batch_size=4, verbose=0)
assert made == [1]
"""
    done = python(code, poptorch=WORKING)
    assert (done.returncode, done.stderr) == (0, "")
