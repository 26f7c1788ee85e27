# SPDX-License-Identifier: Apache-2.0
"""Own options that contradict fields, and `customize`."""

from __future__ import annotations

import pytest
import torch

from ipufit import ConfigError, IPUConfig, IPUModel, poptorch

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


def options_of(kind, **fields):
    config = IPUConfig(**fields)
    if kind == "training_options":
        return config.build_training_options(config.training_plan(16))
    return config.build_inference_options(config.inference_plan(16))


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
    with pytest.raises(ConfigError, match=rf"(replicas|{field})=.*, but {kind} have"):
        IPUConfig(**fields, **{kind: own})


def test_a_contradiction_names_both_and_says_what_to_do():
    own = poptorch.Options().deviceIterations(4)
    with pytest.raises(ConfigError) as caught:
        IPUConfig(device_iterations=9, training_options=own)
    message = str(caught.value)
    for part in ("device_iterations=9", "device_iterations=4", "customize="):
        assert part in message


def test_rounding_that_nobody_wants_is_no_contradiction():
    own = poptorch.Options()
    IPUConfig(precision="float16", stochastic_rounding=False, training_options=own)


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


def test_customize_is_a_function_and_goes_without_own_options():
    with pytest.raises(ConfigError, match="customize='fast'"):
        IPUConfig(customize="fast")
    with pytest.raises(ConfigError, match="both given"):
        IPUConfig(customize=print, training_options=poptorch.Options())


@pytest.mark.parametrize("given", [3, "fast", {"deviceIterations": 3}])
def test_customize_returns_options_or_nothing(given):
    with pytest.raises(ConfigError, match=r"customize returned .* change the options"):
        options_of("training_options", customize=lambda options, is_training: given)


def test_a_mode_of_outputs_of_customize_is_used():
    def customize(options, is_training):
        options.outputMode(poptorch.OutputMode.Final)

    made = options_of("training_options", customize=customize)
    assert made.output_mode == poptorch.OutputMode.Final.value


def test_a_customized_model_trains_and_predicts():
    seen = []
    config = IPUConfig(
        micro_batch_size=4,
        customize=lambda options, is_training: seen.append(is_training),
    )
    model = IPUModel(torch.nn.Linear(3, 2), config)
    model.compile("sgd", "cross_entropy")
    x, y = torch.randn(16, 3), torch.randint(0, 2, (16,))
    model.fit(x, y, batch_size=8, verbose=0)
    assert model.predict(x, verbose=0).shape == (16, 2)
    assert set(seen) == {True, False}
