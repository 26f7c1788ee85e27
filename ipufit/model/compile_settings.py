# SPDX-License-Identifier: Apache-2.0
"""The settings that `compile` has made of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from ipufit.engine import Figures, Objective
from ipufit.optimizers import Optimization, WeightAverage


@dataclass(frozen=True)
class CompileSettings:
    """How to train and what to report, as `compile` was asked.

    Attributes:
        objective: Losses and metrics.
        optimization: The optimiser and its schedule.
        training_figures: Figures of `fit`.
        test_figures: Figures of `evaluate` and of validations.
        average: The running average of the weights; None for none.
        in_words: Each setting as text, which a resumed run compares.
        arguments: The arguments of `compile` by name, of which copies are made.
    """

    objective: Objective
    optimization: Optimization
    training_figures: Figures
    test_figures: Figures
    average: WeightAverage | None
    in_words: dict[str, str]
    arguments: Mapping[str, Any]
