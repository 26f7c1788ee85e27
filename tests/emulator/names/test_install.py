# SPDX-License-Identifier: Apache-2.0
"""The emulator under PopTorch's names, here and in processes started from here."""

import contextlib
import importlib
import importlib.util
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch

import ipufit.emulator
import ipufit.emulator as poptorch
from ipufit.emulator import Error, install, uninstall
from ipufit.emulator._switches import STRICT_VARIABLE, is_strict
from tests.emulator._models import Function
from tests.interpreters import run_python

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed():
    install(force=True)  # the tests may run where a real PopTorch is
    yield
    uninstall()


@pytest.fixture
def real_poptorch(tmp_path, monkeypatch):
    """A package called `poptorch` that isn't the emulator."""
    package = tmp_path / "poptorch"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = 'real'\n", encoding="utf-8")
    (package / "blocks.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    uninstall()
    for name in [n for n in sys.modules if n.partition(".")[0] == "poptorch"]:
        del sys.modules[name]


def state():
    """What `install` may change."""
    names = [n for n in sys.modules if n.partition(".")[0] in ("poptorch", "popdist")]
    variables = [os.environ.get(name) for name in ("PYTHONPATH", STRICT_VARIABLE)]
    return [[*sys.meta_path], [*sys.path], variables, sorted(names)]


@pytest.mark.usefixtures("installed")
def test_every_form_of_import_finds_the_emulator():
    names = {}
    exec(  # as scripts write it; this file must not import `poptorch` itself
        "import poptorch, poptorch.optim\n"
        "import poptorch.poptorch_core as core\n"
        "from poptorch import Options, enums, trainingModel\n"
        "from poptorch.enums import OutputMode\n"
        "import popdist, popdist.poptorch\n",
        names,
    )
    assert names["poptorch"] is ipufit.emulator
    assert names["core"].Error is Error
    assert names["Options"] is ipufit.emulator.Options
    assert names["enums"] is ipufit.emulator.enums
    assert names["OutputMode"] is ipufit.emulator.OutputMode
    assert names["popdist"].poptorch.Options.__mro__[1] is ipufit.emulator.Options


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "name",
    ["poptorch.blocks", "poptorch._pod", "popdist._environment", "popdist.torch"],
)
def test_the_emulators_other_modules_have_no_such_name(name):
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'") as info:
        importlib.import_module(name)
    assert info.value.name == name


@pytest.mark.usefixtures("installed")
def test_the_private_names_that_optimum_graphcore_imports_are_there():
    names = {}
    exec(
        "from poptorch._impl import rewrapModelIfNecessary, unwrapModelIfNecessary\n"
        "from poptorch._poplar_executor import PoplarExecutor\n",
        names,
    )
    assert names["PoplarExecutor"] is ipufit.emulator.PoplarExecutor
    module = torch.nn.BatchNorm1d(2)
    executor = ipufit.emulator.trainingModel(module)
    names["unwrapModelIfNecessary"](module)
    assert type(module) is torch.nn.BatchNorm1d
    assert type(module.running_mean) is torch.Tensor
    names["rewrapModelIfNecessary"](module)
    assert type(module).__name__ == "PoptorchBatchNorm1d"
    assert executor.model is module


class Doubling:
    """Replaces `torch.relu`, as PopTorch Geometric replaces functions of PyG."""

    def replace(self):
        self.before, torch.relu = torch.relu, lambda x: x * 2

    def restore(self):
        torch.relu = self.before


@pytest.mark.usefixtures("installed")
def test_the_private_names_that_poptorch_geometric_uses_are_there(monkeypatch):
    spec = importlib.util.find_spec("poptorch._poplar_executor")
    managers = spec.loader.load_module()._OverwriteContextManager
    again = importlib.import_module("poptorch._poplar_executor")
    assert again._OverwriteContextManager is managers
    utils = importlib.import_module("poptorch._utils")
    (joined,) = utils.combine_batch_tensors_gen([[torch.ones(1)], [torch.zeros(2)]])
    assert joined.tolist() == [1, 0, 0]

    monkeypatch.setattr(managers, "_manager_types", [])
    managers.registerSubsitutionManager(Doubling)
    managers.registerSubsitutionManager(Doubling)  # twice is as once
    before = torch.relu

    class Module(torch.nn.Module):
        def forward(self, x):
            if self.fails:
                raise ValueError("no")
            return torch.relu(x)

    module = Module()
    for module.fails in (True, False):
        executor = ipufit.emulator.inferenceModel(module)
        with contextlib.suppress(ValueError):
            assert executor(torch.tensor([3.0])).tolist() == [6.0]
        assert torch.relu is before
    assert not module.fails


@pytest.mark.usefixtures("installed")
def test_substitutions_are_undone_if_one_of_them_fails(monkeypatch):
    executor_module = importlib.import_module("poptorch._poplar_executor")
    managers = executor_module._OverwriteContextManager

    class Failing(Doubling):
        def replace(self):
            raise ValueError("it can't be replaced")

    monkeypatch.setattr(managers, "_manager_types", [Doubling, Failing])
    before = torch.relu
    with pytest.raises(ValueError, match="it can't be replaced"):
        ipufit.emulator.inferenceModel(torch.nn.ReLU())(torch.ones(1))
    assert torch.relu is before


def test_uninstalling_leaves_things_as_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["one", "two"]))
    before = state()
    install(force=True)
    importlib.import_module("poptorch.optim")
    assert state() != before
    install(force=True)  # twice is as once
    uninstall()
    assert state() == before
    uninstall()
    assert state() == before


