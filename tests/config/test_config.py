# SPDX-License-Identifier: Apache-2.0
"""`IPUConfig`: its checks, its plans of calls, and the options that it makes."""

from __future__ import annotations

import dataclasses
from collections import UserDict, UserList

import pytest
import torch

from ipufit import (
    ConfigError,
    IPUConfig,
    IPUModel,
    UnknownNameError,
    UnsupportedError,
    poptorch,
)

pytestmark = pytest.mark.floor

ALL = poptorch.OutputMode.All.value


def built(config, batch_size=32):
    """Options for training and for inference."""
    return (
        config.build_training_options(config.training_plan(batch_size)),
        config.build_inference_options(config.inference_plan(batch_size)),
    )


def made(**fields):
    """Settings of the options for training and for inference."""
    return tuple(options.toDict() for options in built(IPUConfig(**fields)))


def options_of(kind, **fields):
    config = IPUConfig(**fields)
    if kind == "training_options":
        return config.build_training_options(config.training_plan(16))
    return config.build_inference_options(config.inference_plan(16))


@pytest.fixture
def launched(monkeypatch):
    """Set the variables of a launcher."""

    def launch(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


# Refusals -------------------------------------------------------------------------

OVERLAP = {"overlap_io": "accumulation", "num_io_tiles": 32}
OWN = poptorch.Options()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"replicas": True}, "replicas=True"),
        ({"device_iterations": 2.5}, r"device_iterations=2\.5"),
        ({"precision": "bf16"}, "'bf16': use 'float16', as IPUs have no bfloat16"),
        ({"pipeline": "layer1"}, r"pipeline=\('layer1', ...\)"),
        ({"pipeline": "Auto"}, "or 'auto' to have the model divided"),
        ({"pipeline": ["a", ()]}, r"stage \(\)"),
        ({"pipeline": ["a", ("b", "a")]}, "names a more than once"),
        *(
            ({"pipeline": "auto", "ipus": ipus}, "use a whole number of 1 or more")
            for ipus in (0, 1.5, True)
        ),
        *(
            ({"pipeline": stages, "ipus": 4}, "ipus=4 goes with pipeline='auto'")
            for stages in (None, ["a", "b"])
        ),
        ({"pipeline": "auto", "layers_per_ipu": [1, 1]}, "are both given"),
        ({"pipeline": ("a", "b"), "layers_per_ipu": [1, 1]}, "are both given"),
        ({"pipeline": "auto", "training_options": OWN}, "customize="),
        ({"pipeline": "auto", "ipus": 8, "replicas": 16}, "need 128 IPUs"),
        ({"pipeline": "auto", "ipus": 2, **OVERLAP}, "doesn't go with a pipeline"),
        (
            {"pipeline": "auto", "ipus": 4, "available_memory_proportion": (0.2, 0.4)},
            "has 2 numbers",
        ),
        *(
            ({"layers_per_ipu": given}, "give the number of layers on each IPU")
            for given in (3, [], [1, -2], [1, True])
        ),
        ({"layers_per_ipu": [0]}, "leaves IPU 0 without"),
        ({"layers_per_ipu": [0, 0, 4]}, "leaves IPU 1 without"),
        ({"layers_per_ipu": {"a": [1, 1], "b": [1]}}, "for different IPUs"),
        (
            {"layers_per_ipu": {"a": [1, 0, 0, 0], "b": [0, 0, 1, 1]}},
            "leaves IPU 1 without",
        ),
        (
            {"layers_per_ipu": [0, 1, 1], "available_memory_proportion": (0.1, 0.2)},
            "has 2 numbers, and a replica has 3 IPUs",
        ),
        ({"available_memory_proportion": 2}, r"available_memory_proportion=2: use"),
        ({"available_memory_proportion": 0}, "above 0 and up to 1"),
        ({"available_memory_proportion": "0.5"}, "'0.5'"),
        ({"available_memory_proportion": {"IPU0": 0.5}}, "one per IPU"),
        ({"available_memory_proportion": (0.1, 0.2), "pipeline": ("a",)}, "has 2 num"),
        ({"available_memory_proportion": (0.1,) * 65}, "at most 64 IPUs"),
        ({"seed": 1.5}, r"seed=1\.5"),
        ({"seed": 2**64}, "use a whole number of 64 bits"),
        (
            {"replicas": 128},
            "replicas=128, need 128 IPUs, .* has 64 at most",
        ),
        (
            {"replicas": 64, "pipeline": ("a", ("b", "c"))},
            "replicas=64 with 2 IPUs each, its stages, need 128 .* Use 32 replicas",
        ),
        ({"pipeline": [str(i) for i in range(65)]}, "65 IPUs each, .* need 65"),
        ({"inference_options": "fast"}, "inference_options='fast'"),
        ({"customize": "fast"}, "customize='fast'"),
        ({"stochastic_rounding": 1}, "stochastic_rounding=1"),
        ({"loader_mode": "fast"}, "loader_mode"),
        ({"customize": print, "training_options": OWN}, "both given"),
        ({"partials": "int8"}, "partials='int8': use one of None, 'half', 'float'"),
        ({"num_io_tiles": 33}, "num_io_tiles=33: use an even number from 32 to 192"),
        ({"num_workers": -1}, "num_workers=-1: use a whole number of 0 or more"),
        ({"recompute": ""}, "recompute='': use 'auto'"),
        ({"shard_optimizer": True}, "among replicas, and there is one"),
        ({"overlap_io": "all"}, "overlap_io='all': use one of"),
        ({"overlap_io": "accumulation"}, "give num_io_tiles"),
        ({**OVERLAP, "pipeline": ("a", "b")}, "doesn't go with a pipeline"),
        (
            {**OVERLAP, "pipeline": poptorch.PipelinedExecution("a", "b")},
            "doesn't go with a pipeline",
        ),
        ({"cache_dir": 3}, "cache_dir=3: use a path"),
        ({"inference": "sharded"}, "inference='sharded' must be a mapping"),
        ({"inference": {"device_iterations": 3}}, "inference_iterations"),
        ({"inference": {"pipeline": "auto"}}, "stages of training"),
        *(
            (
                {"precision": "16.16", "inference": {field: "16.32"}},
                "in training and inference",
            )
            for field in ("precision", "float32_modules")
        ),
        (
            {"inference": {"layers_per_ipu": [2, 2], "pipeline": ("a", "b")}},
            "both given",
        ),
        (
            {
                "pipeline": ("a", "b"),
                "available_memory_proportion": (0.1, 0.2),
                "inference": {"pipeline": [("a", "b")]},
            },
            "With inference=.*has 2 numbers",
        ),
        *(
            ({"precision": word}, r"precision=.* use one of .*'16\.32'")
            for word in ("32.16", 16)
        ),
        *(
            ({"precision": word}, "use 'float16', as IPUs have no bfloat16")
            for word in ("bf16-mixed", torch.bfloat16)
        ),
        *(
            (
                {"float32_modules": names},
                "everything is float32: give precision='16.16'",
            )
            for names in ("norm", ["head"])
        ),
        *(
            ({"precision": "16.16", "float32_modules": wrong}, "float32_modules=")
            for wrong in (3, [3])
        ),
        ({"process_id": 0}, "give both"),
        ({"process_id": 2, "num_processes": 2}, "count from 0 to 1"),
        ({"process_id": 0.5, "num_processes": 2}, "process_id=0.5"),
    ],
)
def test_values_are_refused_when_they_are_given(fields, message):
    with pytest.raises(ConfigError, match=message):
        IPUConfig(**fields)


