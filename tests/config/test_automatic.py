# SPDX-License-Identifier: Apache-2.0
"""`pipeline="auto"` before anything is chosen: what fits together, and what doesn't."""

from __future__ import annotations

import pytest

from ipufit import ConfigError, IPUConfig, UnknownNameError, poptorch
from ipufit.config import with_stages


@pytest.mark.parametrize("ipus", [0, -1, 1.5, True, "four"])
def test_a_number_of_ipus_is_whole_or_open(ipus):
    with pytest.raises(ConfigError, match="neither a whole number of 1 or more"):
        IPUConfig(pipeline="auto", ipus=ipus)


@pytest.mark.parametrize("pipeline", [None, ["a", "b"], poptorch.ShardedExecution()])
def test_ipus_are_for_stages_that_are_left_open(pipeline):
    with pytest.raises(ConfigError, match=r"ipus=4 goes with pipeline='auto'"):
        IPUConfig(pipeline=pipeline, ipus=4)


def test_layers_are_another_way_to_say_where_stages_begin():
    with pytest.raises(ConfigError, match="are both given"):
        IPUConfig(pipeline="auto", layers_per_ipu=[1, 1])


@pytest.mark.parametrize("name", ["training_options", "inference_options"])
def test_own_options_have_stages_of_their_own(name):
    with pytest.raises(ConfigError, match="customize="):
        IPUConfig(pipeline="auto", **{name: poptorch.Options()})


def test_another_word_is_no_pipeline():
    with pytest.raises(ConfigError, match="or 'auto' to have the model divided"):
        IPUConfig(pipeline="Auto")


def test_inference_has_no_stages_of_its_own_choice():
    with pytest.raises(ConfigError, match="stages of training"):
        IPUConfig(inference={"pipeline": "auto"})
    with pytest.raises(ConfigError, match="stages of training"):
        IPUConfig(inference={"ipus": 2})
    with pytest.raises(UnknownNameError):
        IPUConfig(inference={"ipu": 2})


def test_a_known_number_counts_before_stages_are_chosen():
    config = IPUConfig(pipeline="auto", ipus=4, replicas=2)
    assert config.num_ipus == 8
    assert config.num_stages == 4
    assert config.training_plan(28).gradient_accumulation == 7
    assert config.stages == ()


def test_a_share_of_memory_for_each_ipu_is_checked():
    IPUConfig(pipeline="auto", ipus=2, available_memory_proportion=(0.2, 0.4))
    with pytest.raises(ConfigError, match="has 2 numbers"):
        IPUConfig(pipeline="auto", ipus=4, available_memory_proportion=(0.2, 0.4))


def test_more_ipus_than_a_process_has_are_refused():
    with pytest.raises(ConfigError, match="need 128 IPUs"):
        IPUConfig(pipeline="auto", ipus=8, replicas=16)


def test_an_overlap_is_refused_as_with_names():
    with pytest.raises(ConfigError, match="doesn't go with a pipeline"):
        IPUConfig(pipeline="auto", ipus=2, num_io_tiles=32, overlap_io="accumulation")


def test_options_need_names():
    config = IPUConfig(pipeline="auto", ipus=2)
    with pytest.raises(ConfigError, match="can be made of config"):
        config.build_training_options(config.training_plan(8))


def test_a_chosen_config_is_that_of_a_user():
    config = IPUConfig(pipeline="auto", ipus=2, replicas=2, inference={"replicas": 1})
    by_hand = IPUConfig(pipeline=["a", "b"], replicas=2, inference={"replicas": 1})
    assert with_stages(config, ("a", "b")) == by_hand
    assert with_stages(config, ("a",)).pipeline is None
    assert by_hand.resolved(None) is by_hand


def test_evaluations_may_be_on_one_ipu():
    config = IPUConfig(pipeline="auto", ipus=4, inference={"pipeline": None})
    assert config.inference_config.num_ipus == 1
    chosen = with_stages(config, ("a", "b", "c", "d"))
    assert chosen.inference_config.stages == (("a", "b", "c", "d"),)
