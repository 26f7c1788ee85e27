# SPDX-License-Identifier: Apache-2.0
"""`Options`: what setters store and refuse, copies, files, keys of PopART."""

import copy
import json
import logging
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ipufit.emulator as poptorch
from ipufit.emulator import enums, poptorch_core
from ipufit.emulator._options_keys import (
    ENUMERATIONS,
    TYPES,
    validate_popart_options,
)
from ipufit.emulator.enums import (
    AutoStage,
    CommGroupType,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
)
from ipufit.emulator.errors import Error
from ipufit.emulator.options import (
    ConfigFileError,
    Options,
    ParallelPhasedExecution,
    PipelinedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)

pytestmark = pytest.mark.floor

FROZEN = "Can't modify frozen Options"
SECTIONS = ("Distributed", "Jit", "Precision", "TensorLocations", "Training")
SHARDED = ShardedExecution()
LOCATION = TensorLocationSettings(onChip=0)
STRATEGY = "MeanAccumulationAndReplicationReductionStrategy"
REDUCTION = "Training.accumulationAndReplicationReductionType"


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


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "run.cfg"
        path.write_text(text)
        return str(path)

    return write_file


def _settings(options):
    """All that was set, by name."""
    private = (
        "execution_strategy",
        "module_namescope_enabled",
        "relax_optimizer_checks",
        "show_compilation_progress_bar",
        "source_location_excludes",
    )
    settings = {name: vars(options)[f"_{name}"] for name in private}
    for section in SECTIONS:
        settings.update(getattr(options, section).toDict())
    return {**settings, **options._values, **options._Popart.options}


# Setters

STORED = [
    ("deviceIterations(3)", {"device_iterations": 3}),
    ("replicationFactor(3)", {"replication_factor": 3}),
    (
        "inputReplicaGrouping(1, CommGroupType.Orthogonal)",
        {"input_group_size": 1, "input_cgt": CommGroupType.Orthogonal},
    ),
    ("autoRoundNumIPUs()", {"auto_round_num_ipus": True}),
    ("broadcastBuffers(False)", {"broadcast_buffers": False}),
    ("setExecutionStrategy(SHARDED)", {"execution_strategy": SHARDED}),
    (
        "setAvailableMemoryProportion({'IPU0': 0.5, 'IPU12': 'any'})",
        {"available_memory_proportion": {0: 0.5, 12: "any"}},
    ),
    ("outputMode(OutputMode.Sum)", {"output_mode": 3, "output_return_period": 1}),
    ("relaxOptimizerAttributesChecks()", {"relax_optimizer_checks": True}),
    ("enableStableNorm(True)", {"enableStableNorm": True}),
    ("updatableNamedBuffers(['b'])", {"updatableNamedBuffers": ["b"]}),
    ("connectionType(ConnectionType.OnDemand)", {"connection_type": 1}),
    ("syncPattern(SyncPattern.ReplicaAndLadder)", {"sync_pattern": 2}),
    ("useIpuId(3)", {"ipu_id": 3}),
    ("useIpuModel(False)", {"use_model": False}),
    ("useOfflineIpuTarget()", {"ipu_version": 2, "connection_type": 2}),
    ("enableExecutableCaching('c')", {"enableEngineCaching": True, "cachePath": "c"}),
    ("enableSyntheticData(True)", {"syntheticDataMode": 2}),
    ("logDir('x')", {"log_dir": "x"}),
    ("maxRepeatLogs(None)", {"max_repeat_logs": 2**64 - 1}),
    ("modelName('x')", {"model_name": "x"}),
    (
        "enableProfiling()",
        {
            "engineOptions": {
                "debug.allowOutOfMemory": "true",
                "autoReport.directory": ".",
                "autoReport.all": "true",
            }
        },
    ),
    ("logCycleCount(True)", {"instrumentWithHardwareCycleCounter": True}),
    ("showCompilationProgressBar(False)", {"show_compilation_progress_bar": False}),
    ("sourceLocationExcludes(['a'])", {"source_location_excludes": ["a"]}),
    ("disableModuleNamescope()", {"module_namescope_enabled": False}),
    ("Training.gradientAccumulation(8)", {"gradient_accumulation": 8}),
    (
        f"{REDUCTION}(ReductionType.Sum)",
        {"accumulation_and_replication_reduction_type": ReductionType.Sum},
    ),
    (
        f"Training.set{STRATEGY}(MeanReductionStrategy.Running)",
        {f"m{STRATEGY[1:]}": MeanReductionStrategy.Running},
    ),
    (
        "Training.setAutomaticLossScaling(True)",
        {"automaticLossScalingSettings.enabled": True},
    ),
    (
        "Training.setConvolutionDithering(True)",
        {"convolutionOptions": {"enableConvDithering": True}},
    ),
    (
        "Precision.enableFloatingPointExceptions(False)",
        {"enableFloatingPointChecks": False},
    ),
    ("Precision.enableStochasticRounding('x')", {"enableStochasticRounding": "x"}),
    (
        "Precision.setPartialsType(torch.float32)",
        {
            "partialsTypeMatMuls": "float",
            "convolutionOptions": {"partialsType": "float"},
        },
    ),
    (
        "Distributed.configureProcessId(5, 2)",
        {"distributed_process_id": 5, "num_distributed_processes": 2},
    ),
    ("TensorLocations.numIOTiles(32)", {"numIOTiles": 32}),
    *(
        (
            f"TensorLocations.set{kind}Location(LOCATION)",
            {f"location_{kind.lower()}": {"onChip": 0}},
        )
        for kind in ("Activation", "Weight", "Optimizer", "Accumulator")
    ),
    ("_Popart.set('whatever', object)", {"whatever": object}),
    ("_Popart.setEngineOptions({'a': 'b'})", {"engineOptions": {"a": "b"}}),
    (
        "_Popart.setPatterns({'PadSum': True}, 1)",
        {"patterns": {"PadSum": True}, "patterns_level": 1},
    ),
]