@pytest.mark.parametrize("own", [None, OWN])
@pytest.mark.parametrize("name", ["pipelines", "ipu"])
def test_a_mistyped_field_of_inference_is_refused(name, own):
    with pytest.raises(UnknownNameError, match=f"'{name}'"):
        IPUConfig(inference={name: ("a",)}, inference_options=own)


def test_sequences_and_mappings_of_other_libraries_are_as_lists_and_dicts():
    plain = {
        "layers_per_ipu": [1, 2],
        "available_memory_proportion": [0.2, 0.3],
        "recompute": ["0", "1.*"],
        "inference": {"available_memory_proportion": [0.1, 0.1]},
    }
    others = {
        name: UserDict(value) if isinstance(value, dict) else UserList(value)
        for name, value in plain.items()
    }
    assert IPUConfig(**others) == IPUConfig(**plain)
    assert repr(IPUConfig(**others)) == repr(IPUConfig(**plain))


def test_a_process_may_have_64_ipus():
    assert IPUConfig(replicas=32, pipeline=("a", "b")).num_stages == 2
    assert IPUConfig(replicas=64).replicas == 64
    stages = [poptorch.Stage("a").ipu(0), poptorch.Stage("b").ipu(0)]
    assert IPUConfig(replicas=64, pipeline=stages).num_stages == 2  # on one IPU


