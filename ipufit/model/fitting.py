# SPDX-License-Identifier: Apache-2.0
"""`fit`: it checks its arguments into a plan, and has the plan run."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Mapping, Sequence

from ipufit.batching import BatchPlan, check_count, check_positive
from ipufit.callbacks import CallbackList, History
from ipufit.callbacks.base import CallbackLike
from ipufit.data import (
    Epochs,
    Source,
    StreamSource,
    TrainingBatches,
    column_names,
    fit_sources,
)
from ipufit.engine import Evaluation, Training
from ipufit.errors import (
    ConfigError,
    DataError,
    DroppedRowsWarning,
    EmptyUpdatesWarning,
)
from ipufit.resume import calls_done, check_same_run, find_checkpoint, numeric_settings
from ipufit.types import PathLike, Verbose

from .evaluating import evaluation_of, rows_to_evaluate, warn_of_coverage
from .fit_plan import FitPlan, run
from .parts import Model, settings_of
from .training import training_of
from .updates_per_call import updates_per_call


def fit(
    self: Model,
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
    validation_updates: int | None = None,
    drop_last: bool | str = True,
    resume: PathLike | None = None,
) -> History:
    """Train on data, epoch after epoch.

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
        class_weight: Weights of samples in the loss by their class: index to weight,
            1 for classes left out. Training only, as in Keras.
        sample_weight: Weight of each sample in the loss, if `x` is arrays. The
            weighted loss is divided by the number of samples, as in Keras.
        initial_epoch: Index of the first epoch.
        steps_per_epoch: Updates per epoch. The next one goes on where this ended,
            and anew from the beginning at the end of the data.
        validation_steps: Batches per validation, of `validation_batch_size`, of the
            loader's own size, or of `batch_size`: always the first ones, but of a
            generator the next ones.
        validation_batch_size: Samples of one validation pass over all replicas. By
            default the micro-batch of the training on each of them.
        validation_freq: Validate every so many epochs, or after these (1-based).
        validation_updates: Validate within epochs too, after every so many updates of
            each. The epoch's row of `History` has the figures of its last validation.
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
        CheckpointError: The checkpoint of `resume` can't be read, is damaged
            (`DamagedCheckpointError`), or isn't there (`MissingCheckpointError`).
        UnsupportedError: Weights or padding for a loss without values per sample.
        Error: PopTorch refuses something (`ipufit.poptorch.Error`).
    """
    settings = settings_of(self)
    epochs_to_come = _epochs(initial_epoch, epochs, validation_freq)
    given = x, y, sample_weight, validation_split, validation_data
    source, validation_source = fit_sources(
        *given, num_workers=self.config.num_workers, processes=self.processes
    )
    self._data.target_columns = column_names(y) or ()
    checkpoint = find_checkpoint(resume, callbacks)
    arguments = {
        "shuffle": shuffle,
        "drop_last": drop_last,
        "class_weight": class_weight,
        "steps_per_epoch": steps_per_epoch,
        "validation_updates": validation_updates,
        **numeric_settings(self.config),
    }
    training, batches = training_of(
        self,
        source,
        batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        class_weight=class_weight,
        checkpoint=checkpoint,
        watched=CallbackList(callbacks).watched_gradients(self.module),
        choose=partial(
            updates_per_call, self, source, callbacks, checkpoint, arguments
        ),
    )
    lengths = steps_per_epoch, len(epochs_to_come), calls_done(checkpoint)
    calls = Epochs(batches, training.plan, *lengths)
    every = _validation_calls(validation_updates, training.plan, validation_source)
    times = sum(epochs_to_come.values()) + 2 * bool(every)
    size = validation_batch_size, validation_steps, times
    validation = _validation_of(self, validation_source, *size, training, callbacks)
    plan = FitPlan(
        training=training,
        batches=batches,
        calls=calls,
        epochs=epochs_to_come,
        validation=validation,
        validation_calls=every,
        callbacks=callbacks,
        checkpoint=checkpoint,
        arguments=arguments,
        settings=settings.in_words,
        params={"verbose": verbose, "epochs": epochs},
    )
    check_same_run(checkpoint, training, source.num_samples, plan.in_words)
    _warn_of_tail(self, batches, training.plan)
    warn_of_coverage(training.options, training.plan, "fit")
    if validation is not None:
        warn_of_coverage(validation.options, validation.plan, "fit's validation")
    return _run(self, plan)


def _run(model: Model, plan: FitPlan) -> History:
    """Run a plan, and say how many samples didn't fill a call.

    Only the end of a stream tells that; of other data it was said before.

    Args:
        model: The model.
        plan: The plan of the run.

    Returns:
        The history, which has the number of samples left out.
    """
    batches = plan.batches
    before = batches.num_dropped, batches.num_empty_updates
    history = run(model, plan)
    if (batches.num_dropped, batches.num_empty_updates) != before:
        history.dropped_samples = batches.num_dropped or 0
        _warn_of_tail(model, batches, plan.training.plan, stacklevel=4)
    return history


def _validation_of(
    model: Model,
    source: Source | None,
    batch_size: int | None,
    steps: int | None,
    num_validations: int,
    training: Training,
    callbacks: CallbackLike,
) -> Evaluation | None:
    """The validation of a fit; a generator without `steps` can be gone through once.

    Raises:
        DataError: It would have to be gone through several times.
    """
    if source is None:
        return None
    is_one_shot = isinstance(source, StreamSource) and source.is_one_shot
    if steps is None and is_one_shot and num_validations > 1:
        raise DataError(
            "`validation_data` is a generator, which can be gone through once, and "
            "there are several validations. Pass a loader or a dataset, "
            "which can be begun anew."
        )
    size, max_rows = rows_to_evaluate(
        model.config, source, batch_size, steps, training.plan
    )
    return evaluation_of(
        model,
        source,
        size,
        max_rows,
        "validation_data",
        "validate",
        callbacks=callbacks,
    )


def _validation_calls(
    updates: int | None, plan: BatchPlan, source: Source | None
) -> int | None:
    """Calls from one validation within an epoch to the next; None for none.

    Raises:
        ConfigError: There is no data for it, or a call ends in between.
    """
    if updates is None:
        return None
    check_positive("validation_updates", updates)
    calls, rest = divmod(updates, plan.device_iterations)
    if rest:
        raise ConfigError(
            f"validation_updates={updates} is no multiple of the "
            f"{plan.device_iterations} updates that a call makes (device_iterations), "
            "and a validation comes between calls. Choose a multiple."
        )
    if source is None:
        raise ConfigError(
            f"validation_updates={updates} was given, and there is nothing to validate "
            "on. Pass validation_data, or leave it out."
        )
    return calls


def _warn_of_tail(
    model: Model, batches: TrainingBatches, plan: BatchPlan, stacklevel: int = 3
) -> None:
    """Warn of samples that are left out, and of updates without any."""
    if not model.processes.is_first:
        return
    if batches.num_dropped:
        total = batches.source.num_samples
        of = "" if total is None else f" of {total}"
        whole = plan.describe_unfilled(batches.num_dropped)
        warnings.warn(
            f"fit() leaves out {batches.num_dropped}{of} samples in every epoch, "
            f"because they don't fill {whole}. Choose factors that divide the number "
            "of samples to use them all, or drop_last='pad'.",
            DroppedRowsWarning,
            stacklevel=stacklevel,
        )
    if batches.num_empty_updates:
        warnings.warn(
            f"{batches.num_empty_updates} of the {plan.device_iterations} updates of "
            "the last call have padding only. Their gradients are zero, but momentum "
            "and weight decay go on. Fewer device_iterations avoid it.",
            EmptyUpdatesWarning,
            stacklevel=stacklevel,
        )


def _epochs(
    initial_epoch: int, epochs: int, validation_freq: int | Sequence[int]
) -> dict[int, bool]:
    """The epochs to come, 0-based, and whether each is validated."""
    check_count("epochs", epochs)
    check_count("initial_epoch", initial_epoch)
    to_come = range(initial_epoch, epochs)
    if isinstance(validation_freq, Sequence) and not isinstance(validation_freq, str):
        for epoch in validation_freq:
            check_positive("validation_freq", epoch)
        return {epoch: epoch + 1 in validation_freq for epoch in to_come}
    check_positive("validation_freq", validation_freq)
    return {epoch: (epoch + 1) % validation_freq == 0 for epoch in to_come}
