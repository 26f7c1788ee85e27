# SPDX-License-Identifier: Apache-2.0
"""The class `IPUModel`: Keras's methods, and the run of a `fit`."""

from __future__ import annotations

import contextlib
import itertools
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterator,
    Literal,
    Mapping,
    NoReturn,
    Sequence,
    TypeVar,
    Union,
    overload,
)

import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._arguments import (
    check_flags,
    check_instance,
    number_in,
    refuse,
    shown,
    skipped_constructor,
)
from ipufit._hints import hint
from ipufit._signals import uninterrupted
from ipufit._tree import tree_map
from ipufit.callbacks import CallbackList, History, make_progress
from ipufit.callbacks.base import CallbackLike, say
from ipufit.callbacks.progress import Notes
from ipufit.config import IPUConfig
from ipufit.data.arrays import column_names, short_list
from ipufit.data.calls import InferenceBatches
from ipufit.data.datasets import Source
from ipufit.data.sources import as_batch, as_source
from ipufit.distributed import (
    Processes,
    configure,
    get_process_info,
)
from ipufit.engine import host_calls
from ipufit.engine.loop import Inference, train
from ipufit.engine.metric_state import MetricState
from ipufit.engine.objective import (
    StepFunction,
    resolve_objective,
)
from ipufit.engine.precision import in_own_types
from ipufit.engine.program import Executors
from ipufit.engine.rows import cut, in_passes, joined
from ipufit.engine.stopping import ProcessSync, ended_in_order
from ipufit.engine.weights import Counterparts, deep_copied, unwrapped
from ipufit.errors import (
    ConfigError,
    DataError,
    UnsupportedError,
    all_suggesting,
    refuse_foreign,
    unknown_attribute,
)
from ipufit.losses import LossLike
from ipufit.metrics import MetricLike
from ipufit.mixing import Mixing
from ipufit.optimizers import (
    Optimization,
    OptimizerLike,
    ScheduleLike,
    SchedulesLike,
    WeightAverage,
    resolve_optimization,
)
from ipufit.resume.finding import held_directories
from ipufit.resume.savers import ModelSaver, RunSaver
from ipufit.resume.settings import compiled_settings, described
from ipufit.state import RunState
from ipufit.types import Logs, PathLike, Verbose

from . import copying
from .arguments import (
    CompileSettings,
    FitArguments,
    InferenceArguments,
    check_augmentation,
    common_samples,
    names_in_logs,
    resolve_steps,
    with_steps,
)
from .calls import (
    CallPlanner,
    warn_of_coverage,
    warn_of_coverage_of_fit,
)
from .fitting import plan_fit
from .runs import Runs

if TYPE_CHECKING:
    from ipufit.planning.memory import Device
    from ipufit.planning.plan import ModelPlan
    from ipufit.planning.schedule import EpochPlan

    from .benchmarking import BenchmarkResult
    from .building import Build
    from .checking import CheckReport
    from .summary import Summary

ModelT = TypeVar("ModelT", bound="IPUModel")
PerOutput = Union[Sequence[Any], Dict[str, Any]]
MetricsLike = Union[MetricLike, PerOutput, None]
"""A list of metrics; or one for each output, in a list or in a dict by name."""


