# SPDX-License-Identifier: Apache-2.0
"""Fields about memory and devices: the options that PopTorch gets, and refusals."""

from __future__ import annotations

import pytest

from ipufit import ConfigError, IPUConfig, UnknownNameError, poptorch


def made(**fields):
    """Settings of the options for training and for inference."""
    config = IPUConfig(**fields)
    return (
        config.build_training_options(config.training_plan(32)).toDict(),
        config.build_inference_options(config.inference_plan(32)).toDict(),
    )


@pytest.mark.parametrize(
    ("fields", "key", "expected"),
    [
        ({"partials": "half"}, "partialsTypeMatMuls", "half"),
        ({"partials": "float"}, "convolutionOptions", {"partialsType": "float"}),
        ({"num_io_tiles": 64}, "numIOTiles", 64),
        ({"prefetch_depth": 3}, "defaultPrefetchBufferingDepth", 3),
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
        ({"recompute": "off"}, "autoRecomputation", 0),
        ({"recompute": "encoder.*"}, "autoRecomputation", 4),
        ({"recompute": "auto", "pipeline": ("a", "b")}, "autoRecomputation", 3),
        ({"recompute": ["a.*"], "pipeline": ("a", "b")}, "autoRecomputation", 3),
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
        ({"cache_dir": "programs"}, "cachePath", "programs"),
        ({"offline": True}, "ipu_version", 2),
    ],
)
def test_fields_reach_the_options_of_training_and_inference(fields, key, expected):
    for settings in made(**fields):
        assert settings[key] == expected


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


@pytest.mark.parametrize("field", ["partials", "num_io_tiles", "prefetch_depth"])
def test_fields_that_are_left_open_set_nothing(field):
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


@pytest.mark.parametrize(
    ("fields", "training", "inference"),
    [
        ({}, None, None),
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partials": "int8"}, "partials='int8' is none of None, 'half', 'float'"),
        ({"num_io_tiles": 33}, "num_io_tiles=33 is not an even number from 32 to 192"),
        ({"num_io_tiles": 200}, "num_io_tiles=200"),
        ({"prefetch_depth": 0}, "prefetch_depth=0"),
        ({"recompute": ""}, "recompute='' is neither"),
        ({"recompute": [3]}, r"recompute=\[3\]"),
        ({"stochastic_rounding": 1}, "stochastic_rounding=1"),
        ({"shard_optimizer": 2}, "shard_optimizer=2"),
        ({"shard_optimizer": True}, "among replicas, and there is one"),
        ({"overlap_io": "all"}, "overlap_io='all' is none of"),
        ({"overlap_io": "accumulation"}, "give num_io_tiles"),
        (
            {
                "overlap_io": "accumulation",
                "num_io_tiles": 32,
                "pipeline": ("a", "b"),
            },
            "doesn't go with a pipeline",
        ),
        (
            {
                "overlap_io": "accumulation",
                "num_io_tiles": 32,
                "pipeline": poptorch.PipelinedExecution("a", "b"),
            },
            "doesn't go with a pipeline",
        ),
        ({"cache_dir": 3}, "cache_dir=3 is not a path"),
        ({"cache_dir": ""}, "cache_dir='' is not a path"),
        ({"offline": "yes"}, "offline='yes'"),
        ({"available_memory_proportion": (0.1, 0.2), "pipeline": ("a",)}, "has 2 num"),
        ({"available_memory_proportion": (0.1,) * 65}, "at most 64 IPUs"),
        ({"available_memory_proportion": ()}, "has 0 numbers"),
        ({"available_memory_proportion": True}, "available_memory_proportion=True"),
        ({"inference": "sharded"}, "inference='sharded' is no mapping"),
        ({"inference": {"precision": "float32"}}, "one precision"),
        ({"inference": {"device_iterations": 3}}, "inference_iterations"),
        ({"inference": {"replicas": 0}}, "replicas=0"),
    ],
)
def test_values_are_refused_when_they_are_given(fields, message):
    with pytest.raises(ConfigError, match=message):
        IPUConfig(**fields)


def test_one_share_of_memory_is_for_all_ipus_that_there_may_be():
    settings, _ = made(available_memory_proportion=0.3)
    assert settings["available_memory_proportion"] == dict.fromkeys(range(64), 0.3)


# inference ------------------------------------------------------------------------


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


def test_a_mistyped_field_of_inference_is_refused():
    with pytest.raises(UnknownNameError, match="'pipelines'"):
        IPUConfig(inference={"pipelines": ("a",)})
