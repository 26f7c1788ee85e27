# SPDX-License-Identifier: Apache-2.0
"""Loss and metrics over the outputs of the inference program."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._spans import awaited
from ipufit.batching import BatchPlan
from ipufit.callbacks import CallbackList, ProgressDisplay
from ipufit.data import Call, InferenceBatches, Labels
from ipufit.errors import ConfigError, UnsupportedError
from ipufit.planning.choices import Choice
from ipufit.scalars import Scalars
from ipufit.state import RunState
from ipufit.types import Logs

from .agreement import Agreement
from .coverage import check_rows, cut, returned_rows
from .objective.dtypes import widened_all
from .objective.figures import Figures, vector_of
from .objective.outputs import OWN_LOSS
from .programs.executors import Executors
from .remarking import Remarking, remark_on_passes
from .waiting import Rows, WaitingRows


class _Look(NamedTuple):
    """A look at rows that go on waiting.

    Attributes:
        num_parts: Calls whose rows were seen.
        vector: Their sums.
        is_one: Whether all were seen at once: then the sums have the bits of a group.
    """

    num_parts: int
    vector: Tensor
    is_one: bool


class Evaluation:
    """An evaluation on one set of samples, done once or after every epoch.

    Args:
        executors: The programs.
        batches: Samples with targets, or with what the module's own loss needs.
        plan: The factors of a call.
        options: Options of the inference program.
        figures: Loss and metrics to report.
        choice: The passes of a call, if they were left open and chosen.
    """

    def __init__(
        self,
        executors: Executors,
        batches: InferenceBatches,
        plan: BatchPlan,
        options: poptorch.Options,
        figures: Figures,
        choice: Choice | None = None,
    ) -> None:
        self._executors = executors
        self.batches = batches
        self.plan = plan
        self.options = options
        self.figures = figures
        self.choice = choice
        self._rows = returned_rows(options, plan)
        self._waiting = self._no_rows()
        self._look: _Look | None = None

    @property
    def remark(self) -> str:
        """The passes of a call, and why not more, if they were chosen."""
        return remark_on_passes(self.choice)

    def prepare(self, display: ProgressDisplay) -> None:
        """Have the program attached, with the newest weights."""
        self._executors.prepare_inference(
            self.batches,
            self.plan,
            self.options,
            display if self.choice is None else Remarking(display, self.remark),
            self.figures.objective.evaluated,
        )
        has_scalars = self._executors.gives_scalars
        if self.figures.objective.steps is not None and not has_scalars:
            raise ConfigError(
                "The step of the validation returned no loss and reports nothing. "
                "Return the loss, or a dict with 'loss' or other scalars."
            )
        if self.figures.objective.owns_loss and not has_scalars:
            raise ConfigError(
                "There is no loss: compile() got none, and in eval mode the module "
                f"returns none that would be understood ({OWN_LOSS}). Return it in "
                "eval mode too, with `if labels is not None` in the place of `if "
                "self.training`; or pass loss='cross_entropy' or the like to compile()."
            )
        self.batches.has_singles = has_scalars
        if has_scalars and self.options.output_mode != poptorch.OutputMode.All.value:
            raise UnsupportedError(
                "The module returns its own loss, or logs scalars, and inference_"
                "options don't ask for OutputMode.All: the samples that they are "
                "about can't be told. Leave the mode at its default."
            )

    def run(self, hooks: CallbackList, run: RunState) -> Logs:
        """The figures over every sample, or over those that come back.

        They are computed here, from the outputs: padding is cut away before it can
        count, and targets are cut to the rows that the output mode returns. They are
        computed for groups of rows that are the same however many rows a call has, so
        that the size of calls changes no bit.

        Args:
            hooks: Callbacks, which hear of each call.
            run: `run.stop_evaluating` ends it, and so does an eviction.
        """
        self.figures.reset()
        self._waiting, self._look = self._no_rows(), None
        run.stop_evaluating = False
        hooks.on_test_begin({})
        agreement = Agreement(run.processes, hooks, run, "on_test_batch_end")
        for number, call in enumerate(awaited(self.batches)):
            if not call.num_real_of_all:  # there for the scalars of single rows only
                self._add_singles(call)
                continue
            first = number * self.batches.passes_per_call
            hooks.on_test_batch_begin(first, {})
            self._add_call(call)
            if not number and not self.figures.samples:
                # Unfit targets fail now, and figures get names.
                self._look_at_waiting()
            last = first + self.batches.num_passes(call.num_real_of_all) - 1
            logs = agreement.running(self.figures, self._look_at_waiting)
            hooks.on_test_batch_end(last, logs)
            agreement.settle()
            if agreement.ends_evaluation or run.is_evicted:
                break
        self._count_waiting()
        self.figures.gather()
        hooks.on_test_end(self.figures.logs())
        return self.figures.logs()

    def _no_rows(self) -> WaitingRows:
        """Make an empty store of rows, which it groups by passes or pass by pass.

        A function of the user's may give one value for all rows that it gets. And rows
        of several processes are put together pass by pass.
        """
        objective = self.figures.objective
        is_joined = objective.is_streamed and self.figures.processes.are_several
        by_pass = is_joined or not objective.is_additive
        return WaitingRows(self.plan.samples_per_update, by_pass=by_pass)

    def _look_at_waiting(self) -> Tensor | None:
        """The sums of rows that go on waiting; None if there are none.

        Each row is looked at once, so that looking after each call costs no more than
        the call's own rows. The sums may differ from those of the group in the last
        bits.
        """
        if not self._waiting:
            return None
        look, count = self._look, self._waiting.num_parts
        if look is None:
            look = _Look(count, self._vector(self._waiting.all()), is_one=True)
        elif look.num_parts < count:
            more = self._vector(self._waiting.all(look.num_parts))
            look = _Look(count, look.vector.double() + more, is_one=False)
        self._look = look
        return look.vector

    def _count_waiting(self) -> None:
        if not self._waiting:
            return
        rows, look = self._waiting.all(), self._look
        is_seen = look and look.is_one and look.num_parts == self._waiting.num_parts
        self._count(rows, look.vector if look and is_seen else self._vector(rows))
        self._waiting.clear()

    def _count(self, rows: Rows, vector: Tensor) -> None:
        self._look = None
        self.figures.add(vector)
        self.figures.stream(*widened_all(rows.outputs, rows.labels))

    def _add_call(self, call: Call) -> None:
        batch, num_real = call.batch, call.num_real
        outputs, scalars = self._executors.infer(batch)
        labels = self.batches.structure.labels(batch)
        rows = self._rows
        num_rows = self.plan.samples_per_call if rows is None else rows.numel()
        check_rows(outputs, num_rows)
        if scalars:
            self._add_scalars(scalars, num_real)
        whole = outputs, labels
        if rows is not None:
            whole = outputs, Labels(*cut(tuple(labels), rows))
            is_real = rows.lt(num_real)
            outputs = cut(outputs, is_real)
            labels = Labels(*cut(tuple(labels), rows[is_real]))
            num_real = int(is_real.sum())
        elif num_real < num_rows:
            real = slice(num_real)
            outputs, labels = cut(outputs, real), Labels(*cut(tuple(labels), real))
        if not num_real:  # no real row came back: NaN under the right names
            self.figures.add(torch.zeros_like(self._vector(Rows(*whole, num_rows))))
        for group in self._waiting.groups(outputs, labels, num_real):
            self._count(group, self._vector(group))

    def _vector(self, rows: Rows) -> Tensor:
        outputs, labels, num_rows = rows.laid_out()
        outputs, labels = widened_all(outputs, labels)
        with torch.no_grad():
            objective = self.figures.objective
            objective.check_logits(outputs, labels, self._executors.probabilities)
            terms = objective.loss_terms(outputs, labels, num_rows)
            vector, entries = vector_of(objective, outputs, labels, num_rows, terms, {})
        self.figures.adopt(entries)
        return vector

    def _add_scalars(self, scalars: Scalars, num_real: int) -> None:
        """Add means over micro-batches that have no padding.

        One that is padded in part is left out: each of its rows follows in a
        micro-batch of its own, of that row alone.
        """
        size = self.plan.micro_batch_size
        values = {name: tensor.tolist() for name, tensor in scalars.items()}
        for index in range(num_real // size):
            self.figures.add_means(_at(values, index), size)

    def _add_singles(self, call: Call) -> None:
        """Add the scalars of single rows."""
        _, scalars = self._executors.infer(call.batch)
        values = {name: tensor.tolist() for name, tensor in scalars.items()}
        for index in range(call.num_singles):
            self.figures.add_means(_at(values, index), 1)


def _at(values: dict[str, list[float]], index: int) -> dict[str, float]:
    return {name: column[index] for name, column in values.items()}