# Fields and options ---------------------------------------------------------------


def test_the_options_of_training_follow_the_plan():
    config = IPUConfig(micro_batch_size=2, replicas=2, device_iterations=3)
    options, _ = built(config, 16)
    assert options.device_iterations == 3
    assert options.replication_factor == 2
    assert options.Training.gradient_accumulation == 4
    assert options.output_mode == ALL
    assert not options.broadcast_buffers


def test_a_seed_reaches_the_device_and_leaves_torchs_generator_alone():
    before = torch.random.get_rng_state()
    options, _ = built(IPUConfig(seed=7))
    assert options.random_seed == 7
    options, _ = built(IPUConfig(seed=-1))
    assert options.random_seed == 2**64 - 1  # PopTorch takes no negative one
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("fields", "key", "expected"),
    [
        ({"partials": "half"}, "partialsTypeMatMuls", "half"),
        ({"partials": "float"}, "convolutionOptions", {"partialsType": "float"}),
        ({"num_io_tiles": 64}, "numIOTiles", 64),
        ({"prefetch_depth": 3}, "defaultPrefetchBufferingDepth", 3),
        ({"cache_dir": "programs"}, "cachePath", "programs"),
        ({"offline": True}, "ipu_version", 2),
        (
            {"available_memory_proportion": 0.3},
            "available_memory_proportion",
            dict.fromkeys(range(64), 0.3),  # as many IPUs as there may be
        ),
        *(
            (
                {"available_memory_proportion": share, "pipeline": ("a", "b")},
                "available_memory_proportion",
                {0: 0.25, 1: 0.25},
            )
            for share in (0.25, (0.25, 0.25))
        ),
    ],
)
def test_fields_reach_the_options_of_training_and_inference(fields, key, expected):
    for settings in made(**fields):
        assert settings[key] == expected


@pytest.mark.parametrize(
    ("fields", "key", "expected"),
    [
        ({"offload_optimizer": True}, "location_optimizer", {"onChip": 0}),
        (
            {"shard_optimizer": True, "replicas": 2},
            "location_optimizer",
            {"useReplicatedTensorSharding": 1},
        ),
        (
            {"shard_optimizer": True, "offload_optimizer": True, "replicas": 2},
            "location_optimizer",
            {"onChip": 0, "useReplicatedTensorSharding": 1},
        ),
        ({"recompute": "auto"}, "autoRecomputation", 1),
        ({"recompute": "encoder.*"}, "autoRecomputation", 4),
        ({"recompute": "auto", "pipeline": ("a", "b")}, "autoRecomputation", 3),
        (
            {
                "recompute": "auto",
                "pipeline": [poptorch.Stage("a").ipu(0), poptorch.Stage("b").ipu(0)],
            },
            "autoRecomputation",
            1,
        ),
        (
            {"recompute": "auto", "pipeline": poptorch.ShardedExecution()},
            "autoRecomputation",
            1,
        ),
    ],
)
def test_fields_of_training_reach_its_options_alone(fields, key, expected):
    training, inference = made(**fields)
    assert training[key] == expected
    assert not inference.get(key)


def test_fields_that_are_left_open_set_nothing():
    default, _ = made()
    for key in (
        "partialsTypeMatMuls",
        "convolutionOptions",
        "numIOTiles",
        "defaultPrefetchBufferingDepth",
        "autoRecomputation",
        "enableStochasticRounding",
        "cachePath",
        "ipu_version",
    ):
        assert key not in default


def test_pipelines_that_fields_do_not_name_recompute_as_pipelines():
    strategy = poptorch.PipelinedExecution("a", "b")
    config = IPUConfig(recompute="auto", pipeline=strategy, gradient_accumulation=4)
    # PopTorch's own choice, which knows whether there are several IPUs.
    options = config.build_training_options(config.training_plan(32))
    assert "autoRecomputation" not in options.toDict()
    config = IPUConfig(recompute=["layer.*"])
    plan = config.training_plan(32, own_stages=2)
    options = config.build_training_options(plan, own_stages=2)
    assert options.toDict()["autoRecomputation"] == 3


def test_a_profile_is_asked_for_by_its_directory(tmp_path):
    settings, _ = made(profile_dir=str(tmp_path))
    assert settings["engineOptions"]["autoReport.directory"] == str(tmp_path)


