# SPDX-License-Identifier: Apache-2.0
"""Two executors and the loops that run them."""

from __future__ import annotations

from .coverage import describe_coverage, joined
from .evaluation import Evaluation
from .executors import Executors
from .figures import Figures
from .gradients import WatchedGradients
from .lazy_modules import check_shapes, give_shapes, lazy_layers
from .learnt import Learnt, check_weights, groups_of_module
from .loop import predictions, train
from .objective import Objective
from .resolve import resolve_objective
from .settings import compiled_settings, described
from .snapshot import Snapshot, check_has_run, check_same_run, place_of
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
