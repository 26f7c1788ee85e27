# SPDX-License-Identifier: Apache-2.0
"""`layers_per_ipu` as a field: what it stands for before a module is known."""

from __future__ import annotations

import pytest

from ipufit import ConfigError, IPUConfig, poptorch


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "give the number of layers on each IPU"),
        ([], "give the number"),
        ({}, "give the number"),
        ([1, -2], "give the number"),
        ([1, True], "give the number"),
        ([1, 2.0], "give the number"),
        ([0], "leaves IPU 0 without"),
        ([0, 0, 4], "leaves IPU 1 without"),
        ([4, 0, 4], "leaves IPU 1 without"),
        ({"a": [1, 1], "b": [1]}, "for different IPUs"),
        ({"a": [1, 0, 0, 0], "b": [0, 0, 1, 1]}, "leaves IPU 1 without"),
    ],
)
def test_numbers_that_place_nothing_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        IPUConfig(layers_per_ipu=value)


def test_stages_are_said_in_one_way():
    with pytest.raises(ConfigError, match="both given"):
        IPUConfig(layers_per_ipu=[1, 1], pipeline=("a", "b"))


def test_the_layout_is_known_before_the_module():
    config = IPUConfig(layers_per_ipu=[0, 4, 4, 4], replicas=2)
    assert (config.num_stages, config.num_ipus) == (4, 8)
    assert config.training_plan(14).gradient_accumulation == 7
    assert config.inference_plan(4).device_iterations == 4
    options = config.build_training_options(config.training_plan(14))
    strategy = options._execution_strategy
    assert isinstance(strategy, poptorch.PipelinedExecution)
    assert strategy.stage("layers on IPU 3")._ipu == 3


def test_shares_of_memory_are_one_per_ipu():
    with pytest.raises(ConfigError, match="has 2 numbers, and a replica has 3 IPUs"):
        IPUConfig(layers_per_ipu=[0, 1, 1], available_memory_proportion=(0.1, 0.2))


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
    with pytest.raises(ConfigError, match="both given"):
        IPUConfig(inference={"layers_per_ipu": [2, 2], "pipeline": ("a", "b")})


def test_an_error_says_that_it_is_about_inference():
    with pytest.raises(ConfigError, match=r"With inference=.*has 2 numbers"):
        IPUConfig(
            pipeline=("a", "b"),
            available_memory_proportion=(0.1, 0.2),
            inference={"pipeline": [("a", "b")]},
        )


def test_settings_of_training_alone_do_not_stand_in_the_way():
    config = IPUConfig(replicas=4, shard_optimizer=True, inference={"replicas": 1})
    assert config.num_inference_replicas == 1
    own = poptorch.Options().replicationFactor(4)
    config = IPUConfig(training_options=own, inference={"replicas": 2})
    assert (config.num_replicas, config.num_inference_replicas) == (4, 2)
