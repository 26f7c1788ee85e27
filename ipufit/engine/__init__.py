# SPDX-License-Identifier: Apache-2.0
"""Two executors and the loops that run them."""

from __future__ import annotations

from .coverage import describe_coverage, joined
from .evaluation import Evaluation
from .learnt import Learnt, check_weights, groups_of_module
from .loop import predictions, train
from .objective.figures import Figures
from .objective.objective import Objective
from .objective.resolve import resolve_objective
from .programs.executors import Executors
from .programs.gradients import WatchedGradients
from .settings import compiled_settings, described
from .snapshot import Snapshot, check_has_run, check_same_run, place_of
from .traced.lazy_modules import check_shapes, give_shapes, lazy_layers
from .training import Training

__all__ = [
    "Evaluation",
    "Executors",
    "Figures",
    "Learnt",
    "Objective",
    "Snapshot",
    "Training",
    "WatchedGradients",
    "check_has_run",
    "check_same_run",
    "check_shapes",
    "check_weights",
    "compiled_settings",
    "describe_coverage",
    "described",
    "give_shapes",
    "groups_of_module",
    "joined",
    "lazy_layers",
    "place_of",
    "predictions",
    "resolve_objective",
    "train",
]
