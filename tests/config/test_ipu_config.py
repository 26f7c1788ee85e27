# SPDX-License-Identifier: Apache-2.0
"""`IPUConfig`: checks, plans, and the options it makes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ipufit import ConfigError, IPUConfig, poptorch

PLAN = IPUConfig(replicas=2).training_plan(8)


def training_options(**settings):
    config = IPUConfig(**settings)
    return config.build_training_options(config.training_plan(16))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"gradient_accumulation": -3}, "gradient_accumulation=-3"),
        ({"replicas": True}, "replicas=True"),
        ({"device_iterations": 2.5}, r"device_iterations=2\.5"),
        (
            {"precision": "bf16"},
            "precision='bf16' is none of 'float16', .* no bfloat16: use 'float16'",
        ),
        ({"execution": "phased"}, "execution='phased' is none of"),
        ({"pipeline": "layer1"}, r"pipeline=\('layer1', ...\)"),
        ({"pipeline": 3}, "pipeline=3 is neither"),
        ({"pipeline": ["a", 3]}, "stage 3"),
        ({"pipeline": ["a", ()]}, r"stage \(\)"),
        ({"pipeline": [("a", None)]}, "stage"),
        ({"pipeline": ["a", ("b", "a")]}, "names a more than once"),
        ({"available_memory_proportion": 2}, r"available_memory_proportion=2\.0"),
        ({"available_memory_proportion": (0.1, -0.5)}, r"-0\.5"),
        ({"available_memory_proportion": float("nan")}, "nan"),
        ({"available_memory_proportion": "0.5"}, "'0.5'"),
        ({"available_memory_proportion": {"IPU0": 0.5}}, "one per IPU"),
        ({"seed": "lucky"}, "seed='lucky'"),
        ({"seed": 1.5}, r"seed=1\.5"),
        (
            {"replicas": 128},
            "replicas=128, need 128 IPUs, and a process has 64 at most",
        ),
        (
            {"replicas": 64, "pipeline": ("a", ("b", "c"))},
            "replicas=64 with 2 IPUs each, its stages, need 128 .* Use 32 replicas",
        ),
        ({"pipeline": [str(i) for i in range(65)]}, "65 IPUs each, .* need 65"),
        ({"training_options": {}}, r"training_options=\{\}"),
        ({"inference_options": "fast"}, "inference_options='fast'"),
    ],
)
def test_values_out_of_range_are_refused_when_they_are_given(settings, message):
    with pytest.raises(ConfigError, match=message):
        IPUConfig(**settings)


def test_a_process_may_have_64_ipus():
    assert IPUConfig(replicas=32, pipeline=("a", "b")).num_stages == 2
    assert IPUConfig(replicas=64).replicas == 64
    stages = [poptorch.Stage("a").ipu(0), poptorch.Stage("b").ipu(0)]
    assert IPUConfig(replicas=64, pipeline=stages).num_stages == 2  # on one IPU


def test_a_config_is_frozen_and_comparable():
    config = IPUConfig(micro_batch_size=4, pipeline=("a", "b"))
    assert config == IPUConfig(micro_batch_size=4, pipeline=("a", "b"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.replicas = 2


def test_the_options_of_training_follow_the_plan():
    config = IPUConfig(micro_batch_size=2, replicas=2, device_iterations=3)
    options = config.build_training_options(config.training_plan(16))
    assert options.device_iterations == 3
    assert options.replication_factor == 2
    assert options.Training.gradient_accumulation == 4
    assert options.output_mode == poptorch.OutputMode.All.value
    assert not options.broadcast_buffers


def test_inference_returns_everything_and_never_accumulates():
    config = IPUConfig(gradient_accumulation=4, replicas=2, device_iterations=3)
    plan = config.inference_plan(8)
    options = config.build_inference_options(plan)
    assert plan.gradient_accumulation == 1
    assert options.Training.gradient_accumulation == 1
    assert options.output_mode == poptorch.OutputMode.All.value
    assert options.device_iterations == 3


def test_sums_of_losses_have_their_gradients_added():
    config = IPUConfig()
    options = config.build_training_options(PLAN, sums_gradients=True)
    kind = options.Training.accumulation_and_replication_reduction_type
    assert kind == poptorch.ReductionType.Sum


def test_a_seed_reaches_the_device_and_leaves_torchs_generator_alone():
    before = torch.random.get_rng_state()
    options = training_options(seed=7)
    assert options.random_seed == 7
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("proportion", [0.25, (0.25, 0.25)])
def test_memory_proportions_are_given_to_each_ipu_of_the_pipeline(proportion):
    options = training_options(
        pipeline=("a", "b"),
        gradient_accumulation=4,
        available_memory_proportion=proportion,
    )
    shares = options.toDict()["available_memory_proportion"]
    assert shares == {0: 0.25, 1: 0.25}


def test_a_profile_is_asked_for_by_its_directory(tmp_path):
    options = training_options(profile_dir=str(tmp_path)).toDict()
    assert options["engineOptions"]["autoReport.directory"] == str(tmp_path)


def test_the_optimisers_state_can_live_off_the_chip():
    options = training_options(offload_optimizer=True).toDict()
    assert options["location_optimizer"]["onChip"] == 0


# Pipelines ------------------------------------------------------------------------


def test_a_pipeline_asks_for_the_micro_batches_that_keep_it_full():
    config = IPUConfig(pipeline=("a", "b", "c"))
    assert config.training_plan(60).gradient_accumulation == 5
    assert config.inference_plan(4).device_iterations == 3


def test_a_sharded_pipeline_asks_for_none():
    config = IPUConfig(pipeline=("a", "b", "c"), execution="sharded")
    assert config.training_plan(60).gradient_accumulation == 1
    assert config.inference_plan(4).device_iterations == 1


def test_accumulation_too_small_for_the_stages_is_refused():
    config = IPUConfig(pipeline=("a", "b", "c"), gradient_accumulation=4)
    with pytest.raises(ConfigError, match="gradient_accumulation=5"):
        config.training_plan(40)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pipeline": ("a", "b")}, poptorch.PipelinedExecution),
        ({"pipeline": ["a", ("b", "c")]}, poptorch.PipelinedExecution),
        (
            {"pipeline": ("a", "b"), "execution": "sharded"},
            poptorch.ShardedExecution,
        ),
        ({"pipeline": poptorch.ShardedExecution()}, poptorch.ShardedExecution),
        ({"pipeline": [poptorch.Stage("a"), "b"]}, poptorch.PipelinedExecution),
    ],
)
def test_a_pipeline_becomes_a_strategy(settings, expected):
    config = IPUConfig(**settings)
    options = config.build_training_options(config.training_plan(60))
    assert type(options._execution_strategy) is expected


def test_the_loss_joins_the_last_block():
    assert IPUConfig().last_block is None
    assert IPUConfig(pipeline=("a", ("b", "c"))).last_block == "c"
    assert IPUConfig(pipeline=[poptorch.Stage("a", "z")]).last_block == "z"
    strategy = poptorch.PipelinedExecution("a", "b")
    assert IPUConfig(pipeline=strategy).last_block is None
    assert IPUConfig(pipeline=strategy, loss_block="b").last_block == "b"


# Own options ----------------------------------------------------------------------


def test_own_options_are_taken_whole():
    own = poptorch.Options()
    own.deviceIterations(4).replicationFactor(2)
    own.Training.gradientAccumulation(3)
    config = IPUConfig(training_options=own)
    plan = config.training_plan(30)
    assert (plan.device_iterations, plan.replicas) == (4, 2)
    assert (plan.gradient_accumulation, plan.micro_batch_size) == (3, 5)
    assert config.build_training_options(plan).output_mode == (
        poptorch.OutputMode.All.value
    )


@pytest.mark.parametrize("mode", ["All", "Final", "Sum"])
def test_an_output_mode_of_ones_own_is_kept(mode):
    own = poptorch.Options().outputMode(poptorch.OutputMode[mode])
    config = IPUConfig(training_options=own, inference_options=own)
    built = [
        config.build_training_options(config.training_plan(4)),
        config.build_inference_options(config.inference_plan(4)),
    ]
    assert [options.output_mode for options in built] == [
        poptorch.OutputMode[mode].value
    ] * 2


def test_own_options_are_taken_as_they_were_when_given():
    own = poptorch.Options()
    config = IPUConfig(training_options=own)
    own.deviceIterations(5)
    built = config.build_training_options(config.training_plan(4))
    assert built.device_iterations == 1
    assert built is not config.training_options


def test_more_processes_than_one_are_seen():
    own = poptorch.Options()
    own.Distributed.configureProcessId(0, 2)
    config = IPUConfig(training_options=own)
    assert config.training_plan(8).processes == 2


def test_passes_per_call_can_be_others_than_updates():
    config = IPUConfig(device_iterations=3, inference_iterations=8)
    assert config.inference_plan(4).device_iterations == 8
    assert config.training_plan(4).device_iterations == 3
    staged = IPUConfig(pipeline=("a", "b", "c"), inference_iterations=1)
    assert staged.inference_plan(4).device_iterations == 3
    with pytest.raises(ConfigError, match="inference_iterations=0"):
        IPUConfig(inference_iterations=0)


# IPUs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1),
        ({"replicas": 4}, 4),
        ({"pipeline": ("a", "b", "c"), "replicas": 2}, 6),
        ({"pipeline": [poptorch.Stage("a").ipu(3), "b"]}, 4),
        ({"training_options": poptorch.Options().replicationFactor(8)}, 8),
    ],
)
def test_the_ipus_are_stages_times_replicas(settings, expected):
    assert IPUConfig(**settings).num_ipus == expected
