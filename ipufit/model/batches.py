# SPDX-License-Identifier: Apache-2.0
"""`train_on_batch`, `test_on_batch` and `predict_on_batch`, for loops of one's own."""

from __future__ import annotations

from typing import Any, Mapping

from ipufit import _env
from ipufit.batching import BatchPlan
from ipufit.callbacks import CallbackList, make_progress
from ipufit.config import IPUConfig
from ipufit.data import StreamSource, as_batch
from ipufit.errors import DataError
from ipufit.state import RunState
from ipufit.types import Logs

from . import compile_only
from .evaluating import (
    default_batch_size,
    evaluation_of,
    figures_of,
    require_ipus,
)
from .inference import outputs_of_calls, whole_outputs
from .parts import Model, settings_of
from .training import training_of


def train_on_batch(
    self: Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    return_dict: bool = True,
) -> Logs | float | list[float]:
    """Train on one batch, in one call: `device_iterations` updates, 1 by default.

    With several processes each of them gives the whole batch, and takes its share.

    No hooks are called. Batches of another size are compiled for anew, because the
    shapes of a program are fixed.

    The weights stay on the device; `get_weights`, `save_weights`, `evaluate` and
    `predict` bring them back, and so does touching them. They may be changed in
    between, in place or by `set_weights`.

    Args:
        x: Inputs: arrays, as for `fit`.
        y: Targets.
        sample_weight: As for `fit`.
        class_weight: As for `fit`.
        return_dict: As for `evaluate`.

    Returns:
        The figures of this batch.

    Raises:
        NotCompiledError: `compile` wasn't called.
        DataError: Data that can't be used, or that doesn't make whole updates.
        ConfigError: The batch is not made of the config's factors.

    Example:
        >>> import torch
        >>> from ipufit import IPUModel
        >>> model = IPUModel(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> list(model.train_on_batch(torch.zeros(4, 2), torch.zeros(4, 1)))
        ['loss']
    """
    settings = settings_of(self)
    source = as_batch(x, y, sample_weight)
    training, batches = training_of(
        self,
        source,
        _samples_per_update(self.config, source),
        shuffle=False,
        drop_last=True,
        class_weight=class_weight,
        num_passes=settings.optimization.num_updates,  # so that no batch draws alike
    )
    if _env.compile_only() is not None:
        compile_only.compiled(
            self,
            "training",
            training.plan,
            training.options,
            lambda display: training.prepare(batches, display),
        )
        return compile_only.unknown(settings.objective, return_dict)
    require_ipus(self)
    _begin_loop(self, training.plan)
    training.prepare(batches, make_progress(0))
    training.figures.reset()
    for call in batches:
        training.run(call)
    training.figures.gather()
    self._data.source = source
    return figures_of(training.figures, return_dict)


def test_on_batch(
    self: Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    return_dict: bool = True,
) -> Logs | float | list[float]:
    """The figures of one batch, without training, in one call.

    A `micro_batch_size` of the config counts, and then it may take several calls.

    Args:
        x: As for `train_on_batch`.
        y: As for `train_on_batch`.
        sample_weight: As for `fit`.
        return_dict: As for `evaluate`.

    Returns:
        The figures of this batch.

    Raises:
        NotCompiledError: `compile` wasn't called.
        DataError: Data that can't be used.
    """
    settings_of(self)
    source = as_batch(x, y, sample_weight)
    size, rows = default_batch_size(self.config), source.rows_of_first
    test = evaluation_of(self, source, size, rows_in_one_call=rows)
    if _env.compile_only() is not None:
        compile_only.compiled(self, "inference", test.plan, test.options, test.prepare)
        return compile_only.unknown(test.figures.objective, return_dict)
    require_ipus(self)
    test.prepare(make_progress(0))
    test.run(CallbackList(None), RunState(processes=self.processes))
    return figures_of(test.figures, return_dict)


def predict_on_batch(self: Model, x: Any) -> Any:
    """The outputs for one batch, in calls as those of `test_on_batch`.

    Args:
        x: As for `train_on_batch`.

    Returns:
        Tensors, nested as the module returns them, one row per sample.

    Raises:
        DataError: Data that can't be used.
    """
    source = as_batch(x, left_out=self._data.target_columns)
    size, rows = default_batch_size(self.config), source.rows_of_first
    outputs = outputs_of_calls(self, source, size, rows_in_one_call=rows)
    return whole_outputs(self, outputs)


def _begin_loop(model: Model, plan: BatchPlan) -> None:
    """Begin the schedule of a loop of batches; the next batch goes on with it."""
    optimization, size = settings_of(model).optimization, plan.batch_size
    if model._runs.batch_loop is optimization:
        optimization.scale_to(size)  # each batch may have another size
    else:
        optimization.begin_fit(None, plan.device_iterations, batch_size=size)
        model._runs.batch_loop = optimization


def _samples_per_update(config: IPUConfig, source: StreamSource) -> int:
    own = config.training_options
    updates = config.device_iterations or 1 if own is None else own.device_iterations
    size, rest = divmod(source.rows_of_first, updates)
    if rest or not size:
        raise DataError(
            f"A batch of {source.rows_of_first} samples doesn't make the {updates} "
            "updates of a call (device_iterations): pass a multiple of it."
        )
    return size