def test_an_installed_poptorch_is_not_hidden(real_poptorch):
    before = state()
    with pytest.raises(Error, match=r"A real poptorch is installed \(.*__init__\.py\)"):
        install()
    assert state() == before
    assert importlib.import_module("poptorch").__version__ == "real"


def test_an_imported_poptorch_is_not_hidden(real_poptorch):
    importlib.import_module("poptorch")
    with pytest.raises(Error, match="A real poptorch is imported already"):
        install()


def test_a_real_poptorch_is_hidden_on_demand_and_comes_back(real_poptorch):
    real = importlib.import_module("poptorch")
    importlib.import_module("poptorch.blocks")
    install(force=True)
    assert importlib.import_module("poptorch") is ipufit.emulator
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("poptorch.blocks")
    uninstall()
    assert importlib.import_module("poptorch") is real
    assert "poptorch.blocks" in sys.modules


def test_objects_pickled_under_the_name_can_be_read_without_it(installed):
    options = importlib.import_module("poptorch").Options().deviceIterations(3)
    text = pickle.dumps(options)
    uninstall()
    assert pickle.loads(text).device_iterations == 3


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("first", ["popdist.poptorch", "ipufit"])
def test_interpreters_started_from_here_find_it(first, tmp_path):
    done = run_python(
        "-c",
        f"import {first}\nimport poptorch, popdist, poptorch.optim\n"
        "from ipufit import poptorch as seen\n"
        "print(poptorch.__name__, popdist.__name__, seen is poptorch)",
        cwd=tmp_path,
    )
    assert done.stderr == ""
    assert done.stdout.split() == [
        "ipufit.emulator",
        "ipufit.emulator._popdist",
        "True",
    ]


@pytest.mark.usefixtures("installed")
def test_tracepoints_of_libpvti_do_nothing():
    done = run_python(
        "-c",
        "import libpvti as pvti\n"
        "channel = pvti.createTraceChannel('training')\n"
        "@pvti.instrument_fn(channel)\n"
        "def train():\n"
        "    return 3\n"
        "pvti.Tracepoint.begin(channel, 'epoch')\n"
        "pvti.Graph('Loss', '').addSeries('training').add(0.5)\n"
        "pvti.HeatmapDouble('weights', [0.0, 1.0], '2^x').add([0.5])\n"
        "with pvti.Tracepoint(channel, 'step'):\n"
        "    print(train(), pvti.checkTraceChannel(channel))\n",
    )
    assert (done.stdout.split(), done.stderr) == (["3", "False"], "")


@pytest.mark.usefixtures("installed")
def test_what_asks_for_ipus_says_whose_it_is():
    with pytest.raises(ImportError, match=r"gcipuinfo.*Poplar SDK"):
        importlib.import_module("gcipuinfo")


SPAWNING = """
import multiprocessing
import sys

import ipufit.emulator

if __name__ == "__main__":
    sys.path[:] = [p for p in sys.path if p != {root!r}]
    ipufit.emulator.install(force=True)

import poptorch
import torch


class Names(torch.utils.data.Dataset):
    def __init__(self, options):
        self.options = options

    def __len__(self):
        return 2

    def __getitem__(self, index):
        import popdist

        assert __name__ == "__mp_main__"
        assert poptorch is ipufit.emulator
        assert isinstance(self.options, poptorch.Options)
        return torch.tensor(popdist.getNumInstances())


if __name__ == "__main__":
    options = poptorch.Options()
    context = multiprocessing.get_context({method!r})
    loader = poptorch.DataLoader(
        options, Names(options), num_workers=1, multiprocessing_context=context
    )
    print(*[batch.item() for batch in loader])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_multiprocessing_starts_find_it(method, tmp_path):
    script = tmp_path / "script.py"
    source = SPAWNING.format(root=str(ROOT), method=method)
    script.write_text(source, encoding="utf-8")
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(script, cwd=tmp_path, env=path)
    assert done.stderr == ""
    assert done.stdout.split() == ["1", "1"]


# Strict mode -------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, "0"])
def test_strict_mode_is_for_this_process_and_its_children(
    before, monkeypatch, tmp_path
):
    monkeypatch.delenv(STRICT_VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(STRICT_VARIABLE, before)
    untouched = state()
    install(force=True, strict=True)
    try:
        assert is_strict()
        code = "from ipufit.emulator._switches import is_strict as x; print(x())"
        assert run_python("-c", code, cwd=tmp_path).stdout == "True\n"
    finally:
        uninstall()
    assert state() == untouched
    assert not is_strict()


@pytest.mark.usefixtures("installed")
def test_strict_mode_can_be_asked_for_later(monkeypatch):
    monkeypatch.delenv(STRICT_VARIABLE, raising=False)
    install()
    assert not is_strict()
    install(strict=True)
    assert is_strict()
    install()
    assert is_strict()


# `import popart`: the enumerations that options take, and nothing else --------------


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
        ("autoRecomputation", popart.RecomputationType.Standard),
        ("virtualGraphMode", popart.VirtualGraphMode.Manual),
        ("batchSerializationSettings.batchSchedule", batches.Isomorphic),
    ):
        options._Popart.set(key, int(value))
    executor = poptorch.inferenceModel(Function(lambda _, x: x * 2), options)
    assert executor(torch.ones(2)).tolist() == [2, 2]


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
