# SPDX-License-Identifier: Apache-2.0
"""`evaluate` and `predict`."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

from ipufit._poptorch import poptorch
from ipufit.callbacks.base import CallbackLike
from ipufit.data import InferenceBatches, Source, as_source, column_names
from ipufit.engine import give_shapes, joined, predictions
from ipufit.errors import ConfigError, DataError
from ipufit.state import RunState
from ipufit.types import Logs, Verbose

from .runs import ModelBase, _rows_of_steps, figures_of, warn_of_coverage


class Inference(ModelBase):
    """Looking, without training."""

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: CallbackLike = None,
        return_dict: bool = True,
    ) -> Logs | float | list[float]:
        """Loss and metrics over every sample, once each.

        Args:
            x: As for `fit`.
            y: As for `fit`.
            batch_size: Samples of one pass over all replicas; it changes no figure.
            verbose: As for `fit`.
            sample_weight: As for `fit`.
            steps: Batches to evaluate, from the beginning; None for all.
            callbacks: As for `fit`.
            return_dict: False for Keras's list: loss, losses of outputs, metrics; or
                the loss alone if there is nothing else.

        Returns:
            The figures by name.

        Raises:
            NotCompiledError: `compile` wasn't called.
            DataError: Data that can't be used, or without targets.
            ConfigError: The own inference options return sums of outputs.
        """
        self._compiled()
        source = as_source(x, y, sample_weight, num_workers=self.config.num_workers)
        self._target_columns = column_names(y) or ()
        test = self._evaluation(source, batch_size, steps)
        run = RunState(params=_params(verbose, test.batches))
        run.coverage = warn_of_coverage(test.options, test.plan, "evaluate", 3)
        with self._running(run, callbacks, None, verbose) as (hooks, display):
            self._seen = source
            try:
                test.prepare(display)
                test.run(hooks, run)
            finally:
                test.batches.close()
        return figures_of(test.figures, return_dict)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        steps: int | None = None,
        callbacks: CallbackLike = None,
        *,
        y: str | Sequence[str] | None = None,
        stream: bool = False,
    ) -> Any:
        """The module's outputs, one row per sample, in order.

        Args:
            x: Inputs, or samples; their targets, if any, are left alone. So are
                columns that the last `fit` or `evaluate` had as targets.
            batch_size: As for `evaluate`.
            verbose: As for `fit`.
            steps: Batches to predict, from the beginning; None for all.
            callbacks: As for `fit`.
            y: The names of other columns to leave alone, if `x` has columns.
            stream: Give an iterator over the outputs of each call, in constant
                memory, instead of all at once.

        Returns:
            Tensors, nested as the module returns them.

        Raises:
            DataError: Data that can't be used.
            ConfigError: The own inference options don't return every row.
        """
        columns = column_names(y)
        if y is not None and columns is None:
            raise DataError(
                f"y={y!r:.80} names no columns: predict() needs no targets, only the "
                "names of columns that it is to leave alone."
            )
        source = as_source(
            x,
            num_workers=self.config.num_workers,
            inputs_only=True,
            left_out=(*self._target_columns, *(columns or ())),
        )
        give_shapes(self.module, source)
        plan, options = self._inference(batch_size)
        if options.output_mode != poptorch.OutputMode.All.value:
            raise ConfigError(
                "predict() needs every row, and inference_options ask for OutputMode."
                f"{poptorch.OutputMode(options.output_mode).name}. Use OutputMode.All, "
                "or leave the mode at its default."
            )
        batches = InferenceBatches(
            source,
            plan,
            options,
            max_rows=_rows_of_steps(
                steps, batch_size or source.batch_size or plan.samples_per_update
            ),
            loading=self._loading(),
            seed=self.config.seed,
        )
        parts = self._predicted(source, batches, plan, options, verbose, callbacks)
        return parts if stream else joined(parts)

    def _predicted(
        self,
        source: Source,
        batches: InferenceBatches,
        plan: Any,
        options: poptorch.Options,
        verbose: Verbose,
        callbacks: CallbackLike,
    ) -> Iterator[Any]:
        """The outputs of each call; the run lasts until the last was taken."""
        how = self._how
        run = RunState(params=_params(verbose, batches))
        with self._running(run, callbacks, None, verbose) as (hooks, display):
            self._seen = source
            try:
                self._executors.prepare_inference(
                    batches,
                    plan,
                    options,
                    display,
                    owns_loss=how is not None and how.objective.owns_loss,
                )
                yield from predictions(self._executors, batches, hooks, run)
            finally:
                batches.close()


def _params(verbose: Verbose, batches: InferenceBatches) -> dict[str, Any]:
    rows = batches.num_samples
    steps = None if rows is None else batches.num_passes(rows)
    return {"verbose": verbose, "calls": batches.num_calls, "steps": steps}