def run(call, options):
    """Call a setter that is written as in a script."""
    others = {"torch": torch, "SHARDED": SHARDED, "LOCATION": LOCATION}
    return eval(f"options.{call}", {**vars(enums), **others, "options": options})


@pytest.mark.parametrize(("call", "stored"), STORED)
def test_setters_store_and_chain(call, stored):
    options = Options()
    expected = {**_settings(options), **stored}
    section, dot, _ = call.partition("(")[0].rpartition(".")
    part = getattr(options, section) if dot else options
    assert run(call, options) is part
    settings = _settings(options)
    assert settings == expected
    # Modes are plain integers.
    assert [type(settings[name]) for name in stored] == list(map(type, stored.values()))


@pytest.mark.parametrize("call", [call for call, _ in STORED])
def test_frozen_options_refuse_changes(frozen, call):
    before = _settings(frozen)
    with pytest.raises(AttributeError, match=FROZEN):
        run(call, frozen)
    assert _settings(frozen) == before


UNKNOWN = """
    Precision.enableStochasticRounding('x')
    _Popart.set('whatever', object)
"""


@pytest.mark.parametrize("call", [call for call, _ in STORED if call not in UNKNOWN])
def test_what_setters_store_is_known_when_a_model_is_compiled(call):
    options = Options().outputMode(OutputMode.All)
    run(call.replace("'any'", "1"), options)
    poptorch_core._validateOptions(options.toDict())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("deviceIterations(2.0)", AssertionError, "Unexpected type"),
        ("autoRoundNumIPUs(1)", AssertionError, "Unexpected type"),
        ("connectionType(1)", AssertionError, "ConnectionType"),
        ("syncPattern(1)", AssertionError, "SyncPattern"),
        ("randomSeed(1.0)", AssertionError, "random_seed"),
        ("outputMode(2)", AssertionError, "OutputMode"),
        ("outputMode(OutputMode.EveryN)", AssertionError, "EveryN anchor must have"),
        ("outputMode(OutputMode.EveryN, 0)", AssertionError, "EveryN anchor must"),
        ("setExecutionStrategy(AutoStage.SameAsIpu)", AssertionError, "Pipelined"),
        ("setAvailableMemoryProportion({'0': 0.5})", AssertionError, "'IPU0'"),
        ("setAvailableMemoryProportion({0: 0.5})", AttributeError, "startswith"),
        ("inputReplicaGrouping(1, CommGroupType.All)", ValueError, "isn't supported"),
        ("inputReplicaGrouping(2, CommGroupType.Consecutive)", ValueError, "groups"),
        (
            "inputReplicaGrouping(0, CommGroupType.Consecutive)",
            ZeroDivisionError,
            "zero",
        ),
        ("Training.gradientAccumulation('2')", AssertionError, "Unexpected type"),
        (f"{REDUCTION}(ReductionType.NoReduction)", ValueError, r"ReductionType\.Sum"),
        ("Precision.setPartialsType(torch.bfloat16)", ValueError, r"torch\.half"),
        ("Precision.setPartialsType([])", ValueError, r"torch\.half"),
        ("Precision.enableFloatingPointExceptions(1)", AssertionError, "enabled"),
        ("Precision.runningStatisticsAlwaysFloat(1)", ValueError, "bool"),
        ("Jit.traceModel(True)", ValueError, "traceModel"),
        ("Distributed.configureProcessId('0', 1)", AssertionError, "Unexpected type"),
        ("TensorLocations.numIOTiles(30)", AssertionError, "an even number"),
        ("TensorLocations.numIOTiles(194)", AssertionError, "an even number"),
        (
            "TensorLocations.setWeightLocation({'onChip': 0})",
            AssertionError,
            "TensorLocationSettings",
        ),
        ("_Popart.setPatterns(['P'])", AssertionError, "patterns"),
        ("_Popart.setPatterns({'P': True}, '2')", AssertionError, "level"),
    ],
)
def test_setters_refuse_wrong_values(call, error, message):
    options = Options()
    before = _settings(options)
    with pytest.raises(error, match=message):
        run(call, options)
    assert _settings(options) == before


