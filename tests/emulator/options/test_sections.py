# SPDX-License-Identifier: Apache-2.0
"""`Options.Training`, `Precision` and `Jit`."""

from __future__ import annotations

import logging

import pytest
import torch

from ipufit.emulator.enums import MeanReductionStrategy, ReductionType
from ipufit.emulator.options import Options


def test_training_defaults():
    training = Options().Training
    assert training.gradient_accumulation == 1
    assert training.accumulation_and_replication_reduction_type is ReductionType.Mean
    assert (
        training.meanAccumulationAndReplicationReductionStrategy
        is MeanReductionStrategy.Post
    )


def test_training_setters_store_and_chain():
    options = Options()
    training = options.Training

    assert training.gradientAccumulation(8) is training
    assert (
        training.accumulationAndReplicationReductionType(ReductionType.Sum) is training
    )
    assert (
        training.setMeanAccumulationAndReplicationReductionStrategy(
            MeanReductionStrategy.Running
        )
        is training
    )
    assert training.setAutomaticLossScaling(True) is training

    assert training.gradient_accumulation == 8
    assert training.accumulation_and_replication_reduction_type is ReductionType.Sum
    assert (
        training.meanAccumulationAndReplicationReductionStrategy
        is MeanReductionStrategy.Running
    )
    assert options._Popart.options["automaticLossScalingSettings.enabled"] is True


@pytest.mark.parametrize("value", [ReductionType.NoReduction, 1, "Mean", None])
def test_gradients_are_summed_or_averaged(value):
    with pytest.raises(ValueError, match=r"Mean or ReductionType\.Sum"):
        Options().Training.accumulationAndReplicationReductionType(value)


@pytest.mark.parametrize("value", [1, None, ReductionType.Mean])
def test_the_mean_strategy_is_typed(value):
    with pytest.raises(AssertionError):
        Options().Training.setMeanAccumulationAndReplicationReductionStrategy(value)


@pytest.mark.parametrize("value", [2.0, "2", None])
def test_gradient_accumulation_is_an_int(value):
    with pytest.raises(AssertionError):
        Options().Training.gradientAccumulation(value)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float, "float"),
        (torch.float32, "float"),
        (torch.half, "half"),
        (torch.float16, "half"),
    ],
)
def test_partials_are_float_or_half(dtype, name):
    options = Options()
    assert options.Precision.setPartialsType(dtype) is options.Precision
    assert options._Popart.options["partialsTypeMatMuls"] == name
    assert options._Popart.options["convolutionOptions"] == {"partialsType": name}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "half", None])
def test_other_partials_are_refused(dtype):
    with pytest.raises(ValueError, match=r"torch\.half"):
        Options().Precision.setPartialsType(dtype)


def test_the_last_convolution_setting_erases_the_other():
    options = Options()
    options.Precision.setPartialsType(torch.half)
    options.Training.setConvolutionDithering(True)
    assert options._Popart.options["convolutionOptions"] == {
        "enableConvDithering": True
    }
    options.Precision.setPartialsType(torch.half)
    assert options._Popart.options["convolutionOptions"] == {"partialsType": "half"}


def test_floating_point_exceptions_take_a_bool():
    options = Options()
    options.Precision.enableFloatingPointExceptions(False)
    assert options._Popart.options["enableFloatingPointChecks"] is False
    with pytest.raises(AssertionError):
        options.Precision.enableFloatingPointExceptions(1)


def test_stochastic_rounding_takes_anything():
    options = Options()
    options.Precision.enableStochasticRounding("x")
    assert options._Popart.options["enableStochasticRounding"] == "x"


def test_deprecated_setters_warn_and_store_nothing(caplog):
    options = Options()
    before = repr(options)

    assert options.Precision.halfFloatCasting(None) is options.Precision
    assert options.Precision.runningStatisticsAlwaysFloat(True) is options.Precision
    assert options.Jit.traceModel(False) is options.Jit

    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 3
    assert repr(options) == before


def test_deprecated_setters_work_on_frozen_options():
    options = Options()
    options._freeze()
    options.Precision.halfFloatCasting(None).runningStatisticsAlwaysFloat(False)
    options.Jit.traceModel(False)


def test_deprecated_setters_still_refuse_some_values(caplog):
    with pytest.raises(ValueError, match="bool"):
        Options().Precision.runningStatisticsAlwaysFloat(1)
    with pytest.raises(ValueError, match="traceModel"):
        Options().Jit.traceModel(True)
    assert "deprecated" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.Training.gradientAccumulation(2),
        lambda o: o.Training.setAutomaticLossScaling(True),
        lambda o: o.Precision.enableStochasticRounding(True),
        lambda o: o.Precision.setPartialsType(torch.half),
        lambda o: o._Popart.set("a", 1),
        lambda o: o._Popart.setEngineOptions({}),
        lambda o: o._Popart.setPatterns({}),
    ],
)
def test_sections_freeze_with_their_options(change):
    options = Options()
    before = repr(options)
    options._freeze()
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        change(options)
    assert repr(options) == before


def test_popart_settings_are_stored_unchecked():
    popart = Options()._Popart
    assert popart.options == {
        "instrumentWithHardwareCycleCounter": False,
        "rearrangeAnchorsOnHost": False,
    }
    assert popart.set("whatever", object) is popart
    assert popart.setEngineOptions({"a": "b"}) is popart
    assert popart.setPatterns({"P": True}, 1) is popart
    assert popart.options["whatever"] is object
    assert popart.options["engineOptions"] == {"a": "b"}
    assert (popart.options["patterns"], popart.options["patterns_level"]) == (
        {"P": True},
        1,
    )


@pytest.mark.parametrize("arguments", [(["P"],), ({"P": True}, "2")])
def test_patterns_are_typed(arguments):
    with pytest.raises(AssertionError):
        Options()._Popart.setPatterns(*arguments)


def test_a_section_gives_its_values_as_a_dict():
    training = Options().Training.gradientAccumulation(3)
    values = training.toDict()
    assert values["gradient_accumulation"] == 3
    values["gradient_accumulation"] = 4
    assert training.gradient_accumulation == 3


def test_a_section_adds_its_values_to_a_dict_that_lacks_them():
    given = {"other": 1}
    training = Options().Training.gradientAccumulation(3)
    assert training.update(given) is given
    assert (given["other"], given["gradient_accumulation"]) == (1, 3)
    with pytest.raises(AssertionError, match="gradient_accumulation is set in two"):
        training.update({"gradient_accumulation": 3})
