# SPDX-License-Identifier: Apache-2.0
"""Options that a run adds to those of the config: synthetic data, and profiles."""

from __future__ import annotations

import pytest

from ipufit import ConfigError, IPUConfig, poptorch
from ipufit.config import NO_INSTRUMENTS, Instruments

REPORTED = {
    "debug.allowOutOfMemory": "true",
    "autoReport.all": "true",
}


def training(instruments, **fields):
    """Settings of the options for training, and what PopART gets of them."""
    config = IPUConfig(**fields)
    options = config.build_training_options(config.training_plan(8))
    before = options.toDict()
    instruments.set_training(options, config)
    return before, options.toDict()


def test_nothing_is_added_by_default():
    before, after = training(NO_INSTRUMENTS)
    assert before == after


def test_synthetic_data_are_popart_s_normal_ones_in_training_and_inference():
    instruments = Instruments(is_synthetic=True)
    before, after = training(instruments)
    assert "syntheticDataMode" not in before
    assert after == {**before, "syntheticDataMode": 2}
    inference = poptorch.Options()
    instruments.set_inference(inference)
    inference.outputMode(poptorch.OutputMode.All)
    assert inference.toDict()["syntheticDataMode"] == 2


def test_a_profile_counts_calls_in_the_directory_of_the_config():
    _, after = training(Instruments(profiled_calls=3))
    assert after["engineOptions"] == {
        **REPORTED,
        "autoReport.directory": "profile",
        "autoReport.executionProfileProgramRunCount": "3",
    }
    _, after = training(Instruments(profiled_calls=1), profile_dir="reports")
    assert after["engineOptions"]["autoReport.directory"] == "reports"
    assert after["engineOptions"]["autoReport.executionProfileProgramRunCount"] == "1"


def test_engine_options_that_were_set_stay():
    def own(options, is_training):
        options._Popart.setEngineOptions({"target.deterministicWorkers": "portable"})

    _, after = training(Instruments(profiled_calls=2), customize=own)
    assert after["engineOptions"]["target.deterministicWorkers"] == "portable"
    assert after["engineOptions"]["autoReport.all"] == "true"

    options = poptorch.Options()
    options._Popart.setEngineOptions({"autoReport.directory": "mine"})
    _, after = training(Instruments(profiled_calls=2), training_options=options)
    assert after["engineOptions"] == {
        "autoReport.directory": "mine",
        "autoReport.executionProfileProgramRunCount": "2",
    }


def test_process_0_alone_profiles():
    for index in (0, 1):
        fields = {"process_id": index, "num_processes": 2, "seed": 0}
        _, after = training(Instruments(profiled_calls=2), **fields)
        assert ("engineOptions" in after) == (index == 0)
        _, after = training(NO_INSTRUMENTS, profile_dir="reports", **fields)
        assert ("engineOptions" in after) == (index == 0)


@pytest.mark.parametrize("steps", [0, -2, 1.5, True])
def test_a_number_of_calls_that_is_none_is_refused(steps):
    with pytest.raises(ConfigError, match=r"profile_steps=.* is not a whole"):
        Instruments(profiled_calls=steps)
    with pytest.raises(ConfigError, match="synthetic=1 is neither True nor False"):
        Instruments(is_synthetic=1)
