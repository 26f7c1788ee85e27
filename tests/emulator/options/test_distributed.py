# SPDX-License-Identifier: Apache-2.0
"""`Options.Distributed`."""

from __future__ import annotations

import pytest

from ipufit.emulator import options as options_module
from ipufit.emulator.options import Options


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)


def test_there_is_one_process_by_default():
    distributed = Options().Distributed
    assert (distributed.numProcesses, distributed.processId) == (1, 0)


def test_new_options_read_open_mpis_variables(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    distributed = Options().Distributed
    assert (distributed.numProcesses, distributed.processId) == (4, 3)
    assert distributed.disable() is distributed
    assert (distributed.numProcesses, distributed.processId) == (1, 0)


def test_a_variable_that_is_no_integer_is_refused(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "first")
    with pytest.raises(ValueError, match="first"):
        Options()


def test_variable_names_come_size_first(monkeypatch):
    monkeypatch.setenv("SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    distributed = Options().Distributed
    assert distributed.setEnvVarNames("SIZE", "RANK") is distributed
    assert (distributed.numProcesses, distributed.processId) == (8, 5)


def test_process_ids_come_index_first_and_unchecked():
    distributed = Options().Distributed.configureProcessId(5, 2)
    assert (distributed.numProcesses, distributed.processId) == (2, 5)


@pytest.mark.parametrize("arguments", [("0", 1), (0, 1.0)])
def test_process_ids_are_integers(arguments):
    with pytest.raises(AssertionError):
        Options().Distributed.configureProcessId(*arguments)


@pytest.mark.parametrize("name", ["processId", "numProcesses"])
def test_process_ids_are_read_only(name):
    with pytest.raises(AssertionError, match="Invalid option"):
        setattr(Options().Distributed, name, 1)


def test_the_class_can_be_swapped_as_popdist_does():
    class Refusing(options_module._DistributedOptions):
        def disable(self):
            raise RuntimeError("Cannot call `disable`")

    options = Options()
    options.Distributed.__class__ = Refusing
    with pytest.raises(RuntimeError, match="Cannot call"):
        options.Distributed.disable()
    assert options.clone().Distributed.numProcesses == 1
    assert type(options.clone().Distributed) is Refusing


def test_processes_freeze_with_their_options():
    options = Options()
    options._freeze()
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.Distributed.configureProcessId(0, 1)
