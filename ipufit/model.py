# SPDX-License-Identifier: Apache-2.0
"""`IPUModel`: the door. It checks, decides the plan, and delegates."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Iterator, Sequence

import torch

from ._poptorch import poptorch
from .batching import DEFAULT_BATCH_SIZE, BatchPlan, check_positive
from .callbacks import CallbackList, History, ProgressDisplay, make_progress
from .callbacks.base import CallbackLike
from .config import IPUConfig
from .data import InferenceBatches, Source, TrainingBatches, as_source, fit_sources
from .engine import Evaluation, Executors, describe_coverage, predict, train
from .errors import (
    ConfigError,
    CoverageWarning,
    DroppedRowsWarning,
    NotCompiledError,
    UnsupportedError,
)
from .losses import Loss, LossLike, resolve_loss
from .metrics import MetricCollection, resolve_metrics
from .metrics.collection import MetricLike
from .optimizers import OptimizerLike, check_covers, resolve_optimizer
from .state import RunState
from .types import Logs, Verbose


class IPUModel:
    """A torch module with Keras's `compile`, `fit`, `evaluate` and `predict`.

    It runs on IPUs through PopTorch, and anywhere else on `ipufit.emulator`.

    Args:
        module: Any module. Its weights are the ones trained: after `fit` they are in
            it, whatever device they were on. With `precision="float16"` they become
            float16.
        config: How it is laid out; one IPU by default.

    Raises:
        ConfigError: `module` is no torch module, or `config` no `IPUConfig`.
        UnknownNameError: `pipeline` names something else among submodules.

    Example:
        >>> x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
        >>> model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(micro_batch_size=8))
        >>> model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
        >>> history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)
        >>> sorted(history.history)
        ['accuracy', 'loss']
        >>> model.predict(x, verbose=0).shape
        torch.Size([64, 3])
    """

    def __init__(
        self, module: torch.nn.Module, config: IPUConfig | None = None
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"module={module!r} is not a torch.nn.Module.")
        if config is not None and not isinstance(config, IPUConfig):
            raise ConfigError(f"config={config!r} is not an ipufit.IPUConfig.")
        self.module = module
        self.config = config or IPUConfig()
        self._executors = Executors(module, self.config)
        if self.config.precision == "float16":
            module.half()
        self.history: History | None = None
        self._run = RunState()
        self._optimizer: torch.optim.Optimizer | None = None
        self._loss: Loss | None = None
        self._micro_batch_size = self.config.micro_batch_size

    # Compile ----------------------------------------------------------------

    def compile(
        self,
        optimizer: OptimizerLike = "rmsprop",
        loss: LossLike | None = None,
        metrics: MetricLike | Sequence[MetricLike] | None = None,
    ) -> None:
        """Say how to train and what to report.

        Nothing is compiled for a device yet: that happens when the first data shows
        the shapes.

        Args:
            optimizer: A name ("sgd", "adam", "adamw", "rmsprop", "lamb"), a
                `torch.optim` SGD, Adam, AdamW or RMSprop of this module's parameters,
                or an optimizer of `poptorch.optim`.
            loss: A name such as "cross_entropy" or "mse", a torch loss module, or a
                function of outputs and targets. It is reported as the mean over
                samples; one with `reduction="sum"` as the sum divided by them.
            metrics: Names such as "accuracy" or "mae", `ipufit.Metric` objects, or
                functions of outputs and targets with one value per sample.

        Raises:
            ConfigError: There is no loss, or something of an unusable type.
            UnknownNameError: A name that stands for nothing; the nearest is suggested.
            UnsupportedError: An optimizer that IPUs don't have.
        """
        if loss is None:
            raise ConfigError(
                "compile() needs a loss: a name such as 'cross_entropy', a torch loss "
                "module, or a function loss(outputs, targets)."
            )
        resolved_loss = resolve_loss(loss)
        resolved_metrics = resolve_metrics(metrics)
        self._optimizer = resolve_optimizer(optimizer, self.module)
        self._loss = resolved_loss
        self._training_figures = MetricCollection(resolved_metrics)
        self._test_figures = MetricCollection(resolved_metrics)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The `poptorch.optim` optimizer that trains; None before `compile`."""
        return self._optimizer

    def _compiled(self) -> tuple[torch.optim.Optimizer, Loss]:
        if self._optimizer is None or self._loss is None:
            raise NotCompiledError(
                "You must call compile() before using the model: "
                "model.compile(optimizer='adamw', loss='cross_entropy')."
            )
        return self._optimizer, self._loss

    # Fit --------------------------------------------------------------------

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
        *,
        initial_epoch: int = 0,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> History:
        """Train.

        Args:
            x: Inputs as tensors or NumPy arrays (nested, if there are several), or a
                map-style dataset of pairs (input, target).
            y: Targets, if `x` is arrays.
            batch_size: Samples of one weight update, over all replicas: the product of
                micro-batch, gradient accumulation and replicas. What the config
                leaves open is derived.
            epochs: Index of the last epoch, plus one.
            verbose: 0 nothing, 1 bars, 2 lines; "auto" bars on a terminal, else lines.
            callbacks: `ipufit.Callback`s.
            validation_split: Share of the samples, at the end, to validate on.
            validation_data: A dataset, or a pair (x, y).
            shuffle: Draw a new order every epoch.
            initial_epoch: Where to begin counting.
            validation_batch_size: Samples of one validation pass over all replicas.
            validation_freq: Validate every so many epochs, or after these (1-based).

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
            Error: What PopTorch refuses (`ipufit.poptorch.Error`).
        """
        optimizer, loss = self._compiled()
        check_covers(optimizer, self.module)
        is_validated = _epochs(initial_epoch, epochs, validation_freq)
        source, validation = fit_sources(x, y, validation_split, validation_data)
        plan = self._checked(self.config.training_plan(batch_size))
        options = self.config.build_training_options(plan, sums_gradients=loss.is_sum)
        batches = TrainingBatches(
            source, plan, options, shuffle=shuffle, seed=self.config.seed
        )
        self._micro_batch_size = plan.micro_batch_size
        test = (
            None
            if validation is None
            else self._evaluation(validation, validation_batch_size)
        )
        _warn_of_dropped(batches, source, plan)
        coverages = {"": _warn_of_coverage(options, plan, "fit")}
        if test is not None:
            coverages["validation "] = _warn_of_coverage(
                test.options, test.plan, "fit's validation"
            )
        run = RunState(
            coverage=", ".join(of + text for of, text in coverages.items() if text)
        )
        run.params = {
            "verbose": verbose,
            "epochs": epochs,
            "steps": len(batches) * plan.device_iterations,
            "calls": len(batches),
            "dropped_samples": batches.num_dropped,
        }
        history = History()
        with self._running(run, callbacks, history, verbose) as (hooks, display):
            self.history, self._run = history, run
            if test is not None:
                test.prepare(display)
            self._executors.prepare_training(
                source, plan, options, optimizer, loss, self._training_figures, display
            )
            train(
                self._executors,
                batches,
                plan,
                self._training_figures,
                hooks,
                run,
                is_validated,
                test,
                display,
            )
        return history

    # Evaluate and predict -----------------------------------------------------

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        callbacks: CallbackLike = None,
    ) -> Logs:
        """Loss and metrics over every sample, once each.

        Args:
            x: As for `fit`.
            y: As for `fit`.
            batch_size: Samples of one pass over all replicas; it changes no figure.
            verbose: As for `fit`.
            callbacks: As for `fit`.

        Returns:
            The figures by name.

        Raises:
            NotCompiledError: `compile` wasn't called.
            DataError: Data that can't be used, or without targets.
            ConfigError: The own inference options return sums of outputs.
        """
        self._compiled()
        source = as_source(x, y)
        source.require_targets("x", "evaluate")
        test = self._evaluation(source, batch_size)
        run = RunState(params={"verbose": verbose, "calls": len(test.batches)})
        run.coverage = _warn_of_coverage(test.options, test.plan, "evaluate")
        with self._running(run, callbacks, None, verbose) as (hooks, display):
            test.prepare(display)
            return test.run(hooks)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        callbacks: CallbackLike = None,
    ) -> Any:
        """The module's outputs, one row per sample, in order.

        Args:
            x: Inputs, or a dataset; its targets, if any, are left alone.
            batch_size: As for `evaluate`.
            verbose: As for `fit`.
            callbacks: As for `fit`.

        Returns:
            Tensors, nested as the module returns them.

        Raises:
            DataError: Data that can't be used.
            ConfigError: The own inference options don't return every row.
        """
        source = as_source(x)
        plan, options = self._inference(batch_size)
        if options.output_mode != poptorch.OutputMode.All.value:
            raise ConfigError(
                "predict() needs every row, and inference_options ask for OutputMode."
                f"{poptorch.OutputMode(options.output_mode).name}. Use OutputMode.All, "
                "or leave the mode at its default."
            )
        batches = InferenceBatches(source, plan, options)
        run = RunState(params={"verbose": verbose, "calls": len(batches)})
        with self._running(run, callbacks, None, verbose) as (hooks, display):
            self._executors.prepare_inference(source, plan, options, display)
            return predict(self._executors, batches, source.inputs.num_leaves, hooks)

    def _inference(self, batch_size: int | None) -> tuple[BatchPlan, Any]:
        if batch_size is None:
            own = self.config.inference_options
            replicas = self.config.replicas if own is None else own.replication_factor
            batch_size = (self._micro_batch_size or DEFAULT_BATCH_SIZE) * replicas
        plan = self._checked(self.config.inference_plan(batch_size))
        return plan, self.config.build_inference_options(plan)

    def _evaluation(self, source: Source, batch_size: int | None) -> Evaluation:
        plan, options = self._inference(batch_size)
        if options.output_mode == poptorch.OutputMode.Sum.value:
            raise ConfigError(
                "inference_options ask for OutputMode.Sum, which adds outputs of "
                "different samples: nothing can be evaluated from that. Use "
                "OutputMode.All, or leave the mode at its default."
            )
        _, loss = self._compiled()
        return Evaluation(
            self._executors, source, plan, options, loss, self._test_figures
        )

    # Around a run -------------------------------------------------------------

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

    def _checked(self, plan: BatchPlan) -> BatchPlan:
        if plan.processes > 1:
            raise UnsupportedError(
                f"{plan.processes} processes are configured (PopRun, mpirun or "
                "Distributed.configureProcessId), but ipufit trains in one process so "
                "far. Use replicas on one host instead."
            )
        return plan

    @contextlib.contextmanager
    def _running(
        self,
        run: RunState,
        callbacks: CallbackLike,
        history: History | None,
        verbose: Verbose,
    ) -> Iterator[tuple[CallbackList, ProgressDisplay]]:
        """Callbacks in Keras's order; whatever happens, weights and terminal return."""
        display = make_progress(verbose)
        own = [] if history is None else [history]
        hooks = CallbackList([callbacks, own, display])
        hooks.set_model(self)
        hooks.set_run(run)
        try:
            yield hooks, display
        finally:
            display.close()
            self._executors.fetch_weights()


def _warn_of_dropped(batches: TrainingBatches, source: Source, plan: BatchPlan) -> None:
    if batches.num_dropped:
        warnings.warn(
            f"fit() leaves out {batches.num_dropped} of {source.num_samples} samples "
            f"in every epoch, because they don't fill a call of {plan.describe()}. "
            "Choose factors that divide the number of samples to use them all.",
            DroppedRowsWarning,
            stacklevel=3,
        )


def _warn_of_coverage(options: poptorch.Options, plan: BatchPlan, method: str) -> str:
    coverage = describe_coverage(options, plan)
    if coverage:
        warnings.warn(
            f"{method}() reports figures of a part of the samples, as the own options "
            f"ask: {coverage}. For exact figures leave the output mode at its default.",
            CoverageWarning,
            stacklevel=3,
        )
    return coverage


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
