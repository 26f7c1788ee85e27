# SPDX-License-Identifier: Apache-2.0
"""`fit`."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Mapping, Sequence

import torch

from ipufit import checkpoint as files
from ipufit.batching import BatchPlan, check_positive
from ipufit.callbacks import CallbackList, History
from ipufit.callbacks.base import CallbackLike
from ipufit.data import (
    Epochs,
    Position,
    Source,
    StreamSource,
    TrainingBatches,
    column_names,
    fit_sources,
)
from ipufit.engine import Objective, Training, WatchedGradients, give_shapes, train
from ipufit.errors import (
    ConfigError,
    DataError,
    DroppedRowsWarning,
    EmptyUpdatesWarning,
    UnsupportedError,
)
from ipufit.optimizers import check_covers
from ipufit.resume import (
    Snapshot,
    check_has_run,
    check_same_run,
    described,
    find_checkpoint,
    position_of,
)
from ipufit.state import RunState
from ipufit.types import PathLike, Verbose

from .runs import ModelBase, _require_targets, warn_of_coverage


class Fitting(ModelBase):
    """Training on epochs."""

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Verbose = "auto",
        callbacks: CallbackLike = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        drop_last: bool | str = True,
        resume: PathLike | None = None,
    ) -> History:
        """Train.

        Args:
            x: Inputs: tensors, NumPy arrays or pandas frames, nested in tuples, lists
                or dicts if there are several. Or samples `(input, target)` or
                `(input, target, weight)`: a map-style dataset, a Hugging Face dataset,
                an `IterableDataset`. Or batches of such: a `DataLoader` (with its own
                sampler, batch sampler, collate function and workers), a
                `poptorch.DataLoader`, a generator or another iterable; they are
                batched anew for the calls.
            y: Targets, if `x` is arrays; or the names of the columns that are targets,
                if `x` has columns.
            batch_size: Samples of one weight update, over all replicas: the product of
                micro-batch, gradient accumulation and replicas. What the config
                leaves open is derived. By default a loader's own, unless the config
                has a micro-batch size.
            epochs: Index of the last epoch, plus one.
            verbose: 0 nothing; 1 bars, or lines where they can't be redrawn: in a pipe
                or file, and in a notebook without ipywidgets; 2 lines; "auto" 1 on a
                terminal, else 2.
            callbacks: `ipufit.Callback`s.
            validation_split: Share of the samples, at the end, to validate on.
            validation_data: Samples of any form, `(x, y)` or `(x, y, sample_weight)`.
            shuffle: Draw a new order every epoch; batches come as they are.
            class_weight: What samples count in the loss by their class: index to
                weight, 1 for those left out. Training only, as in Keras.
            sample_weight: What each sample counts in the loss, if `x` is arrays. The
                weighted loss is divided by the number of samples, as in Keras.
            initial_epoch: Where to begin counting.
            steps_per_epoch: Updates per epoch. The next one goes on where this ended,
                and anew from the beginning at the end of the data.
            validation_steps: Batches per validation, of `validation_batch_size`, of the
                loader's own size, or of `batch_size`: always the first ones, but of a
                generator the next ones.
            validation_batch_size: Samples of one validation pass over all replicas.
            validation_freq: Validate every so many epochs, or after these (1-based).
            drop_last: Leave out the samples that don't fill a call; they are counted
                and reported. `"pad"`, or False, fills the call with rows that count
                nothing, so that the loss of the last update is the mean over its real
                samples. (Layers that mix samples, such as batch norm, see the filling.)
            resume: A checkpoint that was saved while `fit` ran, or a directory of such:
                the run goes on from there, bit by bit as if it hadn't been
                interrupted, if everything else is the same. `"auto"`: the newest whole
                one of the checkpoint callbacks, if there is any.
                `BackupAndRestore` does so by itself. (Streams are gone through again
                from the beginning of their pass, and must give the same batches.)

        Returns:
            The history; its `history` has the exact figures of each epoch, over every
            sample trained on. Ctrl-C ends the run in order before it is raised again:
            `model.history` keeps the epochs that were complete, `on_train_end` is
            called, the weights come back and the IPUs are free.

        Raises:
            NotCompiledError: `compile` wasn't called.
            ConfigError: The batch size is not made of its factors, or too small for
                the pipeline; or the optimizer lacks a trainable parameter.
            DataError: Data that can't be used, or too little for one call.
            CheckpointError: That of `resume` can't be read, is damaged
                (`DamagedCheckpointError`), or isn't there (`MissingCheckpointError`).
            UnsupportedError: Weights or padding for a loss without values per sample.
            Error: What PopTorch refuses (`ipufit.poptorch.Error`).
        """
        how = self._compiled()
        check_covers(how.optimization.optimizer, self.module)
        is_validated = _epochs(initial_epoch, epochs, validation_freq)
        source, validation = fit_sources(
            x,
            y,
            sample_weight,
            validation_split,
            validation_data,
            num_workers=self.config.num_workers,
        )
        self._target_columns = column_names(y) or ()
        _require_targets(source, how.objective, "x", "train")
        _check_weighting(how.objective, class_weight, drop_last)
        if not isinstance(shuffle, bool):
            raise ConfigError(f"shuffle={shuffle!r} is neither True nor False.")
        plan = self._training_plan(batch_size, source)
        watched = CallbackList(callbacks).watched_gradients(self.module)
        checkpoint = find_checkpoint(resume, callbacks)
        if checkpoint is not None:
            check_has_run(checkpoint)
        training, batches = self._training(
            source,
            plan,
            shuffle=shuffle,
            drop_last=drop_last,
            weights=class_weight,
            checkpoint=checkpoint,
            watched=watched,
        )
        done = 0 if checkpoint is None else int(checkpoint.state["run"]["calls"])
        passes = Epochs(batches, plan, steps_per_epoch, len(is_validated), done)
        test = None
        if validation is not None:
            if validation_steps is None:
                _check_repeatable(validation, sum(is_validated.values()))
            test = self._evaluation(
                validation,
                validation_batch_size,
                validation_steps,
                "validation_data",
                "validate",
                plan.batch_size,
            )
        self._stepped = None
        calls, updates = passes.num_calls, plan.device_iterations
        steps = None if calls is None else calls * updates
        total = None if steps is None else steps * len(is_validated)
        told = {
            "shuffle": shuffle,
            "drop_last": drop_last,
            "class_weight": class_weight,
            "steps_per_epoch": steps_per_epoch,
            "precision": self.config.precision,
            "samples seeded one by one": batches.is_seeded,
            "updates of the schedule": total if how.optimization.needs_total else None,
        }
        settings = {**how.settings, **{n: described(v) for n, v in told.items()}}
        if checkpoint is not None:
            check_same_run(checkpoint, training, source.num_samples, settings)
        _warn_of_tail(batches, source, plan)
        coverages = {"": warn_of_coverage(training.options, plan, "fit", 3)}
        if test is not None:
            coverages["validation "] = warn_of_coverage(
                test.options, test.plan, "fit's validation", 3
            )
        run = RunState(
            coverage=", ".join(of + text for of, text in coverages.items() if text)
        )
        run.params = {
            "verbose": verbose,
            "epochs": epochs,
            "steps": steps,
            "calls": calls,
            "dropped_samples": batches.num_dropped or 0,
        }
        left_out = batches.num_dropped or 0, batches.num_empty_updates
        history = History()
        with self._running(run, callbacks, history, verbose) as (hooks, display):
            self._seen = source
            snapshot = Snapshot(training, batches, hooks, run, validation, settings)
            if checkpoint is not None:
                snapshot.check(checkpoint)
            how.optimization.begin_fit(total, updates)
            if checkpoint is not None:
                snapshot.learnt.put_back(checkpoint)
            try:
                if test is not None:
                    test.prepare(display)
                    run.directions.update(test.figures.directions)
                training.prepare(batches, display)
                run.directions.update(training.figures.directions)
                self.history, self._snapshot = history, snapshot
                train(
                    training,
                    is_validated,
                    passes,
                    hooks,
                    run,
                    test,
                    display,
                    None
                    if checkpoint is None
                    else partial(snapshot.put_back, checkpoint),
                )
            finally:
                self._passes = batches.position.number + (batches.position.calls > 0)
                self._snapshot = None
                batches.close()
                if test is not None:
                    test.batches.close()
        if (batches.num_dropped or 0, batches.num_empty_updates) != left_out:
            # Only a stream's end tells.
            history.dropped_samples = batches.num_dropped or 0
            _warn_of_tail(batches, source, plan)
        return history

    def _training_plan(self, batch_size: int | None, source: Source) -> BatchPlan:
        if batch_size is None and self.config.micro_batch_size is None:
            batch_size = source.batch_size
        plan = self._checked(self.config.training_plan(batch_size))
        self._micro_batch_size = plan.micro_batch_size
        return plan

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the last call, in a callback that watches them.

        Returns:
            For each parameter that a callback names in `watched_gradients` the mean of
            the gradients of the call's updates: float32, of the parameter's shape,
            without loss scaling and before clipping.

        Raises:
            ConfigError: It isn't called while `fit` runs, or before the first call.
        """
        if self._snapshot is None:
            raise ConfigError(
                "gradients() is for callbacks while fit() runs: there is no training "
                "program now. GradientMonitor shows how."
            )
        return self._snapshot.training.gradients()

    def _training(
        self,
        source: Source,
        plan: BatchPlan,
        *,
        shuffle: bool,
        drop_last: bool | str,
        weights: Mapping[int, float] | None,
        checkpoint: files.Checkpoint | None = None,
        watched: Sequence[str] = (),
    ) -> tuple[Training, TrainingBatches]:
        how = self._compiled()
        give_shapes(self.module, source)
        if watched and how.optimization.automatic_loss_scaling:
            raise UnsupportedError(
                "Gradients are watched, and the loss scaling is automatic: only the "
                "device knows what it has multiplied them by. Use a fixed loss_scaling."
            )
        gradients = WatchedGradients.of(self.module, watched)
        options = self.config.build_training_options(
            plan,
            sums_gradients=how.objective.is_sum,
            returns_outputs=how.objective.is_streamed,
            scales_automatically=how.optimization.automatic_loss_scaling,
            divides_early=how.optimization.needs_running_mean,
            anchors=gradients.anchors,
        )
        batches = TrainingBatches(
            source,
            plan,
            options,
            shuffle=shuffle,
            seed=self.config.seed
            if checkpoint is None
            else checkpoint.state["data"]["seed"],
            drop_last=drop_last,
            class_weight=weights,
            loading=self._loading(),
            start=Position(self._passes)
            if checkpoint is None
            else position_of(checkpoint),
        )
        training = Training(
            self._executors,
            plan,
            options,
            how.optimization,
            batches.structure,
            how.training_figures,
            how.average,
            gradients,
        )
        return training, batches