def test_defaults_are_poptorchs():
    settings = _settings(Options())
    assert isinstance(settings.pop("execution_strategy"), PipelinedExecution)
    assert settings == {
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
        "module_namescope_enabled": True,
        "relax_optimizer_checks": False,
        "show_compilation_progress_bar": True,
        "source_location_excludes": [
            "install/poptorch",
            "site-packages/torch",
            "site-packages/poptorch",
        ],
        "gradient_accumulation": 1,
        "accumulation_and_replication_reduction_type": ReductionType.Mean,
        "meanAccumulationAndReplicationReductionStrategy": MeanReductionStrategy.Post,
        "num_distributed_processes": 1,
        "distributed_process_id": 0,
        "ipuof_configs": {},
        "location_activation": {},
        "location_weight": {},
        "location_optimizer": {},
        "location_accumulator": {},
        "instrumentWithHardwareCycleCounter": False,
        "rearrangeAnchorsOnHost": False,
    }


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
    with pytest.raises(AssertionError, match="Invalid option processId"):
        options.Distributed.processId = 1


def test_the_seed_reaches_torch():
    with torch.random.fork_rng(devices=[]):
        Options().randomSeed(-7)
        first = torch.rand(3)
        torch.manual_seed(-7)
        assert torch.equal(first, torch.rand(3))


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (True, "Unknown bool option random_seed"),
        (-7, "random_seed is -7"),
        (2**64, "random_seed is 18446744073709551616"),
    ],
)
def test_a_seed_that_the_backend_cannot_take_is_refused_when_it_compiles(seed, message):
    with torch.random.fork_rng(devices=[]):
        options = Options().outputMode(OutputMode.All)
        if seed < 2**64:  # of which torch takes less
            options.randomSeed(seed)
        options.createOrSet(random_seed=seed)
        assert options.random_seed == seed
    with pytest.raises(Error, match=message):
        validate_popart_options(options.toDict())


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


def test_deprecated_setters_warn_and_store_nothing(caplog, frozen):
    for options in (Options(), frozen):
        before = _settings(options)
        assert options.Precision.halfFloatCasting(None) is options.Precision
        assert options.Precision.runningStatisticsAlwaysFloat(True) is options.Precision
        assert options.Jit.traceModel(False) is options.Jit
        assert _settings(options) == before
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 6


def test_processes_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    distributed = Options().Distributed
    assert (distributed.numProcesses, distributed.processId) == (4, 3)
    assert distributed.disable() is distributed
    assert (distributed.numProcesses, distributed.processId) == (1, 0)

    monkeypatch.setenv("SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    assert distributed.setEnvVarNames("SIZE", "RANK") is distributed
    assert (distributed.numProcesses, distributed.processId) == (8, 5)

    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "first")
    with pytest.raises(ValueError, match="first"):
        Options()


# Tensor locations


