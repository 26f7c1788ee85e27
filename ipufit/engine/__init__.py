# SPDX-License-Identifier: Apache-2.0
"""The training and inference programs of a model, and the loops that run them."""

from __future__ import annotations

from .host_calls import (
    HostUpdate,
    OutputSize,
    bytes_of,
    check_shapes,
    figure_bytes,
    give_shapes,
    host_outputs,
    host_update,
    lazy_layers,
    num_weights,
    output_size,
)
from .loop import (
    Evaluation,
    Training,
    describe_coverage,
    in_passes,
    joined,
    predictions,
    remark_on_passes,
)
from .metric_state import Figures, Sums
from .objective import (
    Inferred,
    Objective,
    StepFunction,
    Steps,
    checked_step,
    named_outputs,
    resolve_objective,
)
from .precision import Counterparts, compute_in_types, in_own_types
from .processes import ProcessSync
from .program import Executors, Surveyed, WatchedGradients, surveyed
from .step import (
    NoForwardError,
    arguments_of,
    call_module,
    call_step,
    failures_explained,
)

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
    "ProcessSync",
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
]