@pytest.mark.parametrize(
    ("fields", "training", "inference"),
    [
        ({}, None, None),
        ({"precision": "16.32"}, None, None),
        ({"precision": "float16"}, True, None),
        ({"precision": "float16", "stochastic_rounding": False}, False, None),
        ({"stochastic_rounding": True}, True, None),
        (
            {"precision": "float16", "inference": {"stochastic_rounding": True}},
            True,
            True,
        ),
    ],
)
def test_rounding_is_random_in_training_and_to_the_nearest_after_it(
    fields, training, inference
):
    settings = [one.get("enableStochasticRounding") for one in made(**fields)]
    assert settings == [training, inference]


def test_own_options_must_round_as_the_precision_does():
    own = poptorch.Options()
    with pytest.raises(ConfigError, match="enableStochasticRounding"):
        IPUConfig(precision="16.16", training_options=own)
    IPUConfig(precision="16.32", training_options=own)
    IPUConfig(precision="16.16", stochastic_rounding=False, training_options=own)
    own.Precision.enableStochasticRounding(True)
    IPUConfig(precision="16.16", training_options=own)


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_in_bfloat16_are_refused_unless_they_are_made_float16(in_place):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    module[1].bfloat16()
    with pytest.raises(UnsupportedError, match=r"1\.weight is bfloat16.*precision='fl"):
        IPUModel(module, in_place=in_place)
    model = IPUModel(module, IPUConfig(precision="float16"), in_place=in_place)
    assert {one.dtype for one in model.module.parameters()} == {torch.float16}
    module.register_buffer("odd", torch.ones(1, dtype=torch.bfloat16))
    IPUModel(module.float())


# Stages ---------------------------------------------------------------------------


def test_a_pipeline_asks_for_the_micro_batches_that_keep_it_full():
    config = IPUConfig(pipeline=("a", "b", "c"))
    assert config.training_plan(60).gradient_accumulation == 5
    assert config.inference_plan(4).device_iterations == 3
    sharded = dataclasses.replace(config, execution="sharded")
    assert sharded.training_plan(60).gradient_accumulation == 1
    assert sharded.inference_plan(4).device_iterations == 1
    short = dataclasses.replace(config, gradient_accumulation=4)
    with pytest.raises(ConfigError, match="gradient_accumulation=5"):
        short.training_plan(40)


def test_passes_per_call_can_be_others_than_updates():
    config = IPUConfig(device_iterations=3, inference_iterations=8)
    assert config.inference_plan(4).device_iterations == 8
    assert config.training_plan(4).device_iterations == 3
    staged = IPUConfig(pipeline=("a", "b", "c"), inference_iterations=1)
    assert staged.inference_plan(4).device_iterations == 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1),
        ({"replicas": 4}, 4),
        ({"pipeline": ("a", "b", "c"), "replicas": 2}, 6),
        ({"pipeline": [poptorch.Stage("a").ipu(3), "b"]}, 4),
        ({"layers_per_ipu": [0, 4, 4, 4], "replicas": 2}, 8),
        ({"pipeline": "auto", "ipus": 4, "replicas": 2}, 8),
        ({"training_options": poptorch.Options().replicationFactor(8)}, 8),
    ],
)
def test_the_ipus_are_stages_times_replicas(settings, expected):
    assert IPUConfig(**settings).num_ipus == expected


def test_options_need_names():
    with pytest.raises(ConfigError, match="can be made of config"):
        made(pipeline="auto", ipus=2)


# Inference ------------------------------------------------------------------------


def test_evaluate_and_predict_may_have_values_of_their_own():
    training, inference = made(
        replicas=4,
        pipeline=("a", "b"),
        available_memory_proportion=(0.1, 0.2),
        inference={
            "replicas": 2,
            "execution": "sharded",
            "available_memory_proportion": 0.6,
        },
    )
    assert (training["replication_factor"], inference["replication_factor"]) == (4, 2)
    assert (training["execution_mode"], inference["execution_mode"]) == (0, 1)
    assert training["available_memory_proportion"] == {0: 0.1, 1: 0.2}
    assert inference["available_memory_proportion"] == {0: 0.6, 1: 0.6}


def test_a_pipeline_of_inference_may_have_fewer_stages():
    config = IPUConfig(
        pipeline=("a", "b", "c", "d"), inference={"pipeline": [("a", "b", "c", "d")]}
    )
    assert config.inference_plan(8).device_iterations == 1
    assert config.inference_config.num_stages == 1


