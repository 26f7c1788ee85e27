# SPDX-License-Identifier: Apache-2.0
"""What every method of a model shares: the frame of a run."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, Iterator, Sequence

import torch

from ipufit._failures import do_all
from ipufit._poptorch import poptorch
from ipufit.batching import DEFAULT_BATCH_SIZE, BatchPlan, check_positive
from ipufit.callbacks import CallbackList, History, ProgressDisplay, make_progress
from ipufit.callbacks.base import CallbackLike
from ipufit.config import IPUConfig
from ipufit.data import InferenceBatches, Loading, Source
from ipufit.engine import (
    Evaluation,
    Figures,
    Objective,
    check_shapes,
    describe_coverage,
    give_shapes,
)
from ipufit.errors import (
    ConfigError,
    CoverageWarning,
    UnsupportedError,
)
from ipufit.optimizers import (
    Optimization,
)
from ipufit.resume import Snapshot
from ipufit.state import RunState
from ipufit.types import Logs, Verbose

from .compiling import CompiledModel

if TYPE_CHECKING:
    from ipufit.summary import Summary


class ModelBase(CompiledModel):
    """A compiled model, and the frame of its runs."""

    def __init__(
        self, module: torch.nn.Module, config: IPUConfig | None = None
    ) -> None:
        super().__init__(module, config)
        self.history: History | None = None
        self._run = self._looking = RunState()
        self._hooks: CallbackList | None = None  # of the run under way
        self._micro_batch_size = self.config.micro_batch_size
        self._seen: Source | None = None
        self._target_columns: Sequence[str] = ()  # as fit or evaluate named them last
        self._stepped: Optimization | None = None
        self._snapshot: Snapshot | None = None
        self._passes = 0  # over training data, so that no fit repeats an order

    # Around a run -------------------------------------------------------------

    def summary(self, x: Any = None) -> Summary:
        """Show the layers: shapes, parameters, and the stage and IPU of each.

        Nothing is compiled for it.

        Args:
            x: Inputs to show shapes for, and the blocks that `forward` begins itself;
                those of the last run by default. One sample of them is run through
                the module on the host.

        Returns:
            What is shown, with `total_parameters` and `num_ipus`, the IPUs of all
            replicas; a notebook prints it once more.

        Example:
            >>> from ipufit import IPUConfig, IPUModel
            >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
            >>> model = IPUModel(layers, IPUConfig(pipeline=("0", "1"), replicas=2))
            >>> model.summary(torch.zeros(1, 2)).num_ipus  # doctest: +ELLIPSIS
                        Sequential...
            4
        """
        inputs = None
        if x is not None:
            from ipufit.data import as_source

            inputs = as_source(x)
        source = inputs or self._seen
        self._executors.fetch_weights()
        example = None
        if source is None:
            check_shapes(self.module)
        else:
            give_shapes(self.module, source)
            leaves = source.example(1, inputs_only=True)
            example = source.structure.inputs.rebuild(leaves)
        from ipufit.summary import summarize  # few processes ask for it

        summary = summarize(self.module, self.config, example)
        summary.print()
        return summary

    def detach(self) -> None:
        """Give the IPUs back; the weights stay in `module`, the programs compiled."""
        self._executors.detach()

    @property
    def stop_training(self) -> bool:
        """Keras's flag: a callback sets it to end `fit` after this call."""
        return self._run.is_stopping

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value:
            self._run.stop("model.stop_training was set")
        else:
            self._run.stop_reason = None

    @property
    def stop_evaluating(self) -> bool:
        """Keras's flag: a callback sets it to end the evaluation after this call."""
        return self._looking.stop_evaluating

    @stop_evaluating.setter
    def stop_evaluating(self, value: bool) -> None:
        self._looking.stop_evaluating = value

    @property
    def stop_predicting(self) -> bool:
        """Keras's flag: a callback sets it to end `predict` after this call."""
        return self._looking.stop_predicting

    @stop_predicting.setter
    def stop_predicting(self, value: bool) -> None:
        self._looking.stop_predicting = value

    def _checked(self, plan: BatchPlan) -> BatchPlan:
        if plan.processes > 1:
            raise UnsupportedError(
                f"{plan.processes} processes are configured (PopRun, mpirun or "
                "Distributed.configureProcessId), but ipufit trains in one process so "
                "far. Use replicas on one host instead."
            )
        return plan

    def _loading(self) -> Loading:
        return Loading(self.config.num_workers, self.config.loader_mode)

    def _inference(self, batch_size: int | None) -> tuple[BatchPlan, Any]:
        if batch_size is None:
            own = self.config.inference_options
            replicas = self.config.replicas if own is None else own.replication_factor
            batch_size = (self._micro_batch_size or DEFAULT_BATCH_SIZE) * replicas
        plan = self._checked(self.config.inference_plan(batch_size))
        return plan, self.config.build_inference_options(plan)

    def _evaluation(
        self,
        source: Source,
        batch_size: int | None,
        steps: int | None,
        name: str = "x",
        purpose: str = "evaluate",
        step_rows: int | None = None,
    ) -> Evaluation:
        how = self._compiled()
        _require_targets(source, how.objective, name, purpose)
        give_shapes(self.module, source)
        plan, options = self._inference(batch_size)
        if options.output_mode == poptorch.OutputMode.Sum.value:
            raise ConfigError(
                "inference_options ask for OutputMode.Sum, which adds outputs of "
                "different samples: nothing can be evaluated from that. Use "
                "OutputMode.All, or leave the mode at its default."
            )
        batches = InferenceBatches(
            source,
            plan,
            options,
            max_rows=_rows_of_steps(
                steps,
                batch_size or source.batch_size or step_rows or plan.samples_per_update,
                "validation_steps" if purpose == "validate" else "steps",
            ),
            loading=self._loading(),
            seed=self.config.seed,
        )
        return Evaluation(self._executors, batches, plan, options, how.test_figures)

    @contextlib.contextmanager
    def _running(
        self,
        run: RunState,
        callbacks: CallbackLike,
        history: History | None,
        verbose: Verbose,
    ) -> Iterator[tuple[CallbackList, ProgressDisplay]]:
        """Callbacks in Keras's order; whatever happens, weights and terminal return."""
        given = CallbackList(callbacks).callbacks
        displays = [one for one in given if isinstance(one, ProgressDisplay)]
        display = make_progress(verbose)
        if displays:  # the user's own shows instead, as in Keras
            display = displays[0]
        own = [] if history is None else [history]
        hooks = CallbackList([given, own, [] if displays else display])
        hooks.set_model(self)
        hooks.set_run(run)
        before, self._looking = self._looking, run
        around, self._hooks = self._hooks, hooks
        if history is not None:
            self._run = run
        is_failing = False
        try:
            yield hooks, display
        except GeneratorExit:  # somebody doesn't want the rest of a stream
            raise
        except BaseException:
            is_failing = True
            # Nobody may come back to free the IPUs.
            do_all([self._executors.detach], is_failing=True)
            raise
        finally:
            self._looking, self._hooks = before, around
            do_all(
                [
                    lambda: hooks.end(around, is_failing=is_failing),
                    self._executors.fetch_weights,
                ],
                is_failing=is_failing,
            )
        run.act()  # what waits until all has ended well