@all_suggesting
class IPUModel:
    """A torch module with Keras's `compile`, `fit`, `evaluate` and `predict`.

    It runs on IPUs through PopTorch, and anywhere else on `ipufit.emulator`.

    * `compile` says how to train and what to report.
    * `fit` trains, and returns loss and metrics of each epoch.
    * `evaluate` returns loss and metrics over every sample.
    * `predict` returns the outputs, one row per sample.

    `copy.deepcopy(model)` and `pickle` make a model that goes on as this one would. It
    has the weights, the config, the settings of `compile`, and the optimizer's state.
    It has no programs yet, and random numbers on its device begin anew.
    `copy.copy(model)` makes another model of the same module, compiled alike.

    Args:
        module: Any module. Its own weights are trained: after `fit` the module has the
            trained weights. If `config` asks for weights of another type, a copy with
            such weights is trained instead, `model.module`, and the given module stays
            as it was.
        config: Layout on IPUs; one IPU by default.
        in_place: Change the types of the module's own weights rather than those of a
            copy.

    Raises:
        ConfigError: `module` isn't a torch module, or `config` isn't an `IPUConfig`; or
            the module can't be copied.
        UnknownNameError: `pipeline` has submodules and an unknown name, or a pattern of
            `float32_modules` matches no submodule.

    Example:
        >>> import torch
        >>> from ipufit import IPUConfig
        >>> x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
        >>> model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(micro_batch_size=8))
        >>> model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
        >>> history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)
        >>> sorted(history.history)
        ['accuracy', 'loss']
        >>> model.predict(x, verbose=0).shape
        torch.Size([64, 3])
    """

    module: torch.nn.Module
    processes: Processes
    history: History | None
    _counterparts: Counterparts
    _executors: Executors
    _planner: CallPlanner
    _runs: Runs
    _batch_loop: Optimization | None  # None if a fit came since: schedules begin anew
    # Facts about the data of the last runs.
    _target_columns: Sequence[str]
    _columns: Sequence[Sequence[Any] | None]  # of frames trained on

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        refuse_foreign("module", module, "a torch.nn.Module")
        if not isinstance(module, torch.nn.Module):
            refuse("module", module, "a torch.nn.Module")
        check_flags("IPUModel", in_place=in_place)
        if config is not None and not isinstance(config, IPUConfig):
            raise ConfigError(
                f"config={shown(config)} is not an ipufit.IPUConfig. Write "
                "IPUModel(module, ipufit.IPUConfig(replicas=2)); its customize= gets "
                "PopTorch's options."
            )
        config = config or IPUConfig()
        self.module, self._counterparts = in_own_types(
            unwrapped(module), config, in_place=in_place
        )
        self.history = None
        process = config.process
        if process != get_process_info():
            configure(process)  # for datasets that ask, and files
        self.processes = Processes(process)
        self._executors = Executors(self.module, config, self.processes)
        self._planner = CallPlanner(
            self.module, config, self._executors, self.processes
        )
        self._runs = Runs(self._executors, self.processes)
        self._batch_loop = None
        self._target_columns = ()
        self._columns = ()

    @property
    def config(self) -> IPUConfig:
        """The layout, with what `compile` and the data have added to it."""
        return self._planner.config

    # Keras's methods ------------------------------------------------------------------

    def compile(
        self,
        optimizer: OptimizerLike = "rmsprop",
        loss: LossLike | PerOutput | None = None,
        loss_weights: float | PerOutput | None = None,
        metrics: MetricsLike = None,
        weighted_metrics: MetricsLike = None,
        steps_per_execution: int | None = None,
        *,
        lr_schedule: ScheduleLike = None,
        schedules: SchedulesLike = None,
        augment: Mixing | None = None,
        label_smoothing: float = 0.0,
        step: StepFunction | None = None,
        validation_step: StepFunction | None = None,
        predict_step: StepFunction | None = None,
    ) -> None:
        """Set the optimizer, the loss and the metrics.

        Nothing is compiled for a device yet: that happens when the first data shows
        the shapes.

        With several outputs, `loss`, `loss_weights`, `metrics` and `weighted_metrics`
        take a list in the order of the outputs, or a dict by their names. Outputs in a
        dict are named by its keys, outputs in a tuple `output_1`, `output_2` and so on.
        One name or torch loss is used for each output. A function of yours gets all
        outputs and targets as they nest, and the only output of a dict or tuple itself.

        Args:
            optimizer: A name ("sgd", "adam", "adamw", "rmsprop", "lamb"), an
                `ipufit.Optimizer`, a `torch.optim` SGD, Adam, AdamW or RMSprop of this
                module's parameters, or an optimizer of `poptorch.optim`.
            loss: A name such as "cross_entropy" or "mse", a torch loss module, or a
                function of outputs and targets. The mean over samples is reported; with
                `reduction="sum"`, the sum divided by the number of samples. None if
                the module returns its own loss, a mean over the micro-batch. The module
                may return it as "loss" in a dict or an object, as the result of
                `poptorch.identity_loss`, as a scalar alone, or as the first or last
                element of a tuple, such as `(output, loss)`. The inputs must have all
                that it is computed from.
            loss_weights: Factor of each output's loss in the total; 1 by default.
            metrics: Names such as "accuracy" or "AUC", `ipufit.Metric` objects, ones
                of torchmetrics or a `MetricCollection`, or functions of outputs and
                targets with one value per sample. Sample weights don't count in them.
            weighted_metrics: The same, and sample weights count.
            steps_per_execution: Weight updates per call: `IPUConfig`'s
                `device_iterations` under Keras's name; `fit` chooses by default.
            lr_schedule: A name ("cosine", "linear", ...), an `ipufit.Schedule`, a
                scheduler of `torch.optim.lr_scheduler` for the optimizer given, or a
                function that makes one from an optimizer. Counted in weight updates;
                `ipufit.PerEpoch` has a scheduler of torch stepped per epoch.
            schedules: Schedules of other values of parameter groups by name, as in
                `{"weight_decay": ipufit.Schedule("cosine")}`: "momentum", "eps",
                "alpha", and "beta1" and "beta2", the parts of `betas`. They are
                factors, too.
            augment: `ipufit.Mixing(mixup=0.2, cutmix=1.0)` mixes the training images on
                the device. Metrics of training then count the target that has the
                larger share of an image.
            label_smoothing: Part of each target that all classes share in training, 0.1
                for example. `evaluate` and validations report the loss without it, so
                that models are compared by the same loss.
            step: A step of your own in the place of the module and a loss: a function
                of the module and a batch, which is traced as one program. The batch
                nests as the data do: inputs, `(inputs, targets)` or `(inputs, targets,
                weights)`. The step returns the mean loss over the samples; or `(loss,
                outputs)`; or a dict of "loss", "outputs" for metrics, and further
                scalars to report. A subclass may have a method
                `training_step(self, batch)` instead.
            validation_step: The same for `evaluate` and validations, in eval mode; by
                default `step`, or the method `validation_step(self, batch)`.
            predict_step: A function of the module and inputs for `predict`; by default
                the module is called, or the method `predict_step(self, inputs)`.

        Raises:
            ConfigError: Something of an unusable type, or settings that contradict
                each other.
            UnknownNameError: A name that stands for nothing; the nearest is suggested.
            UnsupportedError: An optimizer or a setting that IPUs don't have; or samples
                can't be mixed, or labels smoothed, in the loss.
        """
        arguments = {
            "optimizer": optimizer,
            "loss": loss,
            "loss_weights": loss_weights,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
            "steps_per_execution": steps_per_execution,
            "lr_schedule": lr_schedule,
            "schedules": schedules,
            "augment": augment,
            "label_smoothing": label_smoothing,
            "step": step,
            "validation_step": validation_step,
            "predict_step": predict_step,
        }
        if self._runs.are_under_way:
            raise ConfigError(
                "compile() was called while fit, evaluate or predict runs, with the "
                "loss and the optimizer that it began with. Compile before or after. "
                "Learning rates may change meanwhile: model.optimizer.learning_rate."
            )
        config = with_steps(self._planner.user_config, steps_per_execution)
        steps = resolve_steps(self, step, validation_step, predict_step)
        for name in ("loss", "loss_weights"):
            if steps is not None and arguments[name] is not None:
                raise ConfigError(
                    f"{name}={arguments[name]!r} was given, and the model has a step "
                    "of its own, which computes the loss: leave one of them out."
                )
        objective = resolve_objective(
            loss, loss_weights, metrics, weighted_metrics, steps
        )
        check_augmentation(objective, augment, label_smoothing)
        optimization = resolve_optimization(
            optimizer,
            lr_schedule,
            self.module,
            schedules,
            counterpart=self._counterparts.own,
            is_half=config.types.is_half,
        )
        momentum = optimization.ema_momentum
        settings = CompileSettings(
            objective=objective,
            trained=objective.smoothed(label_smoothing),
            optimization=optimization,
            average=None if momentum is None else WeightAverage(self.module, momentum),
            in_words={
                **compiled_settings(objective, optimization),
                "augment": described(augment),
                "label_smoothing": described(label_smoothing),
                "step": described(None if steps is None else steps.training),
            },
            mixing=augment,
            arguments=arguments,
        )
        self._planner.compile(config, settings)

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
                `poptorch.DataLoader`, a generator or another iterable. Their batches
                are cut and joined to fit the calls. Or batches that are whole
                micro-batches: `ipufit.FixedSizeBatches`.
            y: Targets, if `x` is arrays; or the names of the columns that are targets,
                if `x` has columns.
            batch_size: Samples of one weight update, over all replicas: the product of
                micro-batch, gradient accumulation and replicas. Factors that the config
                leaves open are derived. The default is a loader's own batch size,
                unless the config has a micro-batch size.
            epochs: Index of the last epoch, plus one.
            verbose: 0 nothing; 1 or "auto" a line per epoch, with a bar before it where
                one can be redrawn: on a terminal, and in a notebook; 2 Keras's lines.
            callbacks: `ipufit.Callback`s.
            validation_split: Share of the samples, at the end, to validate on.
            validation_data: Samples of any form, `(x, y)` or `(x, y, sample_weight)`;
                or several such sets by name: `{"test": a, "hard": b}` reports
                `val_test_loss`, `val_hard_loss` and so on.
            shuffle: Draw a new order every epoch, of samples or of the batches of a
                `keras.utils.PyDataset`; other batches come as they are.
            class_weight: Weights of samples in the loss by their class: index to
                weight, 1 for classes left out. Training only, as in Keras.
            sample_weight: Weight of each sample in the loss, if `x` is arrays. The
                weighted loss is divided by the number of samples, as in Keras.
            initial_epoch: Index of the first epoch.
            steps_per_epoch: Updates per epoch. The next epoch goes on where this one
                ended. At the end of the data it begins anew.
            validation_steps: Batches per validation, of `validation_batch_size`, of the
                loader's own size, or of `batch_size`. Each validation takes the first
                batches; from a generator it takes the next ones.
            validation_batch_size: Samples of one validation pass over all replicas. By
                default the micro-batch of the training on each of them.
            validation_freq: Number of epochs from one validation to the next, or a list
                of the epochs to validate after (1-based).
            validation_updates: Number of updates from one validation to the next within
                an epoch; None to validate at the ends of epochs only. The epoch's row
                of `History` has the metrics of its last validation.
            drop_last: Leave out the samples that don't fill a call; they are counted
                and reported. `"pad"`, or False, fills the call with rows that count
                nothing, so that the loss of the last update is the mean over its real
                samples. (Layers that mix samples, such as batch norm, see the filling.)
            resume: A checkpoint that was saved while `fit` ran, or a directory of such
                checkpoints. If everything else is the same, the run ends with the same
                bits as an uninterrupted one. `"auto"` takes the newest undamaged
                checkpoint of the checkpoint callbacks, if there is any.
                `BackupAndRestore` does so by itself. (Streams are read again from
                the beginning of their pass, and must give the same batches.)

        Returns:
            The history; its `history` has the loss and metrics of each epoch, over
            every sample trained on. Ctrl-C ends the run in order before it is raised
            again: `model.history` keeps the complete epochs, `on_train_end` is called,
            the weights come back and the IPUs are free.

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
        self._runs.refuse_other_thread()
        arguments = FitArguments(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=shuffle,
            class_weight=class_weight,
            sample_weight=sample_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
            validation_updates=validation_updates,
            drop_last=drop_last,
        )
        plan = plan_fit(self._planner, arguments, resume)
        training, validations = plan.training, plan.validations
        batches, optimization = training.batches, training.optimization
        source, updates = batches.source, training.plan.device_iterations
        self._target_columns, self._columns = column_names(y) or (), source.columns
        left_out = batches.num_dropped, batches.num_padded
        self._planner.warn_of_tail(training)

        # The run: programs, then epochs of calls.
        to_come, checkpoint = plan.epochs, plan.checkpoint
        history, self._batch_loop = History(), None
        run = RunState(
            coverage=warn_of_coverage_of_fit(training, validations.sets),
            params={
                "verbose": verbose,
                "epochs": epochs,
                "steps": plan.updates_per_epoch,
                "calls": batches.calls_per_epoch,
                "dropped_samples": batches.num_dropped or 0,
            },
            plan=self._planner.describe_epoch(
                arguments, training.plan, training.choice, source.num_samples
            ),
            metrics=training.metrics,
        )
        running = self._runs.running(self, run, callbacks, verbose, history)
        fitting = self._runs.fitting(self, run, optimization)
        others_out = held_directories(callbacks)
        resuming = contextlib.ExitStack()
        with others_out, running as (hooks, display), fitting, resuming:
            self._planner.last_source = source
            self._planner.trained_rows = training.plan.micro_batch_size
            saver = RunSaver(training, hooks, run, plan.validated, plan.settings)
            if checkpoint is not None:
                saver.check(checkpoint)  # before the training program is dropped
                resuming.enter_context(saver.of_model.kept_on_error())
            optimization.begin_fit(plan.updates_per_epoch, updates, len(to_come))
            if checkpoint is not None:
                saver.of_model.write(checkpoint)
            try:
                for line in optimization.news():
                    display.noted(line)
                validations.prepare(display)
                training.prepare(display)
                run.directions.update(validations.directions(training.metrics))
                validated = validations.names(training.metrics)
                names = names_in_logs(training.metrics.names, validated)
                run.names = None if hooks.adds_names() else names
                matrices = training.metrics.matrices
                run.matrices = names_in_logs(
                    matrices, [(prefix, {*matrices}) for prefix, _ in validated]
                )
                self.history, self._runs.saver = history, saver
                hooks.on_train_begin({})
                with ended_in_order(self._executors, hooks, run):
                    sync = ProcessSync(
                        hooks,
                        run,
                        "on_train_batch_end",
                        "on_batch_end",
                        facts=lambda: optimization.values.variable,
                    )
                    if checkpoint is not None:
                        saver.put_back(checkpoint)
                        resuming.close()
                        if run.calls:
                            display.on_epoch_begin(run.epoch, {})
                        is_over = run.stop_reason is not None
                        first_epoch = epochs if is_over else run.epoch
                        to_come = range(max(first_epoch, initial_epoch), epochs)
                    train(
                        training,
                        to_come,
                        validations,
                        hooks,
                        run,
                        display,
                        sync,
                    )
                training.finish()
                if run.processes.are_several:
                    self._executors.share_buffers()
                hooks.on_train_end(dict(run.logs))
            finally:
                self._planner.count_passes(batches)
                self._runs.saver = None
                batches.close()
                validations.close()
        if (batches.num_dropped, batches.num_padded) != left_out:
            # Only the end of a stream tells how many samples don't fill a call.
            history.dropped_samples = batches.num_dropped or 0
            self._planner.warn_of_tail(training)
        return history

    @overload
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: CallbackLike = None,
        return_dict: Literal[True] = True,
    ) -> Logs: ...

    @overload
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: CallbackLike = None,
        *,
        return_dict: bool,
    ) -> Any: ...

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
        """Return loss and metrics over every sample.

        Args:
            x: As for `fit`.
            y: As for `fit`.
            batch_size: Samples of one pass over all replicas; it doesn't change the
                result. By default the config's `micro_batch_size`, or else 32, on each
                replica; or all samples, if they are one micro-batch of the last `fit`.
            verbose: As for `fit`.
            sample_weight: As for `fit`.
            steps: Batches to evaluate, from the beginning; None for all.
            callbacks: As for `fit`.
            return_dict: False for Keras's list: loss, losses of outputs, metrics; or
                the loss alone if there is nothing else.

        Returns:
            Loss and metrics by name.

        Raises:
            NotCompiledError: `compile` wasn't called.
            DataError: Data that can't be used, or without targets.
            ConfigError: The user's own inference options return sums of outputs.
        """
        self._runs.refuse_other_thread()
        check_flags(return_dict=return_dict)
        self._planner.require_compiled()
        source = as_source(
            x, y, sample_weight, columns=self._columns, **self._planner.loading
        )
        self._target_columns = column_names(y) or ()
        samples = common_samples(source)
        self.processes.require_same(
            "evaluate", samples=samples, batch_size=batch_size, steps=steps
        )
        arguments = InferenceArguments(batch_size, steps, callbacks)
        test = self._planner.evaluation(source, arguments)
        run = RunState(params={"verbose": verbose, **_params(test.batches)})
        run.coverage = warn_of_coverage(test.options, test.plan, "evaluate")
        with self._runs.running(self, run, callbacks, verbose) as (hooks, display):
            self._planner.last_source = source
            naming = self._planner.naming_rows_of_fit(test)
            with contextlib.closing(test.batches), naming:
                test.prepare(display)
                test.run(hooks, run)
        return _format_metrics(test.metrics, return_dict)

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
        """Return the module's outputs, one row per sample, in order.

        Args:
            x: Inputs, or samples; their targets, if any, are ignored. So are columns
                that the last `fit` or `evaluate` had as targets.
            batch_size: As for `evaluate`.
            verbose: As for `fit`.
            steps: Batches to predict, from the beginning; None for all.
            callbacks: As for `fit`.
            y: Names of other columns to ignore, if `x` has columns.
            stream: Return an iterator over the outputs of each call, in constant
                memory, instead of all at once.

        Returns:
            Tensors, nested as the module returns them.

        Raises:
            DataError: Data that can't be used.
            ConfigError: The user's own inference options don't return every row.
        """
        self._runs.refuse_other_thread()
        columns = column_names(y)
        if y is not None and columns is None:
            raise DataError(
                f"y={shown(y)} must be column names: predict() takes no targets, only "
                "the names of columns to leave out."
            )
        is_text = isinstance(batch_size, str)
        if batch_size is not None and number_in(batch_size) is None and not is_text:
            raise DataError(
                f"batch_size={shown(batch_size)} is no number: predict(x, batch_size) "
                "takes inputs only. Leave targets out; evaluate(x, y) takes them."
            )
        check_flags(stream=stream)
        source = self._inputs(x, columns or ())
        samples = common_samples(source)
        self.processes.require_same(
            "predict", samples=samples, batch_size=batch_size, steps=steps
        )
        arguments = InferenceArguments(batch_size, steps, callbacks, is_open=not stream)
        plan = self._planner.prediction(source, arguments)
        parts = self._predicted(plan, callbacks, verbose)
        if not stream:
            return self._join_outputs(plan, parts)
        if not self.processes.are_several:
            return parts
        return (
            _join_processes(self.processes.gathered(_plain(part)), plan.batches)
            for part in parts
        )

    @overload
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: Literal[True] = True,
    ) -> Logs: ...

    @overload
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        *,
        return_dict: bool,
    ) -> Any: ...

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = True,
    ) -> Logs | float | list[float]:
        """Train on one batch, in one call: `device_iterations` updates, 1 by default.

        With several processes each passes the whole batch, and trains on its share.

        No hooks are called. A batch of another size compiles a new program, because the
        shapes of a program are fixed.

        The weights stay on the device; `get_weights`, `save_weights`, `evaluate` and
        `predict` download them, and so does reading them. They may be changed between
        calls, in place or by `set_weights`.

        Args:
            x: Inputs: arrays, as for `fit`.
            y: Targets.
            sample_weight: As for `fit`.
            class_weight: As for `fit`.
            return_dict: As for `evaluate`.

        Returns:
            Loss and metrics of this batch.

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
        check_flags(return_dict=return_dict)
        optimization = self._planner.require_compiled().optimization
        source = as_batch(x, y, sample_weight)
        self._columns = source.columns
        updates = self.config.updates_per_call or 1
        rows = source.num_samples or 0  # that of arrays is known
        self.processes.require_same("train_on_batch", samples=source.num_samples)
        size, rest = divmod(rows, updates)
        if rest or not size:
            raise DataError(
                f"A batch of {rows} samples doesn't make the {updates} "
                "updates of a call (device_iterations): pass a multiple of it."
            )
        arguments = FitArguments(
            batch_size=size,
            shuffle=False,
            class_weight=class_weight,
            updates_per_call=updates,
        )
        # Passes are numbered by updates, so that no batch draws alike.
        training = self._planner.training(
            source, arguments, optimization.num_updates, watched=()
        )
        self._require_ipus()
        # In a fit its rates hold, and its schedules don't move.
        is_in_fit = self._runs.saver is not None
        with optimization.paused() if is_in_fit else contextlib.nullcontext():
            if not is_in_fit and self._batch_loop is not optimization:
                optimization.begin_fit(None, updates)
                self._batch_loop = optimization
            with uninterrupted:
                training.prepare(Notes())
                if is_in_fit:
                    optimization.before_call()
                for call in training.batches:
                    training.run(call, is_scheduled=not is_in_fit)
                if is_in_fit:
                    optimization.num_updates += updates
        training.metrics.gather()
        self._planner.last_source = source
        return _format_metrics(training.metrics, return_dict)

    @overload
    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: Literal[True] = True,
    ) -> Logs: ...

    @overload
    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        return_dict: bool,
    ) -> Any: ...

    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = True,
    ) -> Logs | float | list[float]:
        """Return loss and metrics of one batch, without training, in one call.

        If the config has a `micro_batch_size`, it may take several calls.

        Args:
            x: As for `train_on_batch`.
            y: As for `train_on_batch`.
            sample_weight: As for `fit`.
            return_dict: As for `evaluate`.

        Returns:
            Loss and metrics of this batch.

        Raises:
            NotCompiledError: `compile` wasn't called.
            DataError: Data that can't be used.
        """
        check_flags(return_dict=return_dict)
        self._planner.require_compiled()
        source = as_batch(x, y, sample_weight, columns=self._columns)
        self.processes.require_same("test_on_batch", samples=source.num_samples)
        test = self._planner.evaluation(source, InferenceArguments(is_single=True))
        self._require_ipus()
        test.prepare(Notes())
        test.run(CallbackList(None), RunState(processes=self.processes))
        return _format_metrics(test.metrics, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Return the outputs for one batch, in calls like those of `test_on_batch`.

        Args:
            x: As for `train_on_batch`.

        Returns:
            Tensors, nested as the module returns them, one row per sample.

        Raises:
            DataError: Data that can't be used.
        """
        source = as_batch(x, left_out=self._target_columns, columns=self._columns)
        self.processes.require_same("predict_on_batch", samples=source.num_samples)
        plan = self._planner.prediction(source, InferenceArguments(is_single=True))
        return self._join_outputs(plan, self._predicted(plan))

    def batch_plan(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        *,
        callbacks: CallbackLike = None,
        validation_split: float = 0.0,
        steps_per_epoch: int | None = None,
        drop_last: bool | str = True,
    ) -> EpochPlan:
        """Return how `fit` with these arguments would divide the data.

        Only lazy layers get their shapes, as they do in `fit`.

        Args:
            x: Data as for `fit`.
            y: Targets, as for `fit`.
            batch_size: As for `fit`.
            callbacks: Callbacks of the later `fit`. With one that has batch hooks, each
                update is a call.
            validation_split: As for `fit`.
            steps_per_epoch: As for `fit`.
            drop_last: As for `fit`.

        Returns:
            Every factor, calls and updates of an epoch, the samples left over, and the
            nearest batch sizes that leave none. Printed, it is a few lines.

        Raises:
            NotCompiledError: `compile` wasn't called.
            ConfigError: The batch size is not made of its factors; the error names the
                nearest that are.
            DataError: Data that can't be used, or a generator, which would lose its
                first batch.

        Example:
            >>> import torch
            >>> from ipufit import IPUConfig, IPUModel
            >>> model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(micro_batch_size=8))
            >>> model.compile("adamw", "cross_entropy")
            >>> x, y = torch.rand(1000, 4), torch.randint(0, 3, (1000,))
            >>> plan = model.batch_plan(x, y, batch_size=48)
            >>> plan.updates, plan.dropped_samples, plan.nearest_batch_sizes
            (20, 40, (40,))
        """
        arguments = FitArguments(
            x,
            y,
            batch_size=batch_size,
            callbacks=callbacks,
            validation_split=validation_split,
            steps_per_epoch=steps_per_epoch,
            drop_last=drop_last,
        )
        return self._planner.epoch_plan(arguments)[1]

    def plan(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        *,
        device: str | Device = "mk2",
        callbacks: CallbackLike = None,
        validation_split: float = 0.0,
        steps_per_epoch: int | None = None,
        drop_last: bool | str = True,
    ) -> ModelPlan:
        """Return the memory on each IPU and the pipeline of training.

        The module is called once, with tensors that have shapes and no values: this
        takes seconds, little memory and no IPU. Parameters, buffers, the optimizer's
        state and accumulators are exact; activations and gradients are estimates with
        bounds. Code and temporary data aren't counted, so only a compilation shows
        whether a model fits.

        Args:
            x: Data as for `fit`.
            y: Targets, as for `fit`. They may be left out if a step of your own doesn't
                need them: only what the host sends depends on them. The plan says if
                `fit` would refuse the data then.
            batch_size: As for `fit`.
            device: Kind of IPU: "mk1", "mk2" or "bow"; or an `ipufit.Device` with
                numbers of your own.
            callbacks: As for `batch_plan`.
            validation_split: As for `fit`.
            steps_per_epoch: As for `fit`.
            drop_last: As for `fit`.

        Returns:
            Numbers for each stage and each IPU, and a table of choices. Printed, it is
            a text.

        Raises:
            NotCompiledError: `compile` wasn't called.
            ConfigError: The batch size is not made of its factors, or the module can't
                be copied.
            DataError: Data that can't be used, or not by the module.
            UnknownNameError: There is no such kind of IPU.
            UnsupportedError: `forward` computes with values, or makes dynamic shapes.

        Example:
            >>> import torch
            >>> from ipufit import IPUConfig, IPUModel
            >>> first, last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
            >>> layers = torch.nn.Sequential(first, last)
            >>> model = IPUModel(layers, IPUConfig(4, pipeline=["0", "1"]))
            >>> model.compile("adamw", "cross_entropy")
            >>> x, y = torch.rand(1000, 4), torch.randint(0, 3, (1000,))
            >>> plan = model.plan(x, y, batch_size=40)
            >>> [memory.exact for memory in plan.memory], plan.num_ipus, plan.bubble
            ([648, 440], 2, 0.16666666666666666)
        """
        arguments = FitArguments(
            x,
            y,
            batch_size=batch_size,
            callbacks=callbacks,
            validation_split=validation_split,
            steps_per_epoch=steps_per_epoch,
            drop_last=drop_last,
        )
        return self._planner.model_plan(arguments, device)

    def build(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Verbose = "auto",
        callbacks: CallbackLike = None,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        validation_batch_size: int | None = None,
        *,
        drop_last: bool | str = True,
        validation_split: float = 0.0,
        steps_per_epoch: int | None = None,
        validation_updates: int | None = None,
        validation_data: Any = None,
    ) -> Build:
        """Compile the programs of the next runs, before they read their data.

        Compiling takes minutes on IPUs, and a module that an IPU can't run fails here.
        The next `fit`, `evaluate` and `predict` with the same arguments compile
        nothing. The weights, the optimizer and the random states stay as they are.

        The training program is built if `compile` was called and there are targets, or
        the module returns its own loss. The inference program is built for validation
        in `fit`, and for `evaluate` and `predict` without a `batch_size`. These are one
        program if the config has a `micro_batch_size`, and may be two if it hasn't.

        Where the config leaves `device_iterations` open, the updates per call are those
        that `fit` chooses for the same data and arguments. If `x` is only a sample or
        batch, a call makes one update, and a line says so: then set
        `device_iterations`, or pass the data. Where the config leaves
        `inference_iterations` open, `validation_data` or `validation_split`, or else
        `x`, give the number of samples.

        Args:
            x: Data as for `fit`, of which only the first sample is read, or the first
                batch of a loader. Or a batch; or tensors with shapes and types alone,
                such as `torch.empty(1, 3, 224, 224, device="meta")`. Dim 0 counts
                samples, and one is enough.
            y: Targets, as for `fit`.
            batch_size: As for `fit`; without a training program as for `predict`.
            verbose: 0 for nothing, else a line for each program.
            callbacks: Callbacks of the `fit` to come. One that watches gradients makes
                another program.
            class_weight: As for `fit`.
            sample_weight: As for `fit`.
            validation_batch_size: As for `fit`.
            drop_last: As for `fit`. `"pad"` matters only if the samples don't fill
                their calls, so `x` must then have as many samples as the data.
            validation_split: As for `fit`; it counts where `device_iterations` is open.
            steps_per_epoch: As for `fit`, likewise.
            validation_updates: As for `fit`, likewise.
            validation_data: As for `fit`, where `inference_iterations` is open; only
                the number of samples and the first one count.

        Returns:
            The programs, with the seconds that each took, and whether it came from the
            cache of executables.

        Raises:
            DataError: Data that can't be used, or a generator, which would lose its
                first batch.
            ConfigError: The batch size is not made of its factors.
            Error: PopTorch refuses something (`ipufit.poptorch.Error`).

        Example:
            >>> import torch
            >>> from ipufit import IPUConfig, IPUModel
            >>> model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(micro_batch_size=8))
            >>> model.compile("adamw", "cross_entropy")
            >>> x = torch.empty(1, 4, device="meta")
            >>> y = torch.empty(1, dtype=torch.int64, device="meta")
            >>> built = model.build(x, y, batch_size=32, verbose=0)
            >>> [program.name for program in built.programs]
            ['inference', 'training']
        """
        from .building import build_fit  # few processes ask for it

        arguments = FitArguments(
            x,
            y,
            batch_size=batch_size,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            class_weight=class_weight,
            sample_weight=sample_weight,
            steps_per_epoch=steps_per_epoch,
            validation_batch_size=validation_batch_size,
            validation_updates=validation_updates,
            drop_last=drop_last,
        )
        display = make_progress(verbose if self.processes.is_first else 0)
        return build_fit(self._planner, arguments, display)

    def check(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        *,
        callbacks: CallbackLike = None,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        validation_split: float = 0.0,
        steps_per_epoch: int | None = None,
        validation_updates: int | None = None,
        drop_last: bool | str = True,
    ) -> CheckReport:
        """Find all that PopTorch would refuse in a `fit`, or compute otherwise.

        The program that `fit` would run is traced on one micro-batch, by the rules of
        the emulator. All refusals are recorded; a compilation would end at the first
        one. Nothing is compiled or trained, and the model doesn't change. After a
        refusal the trace continues with torch's result for the first sample, so later
        findings may depend on that sample.

        Args:
            x: Data as for `fit`.
            y: Targets, as for `fit`.
            batch_size: As for `fit`.
            callbacks: Callbacks of the `fit` to come.
            class_weight: As for `fit`.
            sample_weight: As for `fit`.
            validation_split: As for `fit`.
            steps_per_epoch: As for `fit`.
            validation_updates: As for `fit`.
            drop_last: As for `fit`.

        Returns:
            The findings. `print()` shows them as a table; `is_refused` says whether
            `fit` would fail.

        Raises:
            NotCompiledError: `compile` wasn't called.
            DataError: `x` is a generator, which would lose its first batch.
            UnsupportedError: This process runs on PopTorch itself: `ipufit check`
                starts one of its own.

        Example:
            >>> import torch
            >>> from ipufit import IPUConfig, IPUModel
            >>> class Net(torch.nn.Linear):
            ...     def forward(self, x):
            ...         return super().forward(x) * (2 if x.sum() > 0 else 1)
            >>> model = IPUModel(Net(4, 3), IPUConfig(micro_batch_size=8))
            >>> model.compile("adamw", "cross_entropy")
            >>> x, y = torch.rand(100, 4), torch.randint(0, 3, (100,))
            >>> report = model.check(x, y, batch_size=16)
            >>> [(one.severity, one.topic) for one in report.findings]
            [('refused', 'control flow'), ('good to know', 'data'), ...]
        """
        from .checking import check_fit  # few processes ask for it

        arguments = FitArguments(
            x,
            y,
            batch_size=batch_size,
            callbacks=callbacks,
            validation_split=validation_split,
            class_weight=class_weight,
            sample_weight=sample_weight,
            steps_per_epoch=steps_per_epoch,
            validation_updates=validation_updates,
            drop_last=drop_last,
        )
        return check_fit(self._planner, arguments)

    def benchmark(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        *,
        mode: str = "training",
        data: str = "real",
        calls: int = 10,
        repeats: int = 2,
        warmup: int = 2,
        verbose: int = 1,
    ) -> BenchmarkResult:
        """Measure samples per second and latency, and print them.

        Compilation and the first calls are left out. A copy of the model is measured,
        and this one stays as it is: weights, the optimizer's state, random states and
        the number of updates. It gives its IPUs back, as the copy needs them, and takes
        them again for its next call. The learning rate stays as it is now.

        Args:
            x: Data, as for `fit`.
            y: As for `fit`.
            batch_size: As for `fit`, or in inference as for `predict`.
            mode: `"training"`, or `"inference"` for the calls of `predict`.
            data: `"real"` takes the samples of `x` from their loader. `"generated"`
                takes random inputs of the same shapes and types from the memory of the
                host, where nothing has to be loaded or decoded; targets are the first
                sample's. `"synthetic"` has the devices make their inputs and send
                nothing back, so that there is no input or output at all
                (`poptorch.Options.enableSyntheticData`).
            calls: Calls of a repeat.
            repeats: Number of times that the calls are measured; a line is printed for
                each. Benchmark files with `skip: 1` leave out the slowest line, so they
                need two or more.
            warmup: Number of first calls that aren't measured.
            verbose: 0 prints nothing.

        Returns:
            The measurements, of all processes together.

        Raises:
            NotCompiledError: `compile` wasn't called, and the mode is training.
            UnknownNameError: `mode` or `data` is another word.
            ConfigError: A number of calls is not a whole number, or the batch size is
                not made of its factors.
            DataError: Data that can't be used, or a generator that ends too early.
            UnsupportedError: The model can't be copied.

        Example:
            >>> import torch
            >>> import ipufit
            >>> model = ipufit.IPUModel(torch.nn.Linear(4, 3))
            >>> model.compile("sgd", "cross_entropy")
            >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
            >>> result = model.benchmark(x, y, batch_size=16, calls=3, verbose=0)
            >>> result.samples_per_call, result.samples_per_second > 0
            (64, True)
            >>> model.num_updates
            0
        """
        from .benchmarking import benchmark  # few processes ask for it

        sizes = calls, repeats, warmup
        result = benchmark(self, x, y, batch_size, mode, data, *sizes, verbose)
        if verbose and self.processes.is_first:
            say(str(result))
        return result

    def summary(self, x: Any = None) -> Summary:
        """Show the layers: shapes, parameters, and the stage and IPU of each.

        Nothing is compiled for it.

        Args:
            x: Inputs to show shapes for, and the blocks that `forward` begins itself;
                by default the inputs of the last run. One sample of them is run through
                the module on the host.

        Returns:
            The summary, with `total_parameters` and `num_ipus`, the IPUs of all
            replicas. `print` shows it once more. A line of Python's console shows what
            it returns, so there nothing is printed.

        Example:
            >>> from ipufit import IPUConfig, IPUModel
            >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
            >>> model = IPUModel(layers, IPUConfig(pipeline=("0", "1"), replicas=2))
            >>> model.summary(torch.zeros(1, 2)).num_ipus  # doctest: +ELLIPSIS
                        Sequential...
            4
        """
        # few processes ask for it
        from .summary import is_shown_by_console, summarize_inputs

        self._executors.fetch_weights()
        summary = summarize_inputs(self._planner, x)
        if not is_shown_by_console():
            say(str(summary))
        return summary

    def reset_metrics(self) -> None:
        """Reset the metrics of the run under way, in a hook of it.

        Loss and metrics of its epoch or evaluation are then those of later batches, and
        0 if there are none, as in Keras. Each epoch and evaluation begins so anyway.
        """
        self._planner.require_compiled()
        if self._runs.innermost.metrics is not None:
            self._runs.innermost.metrics.forget()

    # Weights --------------------------------------------------------------------------

    def get_weights(self) -> list[Any]:
        """Return copies of weights and buffers, as arrays in `state_dict`'s order.

        Example:
            >>> from ipufit import IPUModel
            >>> [w.shape for w in IPUModel(torch.nn.Linear(2, 3)).get_weights()]
            [(3, 2), (3,)]
        """
        return [t.detach().numpy().copy() for t in self._fetched_state().values()]

    def copied_weights(self) -> dict[str, Tensor]:
        """Return copies of the weights and buffers by name, in any dtype.

        Returns:
            Tensors on the host; names that are tied share a copy.

        Example:
            >>> from ipufit import IPUModel
            >>> list(IPUModel(torch.nn.Linear(2, 3)).copied_weights())
            ['weight', 'bias']
        """
        return files.copied_tensors(self._fetched_state())

    def set_weights(self, weights: Sequence[Any] | Mapping[str, Any]) -> None:
        """Set the weights and buffers, on the device too.

        Args:
            weights: Arrays as from `get_weights`; or a state dict, such as from
                `average_checkpoints`.

        Raises:
            DataError: The weights aren't arrays, or their number, a name or a shape is
                wrong.
        """
        state = self._fetched_state()
        if isinstance(weights, Mapping):
            odd = sorted(str(name) for name in {*state} ^ {*weights})
            if odd:
                raise DataError(
                    f"These weights are of another module: {', '.join(odd)} are only "
                    "in one of the two."
                )
            weights = [weights[name] for name in state]
        if not isinstance(weights, (tuple, list)):
            raise DataError(
                "set_weights() takes a list of arrays, in the order of state_dict(), "
                f"or a state dict, and got a {type(weights).__name__}."
            )
        if len(weights) != len(state):
            raise DataError(
                f"There are {len(weights)} arrays for {len(state)} weights: "
                f"{', '.join(state)}."
            )
        tensors: dict[str, Tensor] = {}
        for (name, tensor), value in zip(state.items(), weights):
            try:
                tensors[name] = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise DataError(
                    f"The value for {name} must be an array of numbers: {error}."
                ) from error
            if tensors[name].shape != tensor.shape:
                raise DataError(
                    f"The array for {name} has shape {tuple(tensors[name].shape)}, and "
                    f"the weight has {tuple(tensor.shape)}."
                )
        _copy_into(state, tensors)

    def save_weights(
        self, path: PathLike, *, moment: files.SavedAt | None = None
    ) -> None:
        """Write the weights to a safetensors file, under the module's own names.

        Args:
            path: A file whose name ends in `.safetensors`.
            moment: Update, epoch and metric of the weights, which `ModelCheckpoint`
                passes for `average_checkpoints`.

        Raises:
            ConfigError: The name ends in something else.
            FileError: The file can't be written; a file that was there before is whole.
        """
        if moment is not None:
            check_instance("moment", moment, files.SavedAt)
        weights = self._fetched_state()
        files.written_by_one(lambda: files.save_weights(weights, path, moment=moment))

    def load_weights(self, path: PathLike) -> None:
        """Load the weights from a file, and send them to the device.

        Args:
            path: A file of safetensors (`.safetensors`) or a state dict of torch
                (`.pt`, `.pth`, `.bin`), which is read with `weights_only=True`.

        Raises:
            ConfigError: The name ends in something else.
            DataError: The file is damaged, or has other weights.
            MissingCheckpointError: There is no such file.
            FileError: The file can't be read.
        """
        state = self._fetched_state()
        tensors = files.load_weights(path)
        odd = files.differences(state, tensors, "shape")
        if odd:
            raise DataError(f"{str(path)!r} has the weights of another module: {odd}.")
        for name, tensor in state.items():
            if not torch.can_cast(tensors[name].dtype, tensor.dtype):
                raise DataError(
                    f"{str(path)!r} has {name} in {tensors[name].dtype}, and the "
                    f"weight is {tensor.dtype}, which can't hold it."
                )
        _copy_into(state, tensors)

    @uninterrupted
    def swap_weights(self, *, is_average: bool, is_joint: bool = False) -> None:
        """Exchange the weights for their running average, or back.

        Training on averaged weights would average the averages: swap back before.

        Args:
            is_average: True for the average, False for the weights.
            is_joint: Whether all processes of a run call this method together. Then all
                get the averages of buffers from process 0, as in an evaluation.

        Raises:
            ConfigError: There is no average: `compile` got no `ema_momentum`.
        """
        check_flags(is_average=is_average, is_joint=is_joint)
        average = self.weight_average
        if average is None:
            raise ConfigError(
                "There is no running average of the weights: compile with an optimizer "
                "that keeps one, Optimizer('adamw', ema_momentum=0.999)."
            )
        if is_average == average.is_swapped:
            return
        self._executors.fetch_weights()
        if is_average:
            self._executors.take_back()
            average.swap_in()
            if is_joint:
                self._executors.share_buffers()
        else:
            average.swap_out()

    # Checkpoints: weights and the optimizer's state, and in a callback the whole run.

    def checkpoint(self, *, copied: bool = True) -> files.Checkpoint:
        """Return the state of the model and, while `fit` runs, of the whole run.

        Args:
            copied: If False, tensors may be those of the model, which training changes:
                this takes no memory for a checkpoint that is written at once.

        Returns:
            Weights, the optimizer's state, averages; in a callback also everything that
            `fit(resume=...)` needs. In `run.after_hooks` it has the state of all
            callbacks after the event.

        Raises:
            NotCompiledError: `compile` wasn't called.
        """
        check_flags(copied=copied)
        if self._runs.saver is not None:
            now = self._runs.saver.take()
        else:
            host_calls.check_shapes(self.module)
            now = self._saver().take()
        return now.copied() if copied else now

    def save(self, path: PathLike) -> None:
        """Write a checkpoint: a directory of safetensors and JSON.

        The directory is written beside `path` and renamed: at any time there is a whole
        checkpoint, the old one or the new. With several processes all of them call
        `save`: the first one writes, and a failure is raised in all.

        Args:
            path: A directory, which is made; a checkpoint there is replaced.

        Raises:
            ConfigError: The path is a file, or ends as the name of one, such as `.pt`.
            NotCompiledError: `compile` wasn't called.
            CheckpointError: The checkpoint can't be written.
        """
        files.refuse_name_of_file(path)
        taken = self.checkpoint(copied=False)
        files.written_by_one(lambda: files.write_checkpoint(path, taken))

    def load(self, path: PathLike) -> None:
        """Load weights, the optimizer's state and averages from a checkpoint.

        To resume a run use `fit(resume=path)`.

        Args:
            path: A checkpoint of the same module and optimizer.

        Raises:
            NotCompiledError: `compile` wasn't called.
            CheckpointError: The checkpoint can't be read, is damaged
                (`DamagedCheckpointError`), or isn't there (`MissingCheckpointError`).
            ConfigError: The checkpoint is of another module or optimizer.
        """
        host_calls.check_shapes(self.module)
        self._saver().put_back(files.load_checkpoint(path))

    def export(
        self,
        path: PathLike,
        x: Any = None,
        batch_size: int | None = None,
        *,
        with_module: bool = True,
    ) -> dict[str, Any]:
        """Write the compiled inference program, with the present weights, to a file.

        `poptorch.load(path)` gives an executor that runs it without ipufit. It takes
        the arguments of `forward`, with the rows of a call, and returns the results of
        `forward` in eval mode. Graphcore's back end for the Triton server runs the
        file, too.

        The module is compiled by itself, in eval mode, with the options that `predict`
        has, for one process. The model gives its IPUs back first, as by
        `model.detach()`. With `IPUConfig(offline=True)` no IPUs are needed.

        A description is written beside the file, with `.json` at its end. Both are
        written under another name first, so that a file is whole or isn't there. With
        several processes all of them call `export`; the first one writes.

        Args:
            path: The file. In a directory that exists, it is `executable.popef`.
            x: Inputs to compile for, as for `build`: a batch, data, or tensors of
                shapes and types only. None takes those of the last run.
            batch_size: As for `predict`.
            with_module: Pickle the module into the file, which `poptorch.load` needs. A
                Triton server doesn't. Load only files that you trust.

        Returns:
            The description: names, shapes and types of inputs and outputs in a call,
            samples per call, versions, and the size and SHA-256 of the file.

        Raises:
            DataError: The data can't be used; or `x` is None, and there was no run.
            ConfigError: The path ends in `.pt2` or `.onnx`, which torch writes.
            UnsupportedError: The module can't be pickled.
            FileError: The file can't be written.
            Error: PopTorch refuses something (`ipufit.poptorch.Error`).

        Example:
            >>> import tempfile, torch
            >>> from ipufit import IPUConfig, IPUModel, poptorch
            >>> model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(micro_batch_size=8))
            >>> x = torch.randn(8, 4)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     about = model.export(f"{folder}/linear.popef", x)
            ...     loaded = poptorch.load(f"{folder}/linear.popef")
            >>> torch.equal(loaded(x), model.predict(x, verbose=0))
            True
            >>> about["inputs"]
            [{'name': 'input', 'shape': [8, 4], 'dtype': 'float32'}]
        """
        from .exporting import export  # few processes ask for it

        return export(self._planner, path, x, batch_size, with_module=with_module)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last call, for a callback that watches them.

        Returns:
            For each parameter that a callback names in `watched_gradients` the mean of
            the gradients of the call's updates: float32, of the parameter's shape,
            without loss scaling and before clipping.

        Raises:
            ConfigError: No `fit` is running, or it hasn't made a call yet.
        """
        if self._runs.saver is None:
            raise ConfigError(
                "gradients() is for callbacks while fit() runs: there is no training "
                "program now. GradientMonitor shows how."
            )
        return self._runs.saver.training.gradients()

    def detach(self) -> None:
        """Release the IPUs; the weights stay in `module`, the programs compiled."""
        self._executors.detach()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The `poptorch.optim` optimizer that trains; None before `compile`."""
        settings = self._planner.settings
        return None if settings is None else settings.optimization.optimizer

    @property
    def has_lr_schedule(self) -> bool:
        """Whether a schedule sets the learning rates, so that callbacks must not."""
        settings = self._planner.settings
        return settings is not None and settings.optimization.has_schedule

    @property
    def num_updates(self) -> int:
        """Number of weight updates since `compile`."""
        settings = self._planner.settings
        return 0 if settings is None else settings.optimization.num_updates

    @property
    def weight_average(self) -> WeightAverage | None:
        """The average of the weights (`ema_momentum`); None without one."""
        settings = self._planner.settings
        return None if settings is None else settings.average

    @property
    def stop_training(self) -> bool:
        """Keras's flag: a callback sets it to end `fit` after this call."""
        return self._runs.fit.stop_reason is not None

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value:
            self._runs.fit.stop("model.stop_training was set")
        else:
            self._runs.fit.go_on()

    @property
    def stop_evaluating(self) -> bool:
        """Keras's flag: a callback sets it to end the evaluation after this call."""
        return self._runs.innermost.stop_evaluating

    @stop_evaluating.setter
    def stop_evaluating(self, value: bool) -> None:
        self._runs.innermost.stop_evaluating = value

    @property
    def stop_predicting(self) -> bool:
        """Keras's flag: a callback sets it to end `predict` after this call."""
        return self._runs.innermost.stop_predicting

    @stop_predicting.setter
    def stop_predicting(self, value: bool) -> None:
        self._runs.innermost.stop_predicting = value

    def __repr__(self) -> str:
        """Describe the module, the layout, and the settings of `compile`."""
        settings, compiled = self._planner.settings, "not compiled"
        if settings is not None:
            objective = settings.objective
            losses = ", ".join(loss.name for _, loss in objective.losses)
            metrics = ", ".join(metric.full_name for metric in objective.metrics)
            whose = "of the module" if objective.steps is None else "of its own step"
            compiled = (
                f"compiled with {type(settings.optimization.optimizer).__name__}, "
                f"loss {losses or whose}, metrics {metrics or 'none'}"
            )
        module = type(self.module).__name__
        return f"<{type(self).__name__}: {module} on {self.config}, {compiled}>"

    def __getattr__(self, name: str) -> Any:
        """Raise an error for an unknown attribute, and name that of the module."""
        what = f"{type(self).__name__!r} object"
        advice = skipped_constructor(type(self))
        if advice:
            raise AttributeError(f"{what} has no attribute {name!r}{advice}")
        of_module = f"model.module.{name}" if hasattr(torch.nn.Module, name) else ""
        raise unknown_attribute(what, "model", name, dir(type(self)), of_module)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise an error for names of other libraries whose setting changes nothing.

        A subclass may use all of them but `trainable` for attributes of its own.
        """
        is_complete = type(self) is IPUModel and "module" in vars(self)
        if name == "trainable" or (is_complete and not name.startswith("_")):
            advice = hint("model.set", name)
            if advice:
                raise AttributeError(f"model.{name} can't be set. {advice}")
        super().__setattr__(name, value)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error with the methods to call instead."""
        raise UnsupportedError(
            "An IPUModel isn't called: model.predict(x) gives outputs for all samples, "
            "model.predict_on_batch(x) for a batch, and model.module(x) calls the "
            "module on the host."
        )

    # help() lists methods in the order of these names, and the others after them.
    _fields = tuple(name for name in vars() if not name.startswith("_"))

    # Copies ---------------------------------------------------------------------------

    def __copy__(self: ModelT) -> ModelT:
        other = type(self).__new__(type(self))
        IPUModel.__setstate__(other, {**self._copied_state(), "trained": None})
        return other

    def __deepcopy__(self: ModelT, memo: dict[int, Any]) -> ModelT:
        other = memo[id(self)] = type(self).__new__(type(self))
        IPUModel.__setstate__(other, deep_copied(self._copied_state(), memo))
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = self._copied_state()
        copying.refuse_unpicklable(state)
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        copying.unshare(state)
        IPUModel.__init__(self, state["module"], state["config"])
        copying.continue_from(self, state)

    def _copied_state(self) -> dict[str, Any]:
        return copying.state_of(self, IPUModel.__annotations__)

    # The model as a whole -------------------------------------------------------------

    def _inputs(self, x: Any, left_out: Sequence[str]) -> Source:
        """Return data as a source without targets."""
        left_out = (*self._target_columns, *left_out)
        return as_source(
            x,
            inputs_only=True,
            left_out=left_out,
            columns=self._columns,
            **self._planner.loading,
        )

    def _require_ipus(self) -> None:
        """Check that the model can run a program here and now.

        Raises:
            ConfigError: The config is offline, or another thread runs the model.
        """
        self._runs.refuse_other_thread()
        if self._planner.config.offline:
            raise ConfigError(
                "The config has offline=True, so that programs are compiled and can't "
                "be run. model.build(x, y) compiles them here, and cache_dir= keeps "
                "them; run where the IPUs are, with offline=False."
            )

    def _fetched_state(self) -> dict[str, Tensor]:
        """Return the module's state dict, with the newest weights from the device."""
        host_calls.check_shapes(self.module)
        self._executors.fetch_weights()
        return self.module.state_dict()

    def _saver(self) -> ModelSaver:
        settings = self._planner.require_compiled()
        return ModelSaver(self._executors, settings.optimization, settings.average)

    # Runs -----------------------------------------------------------------------------

    def _predicted(
        self, plan: Inference, callbacks: CallbackLike = None, verbose: Verbose = 0
    ) -> Iterator[Any]:
        """Run a prediction, and yield the outputs of this process for each call."""
        batches = plan.batches
        run = RunState(params={"verbose": verbose, **_params(batches)})
        with self._runs.running(self, run, callbacks, verbose) as (hooks, display):
            self._planner.last_source = batches.source
            try:
                with self._planner.naming_rows_of_fit(plan):
                    plan.prepare(display)
                    for part in plan.outputs(hooks, run):
                        with self._runs.paused(hooks):
                            yield part
            except DataError as error:
                names = next(filter(None, batches.source.columns), ())
                if not names or self._columns or "shapes cannot" not in str(error):
                    raise
                raise DataError(
                    f"{error}. `x` has the columns {short_list(names)}: if one is the "
                    'target, name it, predict(frame, y="its name").'
                ) from error.__cause__
            finally:
                batches.close()

    def _join_outputs(self, plan: Inference, parts: Iterator[Any]) -> Any:
        """Join the outputs of all calls and processes, in the order of the samples."""
        if not self.processes.are_several:
            return joined(parts)
        of_processes = self.processes.gathered([_plain(part) for part in parts])
        calls = zip(*of_processes)
        return joined(_join_processes(call, plan.batches) for call in calls)


