# SPDX-License-Identifier: Apache-2.0
"""Numbers that a user leaves open, chosen from config and data alone."""

from __future__ import annotations

from .block_cost import BlockCost
from .choice import Choice
from .device_iterations import (
    MOST_CALL_BYTES,
    MOST_UPDATES,
    MOST_WORK,
    Limit,
    chosen_device_iterations,
)
from .epoch_plan import EpochPlan, nearest_batch_sizes
from .inference_iterations import (
    MOST_FORWARD_WORK,
    MOST_LOADED_PASSES,
    MOST_PASSES,
    MOST_UNKNOWN_PASSES,
    chosen_inference_iterations,
)
from .pipeline_schedule import PipelineSchedule

__all__ = [
    "MOST_CALL_BYTES",
    "MOST_FORWARD_WORK",
    "MOST_LOADED_PASSES",
    "MOST_PASSES",
    "MOST_UNKNOWN_PASSES",
    "MOST_UPDATES",
    "MOST_WORK",
    "BlockCost",
    "Choice",
    "EpochPlan",
    "Limit",
    "PipelineSchedule",
    "chosen_device_iterations",
    "chosen_inference_iterations",
    "nearest_batch_sizes",
]