def _require_targets(
    source: Source, objective: Objective, name: str, purpose: str
) -> None:
    """Refuse samples without targets if a loss or metric needs them.

    Raises:
        DataError: There are none.
        UnsupportedError: There are weights, and the module returns its own loss.
    """
    if not objective.owns_loss:
        source.require_targets(name, purpose)
    elif objective.measures:
        source.require_targets(name, "compute metrics")
    if objective.owns_loss and source.structure.has_weights:
        raise UnsupportedError(
            f"`{name}` has sample weights, but the module returns its own loss, in "
            "which samples can't be told apart. Give the weights to the module as an "
            "input, or compile() with a loss."
        )


def _rows_of_steps(
    steps: int | None, rows_per_step: int, name: str = "steps"
) -> int | None:
    if steps is None:
        return None
    check_positive(name, steps)
    return steps * rows_per_step


def figures_of(figures: Figures, return_dict: bool) -> Logs | float | list[float]:
    """The figures by name; or as Keras's list, or the loss if there is only that."""
    if return_dict:
        return figures.logs()
    values = list(figures.in_order().values())
    return values[0] if len(values) == 1 else values


def warn_of_coverage(
    options: poptorch.Options, plan: BatchPlan, method: str, stacklevel: int
) -> str:
    """Say which samples figures are about, if not about all."""
    coverage = describe_coverage(options, plan)
    if coverage:
        warnings.warn(
            f"{method}() reports figures of a part of the samples, as the own options "
            f"ask: {coverage}. For exact figures leave the output mode at its default.",
            CoverageWarning,
            stacklevel=stacklevel,
        )
    return coverage
