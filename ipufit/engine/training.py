# SPDX-License-Identifier: Apache-2.0
"""Training call by call: program, optimiser, figures and averages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ipufit._poptorch import poptorch
from ipufit._spans import span
from ipufit.batching import BatchPlan
from ipufit.callbacks import ProgressDisplay
from ipufit.data import Call, Labels, SampleStructure, TrainingBatches
from ipufit.optimizers import Optimization, WeightAverage
from ipufit.planning.choices import Choice

from .coverage import check_rows, cut, returned_rows
from .objective.dtypes import widened_all
from .objective.figures import Figures
from .objective.mixed import dominant_labels
from .programs.executors import Executors
from .programs.gradients import WatchedGradients
from .remarking import Remarking


@dataclass(frozen=True)
class Training:
    """Everything that a call of training takes and changes.

    Attributes:
        executors: The programs.
        plan: The factors of a call.
        options: Options of the training program.
        optimization: The optimiser and its schedule.
        structure: How the tensors of a batch nest.
        figures: Loss and metrics to report.
        average: The running average of the weights; None for none.
        watched: The gradients that come back.
        choice: The updates of a call, if they were left open and chosen.
    """

    executors: Executors
    plan: BatchPlan
    options: poptorch.Options
    optimization: Optimization
    structure: SampleStructure
    figures: Figures
    average: WeightAverage | None = None
    watched: WatchedGradients = field(default_factory=WatchedGradients)
    choice: Choice | None = None

    def prepare(self, batches: TrainingBatches, display: ProgressDisplay) -> None:
        """Have the program attached, with the weights of the user's module.

        Args:
            batches: The calls, whose shapes are compiled for.
            display: Shows that something is compiled.
        """
        entries = self.executors.prepare_training(
            batches,
            self.plan,
            self.options,
            self.optimization,
            self.figures.objective,
            sorted(self.watched.anchors),
            display if self.choice is None else Remarking(display, self.remark),
        )
        self.figures.adopt(entries)

    @property
    def remark(self) -> str:
        """The updates of a call, and why not more, if they were chosen."""
        if self.choice is None:
            return ""
        value, reason = self.choice
        updates = "1 update" if value == 1 else f"{value} updates"
        return (
            f"{updates} per call (device_iterations left open); not more because "
            f"{reason}"
        )

    def run(self, call: Call, *, is_scheduled: bool = True) -> None:
        """Train on one call, and add to the figures.

        Args:
            call: Batch of the call.
            is_scheduled: False to leave learning rates and the count of updates as
                they are.
        """
        updates = self.plan.device_iterations
        if is_scheduled:
            with span("optimizer"):
                self.optimization.before_call()
        sums, outputs = self.executors.train(call.batch)
        if is_scheduled:
            with span("optimizer"):
                self.optimization.after_call(updates)
        with span("figures"):
            self.figures.add(sums)
            if outputs is not None:
                self._stream(outputs, call)
        if self.average is not None:
            with span("weights"):
                self.average.update(updates, self.executors.weights_shown)

    def losses_of_call(self) -> list[float]:
        """The loss of the epoch so far after each update of the last call.

        Only the last of them if not every micro-batch has come back for itself.
        """
        is_each = self.options.output_mode == poptorch.OutputMode.All.value
        return self.figures.losses(self.plan.device_iterations if is_each else 1)

    def finish(self) -> None:
        """Put the average of the weights in their place, as Keras does after `fit`."""
        if self.average is not None:
            self.executors.fetch_weights()
            self.average.apply()
            self.executors.send_weights()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The watched gradients of the last call, by parameter."""
        scale = float(getattr(self.optimization.optimizer, "loss_scaling", 1.0))
        return self.watched.means(
            self.executors.anchored,
            self.options,
            self.plan,
            scale,
            self.figures.processes,
        )

    def _stream(self, outputs: Any, call: Call) -> None:
        """Give the real rows that came back to the metrics that need outputs."""
        plan, rows = self.plan, returned_rows(self.options, self.plan)
        if rows is None:
            rows = torch.arange(plan.samples_per_call)
        check_rows(outputs, rows.numel())
        labels = self.structure.labels(call.batch)
        mixing = self.structure.mixing(call.batch)
        if mixing is not None:
            labels = dominant_labels(labels, mixing, plan.micro_batch_size)
        of_update = rows.div(plan.samples_per_update, rounding_mode="floor")
        for update in range(plan.device_iterations):
            # A metric that rounds gives the same figure, however many updates come.
            is_taken = rows.lt(call.num_real).logical_and(of_update.eq(update))
            if not is_taken.any():
                continue
            parts = cut((labels.targets, labels.weights), rows[is_taken])
            real = widened_all(cut(outputs, is_taken), Labels(*parts))
            self.figures.stream(*real)