def _check_weighting(
    objective: Objective, class_weight: Any, drop_last: bool | str
) -> None:
    if not isinstance(drop_last, bool) and drop_last != "pad":
        raise ConfigError(
            f"drop_last={drop_last!r} is neither True nor 'pad': samples that don't "
            "fill a call are left out, or the call is padded."
        )
    for what, is_given in (
        ("class_weight", class_weight is not None),
        (f"drop_last={drop_last!r}", drop_last is not True),
    ):
        if is_given and objective.owns_loss:
            raise UnsupportedError(
                f"{what} was given, but the module returns its own loss, in which "
                "samples can't be told apart. compile() with a loss, or leave it out."
            )


def _check_repeatable(validation: Source, num_validations: int) -> None:
    is_one_shot = isinstance(validation, StreamSource) and validation.is_one_shot
    if is_one_shot and num_validations > 1:
        raise DataError(
            f"`validation_data` is a generator, which can be gone through once, and "
            f"there are {num_validations} validations. Pass a loader or a dataset, "
            "which can be begun anew."
        )


def _warn_of_tail(batches: TrainingBatches, source: Source, plan: BatchPlan) -> None:
    if batches.num_dropped:
        total = source.num_samples
        of = "" if total is None else f" of {total}"
        warnings.warn(
            f"fit() leaves out {batches.num_dropped}{of} samples in every epoch, "
            f"because they don't fill a call of {plan.describe()}. Choose factors that "
            "divide the number of samples to use them all, or drop_last='pad'.",
            DroppedRowsWarning,
            stacklevel=3,
        )
    if batches.num_empty_updates:
        warnings.warn(
            f"{batches.num_empty_updates} of the {plan.device_iterations} updates of "
            "the last call have padding only. Their gradients are zero, but momentum "
            "and weight decay go on. Fewer device_iterations avoid it.",
            EmptyUpdatesWarning,
            stacklevel=3,
        )


def _epochs(
    initial_epoch: int, epochs: int, validation_freq: int | Sequence[int]
) -> dict[int, bool]:
    """The epochs to come, 0-based, and whether each is validated."""
    for name, value in (("epochs", epochs), ("initial_epoch", initial_epoch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name}={value!r} is not a whole number of 0 or more.")
    to_come = range(initial_epoch, epochs)
    if isinstance(validation_freq, Sequence) and not isinstance(validation_freq, str):
        for epoch in validation_freq:
            check_positive("validation_freq", epoch)
        return {epoch: epoch + 1 in validation_freq for epoch in to_come}
    check_positive("validation_freq", validation_freq)
    return {epoch: (epoch + 1) % validation_freq == 0 for epoch in to_come}
