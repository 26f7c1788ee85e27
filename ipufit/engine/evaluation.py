# SPDX-License-Identifier: Apache-2.0
"""Loss and metrics over the outputs of the inference program."""

from __future__ import annotations

from typing import Any

import torch

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.callbacks import CallbackList, ProgressDisplay
from ipufit.data import InferenceBatches, Source
from ipufit.losses import Loss
from ipufit.metrics import MetricCollection
from ipufit.types import Logs

from .coverage import check_rows, cut, returned_rows
from .executors import Executors
from .step import widened


class Evaluation:
    """One set of samples to evaluate on, once or after every epoch.

    Args:
        executors: The programs.
        source: Samples with targets.
        plan: The factors of a call.
        options: Of the inference program.
        loss: The loss.
        figures: What is reported.
    """

    def __init__(
        self,
        executors: Executors,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        loss: Loss,
        figures: MetricCollection,
    ) -> None:
        self._executors = executors
        self._source = source
        self._loss = loss
        self._figures = figures
        self.plan = plan
        self.options = options
        self._rows = returned_rows(options, plan)
        self.batches = InferenceBatches(source, plan, options)

    def prepare(self, display: ProgressDisplay) -> None:
        """Have the program attached, with the newest weights."""
        self._executors.prepare_inference(
            self._source, self.plan, self.options, display
        )

    def run(self, hooks: CallbackList) -> Logs:
        """The figures over every sample, or over those that come back.

        They are computed here, from the outputs: padding is cut away before it can
        count, and targets are cut to the rows that the output mode returns.

        Args:
            hooks: Hear of each call.

        Returns:
            The figures by name.
        """
        self._figures.reset()
        hooks.on_test_begin({})
        for call, (batch, num_real) in enumerate(self.batches):
            hooks.on_test_batch_begin(call, {})
            self._add_call(batch, num_real)
            hooks.on_test_batch_end(call, self._figures.logs())
        hooks.on_test_end(self._figures.logs())
        return self._figures.logs()

    def _add_call(self, batch: Any, num_real: int) -> None:
        num_inputs = self._source.inputs.num_leaves
        outputs = self._executors.infer(batch[:num_inputs])
        targets = batch[num_inputs:]
        rows = self._rows
        check_rows(
            outputs, self.plan.samples_per_call if rows is None else rows.numel()
        )
        if rows is not None:
            is_real = rows.lt(num_real)
            outputs = cut(outputs, is_real)
            targets = cut(targets, rows[is_real])
            num_real = int(is_real.sum())
        elif num_real < self.plan.samples_per_call:
            outputs, targets = (
                cut(part, slice(num_real)) for part in (outputs, targets)
            )
        if num_real:
            self._add(outputs, self._source.targets.rebuild(targets), num_real)

    def _add(self, outputs: Any, targets: Any, num_rows: int) -> None:
        outputs, targets = widened((outputs, targets))
        with torch.no_grad():
            total = self._loss.total(self._loss.value(outputs, targets), num_rows)
            self._figures.add(self._figures.vector(total, outputs, targets, num_rows))
