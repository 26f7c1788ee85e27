# SPDX-License-Identifier: Apache-2.0
"""`Options`: storage, setters, freezing, copies, text, and the environment."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit.emulator.enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    OutputMode,
    SyncPattern,
)
from ipufit.emulator.options import (
    Options,
    ParallelPhasedExecution,
    PipelinedExecution,
    ShardedExecution,
    Stage,
)

FROZEN = "Can't modify frozen Options"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in (
        "POPTORCH_CACHE_DIR",
        "POPTORCH_DEFAULT_OPTIONS",
        "POPLAR_ENGINE_OPTIONS",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def frozen():
    options = Options()
    options._freeze()
    return options


# Storage


def test_defaults_are_poptorchs():
    assert Options()._values == {
        "replication_factor": 1,
        "input_group_size": 1,
        "input_cgt": CommGroupType.Consecutive,
        "broadcast_buffers": True,
        "device_iterations": 1,
        "log_dir": ".",
        "max_repeat_logs": 4,
        "auto_round_num_ipus": False,
        "anchored_tensors": {},
        "output_mode": 4,
        "output_return_period": 1,
        "connection_type": 0,
        "sync_pattern": 0,
        "available_memory_proportion": {},
    }


@pytest.mark.parametrize("name", ["output_mode", "connection_type", "sync_pattern"])
def test_modes_are_stored_as_plain_integers(name):
    options = Options().outputMode(OutputMode.All)
    options.connectionType(ConnectionType.Never).syncPattern(SyncPattern.SinglePipeline)
    assert type(options(name)) is int


def test_values_are_read_and_written_as_attributes():
    options = Options()
    options.replication_factor = 4
    assert options.replication_factor == 4
    assert options("replication_factor") == 4


def test_unknown_names_are_refused():
    options = Options()
    with pytest.raises(AttributeError, match="Invalid attribute anchorMode"):
        _ = options.anchorMode
    with pytest.raises(AssertionError, match="Invalid option replicas"):
        options.replicas = 2
    with pytest.raises(AttributeError, match="Invalid private attribute _replicas"):
        options._replicas = 2
    with pytest.raises(AssertionError, match="Invalid option Training"):
        options.Training = None
    with pytest.raises(AttributeError, match="_Popart"):
        options._Popart = None


@pytest.mark.parametrize("name", ["ipu_id", "random_seed", "model_name"])
def test_some_values_are_absent_until_set(name):
    assert not Options().exists(name)
    assert not hasattr(Options(), name)


@pytest.mark.parametrize("value", [2.0, "2", None, np.int64(2)])
def test_counts_are_ints(value):
    for setter in (Options().deviceIterations, Options().replicationFactor):
        with pytest.raises(AssertionError, match="Unexpected type"):
            setter(value)


@given(st.integers())
def test_any_int_is_a_count(value):
    assert Options().deviceIterations(value).device_iterations == value
    assert Options().replicationFactor(value).replication_factor == value


def test_a_bool_is_an_int_but_not_the_reverse():
    assert Options().deviceIterations(True).device_iterations is True
    with pytest.raises(AssertionError):
        Options().autoRoundNumIPUs(1)
    with pytest.raises(AssertionError):
        Options().broadcastBuffers(0)


def test_the_first_value_of_a_new_option_decides_its_type():
    options = Options()
    options.createOrSet(custom=1)
    options.createOrSet(custom=2)
    with pytest.raises(AssertionError, match="Unexpected type"):
        options.createOrSet(custom="3")
    with pytest.raises(AssertionError, match="Unexpected type"):
        options.useIpuModel(True).useIpuModel("yes")
    assert options.custom == 2


def test_set_stores_what_comes_before_a_mistake():
    options = Options()
    with pytest.raises(AssertionError):
        options.set(device_iterations=2, replication_factor=None)
    assert options.device_iterations == 2


# Setters


@pytest.mark.parametrize(
    ("setter", "arguments", "stored"),
    [
        ("deviceIterations", (3,), {"device_iterations": 3}),
        ("replicationFactor", (3,), {"replication_factor": 3}),
        ("autoRoundNumIPUs", (), {"auto_round_num_ipus": True}),
        ("broadcastBuffers", (False,), {"broadcast_buffers": False}),
        ("logDir", ("x",), {"log_dir": "x"}),
        ("maxRepeatLogs", (None,), {"max_repeat_logs": 2**64 - 1}),
        ("modelName", ("x",), {"model_name": "x"}),
        ("connectionType", (ConnectionType.OnDemand,), {"connection_type": 1}),
        ("syncPattern", (SyncPattern.ReplicaAndLadder,), {"sync_pattern": 2}),
        ("useIpuId", (-3,), {"ipu_id": -3}),
        ("useIpuModel", (False,), {"use_model": False}),
        ("useOfflineIpuTarget", (), {"ipu_version": 2, "connection_type": 2}),
        ("outputMode", (OutputMode.Sum,), {"output_mode": 3}),
        (
            "setAvailableMemoryProportion",
            ({"IPU0": 0.5, "IPU12": "any"},),
            {"available_memory_proportion": {0: 0.5, 12: "any"}},
        ),
    ],
)
def test_setters_store_and_chain(setter, arguments, stored):
    options = Options()
    expected = {**options._values, **stored}
    assert getattr(options, setter)(*arguments) is options
    assert options._values == expected


@pytest.mark.parametrize(
    ("setter", "arguments", "stored"),
    [
        ("enableStableNorm", (True,), {"enableStableNorm": True}),
        ("enableSyntheticData", (True,), {"syntheticDataMode": 2}),
        ("enableSyntheticData", (False,), {"syntheticDataMode": 0}),
        ("logCycleCount", (True,), {"instrumentWithHardwareCycleCounter": True}),
        ("updatableNamedBuffers", (["b"],), {"updatableNamedBuffers": ["b"]}),
        (
            "enableExecutableCaching",
            ("c",),
            {"enableEngineCaching": True, "cachePath": "c"},
        ),
        (
            "enableProfiling",
            (),
            {
                "engineOptions": {
                    "debug.allowOutOfMemory": "true",
                    "autoReport.directory": ".",
                    "autoReport.all": "true",
                }
            },
        ),
    ],
)
def test_setters_for_popart_store_and_chain(setter, arguments, stored):
    options = Options()
    expected = {**options._Popart.options, **stored}
    assert getattr(options, setter)(*arguments) is options
    assert options._Popart.options == expected


@pytest.mark.parametrize(
    ("setter", "arguments", "name", "value"),
    [
        ("relaxOptimizerAttributesChecks", (), "_relax_optimizer_checks", True),
        (
            "showCompilationProgressBar",
            (False,),
            "_show_compilation_progress_bar",
            False,
        ),
        ("sourceLocationExcludes", (["a"],), "_source_location_excludes", ["a"]),
        ("disableModuleNamescope", (), "_module_namescope_enabled", False),
    ],
)
def test_setters_of_private_settings_store_and_chain(setter, arguments, name, value):
    options = Options()
    assert getattr(options, name) != value
    assert getattr(options, setter)(*arguments) is options
    assert getattr(options, name) == value


@pytest.mark.parametrize(
    ("setter", "value", "error"),
    [
        ("connectionType", 1, AssertionError),
        ("syncPattern", 1, AssertionError),
        ("useIpuId", "1", AssertionError),
        ("randomSeed", 1.0, AssertionError),
        ("outputMode", 2, AssertionError),
        ("logDir", None, AssertionError),
        ("maxRepeatLogs", "4", AssertionError),
        ("setExecutionStrategy", AutoStage.SameAsIpu, AssertionError),
        ("setAvailableMemoryProportion", {"0": 0.5}, AssertionError),
        ("setAvailableMemoryProportion", {"IPU": 0.5}, ValueError),
        ("setAvailableMemoryProportion", {0: 0.5}, AttributeError),
    ],
)
def test_setters_refuse_wrong_values(setter, value, error):
    options = Options()
    before = repr(options)
    with pytest.raises(error):
        getattr(options, setter)(value)
    assert repr(options) == before


def test_memory_proportions_are_replaced_not_merged():
    options = Options().setAvailableMemoryProportion({"IPU0": 0.1})
    options.setAvailableMemoryProportion({"IPU1": 0.2})
    assert options.available_memory_proportion == {1: 0.2}


def test_location_excludes_are_appended_without_touching_other_options():
    options = Options().appendToLocationExcludes("a", "b")
    assert options._source_location_excludes[-2:] == ["a", "b"]
    assert Options()._source_location_excludes == options._source_location_excludes[:-2]


def test_the_seed_reaches_torch():
    with torch.random.fork_rng(devices=[]):
        Options().randomSeed(-7)
        first = torch.rand(3)
        torch.manual_seed(-7)
        assert torch.equal(first, torch.rand(3))


def test_disabling_the_cache_leaves_its_path():
    options = Options().enableExecutableCaching("c").enableExecutableCaching(None)
    assert options._Popart.options["enableEngineCaching"] is False
    assert options._Popart.options["cachePath"] == "c"


def test_profiling_keeps_other_engine_options_and_warns_of_the_environment(
    monkeypatch, caplog
):
    options = Options()
    options._Popart.setEngineOptions({"other": "1", "autoReport.all": "false"})
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.directory": "/x"}')

    options.enableProfiling("p")

    assert options._Popart.options["engineOptions"] == {
        "other": "1",
        "debug.allowOutOfMemory": "true",
        "autoReport.directory": "p",
        "autoReport.all": "true",
    }
    assert "autoReport.directory" in caplog.text
    assert "autoReport.all" not in caplog.text


# Output mode


@pytest.mark.parametrize("period", [None, 0, -1])
def test_every_n_needs_a_positive_period(period):
    with pytest.raises(AssertionError, match="EveryN anchor must have"):
        Options().outputMode(OutputMode.EveryN, period)


def test_a_fractional_period_fails_the_type_rule():
    with pytest.raises(AssertionError, match="Unexpected type"):
        Options().outputMode(OutputMode.EveryN, 2.5)


def test_a_period_is_stored_even_where_it_is_ignored():
    options = Options().outputMode(OutputMode.All, 5)
    assert options.output_return_period == 5
    assert options.outputMode(OutputMode.All).output_return_period == 1


def test_the_default_mode_can_be_set_again():
    options = Options()
    assert options.defaultOutputMode()
    assert not options.outputMode(OutputMode.Final).defaultOutputMode()
    assert options.outputMode(OutputMode.Default).defaultOutputMode()


@pytest.mark.parametrize(
    ("arguments", "stored"),
    [
        ((), [True, None, 1]),
        ((None, 3), [True, None, 1]),
        ((OutputMode.Sum, 3), [False, OutputMode.Sum, 1]),
        ((OutputMode.EveryN, 3), [False, OutputMode.EveryN, 3]),
        ((OutputMode.EveryN,), [False, OutputMode.EveryN, 1]),
    ],
)
def test_anchors_are_stored_unchecked(arguments, stored):
    options = Options()
    assert options.anchorTensor("short", "long", *arguments) is None
    assert options.anchored_tensors == {"short": ["long", *stored]}
    assert Options().anchored_tensors == {}


# Replica grouping


@pytest.mark.parametrize("kind", [CommGroupType.Consecutive, CommGroupType.Orthogonal])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_groups_that_divide_the_replicas_are_stored(kind, size):
    options = Options().replicationFactor(4).inputReplicaGrouping(size, kind)
    assert (options.input_group_size, options.input_cgt) == (size, kind)


def test_no_grouping_means_groups_of_one_whatever_the_size():
    options = Options().inputReplicaGrouping(7, CommGroupType.NoGrouping)
    assert options.input_group_size == 1
    assert options.input_cgt is CommGroupType.Consecutive


@pytest.mark.parametrize(
    ("size", "kind", "error"),
    [
        (4, CommGroupType.All, ValueError),
        (8, CommGroupType.Consecutive, ValueError),
        (3, CommGroupType.Consecutive, ValueError),
        (0, CommGroupType.Consecutive, ZeroDivisionError),
    ],
)
def test_other_groups_are_refused(size, kind, error):
    with pytest.raises(error):
        Options().replicationFactor(4).inputReplicaGrouping(size, kind)


def test_a_group_type_that_is_no_member_is_noticed_after_storing_the_size():
    options = Options().replicationFactor(4)
    with pytest.raises(AssertionError):
        options.inputReplicaGrouping(2, 1)
    assert options.input_group_size == 2


def test_groups_are_not_checked_again_when_the_replicas_change():
    options = Options().replicationFactor(4)
    options.inputReplicaGrouping(4, CommGroupType.Consecutive).replicationFactor(2)
    assert (options.input_group_size, options.replication_factor) == (4, 2)


# Freezing


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.deviceIterations(2),
        lambda o: o.outputMode(OutputMode.All),
        lambda o: o.useIpuId(1),
        lambda o: o.modelName("x"),
        lambda o: o.createOrSet(new=1),
        lambda o: o.setExecutionStrategy(ShardedExecution()),
        lambda o: o.showCompilationProgressBar(False),
        lambda o: o.relaxOptimizerAttributesChecks(),
        lambda o: o.sourceLocationExcludes([]),
        lambda o: o.disableModuleNamescope(),
        lambda o: o.enableSyntheticData(True),
        lambda o: setattr(o, "replication_factor", 2),
        lambda o: setattr(o, "_jit", None),
        lambda o: o.from_json('{"deviceIterations": 2}'),
        lambda o: o.checkIsFrozen(),
    ],
)
def test_frozen_options_refuse_changes(frozen, change):
    before = (repr(frozen), dict(vars(frozen)))
    with pytest.raises(AttributeError, match=FROZEN):
        change(frozen)
    assert (repr(frozen), vars(frozen)) == before


def test_thawed_options_can_be_changed(frozen):
    frozen._unfreeze()
    frozen.deviceIterations(2).checkIsFrozen()
    frozen.Training.gradientAccumulation(2)
    frozen._Popart.set("a", 1)


def test_poptorchs_holes_in_freezing_are_kept(frozen):
    frozen.anchorTensor("short", "long")
    frozen.deleteIfExists("log_dir")
    with pytest.raises(AttributeError, match=FROZEN):
        frozen.appendToLocationExcludes("a")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with pytest.raises(AttributeError, match=FROZEN):
            frozen.randomSeed(3)
        assert torch.initial_seed() == 3

    assert "short" in frozen.anchored_tensors
    assert not frozen.exists("log_dir")
    assert frozen._source_location_excludes[-1] == "a"
    assert not frozen.exists("random_seed")


# Copies


def _is_frozen(options):
    flags = {
        part._is_frozen
        for part in (
            options,
            options.Training,
            options.Precision,
            options.Jit,
            options.Distributed,
            options.TensorLocations,
            options._Popart,
        )
    }
    assert len(flags) == 1
    return flags.pop()


@pytest.mark.parametrize("copier", [lambda o: o.clone(), copy.deepcopy])
def test_a_clone_is_equal_apart_and_never_frozen(frozen, copier):
    duplicate = copier(frozen)

    assert _is_frozen(frozen)
    assert not _is_frozen(duplicate)
    assert repr(duplicate) == repr(frozen)
    before = repr(frozen)
    duplicate.deviceIterations(9).anchorTensor("a", "b")
    duplicate.Training.gradientAccumulation(9).setAutomaticLossScaling(True)
    duplicate.appendToLocationExcludes("x")
    assert repr(frozen) == before
    assert "x" not in frozen._source_location_excludes


def test_a_clone_shares_its_popart_settings_with_its_own_sections():
    duplicate = Options().clone()
    duplicate.Precision.enableStochasticRounding(True)
    duplicate.Training.setAutomaticLossScaling(True)
    assert duplicate._Popart.options["enableStochasticRounding"] is True
    assert duplicate._Popart.options["automaticLossScalingSettings.enabled"] is True


def test_a_clone_has_its_own_strategy():
    stage = Stage("a")
    options = Options().setExecutionStrategy(PipelinedExecution(stage))
    assert options._execution_strategy.stage("a") is stage
    assert options.clone()._execution_strategy.stage("a") is not stage


def test_a_shallow_copy_shares_values_and_stays_frozen(frozen):
    duplicate = copy.copy(frozen)
    assert duplicate._values is frozen._values
    assert duplicate.Training is frozen.Training
    with pytest.raises(AttributeError, match=FROZEN):
        duplicate.deviceIterations(2)


@pytest.mark.parametrize(
    "strategy",
    [
        PipelinedExecution(),
        PipelinedExecution("a", Stage("b").ipu(3)),
        ShardedExecution(AutoStage.AutoIncrement),
        ParallelPhasedExecution("a", "b"),
    ],
)
def test_pickled_options_stay_as_they_are(strategy):
    options = Options().deviceIterations(3).setExecutionStrategy(strategy)
    options.Training.gradientAccumulation(5)
    thawed = pickle.loads(pickle.dumps(options))
    options._freeze()
    frozen = pickle.loads(pickle.dumps(options))

    assert not _is_frozen(thawed)
    assert _is_frozen(frozen)
    assert repr(thawed) == repr(frozen) == repr(options)
    assert frozen._Popart is frozen.Training._popart
    assert type(frozen._execution_strategy) is type(strategy)


def test_options_are_equal_to_themselves_only():
    options = Options()
    assert options != Options()
    assert len({options, Options()}) == 2


# Text and toDict


def test_the_text_shows_values_and_sections_without_addresses():
    options = Options().replicationFactor(4)
    text = repr(options)
    assert text == str(options) == f"{options}"
    assert text.startswith("Options(replication_factor=4, ")
    assert hex(id(options)) not in text
    assert "0x" not in text
    places = [
        text.index(f"{name}=")
        for name in (
            "Distributed",
            "Jit",
            "Precision",
            "TensorLocations",
            "Training",
            "_Popart",
        )
    ]
    assert places == sorted(places)


def test_equal_settings_give_equal_text_and_others_do_not():
    assert repr(Options().deviceIterations(2)) == repr(Options().deviceIterations(2))
    assert repr(Options().deviceIterations(2)) != repr(Options().deviceIterations(3))


def test_to_dict_needs_an_output_mode():
    with pytest.raises(AssertionError, match="An output mode must be picked"):
        Options().toDict()


def test_to_dict_merges_every_part_and_works_frozen(frozen):
    options = frozen.clone().outputMode(OutputMode.Sum)
    options.Training.gradientAccumulation(3)
    options.Precision.enableStochasticRounding(True)
    options.TensorLocations.numIOTiles(32)
    options._freeze()
    merged = options.toDict()

    assert merged["execution_mode"] == 0
    assert merged["rearrangeAnchorsOnHost"] is False
    assert merged["output_mode"] == 3
    assert merged["gradient_accumulation"] == 3
    assert merged["num_distributed_processes"] == 1
    assert merged["numIOTiles"] == 32
    assert merged["enableStochasticRounding"] is True
    assert _is_frozen(options)


def test_the_progress_callback_is_there_unless_the_bar_is_off(caplog):
    options = Options().outputMode(OutputMode.All)
    merged = options.toDict()
    merged["compilation_progress_bar_fn"](3, 10)
    options.showCompilationProgressBar(False)
    assert "compilation_progress_bar_fn" not in options.toDict()


def test_a_name_set_in_two_places_is_refused():
    options = Options().outputMode(OutputMode.All)
    options._Popart.set("gradient_accumulation", 3)
    with pytest.raises(AssertionError, match="gradient_accumulation"):
        options.toDict()


# Environment


def test_a_cache_directory_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "")
    assert "cachePath" not in Options()._Popart.options
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "c")
    assert Options()._Popart.options["cachePath"] == "c"


def test_default_options_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 6}')
    assert Options().device_iterations == 6
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", "")
    with pytest.raises(json.JSONDecodeError):
        Options()