def test_locations_store_integers_and_are_snapshots():
    settings = (
        TensorLocationSettings()
        .minElementsForOffChip(10)
        .minElementsForReplicatedTensorSharding(20)
        .useOnChipStorage(False)
        .useReplicatedTensorSharding()
        .useIOTilesToLoad(True)
        .useIOTilesToStore(False)
    )
    stored = {
        "minElementsForOffChip": 10,
        "minElementsForReplicatedTensorSharding": 20,
        "onChip": 0,
        "useReplicatedTensorSharding": 1,
        "useIOTilesToLoad": 1,
        "useIOTilesToStore": 0,
    }
    assert settings.toDict() == stored
    assert {type(value) for value in settings.toDict().values()} == {int}

    locations = Options().TensorLocations.setWeightLocation(settings)
    settings.useOnChipStorage(True)
    assert locations.location_weight == stored
    assert "onChip" not in settings.useOnChipStorage(None).toDict()


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("minElementsForOffChip", 1.0),
        ("useOnChipStorage", 1),
        ("useReplicatedTensorSharding", None),
    ],
)
def test_locations_of_another_type_are_refused(setter, value):
    settings = TensorLocationSettings()
    with pytest.raises(AssertionError):
        getattr(settings, setter)(value)
    assert settings.toDict() == {}


# Freezing and copies


def _is_frozen(options):
    parts = [options, options._Popart, *(getattr(options, name) for name in SECTIONS)]
    flags = {part._is_frozen for part in parts}
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
    duplicate.Precision.enableStochasticRounding(True)
    duplicate.appendToLocationExcludes("x")
    assert repr(frozen) == before
    # Its sections share its own settings of PopART.
    assert duplicate._Popart.options["enableStochasticRounding"] is True
    assert duplicate._Popart.options["automaticLossScalingSettings.enabled"] is True


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


# Text and toDict


def test_to_dict_needs_an_output_mode():
    options = Options()
    assert options.defaultOutputMode()
    with pytest.raises(AssertionError, match="An output mode must be picked"):
        options.toDict()
    assert not options.outputMode(OutputMode.Final).defaultOutputMode()


# Environment, files, JSON


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "")
    assert "cachePath" not in Options()._Popart.options
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "c")
    assert Options()._Popart.options["cachePath"] == "c"
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 6}')
    assert Options().device_iterations == 6
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", "")
    with pytest.raises(json.JSONDecodeError):
        Options()


def test_files_call_setters_of_options_and_sections(write):
    options = Options().loadFromFile(
        write(
            """
            # how this run is laid out

            deviceIterations(4)  # and a comment here
            Training.gradientAccumulation(7)
            outputMode(poptorch.OutputMode.Sum)
            replication_factor = 5
            logDir("logs").modelName("net")
            """
        )
    )
    options.loadFromFile(write("deviceIterations(6)\n"))

    assert options.device_iterations == 6
    assert options.Training.gradient_accumulation == 7
    assert options.output_mode == 3
    assert options.replication_factor == 5
    assert (options.log_dir, options.model_name) == ("logs", "net")


def test_nothing_runs_of_a_file_with_a_syntax_error(write):
    path = write("# first\n\ndeviceIterations(4)\n\nmodelName('a' 3)\nlogDir('b')\n")
    options = Options()
    with pytest.raises(ConfigFileError) as info:
        options.loadFromFile(path)

    first, second = str(info.value).split("\n")
    assert first.startswith("SyntaxError at line 2 of run.cfg: ")  # of those kept
    assert second == "> options.modelName('a' 3)"
    assert options.device_iterations == 1
    with pytest.raises(ConfigFileError):
        options.loadFromFile(write("deviceIterations(4)\nmodelName(\n"))


def test_json_calls_setters():
    options = Options().from_json(
        json.dumps(
            {
                "deviceIterations": 4,
                "Training.gradientAccumulation": 7,
                "connectionType": "ConnectionType.OnDemand",
                "Distributed.configureProcessId": [1, 2],
                "_Popart.set": ["enableOutlining", False],
                "maxRepeatLogs": None,
            }
        )
    )

    assert options.device_iterations == 4
    assert options.Training.gradient_accumulation == 7
    assert options.connection_type == 1
    assert options.Distributed.processId == 1
    assert options._Popart.options["enableOutlining"] is False
    assert options.max_repeat_logs == 2**64 - 1


# What is refused when a model is compiled: settings the backend doesn't know --------

LOCATIONS = ("activation", "weight", "optimizer", "accumulator")
EXAMPLES = {
    "bool": True,
    "uint": 1,
    "float": 0.5,
    "str": "x",
    "list": ["1"],  # some lists are numbers of an enumeration's members
    "dict": {"x": "y"},
}


def _options():
    return Options().outputMode(OutputMode.All)