def test_inference_may_have_stages_of_the_other_kind():
    layered = IPUConfig(
        layers_per_ipu=[0, 2, 2],
        loss_block="layers on IPU 1",
        inference={"pipeline": None},
    )
    assert layered.inference_config.placement is None
    assert layered.inference_config.last_block is None
    assert layered.inference_plan(4).device_iterations == 1
    named = IPUConfig(pipeline=("a", "b"), inference={"layers_per_ipu": [2, 2]})
    assert named.inference_config.last_block == "layers on IPU 1"
    assert named.last_block == "b"


def test_settings_of_training_alone_do_not_stand_in_the_way():
    config = IPUConfig(replicas=4, shard_optimizer=True, inference={"replicas": 1})
    assert config.num_inference_replicas == 1
    own = poptorch.Options().replicationFactor(4)
    config = IPUConfig(training_options=own, inference={"replicas": 2})
    assert (config.num_replicas, config.num_inference_replicas) == (4, 2)


# Own options ----------------------------------------------------------------------


def test_own_options_are_taken_whole():
    own = poptorch.Options()
    own.deviceIterations(4).replicationFactor(2)
    own.Training.gradientAccumulation(3)
    config = IPUConfig(training_options=own)
    plan = config.training_plan(30)
    assert (plan.device_iterations, plan.replicas) == (4, 2)
    assert (plan.gradient_accumulation, plan.micro_batch_size) == (3, 5)
    assert built(config, 30)[0].output_mode == ALL
    own.deviceIterations(5)
    assert built(config, 30)[0].device_iterations == 4  # as they were when given


@pytest.mark.parametrize("mode", ["All", "Final", "Sum"])
def test_an_output_mode_of_ones_own_is_kept(mode):
    own = poptorch.Options().outputMode(poptorch.OutputMode[mode])
    options = built(IPUConfig(training_options=own, inference_options=own), 4)
    assert {one.output_mode for one in options} == {poptorch.OutputMode[mode].value}


OF_TRAINING = {
    "gradient_accumulation": 4,
    "device_iterations": 3,
    "offload_optimizer": True,
    "shard_optimizer": True,
    "precision": "float16",
    "profile_dir": "reports",
    "recompute": "auto",
}
OF_BOTH = {
    "replicas": 2,
    "execution": "sharded",
    "available_memory_proportion": 0.25,
    "partials": "half",
    "stochastic_rounding": True,
    "overlap_io": "accumulation",
    "num_io_tiles": 64,
    "prefetch_depth": 3,
    "cache_dir": "cache",
    "offline": True,
    "seed": 7,
}
GIVEN = {**OF_TRAINING, **OF_BOTH, "inference_iterations": 6}
"""A value that isn't the default, of each field that options are made of."""

ALSO = {
    "shard_optimizer": {"replicas": 2},
    "overlap_io": {"num_io_tiles": 64},
}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *(("training_options", field) for field in [*OF_TRAINING, *OF_BOTH]),
        *(("inference_options", field) for field in ["inference_iterations", *OF_BOTH]),
    ],
)
def test_own_options_have_what_a_field_asks_for_or_are_refused(kind, field):
    fields = {field: GIVEN[field], **ALSO.get(field, {})}
    made = options_of(kind, **fields)
    # What ipufit makes of the field is what it asks for.
    config = IPUConfig(**fields, **{kind: made})
    assert getattr(config, kind) is not None
    own = poptorch.Options()
    if field == "seed":  # is added to options that have none
        assert options_of(kind, **fields, **{kind: own}).random_seed == 7
        own.randomSeed(8)
    if kind == "inference_options" and field == "stochastic_rounding":
        return  # that is about training
    with pytest.raises(
        ConfigError, match=rf"(replicas|num_io_tiles|{field})=.*, but {kind} have"
    ):
        IPUConfig(**fields, **{kind: own})


# customize ------------------------------------------------------------------------


def test_customize_comes_on_top_of_everything_and_knows_what_it_is_for():
    told = []

    def customize(options, is_training):
        told.append((is_training, options.toDict()["device_iterations"]))
        options.modelName("mine")
        options._Popart.set("outlineThreshold", 10.0)
        options._Popart.setPatterns({"TiedGather": True})

    fields = {"device_iterations": 3, "customize": customize}
    for kind in ("training_options", "inference_options"):
        made = options_of(kind, **fields).toDict()
        assert made["model_name"] == "mine"
        assert made["outlineThreshold"] == 10.0
    assert told == [(True, 3), (False, 3)]


def test_customize_may_return_other_options():
    def customize(options, is_training):
        return options.clone().logDir("elsewhere")

    assert options_of("training_options", customize=customize).log_dir == "elsewhere"


