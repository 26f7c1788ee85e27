# SPDX-License-Identifier: Apache-2.0
"""Names of precisions, and the options that PopTorch gets for them."""

from __future__ import annotations

import pytest
import torch

from ipufit import ConfigError, IPUConfig, IPUModel, UnsupportedError, poptorch

HALF, SINGLE = torch.float16, torch.float32


def made(**fields):
    """Settings of the options for training and for inference."""
    config = IPUConfig(**fields)
    return (
        config.build_training_options(config.training_plan(32)).toDict(),
        config.build_inference_options(config.inference_plan(32)).toDict(),
    )


@pytest.mark.parametrize(
    ("word", "types", "rounds_at_random", "named"),
    [
        ("float32", (SINGLE, SINGLE), None, "float32"),
        ("32.32", (SINGLE, SINGLE), None, "float32"),
        ("16.32", (HALF, SINGLE), None, "16.32"),
        ("16.16", (HALF, HALF), True, "float16"),
        ("float16", (HALF, HALF), True, "float16"),
    ],
)
def test_a_word_says_types_and_rounding(word, types, rounds_at_random, named):
    config = IPUConfig(precision=word)
    assert config.types == types
    assert config.types.word == named
    training, inference = made(precision=word)
    key = "enableStochasticRounding"
    assert training.get(key) == rounds_at_random
    assert inference.get(key) is None


@pytest.mark.parametrize("word", ["16.32", "16.16"])
@pytest.mark.parametrize("wanted", [True, False])
def test_rounding_is_as_it_is_asked_for(word, wanted):
    training, inference = made(precision=word, stochastic_rounding=wanted)
    assert training["enableStochasticRounding"] == wanted
    assert "enableStochasticRounding" not in inference
    both = {"inference": {"stochastic_rounding": True}}
    assert made(precision=word, **both)[1]["enableStochasticRounding"]


def test_own_options_must_round_as_the_precision_does():
    own = poptorch.Options()
    with pytest.raises(ConfigError, match="enableStochasticRounding"):
        IPUConfig(precision="16.16", training_options=own)
    IPUConfig(precision="16.32", training_options=own)
    own.Precision.enableStochasticRounding(True)
    IPUConfig(precision="16.16", training_options=own)


@pytest.mark.parametrize("word", ["16", "32.16", "bf16", 16, None, "16.64"])
def test_other_words_are_refused(word):
    with pytest.raises(ConfigError, match=r"precision=.* is none of .*'16\.32'"):
        IPUConfig(precision=word)


@pytest.mark.parametrize(
    "word", ["bfloat16", "bf16", "bf16-mixed", "mixed_bfloat16", torch.bfloat16]
)
def test_bfloat16_is_said_to_be_absent(word):
    with pytest.raises(ConfigError, match="IPUs have no bfloat16: use 'float16'"):
        IPUConfig(precision=word)


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


@pytest.mark.parametrize("field", ["precision", "float32_modules"])
def test_inference_has_the_precision_of_training(field):
    with pytest.raises(ConfigError, match="in training and inference"):
        IPUConfig(precision="16.16", inference={field: "16.32"})
