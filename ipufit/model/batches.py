# SPDX-License-Identifier: Apache-2.0
"""`train_on_batch`, `test_on_batch` and `predict_on_batch`."""

from __future__ import annotations

from typing import Any, Mapping

from ipufit.callbacks import CallbackList, make_progress
from ipufit.data import StreamSource, as_batch
from ipufit.errors import DataError
from ipufit.optimizers import check_covers
from ipufit.state import RunState
from ipufit.types import Logs

from .fitting import Fitting, _check_weighting
from .inference import Inference
from .runs import _require_targets, figures_of


class SingleBatches(Fitting, Inference):
    """One batch at a time, for loops of one's own.

    No hooks are called. Batches of another size are compiled for anew, because the
    shapes of a program are fixed.
    """

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = True,
    ) -> Logs | float | list[float]:
        """Train on one batch, in one call: `device_iterations` updates.

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
        how = self._compiled()
        check_covers(how.optimization.optimizer, self.module)
        source = as_batch(x, y, sample_weight)
        _require_targets(source, how.objective, "x", "train")
        _check_weighting(how.objective, class_weight, True)
        plan = self._training_plan(self._samples_per_update(source), source)
        training, batches = self._training(
            source, plan, shuffle=False, drop_last=True, weights=class_weight
        )
        if self._stepped is not how.optimization:  # schedules go on
            how.optimization.begin_fit(None, plan.device_iterations)
            self._stepped = how.optimization
        training.prepare(batches, make_progress(0))
        training.figures.reset()
        for call in batches:
            training.run(call)
        self._seen = source
        return figures_of(training.figures, return_dict)

    def _samples_per_update(self, source: StreamSource) -> int:
        own = self.config.training_options
        updates = (
            self.config.device_iterations if own is None else own.device_iterations
        )
        size, rest = divmod(source.rows_of_first, updates)
        if rest or not size:
            raise DataError(
                f"A batch of {source.rows_of_first} samples doesn't make the {updates} "
                "updates of a call (device_iterations): pass a multiple of it."
            )
        return size

    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = True,
    ) -> Logs | float | list[float]:
        """The figures of one batch, without training.

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
        test = self._evaluation(as_batch(x, y, sample_weight), None, None)
        test.prepare(make_progress(0))
        test.run(CallbackList(None), RunState())
        return figures_of(test.figures, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """The outputs for one batch.

        Args:
            x: As for `train_on_batch`.

        Returns:
            Tensors, nested as the module returns them, one row per sample.

        Raises:
            DataError: Data that can't be used.
        """
        return self.predict(as_batch(x, left_out=self._target_columns), verbose=0)
