# SPDX-License-Identifier: Apache-2.0
"""`import popart`: the enumerations that options take, and nothing else."""

from __future__ import annotations

import importlib

import pytest
import torch

import ipufit.emulator as poptorch
from ipufit.emulator import install, uninstall
from tests.emulator._models import Function
from tests.interpreters import run_python


@pytest.fixture
def popart():
    install(force=True)
    yield importlib.import_module("popart")
    uninstall()


MEMBERS = {
    # graphcore/popart, `willow/include/popart/sessionoptions.hpp`, as named in
    # `python/popart/popart_core/popart.cpp`.
    "AccumulateOuterFragmentSchedule": (
        "Scheduler Serial OverlapCycleOptimized OverlapMemoryOptimized"
    ),
    "BatchSerializationBatchSchedule": (
        "Scheduler Isomorphic OverlapOnIo OverlapOnCompute"
    ),
    "RecomputationType": "NoRecompute Standard NormOnly Pipeline RecomputeAll",
    "SubgraphCopyingStrategy": "OnEnterAndExit JustInTime",
    "SyntheticDataMode": "Off Zeros RandomNormal RandomUniform",
    "VirtualGraphMode": "Off Manual Auto ExecutionPhases",
}
"""What Graphcore's public programs use beside PopTorch."""


@pytest.mark.parametrize("name", MEMBERS)
def test_enumerations_have_popart_members_and_values(popart, name):
    enumeration = getattr(popart, name)
    assert [member.name for member in enumeration] == MEMBERS[name].split()
    assert [int(member) for member in enumeration] == list(range(len(enumeration)))


def test_a_program_with_such_options_runs(popart):
    """The settings of BERT, CLIP and the CNNs of graphcore/examples."""
    options = poptorch.Options()
    schedules = popart.AccumulateOuterFragmentSchedule
    batches = popart.BatchSerializationBatchSchedule
    for key, value in (
        ("accumulateOuterFragmentSettings.schedule", schedules.OverlapMemoryOptimized),
        ("subgraphCopyingStrategy", popart.SubgraphCopyingStrategy.JustInTime),
        ("autoRecomputation", popart.RecomputationType.Pipeline),
        ("virtualGraphMode", popart.VirtualGraphMode.Manual),
        ("batchSerializationSettings.batchSchedule", batches.Isomorphic),
    ):
        options._Popart.set(key, int(value))
    executor = poptorch.inferenceModel(Function(lambda _, x: x * 2), options)
    assert executor(torch.ones(2)).tolist() == [2, 2]


def test_synthetic_data_are_asked_for_by_number(popart):
    """`Options.enableSyntheticData` looks at the truth of what it is given."""
    options = poptorch.Options()
    options.enableSyntheticData(int(popart.SyntheticDataMode.RandomNormal))
    assert options._Popart.options["syntheticDataMode"] == 2
    options.enableSyntheticData(int(popart.SyntheticDataMode.Off))
    assert options._Popart.options["syntheticDataMode"] == 0


def test_anything_else_says_what_popart_is(popart):
    with pytest.raises(AttributeError, match="no attribute 'Builder': popart is Gra"):
        popart.Builder  # noqa: B018
    assert not hasattr(popart, "Builder")


@pytest.mark.parametrize(
    "statement",
    [
        "from popart import Builder",
        "import popart.ir",
        "from popart.ir import Ir",
        "import popart._internal.ir as _ir",
    ],
)
@pytest.mark.usefixtures("popart")
def test_importing_anything_else_says_what_popart_is(statement):
    with pytest.raises(ModuleNotFoundError, match=r"'popart\..*: popart is Graphcore"):
        exec(statement, {})


@pytest.mark.usefixtures("popart")
def test_a_program_may_go_on_without(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import popart\n"
        "try:\n"
        "    from popart import Session\n"
        "except ImportError:\n"
        "    print(popart.__name__, popart.RecomputationType.Standard.value)\n",
        encoding="utf-8",
    )
    done = run_python(script, cwd=tmp_path)
    assert done.stdout.split() == ["ipufit.emulator._popart", "1"]
    assert done.stderr == ""