# Weights, metrics and outputs ---------------------------------------------------------


@uninterrupted
@torch.no_grad()
def _copy_into(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the tensors of a state dict that have the same names."""
    for name, tensor in state.items():
        tensor.copy_(tensors[name])


class _NamedMetrics(Dict[str, float]):
    """Loss and metrics by name; an index, as for Keras's list, says what to write."""

    def __missing__(self, key: Any) -> NoReturn:
        """Raise the error for a name that isn't there."""
        if not isinstance(key, int):
            raise KeyError(key)
        names = " and ".join(f"results[{name!r}]" for name in self)
        raise KeyError(
            f"no {key}: loss and metrics have names, {names}. Keras's list is that of "
            "return_dict=False."
        )


def _format_metrics(
    metrics: MetricState, return_dict: bool
) -> Logs | float | list[float]:
    """Return metrics by name; or as Keras's list; or the loss if it is the only one."""
    named = metrics.logs() if return_dict else metrics.in_order()
    values = list(named.values())
    if return_dict:
        return _NamedMetrics(named)
    return values if len(values) > 1 else values[0]


def _params(batches: InferenceBatches) -> dict[str, Any]:
    """Return the calls and steps of a run, for Keras's callbacks."""
    rows = batches.num_samples
    steps = None if rows is None else batches.num_passes(rows)
    return {"calls": batches.num_calls, "steps": steps}


def _plain(outputs: Any) -> Any:
    """Convert PopTorch's tensors to plain ones, which can be pickled."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, outputs)


def _join_processes(of_processes: Sequence[Any], batches: InferenceBatches) -> Any:
    """Join the outputs of all processes for a call, in the order of the samples."""
    rows = batches.plan_of_samples.samples_per_update
    of_passes = itertools.zip_longest(*(in_passes(part, rows) for part in of_processes))
    parts = itertools.chain.from_iterable(of_passes)
    outputs = joined(part for part in parts if part is not None)
    return outputs if batches.structure.rows is None else cut(*outputs)
