# SPDX-License-Identifier: Apache-2.0
"""Two executors and the loops that run them."""

from __future__ import annotations

from .coverage import describe_coverage, in_passes, joined
from .evaluation import Evaluation
from .loop import predictions, train
from .objective.figures import Figures
from .objective.objective import Objective
from .objective.outputs import named_outputs
from .objective.resolve import resolve_objective
from .objective.steps import Inferred, StepFunction, Steps, checked_step
from .objective.sums import Sums
from .programs.executors import Executors
from .programs.gradients import WatchedGradients
from .programs.surveying import Surveyed, surveyed
from .remarking import Remarking, remark_on_passes
from .traced.calling import (
    NoForwardError,
    arguments_of,
    call_module,
    call_step,
    failures_explained,
)
from .traced.casting import compute_in_types
from .traced.figure_bytes import figure_bytes
from .traced.lazy_modules import check_shapes, give_shapes, lazy_layers
from .traced.output_bytes import OutputSize, bytes_of, num_weights, output_size
from .traced.reference import HostUpdate, host_outputs, host_update
from .training import Training
from .weights.precision import Counterparts, in_own_types

__all__ = [
    "Counterparts",
    "Evaluation",
    "Executors",
    "Figures",
    "HostUpdate",
    "Inferred",
    "NoForwardError",
    "Objective",
    "OutputSize",
    "Remarking",
    "StepFunction",
    "Steps",
    "Sums",
    "Surveyed",
    "Training",
    "WatchedGradients",
    "arguments_of",
    "bytes_of",
    "call_module",
    "call_step",
    "check_shapes",
    "checked_step",
    "compute_in_types",
    "describe_coverage",
    "failures_explained",
    "figure_bytes",
    "give_shapes",
    "host_outputs",
    "host_update",
    "in_own_types",
    "in_passes",
    "joined",
    "lazy_layers",
    "named_outputs",
    "num_weights",
    "output_size",
    "predictions",
    "remark_on_passes",
    "resolve_objective",
    "surveyed",
    "train",
]