@given(st.sampled_from(sorted(EXAMPLES)), st.sampled_from(sorted(EXAMPLES)))
def test_a_known_key_takes_only_values_of_its_kind(kind, other):
    values = {
        "available_memory_proportion": {0: 0.5},
        "patterns": {"PadSum": False},
        **{f"location_{kind}": {"onChip": 0} for kind in LOCATIONS},
    }
    for key in TYPES.keys() - {"patterns_level"}:
        if TYPES[key] != kind:
            continue
        if kind == other:
            value = values.get(key, EXAMPLES[other])
            validate_popart_options({key: value, "patterns_level": 2})
        else:
            with pytest.raises(Error, match=f"Unknown {other} option {key}"):
                validate_popart_options({key: EXAMPLES[other]})


@pytest.mark.parametrize(
    "value", [None, object(), np.float32(1), print, [None], {"x": 1.5}, (2.0,)]
)
def test_a_value_of_a_type_that_the_backend_does_not_take_is_refused(value):
    with pytest.raises(Error, match="Unknown value type"):
        validate_popart_options({"dotChecks": value})


def test_a_boolean_count_is_refused_although_its_setter_takes_it():
    options = _options().deviceIterations(True)
    with pytest.raises(Error, match="Unknown bool option device_iterations"):
        validate_popart_options(options.toDict())


@pytest.mark.parametrize("key", sorted(ENUMERATIONS))
def test_numbers_of_enumerations_are_those_that_popart_knows(key):
    """PopTorch, `SessionOptions.cpp`: `ADD_POPART_ENUM_OPTION` and its like."""
    is_list = TYPES[key] == "list"
    known = {int(member) for member in ENUMERATIONS[key]}
    for number in range(-1, max(known) + 2):
        setting = {"patterns": {}, "patterns_level": 2}
        setting[key] = [number] if is_list else number
        if number in known:
            validate_popart_options(setting)
        else:
            with pytest.raises(Error, match=f"out of range: option .* = {number}, and"):
                validate_popart_options(setting)


def test_patterns_need_their_level():
    with pytest.raises(Error, match="patterns_level"):
        validate_popart_options({"patterns": {"PadSum": True}})
    validate_popart_options({"patterns": {"PadSum": True}, "patterns_level": 2})


def test_a_memory_proportion_that_is_no_number_is_refused():
    options = _options().setAvailableMemoryProportion({"IPU3": "much"})
    with pytest.raises(Error, match="IPU3"):
        validate_popart_options(options.toDict())


@pytest.mark.parametrize(
    ("patterns", "level", "message"),
    [
        ({"Inplace": True}, 2, "Unknown pattern Inplace: PopART has .*'InPlace'"),
        ({"PadSum": True, "MatMulOp": False}, 2, "'MatMulOp' is mandatory"),
        ({"PadSum": True}, 4, r"patterns_level = 4, and PopART knows 0 \(NoPatterns\)"),
    ],
)
def test_patterns_are_those_of_popart(patterns, level, message):
    """`Patterns::enablePattern`, and PopTorch's `SessionOptions::setPatternsLevel`."""
    options = _options()
    options._Popart.setPatterns(patterns, level)
    with pytest.raises(Error, match=message):
        validate_popart_options(options.toDict())


def test_names_inside_a_location_are_known():
    options = _options()
    options.TensorLocations.setWeightLocation(TensorLocationSettings(offChip=1))
    with pytest.raises(Error, match=r"location_weight: \['offChip'\], and there are"):
        validate_popart_options(options.toDict())


# What is refused together with a model ------------------------------------------------


class Chain(torch.nn.Module):
    """Multiplies by a weight on each of its IPUs."""

    def __init__(self, num_ipus):
        super().__init__()
        self.weights = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.ones(2).half()) for _ in range(num_ipus)]
        )

    def forward(self, x):
        for ipu, weight in enumerate(self.weights):
            poptorch.Block.start(f"block {ipu}", ipu_id=ipu)
            x = x * weight
        return poptorch.identity_loss(x.float(), reduction="sum"), x.float()


def compiled(calls, num_ipus=1, *, trains=False, accumulation=1):
    """Compile a chain with options for which these setters are called."""
    options = Options().deviceIterations(4)
    for call in calls.split("; "):
        run(call, options)
    if trains:
        options.Training.gradientAccumulation(accumulation)
    make = poptorch.trainingModel if trains else poptorch.inferenceModel
    executor = make(Chain(num_ipus), options)
    rows = 4 * accumulation * options.replication_factor
    executor.compile(torch.ones(rows, 2).half())


