# SPDX-License-Identifier: Apache-2.0
"""What isn't used isn't imported, and a call of `fit` goes through few files."""

import json
import os
from importlib.util import find_spec

import pytest

from tests.interpreters import run_python

MODEL = "from ipufit import IPUConfig, IPUModel\n"
FIT = """
import torch
x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(micro_batch_size=2))
model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
model.fit(x, y, batch_size=8, verbose=0)
model.predict(x, verbose=0)
"""
NEW = """
import json, sys, torch
before = set(sys.modules)
{code}
print(json.dumps(sorted(set(sys.modules) - before)))
"""

BY_CALLBACKS = {
    "ipufit.callbacks.checkpoints",
    "ipufit.callbacks.loggers",
    "ipufit.callbacks.monitoring",
}
TO_RUN = {
    "ipufit.emulator.core.fold",
    "ipufit.emulator.core.program",
    "ipufit.emulator.core.tracer",
    "ipufit.emulator._poplar_executor",
}
TO_LOAD = {
    "ipufit.emulator._dataloader",
}  # not arrays
LATER = {"ipufit.model.summary", *BY_CALLBACKS, *TO_LOAD}
FOREIGN = {
    "matplotlib",
    "pandas",
    "rich",
    "sklearn",
    "sympy",  # with torch's compiler, and with shapes of tensors on "meta"
    "torch._dynamo",
    "torch._inductor",
    "torchmetrics",
}


def imported(code, then=""):
    """The modules that code imports in a process of its own, beyond torch's.

    Or what `then` prints, which goes on from there.
    """
    environment = {**os.environ, "IPUFIT_BACKEND": "emulator"}
    done = run_python("-c", NEW.format(code=code) + then, env=environment)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    return last if then else set(last)


@pytest.fixture(scope="module")
def with_model():
    return imported(MODEL)


@pytest.fixture(scope="module")
def with_fit():
    return imported(MODEL + FIT)


def test_the_package_alone_imports_itself():
    assert {name for name in imported("import ipufit") if "ipufit" in name} == {
        "ipufit",
        "ipufit._lazy",
    }


def test_a_model_is_there_before_what_runs_it(with_model):
    assert {"ipufit.model", "ipufit.config", "ipufit.emulator"} <= with_model
    assert with_model & {*LATER, *TO_RUN, *FOREIGN} == set()


def test_a_fit_imports_what_runs_it(with_fit):
    assert (TO_RUN - with_fit) == set()


def test_a_fit_imports_nothing_of_what_it_does_without(with_fit):
    assert with_fit & {*LATER, *FOREIGN} == set()


def test_a_callback_brings_no_other():
    code = "from ipufit import EarlyStopping"
    assert imported(code) & BY_CALLBACKS == {"ipufit.callbacks.monitoring"}


@pytest.mark.parametrize("name", sorted({*LATER, *TO_RUN}))
def test_the_names_are_those_of_modules(name):
    assert find_spec(name) is not None
