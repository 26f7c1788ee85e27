# SPDX-License-Identifier: Apache-2.0
"""What code can reach, and what a change of it is called."""

from __future__ import annotations

import functools
import math
import sys
import sysconfig
import types

import pytest
import torch
from torch import nn

from ipufit.engine.constants import ReachableValues
from tests.resume import settings_of_another_module as settings

FACTOR = types.SimpleNamespace(k=1.0)


class Deep(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5)))
        self.cfg = types.SimpleNamespace(parts=[{"k": 1.0}], unread=1.0)

    def forward(self, x, scale=1.0):
        x = x * self.cfg.parts[0]["k"] * self.factor * FACTOR.k * scale
        return self.inner(x) * settings.SCALE


def change_a_cell():
    value = 1.0

    def loss(outputs, targets):
        return value * outputs

    def change():
        nonlocal value
        value = 2.0

    return loss, change


def difference(roots, change):
    """The paths, old and new values that a change makes different."""
    before = ReachableValues(roots)
    assert before.are_unmoved(thoroughly=True)
    change()
    is_unmoved = before.are_unmoved(thoroughly=True)
    differences = list(before.differences(ReachableValues(roots)))
    assert is_unmoved == (not differences)
    return differences


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("module.inner.1.0.p", lambda m: setattr(m.inner[1][0], "p", 2.0)),
        ("module.cfg.parts[0]['k']", lambda m: m.cfg.parts[0].update(k=2.0)),
        ("Deep.factor", lambda m: setattr(Deep, "factor", 2.0)),
        ("module.factor", lambda m: setattr(m, "factor", 2.0)),
        ("global FACTOR.k", lambda m: setattr(FACTOR, "k", 2.0)),
        ("global settings.SCALE", lambda m: setattr(settings, "SCALE", 2.0)),
        ("forward's default scale", lambda m: setattr(
            Deep.forward, "__defaults__", (2.0,)
        )),
    ],
)  # fmt: skip
def test_values_are_called_as_in_the_code(path, change, monkeypatch):
    for owner, name in ((Deep, "factor"), (FACTOR, "k"), (settings, "SCALE")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(Deep.forward, "__defaults__", (1.0,))
    module = Deep()
    ((found, _, new),) = difference({"module": module}, lambda: change(module))
    assert (found, new) == (path, 2.0)


def test_cells_are_called_by_their_names():
    loss, change = change_a_cell()
    assert difference({"loss": loss}, change) == [("closure variable value", 1.0, 2.0)]


def test_partials_are_called_by_their_arguments():
    loss = functools.partial(max, 1, key=2)
    ((path, old, new),) = difference(
        {"loss": loss}, lambda: loss.keywords.update(key=3)
    )
    assert (path, old, new) == ("loss.keywords['key']", 2, 3)


def test_what_no_code_reads_isnt_found():
    module = Deep()
    assert not difference(
        {"module": module}, lambda: setattr(module.cfg, "unread", 2.0)
    )


def test_equal_values_in_other_objects_are_no_change():
    module = Deep()

    def change():
        module.cfg = types.SimpleNamespace(parts=[{"k": float("1")}], unread=0.0)

    before = ReachableValues({"module": module})
    change()
    assert before.difference(ReachableValues({"module": module})) is None


def test_a_number_that_is_none_equals_itself():
    module = Deep()
    module.cfg.parts[0]["k"] = math.nan
    before = ReachableValues({"module": module})
    module.cfg.parts[0]["k"] = float("nan")
    assert before.difference(ReachableValues({"module": module})) is None


def test_modes_and_weights_are_no_values():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def change():
        module.eval()
        with torch.no_grad():
            module[0].weight.fill_(3.0)
        module(torch.rand(3, 2))

    assert not difference({"module": module}, change)


@pytest.mark.parametrize("name", ["0", "weight"])
def test_another_part_is_a_change(name):
    module = nn.Sequential(nn.Linear(2, 2))

    def change():
        if name == "0":
            module[0] = nn.Linear(2, 2)
        else:
            module[0].weight = nn.Parameter(torch.zeros(2, 2))

    assert difference({"module": module}, change)


class Config:
    """As configs of packages are: fields in a private dict, found by `__getattr__`."""

    def __init__(self, **fields):
        object.__setattr__(self, "_fields", fields)

    def __getattr__(self, name):
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self._fields[name] = value


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.cfg = Config(model=Config(k=1.0), fresh=1.0)

    def forward(self, x):
        return x * self.cfg.model.k


def test_what_an_installed_class_gives_by_getattr_is_looked_at(monkeypatch):
    package = types.ModuleType("a_package_of_configs")
    package.__file__ = f"{sysconfig.get_paths()['purelib']}/a_package_of_configs.py"
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(Config, "__module__", package.__name__)
    module = Configured()

    def change():
        module.cfg.model.k = 2.0
        module.cfg.fresh = 2.0

    assert difference({"module": module}, change) == [("module.cfg.model.k", 1.0, 2.0)]