SCALES = "Training.setAutomaticLossScaling(True); _Popart.set('automaticLossScaling"
EXPLICIT = "_Popart.set('enableExplicitIR', True)"
TRAINED = {"trains": True}
FACTOR = {"trains": True, "accumulation": 2}
CHAINED = {"num_ipus": 2}
SHARDS = "setExecutionStrategy(SHARDED); "
REFUSED = [
    (
        "setAvailableMemoryProportion({'IPU0': 1.5})",
        {},
        "IPU0 is 1.5: it must",
    ),
    ("setAvailableMemoryProportion({'IPU0': 0})", {}, "above 0, and 1 at most"),
    ("setAvailableMemoryProportion({'IPU0': 1, 'IPU1': -1})", CHAINED, "IPU1 is -1"),
    ("_Popart.set('virtualGraphMode', 0)", CHAINED, "is for 1 IPU, not for 2"),
    ("_Popart.set('enablePipelining', True)", {}, "models on several IPUs"),
    ("_Popart.set('executionPhaseSettings.phases', 2)", {}, "2 phases need"),
    ("_Popart.set('autoRecomputation', 3)", {}, "Pipeline needs a pipeline"),
    (SHARDS + "_Popart.set('autoRecomputation', 3)", CHAINED, "Pipeline needs"),
    ("_Popart.set('aliasZeroCopy', True)", {}, "needs enableExplicitIR"),
    ("_Popart.set('aliasZeroCopy', True)", CHAINED, "needs enableExplicitIR"),
    ("_Popart.set('enableExplicitMainLoops', True)", {}, "needs useHostCopyOps"),
    (
        EXPLICIT + "; _Popart.set('explicitRecomputation', False)",
        CHAINED,
        "need explicitRecomputation",
    ),
    (EXPLICIT + "; outputMode(OutputMode.EveryN, 2)", {}, "doesn't go with EveryN"),
    ("_Popart.set('enableGradientAccumulation', True)", {}, "gradients of 1 micro"),
    (
        "_Popart.set('enableGradientAccumulation', False)",
        FACTOR,
        "gradients of 2 micro",
    ),
    (
        "replicationFactor(2); _Popart.set('enableReplicatedGraphs', False)",
        {},
        "2 replicas need",
    ),
    ("_Popart.set('defaultBufferingDepth', 0)", {}, "depth is 0"),
    ("_Popart.set('defaultPrefetchBufferingDepth', 0)", {}, "depth is 0"),
    ("_Popart.set('numIOTiles', 33)", {}, "numIOTiles is 33"),
    ("_Popart.set('gclOptions', {'fast': 'true'})", {}, "Unknown gclOptions: fast"),
    ("Training.setAutomaticLossScaling(True)", {}, "is for training"),
    ("_Popart.setPatterns({'PadSum': True}, 0)", TRAINED, "lacks mandatory patterns"),
    (SCALES + "Settings.binEdgeLocation', 1.5)", TRAINED, "binEdgeLocation is 1.5"),
    (SCALES + "Settings.thresholdUpperCountProportion', -0.1)", TRAINED, "is -0.1"),
    (SCALES + "Settings.gradientTensorTrackingMethod', 2)", TRAINED, "Method 2 needs"),
]


@pytest.mark.parametrize(("calls", "program", "message"), REFUSED)
def test_popart_refuses_some_settings_of_a_program(calls, program, message):
    with pytest.raises(Error, match=message) as info:
        compiled(calls, **program)
    assert info.value.type == "popart_exception"


@pytest.mark.parametrize(
    ("calls", "program"),
    [
        ("setAvailableMemoryProportion({'IPU0': 1 + 1e-9, 'IPU1': 2.0})", {}),
        ("_Popart.set('autoRecomputation', 3)", CHAINED),
        ("_Popart.setPatterns({'PadSum': True}, 0)", {}),
        (EXPLICIT, CHAINED),
        (EXPLICIT + "; _Popart.set('aliasZeroCopy', True)", CHAINED),
        ("_Popart.set('enableGradientAccumulation', True)", TRAINED),
        ("_Popart.set('automaticLossScalingSettings.binEdgeLocation', 1.5)", TRAINED),
        (SCALES + "Settings.updatePeriod', 0)", TRAINED),
        ("enableSyntheticData(True); _Popart.set('defaultBufferingDepth', 0)", {}),
    ],
)
def test_popart_takes_the_same_settings_in_other_programs(calls, program):
    compiled(calls, **program)