def test_engine_options_are_merged_and_not_replaced(tmp_path):
    def customize(options, is_training):
        options._Popart.setEngineOptions({"opt.useAutoloader": "true"})
        options.Training.setConvolutionDithering(True)

    made = options_of(
        "training_options",
        profile_dir=str(tmp_path),
        partials="half",
        customize=customize,
    ).toDict()
    assert made["engineOptions"]["opt.useAutoloader"] == "true"
    assert made["engineOptions"]["autoReport.directory"] == str(tmp_path)
    assert made["convolutionOptions"]["enableConvDithering"]
    assert made["convolutionOptions"]["partialsType"] == "half"


@pytest.mark.parametrize(
    "change",
    [
        lambda options: options.deviceIterations(5),
        lambda options: options.replicationFactor(2),
        lambda options: options.Training.gradientAccumulation(2),
        lambda options: options.Distributed.configureProcessId(0, 2),
    ],
)
def test_customize_may_not_change_what_data_are_laid_out_by(change):
    with pytest.raises(ConfigError, match=r"customize has set \w+ to [25]"):
        options_of("training_options", customize=lambda options, _: change(options))


@pytest.mark.parametrize("given", [3, "fast", {"deviceIterations": 3}])
def test_customize_returns_options_or_nothing(given):
    with pytest.raises(ConfigError, match=r"customize returned .* change the options"):
        options_of("training_options", customize=lambda options, is_training: given)


def test_a_mode_of_outputs_of_customize_is_used():
    def customize(options, is_training):
        options.outputMode(poptorch.OutputMode.Final)

    made = options_of("training_options", customize=customize)
    assert made.output_mode == poptorch.OutputMode.Final.value


# Processes ------------------------------------------------------------------------

POPRUN = {
    "POPDIST_NUM_TOTAL_REPLICAS": "8",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "6",
    "POPDIST_NUM_IPUS_PER_REPLICA": "1",
}


def test_a_tool_of_ones_own_names_the_process():
    config = IPUConfig(process_id=1, num_processes=4)
    assert config.training_plan(32).micro_batch_size == 8
    for options in built(config):
        assert options.Distributed.processId == 1
        assert options.Distributed.numProcesses == 4


def test_the_launchers_processes_divide_the_batch(launched):
    launched({"RANK": "2", "WORLD_SIZE": "4", "IPUFIT_REPLICAS": "8"})
    config = IPUConfig()
    plan = config.training_plan(32)
    assert (plan.processes, plan.replicas, plan.micro_batch_size) == (4, 2, 4)
    for options in built(config):
        assert options.replication_factor == 2
        assert options.Distributed.processId == 2


@pytest.mark.skipif(poptorch.__name__ == "poptorch", reason="PopDist isn't there")
def test_popruns_options_are_popdists(launched):
    launched(POPRUN)
    for options in built(IPUConfig()):
        assert options.replication_factor == 2
        assert options.Distributed.processId == 3
        assert options.Distributed.numProcesses == 4
        with pytest.raises(RuntimeError, match="Cannot call `replicationFactor`"):
            options.clone().replicationFactor(1)


def test_replicas_may_repeat_the_launchers_but_not_contradict(launched):
    launched(POPRUN)
    assert IPUConfig(replicas=2).num_replicas == 2
    with pytest.raises(ConfigError, match=r"replicas=4, and the launcher .* 2 repl"):
        IPUConfig(replicas=4)


def test_own_options_get_the_process(launched):
    launched({"RANK": "1", "WORLD_SIZE": "2"})
    own = poptorch.Options().replicationFactor(4)
    config = IPUConfig(training_options=own, inference_options=own)
    for options in built(config):
        assert options.Distributed.processId == 1
    assert own.Distributed.numProcesses == 1  # cloned


def test_own_options_of_other_processes_are_refused(launched):
    launched({"RANK": "1", "WORLD_SIZE": "2"})
    own = poptorch.Options()
    own.Distributed.configureProcessId(0, 4)
    with pytest.raises(ConfigError, match=r"process 0 of 4, and torchrun .* 1 of 2"):
        IPUConfig(training_options=own).training_plan(32)


def test_own_options_may_name_the_process():
    own = poptorch.Options()
    own.Distributed.configureProcessId(1, 2)
    config = IPUConfig(training_options=own)
    assert config.process.count == config.training_plan(8).processes == 2


def test_half_of_a_launchers_variables_is_refused_at_once(launched):
    launched({"WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK is missing"):
        IPUConfig()
