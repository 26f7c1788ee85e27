# SPDX-License-Identifier: Apache-2.0
"""`evaluate` and `predict`."""

from __future__ import annotations

import itertools
from typing import Any, Iterator, NamedTuple, Sequence

from torch import Tensor

from ipufit import _env
from ipufit._poptorch import poptorch
from ipufit._tree import tree_map
from ipufit.callbacks import ProgressDisplay
from ipufit.callbacks.base import CallbackLike
from ipufit.data import InferenceBatches, Source, as_source, column_names
from ipufit.engine import (
    in_passes,
    joined,
    predictions,
    remark_on_passes,
)
from ipufit.errors import ConfigError, DataError
from ipufit.state import RunState
from ipufit.types import Logs, Verbose

from . import compile_only
from .evaluating import (
    evaluation_of,
    figures_of,
    inference_batches,
    inference_plan,
    plan_of_calls,
    rows_to_evaluate,
    warn_of_coverage,
)
from .parts import Model, predicted, settings_of
from .run_frame import under_way
from .splitting import settle


def evaluate(
    self: Model,
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
        batch_size: Samples of one pass over all replicas; it changes no figure. By
            default the config's `micro_batch_size`, or else 32, on each replica.
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
    settings_of(self)
    source = as_source(
        x,
        y,
        sample_weight,
        num_workers=self.config.num_workers,
        processes=self.processes,
    )
    self._data.target_columns = column_names(y) or ()
    size, max_rows = rows_to_evaluate(self.config, source, batch_size, steps)
    test = evaluation_of(self, source, size, max_rows, callbacks=callbacks)
    if _env.compile_only() is not None:
        compile_only.compiled(self, "inference", test.plan, test.options, test.prepare)
        return compile_only.unknown(test.figures.objective, return_dict)
    run = RunState(params=_params(verbose, test.batches))
    run.coverage = warn_of_coverage(test.options, test.plan, "evaluate")
    with under_way(self, run, callbacks, verbose) as (hooks, display):
        self._data.source = source
        try:
            test.prepare(display)
            test.run(hooks, run)
        finally:
            test.batches.close()
    return figures_of(test.figures, return_dict)


def predict(
    self: Model,
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
        x: Inputs, or samples; their targets, if any, are left alone. So are columns
            that the last `fit` or `evaluate` had as targets.
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
        processes=self.processes,
        inputs_only=True,
        left_out=(*self._data.target_columns, *(columns or ())),
    )
    size, max_rows = rows_to_evaluate(self.config, source, batch_size, steps)
    outputs = outputs_of_calls(
        self, source, size, max_rows, callbacks, verbose, may_choose=not stream
    )
    if stream and self.processes.are_several:
        return (
            outputs.in_order(self.processes.gathered(_plain(part)))
            for part in outputs.parts
        )
    if stream:
        return outputs.parts
    return whole_outputs(self, outputs)


class OutputsOfCalls(NamedTuple):
    """The outputs of a run of predictions.

    Attributes:
        parts: The outputs of this process, call by call, as they are asked for; nested
            as the module returns them.
        rows_per_pass: Rows of one process in a forward pass.
    """

    parts: Iterator[Any]
    rows_per_pass: int

    def in_order(self, of_processes: Sequence[Any]) -> Any:
        """The outputs of a call in the order of the samples: they divide each pass.

        Args:
            of_processes: Outputs of each process.
        """
        cut_up = [in_passes(part, self.rows_per_pass) for part in of_processes]
        of_passes = itertools.zip_longest(*cut_up)
        return joined(part for one in of_passes for part in one if part is not None)


def outputs_of_calls(
    model: Model,
    source: Source,
    batch_size: int,
    max_rows: int | None = None,
    callbacks: CallbackLike = None,
    verbose: Verbose = 0,
    rows_in_one_call: int | None = None,
    *,
    may_choose: bool = False,
) -> OutputsOfCalls:
    """Check a run of predictions, which is made as its outputs are asked for.

    Args:
        model: The model.
        source: The data.
        batch_size: Samples of one pass over all replicas.
        max_rows: Samples to predict, from the beginning; None for all.
        callbacks: As for `fit`.
        verbose: As for `fit`.
        rows_in_one_call: As for `inference_plan`.
        may_choose: Whether calls may have more passes than the config gives them, if
            it leaves them open.

    Raises:
        ConfigError: The own inference options don't return every row.
    """
    settle(model, source)
    inferred = predicted(model)
    choice = None
    if may_choose:
        plan, options, choice = plan_of_calls(
            model, source, batch_size, max_rows, inferred, callbacks, "predict"
        )
    else:
        plan, options = inference_plan(
            *(model.module, model.config, batch_size),
            rows_in_one_call=rows_in_one_call,
        )
    if options.output_mode != poptorch.OutputMode.All.value:
        raise ConfigError(
            "predict() needs every row, and inference_options ask for OutputMode."
            f"{poptorch.OutputMode(options.output_mode).name}. Use OutputMode.All, "
            "or leave the mode at its default."
        )
    batches = inference_batches(model, source, plan, options, max_rows)

    def prepare(display: ProgressDisplay) -> None:
        model._executors.prepare_inference(
            batches, plan, options, display, inferred, remark_on_passes(choice)
        )

    if _env.compile_only() is not None:
        compile_only.compiled(model, "inference", plan, options, prepare)
        compile_only.end_script()

    def run_to_the_end() -> Iterator[Any]:
        run = RunState(params=_params(verbose, batches))
        with under_way(model, run, callbacks, verbose) as (hooks, display):
            model._data.source = source
            try:
                prepare(display)
                yield from predictions(model._executors, batches, hooks, run)
            finally:
                batches.close()

    return OutputsOfCalls(run_to_the_end(), plan.samples_per_update)


def whole_outputs(model: Model, outputs: OutputsOfCalls) -> Any:
    """The outputs of all processes in one, in the order of the samples.

    Args:
        model: The model.
        outputs: The outputs of this process.
    """
    if not model.processes.are_several:
        return joined(outputs.parts)
    of_processes = model.processes.gathered([_plain(part) for part in outputs.parts])
    return joined(map(outputs.in_order, zip(*of_processes)))


def _plain(outputs: Any) -> Any:
    """Outputs that can be pickled: PopTorch's own tensors refuse."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, outputs)


def _params(verbose: Verbose, batches: InferenceBatches) -> dict[str, Any]:
    rows = batches.num_samples
    steps = None if rows is None else batches.num_passes(rows)
    return {"verbose": verbose, "calls": batches.num_calls, "steps": steps}
