# SPDX-License-Identifier: Apache-2.0
"""Executables saved by former versions load."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import ipufit.emulator as poptorch
from ipufit.emulator._executor.former_names import Unpickler

# Saved with Python 3.8 and torch 2.0.1, when the emulator was one folder of modules:
# `tests.emulator._models.Model` after one call of two updates by Adam(lr=0.5), with
# deviceIterations(2) and PipelinedExecution("first", Stage("second")).
FOLDER = Path(__file__).parents[2] / "golden" / "executables"
TRAINING = FOLDER / "training-flat-emulator.poptorch"

FORMER = [
    "_lamb LAMB",
    "_markers NameScope",
    "_multi_conv MultiConv",
    "_optimizer_base VariableAttributes",
    "_options_distributed _DistributedOptions",
    "_options_sections _JitOptions",
    "_options_sections _PrecisionOptions",
    "_options_sections _TrainingOptions",
    "_options_state _log_compilation_progress",
    "_popart_options _PopartOptions",
    "_popdist.poptorch Options",
    "_popdist.poptorch _Distributed",
    "_stages AutomaticStages",
    "_stages ExplicitStages",
    "_stages Stage",
    "_tensor_locations TensorLocationSettings",
    "_tensor_locations _TensorLocationOptions",
    "_wrapper_registry rewrap",
    "blocks Block",
    "blocks _BeginBlockHook",
    "enums AutoStage",
    "optim Adam",
    "optim AdamW",
    "optim RMSprop",
    "optim SGD",
    "options Options",
    "strategies ParallelPhasedExecution",
    "strategies Phase",
    "strategies PipelinedExecution",
    "strategies SerialPhasedExecution",
    "strategies ShardedExecution",
]
"""Modules and names that such executables can have pickled."""


@pytest.mark.parametrize("former", FORMER)
def test_a_name_is_found_where_it_was(former):
    module, name = former.split()
    found = Unpickler(io.BytesIO()).find_class(f"ipufit.emulator.{module}", name)
    assert found.__name__ == name


def test_an_unknown_name_is_an_error():
    with pytest.raises(ModuleNotFoundError, match="_no_such_module"):
        Unpickler(io.BytesIO()).find_class("ipufit.emulator._no_such_module", "A")


def test_a_training_model_goes_on_as_the_one_that_was_saved():
    training = poptorch.load(str(TRAINING))
    x = torch.tensor([[1.0], [2.0]])
    loss, weight = training(x)
    # What the saved model itself returned, in its two calls after it was saved.
    assert (loss.item(), weight.item()) == pytest.approx((-2.9071212, -1.4535606))
    loss, weight = training(x)
    assert (loss.item(), weight.item()) == pytest.approx((-4.8146944, -2.4073472))
    assert training.options.device_iterations == 2
    assert training.options._execution_strategy.stage("second").blocks == ("second",)
