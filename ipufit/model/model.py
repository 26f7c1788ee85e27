# SPDX-License-Identifier: Apache-2.0
"""The class `IPUModel`: Keras's methods, and the loop that trains."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import itertools
import math
import pickle
import signal
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    Mapping,
    NoReturn,
    Sequence,
    TypeVar,
    Union,
)

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ipufit import checkpoint as files
from ipufit._arguments import (
    check_choice,
    check_flags,
    check_instance,
    check_number,
    check_whole,
    refuse,
    shown,
)
from ipufit._poptorch import poptorch
from ipufit._signals import uninterrupted
from ipufit._tree import tree_map
from ipufit.batching import (
    DEFAULT_BATCH_SIZE,
    BatchPlan,
)
from ipufit.callbacks import CallbackList, History, ProgressDisplay, make_progress
from ipufit.callbacks.base import CallbackLike, say
from ipufit.callbacks.progress import Notes
from ipufit.config import IPUConfig, forward_stages, with_stages
from ipufit.data.calls import (
    Epochs,
    InferenceBatches,
    Loading,
    Position,
    TrainingBatches,
)
from ipufit.data.datasets import SampleStructure, Source, column_names, short_list
from ipufit.data.random_state import HostRandomState, set_random_state
from ipufit.data.sources import (
    StreamSource,
    as_batch,
    as_source,
    example_of,
    fit_sources,
    generated_like,
    generators_of,
    is_stream,
    num_trained_on,
    validation_sources,
)
from ipufit.distributed import (
    Processes,
    configure,
    exchanges_off,
    get_process_info,
)
from ipufit.engine import host_calls
from ipufit.engine.loop import (
    Evaluation,
    Inference,
    ProcessSync,
    Training,
    cut,
    describe_coverage,
    in_passes,
    joined,
)
from ipufit.engine.metric_state import MetricState
from ipufit.engine.objective import (
    Inferred,
    Objective,
    StepFunction,
    Steps,
    checked_step,
    resolve_objective,
)
from ipufit.engine.precision import in_own_types
from ipufit.engine.program import Executors, gradient_anchors, surveyed
from ipufit.engine.step import NoForwardError
from ipufit.engine.weights import Counterparts, deep_copied, unwrapped
from ipufit.errors import (
    ConfigError,
    CoverageWarning,
    DataError,
    DataRanOutWarning,
    DroppedRowsWarning,
    EmptyUpdatesWarning,
    IpufitError,
    NonFiniteLossWarning,
    NotCompiledError,
    UnsupportedError,
    all_suggesting,
    do_all,
    refuse_foreign,
    unknown_attribute,
    warn,
)
from ipufit.losses import LossLike, check_smoothing
from ipufit.metrics import MetricLike
from ipufit.mixing import Mixing
from ipufit.optimizers import (
    Optimization,
    OptimizerLike,
    ScheduleLike,
    SchedulesLike,
    WeightAverage,
    check_covers,
    resolve_optimization,
)
from ipufit.placement import own_stages
from ipufit.planning import choices
from ipufit.resume import (
    Snapshot,
    TrainedState,
    calls_done,
    check_same_run,
    compiled_settings,
    described,
    find_checkpoint,
    groups_of_module,
    held_directories,
    naming,
    numeric_settings,
    position_of,
)
from ipufit.state import EVICTED, EVICTING_SIGNALS, RunState, awaited
from ipufit.types import Logs, PathLike, Verbose

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

_METRIC_BYTES = 4096
"""Bytes of the losses, means and scalars of a micro-batch, without large metrics.

The real number is known once a program is traced.
"""

_LEAST_CALLS = 16
"""Calls of a pass over samples that are loaded: some are loaded while others train."""

_OF_KERAS = {
    "train_step": "training_step(self, batch), which returns the loss. Gradients and "
    "the update are the device's",
    "test_step": "validation_step(self, batch), which returns the loss",
    "compute_loss": "training_step(self, batch), which returns the loss",
    "compute_metrics": "training_step(self, batch), which returns metrics beside the "
    "loss, {'loss': loss, 'error': error}",
}
"""Methods that Keras's users override, and what stands in their place."""


@dataclass(frozen=True)
class CompileSettings:
    """The settings that `compile` makes from its arguments.

    Attributes:
        objective: Losses and metrics of `evaluate` and of validations.
        trained: Losses and metrics of `fit`.
        optimization: The optimiser and its schedule.
        average: The running average of the weights; None for none.
        mixing: Mixup and CutMix in training; None without.
        in_words: Each setting as text, which a resumed run compares.
        arguments: The arguments of `compile` by name, for copies of the model.
    """

    objective: Objective
    trained: Objective
    optimization: Optimization
    average: WeightAverage | None
    mixing: Mixing | None
    in_words: dict[str, str]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class FitArguments:
    """Arguments of `fit` on which the program of the training and its calls depend.

    Attributes:
        updates: Updates of a call, if they were chosen before; None to choose them.
        checkpoint: Checkpoint of the run to resume; None for a new run.
    """

    batch_size: int | None = None
    callbacks: CallbackLike = None
    shuffle: bool = True
    class_weight: Mapping[int, float] | None = None
    drop_last: bool | str = True
    validation_split: float = 0.0
    steps_per_epoch: int | None = None
    validation_updates: int | None = None
    updates: int | None = None
    checkpoint: files.Checkpoint | None = None

    def __post_init__(self) -> None:
        check_flags(shuffle=self.shuffle)
        check_choice("drop_last", self.drop_last, (True, False, "pad"))
        for name in ("batch_size", "steps_per_epoch", "validation_updates"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least=1)
        if self.validation_split is not None:
            check_number("validation_split", self.validation_split, least=0, below=1)
        CallbackList(self.callbacks)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> FitArguments:
        """Select these arguments among all arguments of a `fit`."""
        names = {one.name for one in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in names})


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
        ConfigError: `module` is no torch module, or `config` no `IPUConfig`; or the
            module can't be copied.
        UnknownNameError: `pipeline` names something else among submodules, or a
            pattern of `float32_modules` matches none.

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
    config: IPUConfig
    processes: Processes
    history: History | None
    _given_config: IPUConfig
    _counterparts: Counterparts
    _executors: Executors
    _settings: CompileSettings | None
    _runs: list[CallbackList]  # under way: paused ones, then each within the one before
    _no_run: RunState
    _fit_run: RunState  # of the innermost fit under way, or else of the last one
    _snapshot: Snapshot | None  # of the innermost fit under way
    _batch_loop: Optimization | None  # None if a fit came since: schedules begin anew
    _output_sizes: list[tuple[Any, host_calls.OutputSize | None]]
    _compared_modes: list[SampleStructure]  # of data: outputs of both modes fit
    _built_options: tuple[object, poptorch.Options] | None
    # Facts about the data of the last runs.
    _last_source: Source | None
    _trained_rows: int | None  # samples of a micro-batch of the last fit
    _target_columns: Sequence[str]
    _columns: Sequence[Sequence[Any] | None]  # of frames trained on
    _num_passes: int  # over training data, so that no fit repeats an order

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
        self.config = self._given_config = config or IPUConfig()
        self.module, self._counterparts = in_own_types(
            unwrapped(module), self.config, in_place=in_place
        )
        self.history = None
        process = self.config.process
        if process != get_process_info():
            configure(process)  # for datasets that ask, and files
        self.processes = Processes(process)
        self._executors = Executors(self.module, self.config, self.processes)
        self._settings = None
        self._runs = []
        self._fit_run = self._no_run = RunState()
        self._snapshot = self._batch_loop = None
        self._output_sizes = []
        self._compared_modes = []
        self._built_options = None
        self._last_source = None
        self._trained_rows = None
        self._target_columns = ()
        self._columns = ()
        self._num_passes = 0

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
        arguments = {name: value for name, value in locals().items() if name != "self"}
        if self._runs and not self._innermost_run.is_paused:
            raise ConfigError(
                "compile() was called while fit, evaluate or predict runs, with the "
                "loss and the optimizer that it began with. Compile before or after. "
                "Learning rates may change meanwhile: model.optimizer.learning_rate."
            )
        config = _with_steps(self._given_config, steps_per_execution)
        steps = self._resolved_steps(step, validation_step, predict_step)
        for name in ("loss", "loss_weights"):
            if steps is not None and arguments[name] is not None:
                raise ConfigError(
                    f"{name}={arguments[name]!r} was given, and the model has a step "
                    "of its own, which computes the loss: leave one of them out."
                )
        objective = resolve_objective(
            loss, loss_weights, metrics, weighted_metrics, steps
        )
        _check_augmentation(objective, augment, label_smoothing)
        optimization = resolve_optimization(
            optimizer,
            lr_schedule,
            self.module,
            schedules,
            own=self._counterparts.own,
            is_half=config.types.is_half,
        )
        momentum = optimization.ema_momentum
        self._settings = CompileSettings(
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
        self.config = config
        self._executors.drop_incomplete()
        self._output_sizes.clear()
        self._compared_modes.clear()
        self._built_options = None

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
        # The arguments, and the data.
        self._refuse_other_thread()
        settings = self._compiled
        to_come, is_validated = _epochs(initial_epoch, epochs, validation_freq)
        sizes = {
            "validation_batch_size": validation_batch_size,
            "validation_steps": validation_steps,
        }
        for name, size in sizes.items():
            if size is not None:
                check_whole(name, size, least=1)
        data = x, y, sample_weight, validation_split, validation_data
        source, validated = fit_sources(*data, shuffle=shuffle, **self._of_data)
        counts = {name: _common_samples(one) for name, one in validated.items()}
        self._target_columns, self._columns = column_names(y) or (), source.columns
        self.processes.require_same(
            "fit",
            samples=_common_samples(source),
            batch_size=batch_size,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            validation_samples=counts.get("", counts or None),
            callbacks=[type(one).__name__ for one in CallbackList(callbacks).callbacks],
        )
        _require_same_rows(self.processes, source, *validated.values())
        given = FitArguments(
            batch_size=batch_size,
            callbacks=callbacks,
            shuffle=shuffle,
            class_weight=class_weight,
            drop_last=drop_last,
            steps_per_epoch=steps_per_epoch,
            validation_updates=validation_updates,
            checkpoint=find_checkpoint(resume, callbacks),
        )
        checkpoint = given.checkpoint

        # The plan of a call, of an epoch, and of the validation.
        training = self._training(
            source, given, CallbackList(callbacks).watched_gradients(self.module)
        )
        batches, plan = training.batches, training.plan
        optimization = training.optimization
        updates = plan.device_iterations
        calls = Epochs(
            batches, plan, steps_per_epoch, len(to_come), calls_done(checkpoint)
        )
        per_epoch = None if calls.num_calls is None else calls.num_calls * updates
        total = None if per_epoch is None else per_epoch * len(to_come)
        between = _calls_between(validation_updates, updates, validated)
        validations = []
        times = len([*itertools.islice(filter(is_validated, to_come), 2)])
        for name, one in validated.items():
            _check_repeats(one, validation_steps, times + 2 * bool(between))
            validation = self._evaluation(
                one,
                validation_batch_size,
                validation_steps,
                training=plan,
                beside=[other for other in validated.values() if other is not one],
                callbacks=callbacks,
            )
            validation.prefix = f"{name}_" if name else ""
            validations.append(validation)
        of_run = {
            "shuffle": shuffle,
            "drop_last": drop_last,
            "class_weight": class_weight,
            "steps_per_epoch": steps_per_epoch,
            "validation_updates": validation_updates,
            **numeric_settings(self.config),
            "samples seeded one by one": batches.is_seeded,
            "updates of the schedule": total if optimization.needs_total else None,
            "updates of an epoch": per_epoch if optimization.needs_epochs else None,
        }
        in_words = {**settings.in_words, **{n: described(v) for n, v in of_run.items()}}
        check_same_run(checkpoint, training, source.num_samples, in_words)
        left_out = batches.num_dropped, batches.num_empty_updates
        self._warn_of_tail(training)
        coverage = {"": _warn_of_coverage(training.options, plan, "fit")}
        total_samples = source.num_samples or 0
        if 0 < total_samples <= 10 * (batches.num_dropped or 0):  # not to be overlooked
            trained_on = total_samples - (batches.num_dropped or 0)
            coverage["training "] = f"on {trained_on} of {total_samples} samples"
        for validation in validations[:1]:  # all have the same options
            coverage["validation "] = _warn_of_coverage(
                validation.options, validation.plan, "fit's validation"
            )

        # The run: programs, then epochs of calls.
        history, self._batch_loop = History(), None
        run = RunState(
            coverage=", ".join(of + text for of, text in coverage.items() if text),
            params={
                "verbose": verbose,
                "epochs": epochs,
                "steps": per_epoch,
                "calls": calls.num_calls,
                "dropped_samples": batches.num_dropped or 0,
            },
            metrics=training.metrics,
        )
        running = self._running(run, callbacks, verbose, history)
        others_out = held_directories(callbacks)
        resuming = contextlib.ExitStack()
        with others_out, running as (hooks, display), self._fitting(run), resuming:
            self._last_source = source
            self._trained_rows = plan.micro_batch_size
            snapshot = Snapshot(training, batches, hooks, run, validated, in_words)
            if checkpoint is not None:
                with naming(checkpoint):
                    snapshot.check(checkpoint)
                resuming.enter_context(snapshot.trained.kept_on_error())
            optimization.begin_fit(total, updates, len(to_come))
            if checkpoint is not None:
                with naming(checkpoint):
                    snapshot.trained.put_back(checkpoint)
            try:
                for line in optimization.news():
                    display.noted(line)
                names = []
                for validation in validations:
                    validation.prepare(display)
                    names.append((validation.prefix, validation.names()))
                training.prepare(display)
                ways = training.metrics.directions
                for validation in validations:
                    own_ways = {**validation.metrics.directions, **ways}
                    run.directions.update(validation.named(own_ways))
                run.directions.update(ways)
                _refuse_names_of_validation(training.metrics.names, names)
                if not hooks.adds_names():
                    run.names = _names_in_logs(training.metrics.names, names)
                self.history, self._snapshot = history, snapshot
                hooks.on_train_begin({})
                with _ended_in_order(training, hooks, run):
                    sync = ProcessSync(
                        run.processes,
                        hooks,
                        run,
                        "on_train_batch_end",
                        "on_batch_end",
                        facts=optimization.numbers,
                    )
                    if checkpoint is not None:
                        with naming(checkpoint):
                            snapshot.put_back(checkpoint)
                        resuming.close()
                        if run.calls:
                            display.on_epoch_begin(run.epoch, {})
                        first_epoch = epochs if run.is_stopping else run.epoch
                        to_come = range(max(first_epoch, initial_epoch), epochs)
                    for epoch in to_come:
                        if not run.calls:  # else it began before the interruption
                            run.begin_epoch(epoch)
                            training.metrics.reset()
                            hooks.on_epoch_begin(epoch, {})
                        elif between and run.calls % between == 0:
                            _validate(validations, calls, hooks, run, display)
                        for call in awaited(calls):
                            first = run.calls * updates
                            hooks.on_train_batch_begin(first, {})
                            with uninterrupted:
                                training.run(call)
                                run.count_call(updates, call.num_samples_of_all)
                            _warn_if_not_finite(training, run, first)
                            logs = sync.running(training.metrics)
                            hooks.on_train_batch_end(first + updates - 1, logs)
                            if _has_ended(run, sync.sync):
                                break
                            # Before the next call is taken from the data: a run that
                            # is saved meanwhile goes on with the validation.
                            if between and run.calls % between == 0:
                                _validate(validations, calls, hooks, run, display)
                        _check_length(calls, training, run)
                        if is_validated(epoch):
                            _validate(validations, calls, hooks, run, display)
                        # An eviction before this saves each process's own sums.
                        training.metrics.gather()
                        logs = training.metrics.logs()
                        for name, value in run.validated.items():
                            logs[f"val_{name}"] = value
                        logs = dict(sorted(logs.items()))
                        hooks.on_epoch_end(epoch, dict(logs))
                        with uninterrupted:
                            run.end_epoch(logs)
                            optimization.end_epoch()
                        if _has_ended(run, sync.sync_now):
                            break
                training.finish()
                if run.processes.are_several:
                    self._executors.share_buffers()
                hooks.on_train_end(dict(run.logs))
            finally:
                number, done = batches.position
                self._num_passes = max(self._num_passes, number + (done > 0))
                self._snapshot = None
                batches.close()
                for validation in validations:
                    validation.batches.close()
        if (batches.num_dropped, batches.num_empty_updates) != left_out:
            # Only the end of a stream tells how many samples don't fill a call.
            history.dropped_samples = batches.num_dropped or 0
            self._warn_of_tail(training)
        return history

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
            ConfigError: The own inference options return sums of outputs.
        """
        self._refuse_other_thread()
        check_flags(return_dict=return_dict)
        self._require_compiled()
        source = as_source(x, y, sample_weight, columns=self._columns, **self._of_data)
        self._target_columns = column_names(y) or ()
        samples = _common_samples(source)
        self.processes.require_same(
            "evaluate", samples=samples, batch_size=batch_size, steps=steps
        )
        test = self._evaluation(source, batch_size, steps, callbacks=callbacks)
        run = RunState(params={"verbose": verbose, **_params(test.batches)})
        run.coverage = _warn_of_coverage(test.options, test.plan, "evaluate")
        with self._running(run, callbacks, verbose) as (hooks, display):
            self._last_source = source
            try:
                with self._naming_rows_of_fit(test):
                    test.prepare(display)
                    test.run(hooks, run)
            finally:
                test.batches.close()
        return _as_asked(test.metrics, return_dict)

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
            ConfigError: The own inference options don't return every row.
        """
        self._refuse_other_thread()
        columns = column_names(y)
        if y is not None and columns is None:
            raise DataError(
                f"y={shown(y)} names no columns: predict() needs no targets, only the "
                "names of columns that it is to leave alone."
            )
        check_flags(stream=stream)
        source = self._inputs(x, columns or ())
        samples = _common_samples(source)
        self.processes.require_same(
            "predict", samples=samples, batch_size=batch_size, steps=steps
        )
        plan = self._prediction(
            source, batch_size, steps, callbacks=callbacks, is_open=not stream
        )
        parts = self._predicted(plan, callbacks, verbose)
        if not stream:
            return self._whole_outputs(plan, parts)
        if not self.processes.are_several:
            return parts
        return (
            _in_order(self.processes.gathered(_plain(part)), plan.batches)
            for part in parts
        )

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
        optimization = self._compiled.optimization
        source = as_batch(x, y, sample_weight)
        self._columns = source.columns
        own = self.config.training_options
        updates = self.config.device_iterations or 1
        if own is not None:
            updates = own.device_iterations
        rows = source.num_samples or 0  # that of arrays is known
        self.processes.require_same("train_on_batch", samples=source.num_samples)
        size, rest = divmod(rows, updates)
        if rest or not size:
            raise DataError(
                f"A batch of {rows} samples doesn't make the {updates} "
                "updates of a call (device_iterations): pass a multiple of it."
            )
        given = FitArguments(
            size, shuffle=False, class_weight=class_weight, updates=updates
        )
        # Passes are numbered by updates, so that no batch draws alike.
        training = self._training(source, given, num_passes=optimization.num_updates)
        self._require_ipus()
        is_in_fit = self._snapshot is not None  # at its rates; its schedules don't move
        with optimization.paused() if is_in_fit else contextlib.nullcontext():
            if not is_in_fit and self._batch_loop is not optimization:
                optimization.begin_fit(None, updates)
                self._batch_loop = optimization
            training.prepare(Notes())
            if is_in_fit:
                optimization.before_call()
            with uninterrupted:
                for call in training.batches:
                    training.run(call, is_scheduled=not is_in_fit)
                if is_in_fit:
                    optimization.num_updates += updates
        training.metrics.gather()
        self._last_source = source
        return _as_asked(training.metrics, return_dict)

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
        self._require_compiled()
        source = as_batch(x, y, sample_weight, columns=self._columns)
        self.processes.require_same("test_on_batch", samples=source.num_samples)
        test = self._evaluation(source, is_single=True)
        self._require_ipus()
        test.prepare(Notes())
        test.run(CallbackList(None), RunState(processes=self.processes))
        return _as_asked(test.metrics, return_dict)

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
        plan = self._prediction(source, is_single=True)
        return self._whole_outputs(plan, self._predicted(plan))

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
        return self._epoch_of_fit(locals())[1]

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
        takes seconds, little memory and no IPU. Parameters, buffers, the optimiser's
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
        return self._plan_of_fit(locals(), device)

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
        from .building import Build, built  # few processes ask for it

        given = FitArguments.of(locals())
        is_whole = drop_last is not True
        source = example_of(x, y, sample_weight, is_whole=is_whole, **self._of_data)
        self._settle(source)
        settings, before = self._settings, HostRandomState()
        display = make_progress(verbose if self.processes.is_first else 0)
        try:
            training = None
            if settings is not None and (
                settings.objective.owns_loss or source.structure.has_targets
            ):
                watched = CallbackList(callbacks).watched_gradients(self.module)
                training = self._training(source, given, watched)
            tested, num_tested = {"": source}, None
            if validation_data is not None:
                tested = validation_sources(validation_data, y, x, **self._of_data)
            elif source.num_certain is not None and validation_split:
                count = source.num_certain
                num_tested = count - num_trained_on(count, validation_split)
            predicted = self._predicted_by
            plans: dict[object, Inference] = {}

            def add(
                inferred: Inferred, kind: str, size: int | None = None, **how: Any
            ) -> None:
                for data in tested.values():
                    beside = [one for one in tested.values() if one is not data]
                    how.update(beside=beside if "training" in how else ())
                    one = self._inference(data, inferred, kind, size, **how)
                    left_over = tuple(getattr(one, "left_over", ()))
                    plans.setdefault((inferred, one.plan, left_over), one)

            # Each with the arguments for which it may have a program of its own.
            if training is None:
                add(predicted, "predict", batch_size)
            else:
                tests = training.metrics.objective.evaluated
                how: dict[str, Any] = {}
                if validation_data is not None or num_tested is not None:
                    # The number of rows is known, and so are those left over.
                    how["metrics"] = MetricState(training.metrics.objective)
                add(
                    *(tests, "test", validation_batch_size),
                    training=training.plan,
                    max_rows=num_tested,
                    callbacks=callbacks,
                    **how,
                )
                add(tests, "test", **how)
                add(predicted, "predict")
            programs = []
            to_build: list[Training | Inference] = [*plans.values()]
            to_build += [] if training is None else [training]
            for one in to_build:
                try:
                    programs.append(built(one, display))
                except NoForwardError:
                    is_called = isinstance(one, Training) or one.inferred.step
                    if training is None or is_called:
                        raise  # else only its steps are used
            return Build(tuple(programs))
        except BaseException:
            with exchanges_off():  # other processes are elsewhere
                do_all([self._executors.detach], is_failing=True)
            raise
        finally:
            before.put_back()

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
        if hasattr(x, "__next__"):
            raise DataError(
                "`x` is a generator, which can be gone through once: a check would "
                "take its first batch away. Pass one batch, or tensors of its shapes."
            )
        return self._check_of_fit(locals())

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
        from . import benchmarking  # few processes ask for it

        benchmarking.check_arguments(mode, data, calls, repeats, warmup)
        is_training = mode == "training"
        if is_training:
            self._require_compiled()
        with HostRandomState(generators_of(x) if is_stream(x) else ()):
            if is_training:
                source = as_source(x, y, **self._of_data)
            else:
                source = self._inputs(x, column_names(y) or ())
            copied = self._independent_copy("benchmark()")

            def planned(source: Source, fitted: FitArguments) -> Training | Inference:
                if is_training:
                    return copied._training(source, fitted)
                how = copied._predicted_by, "predict", batch_size
                return copied._inference(source, *how, is_open=False)

            program = planned(source, FitArguments(batch_size))
            if data != "real":  # as many samples as a call of the real ones takes
                plan = program.plan
                source = generated_like(source, plan.samples_per_call * plan.processes)
                updates = plan.device_iterations
                program = planned(
                    source, FitArguments(plan.batch_size, updates=updates)
                )
            run = copied._running(RunState(), None, verbose)
            with run as (_, display), contextlib.closing(program.batches):
                result = benchmarking.measure(
                    program, data, calls, repeats, warmup, display, copied.processes
                )
            copied.detach()
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
            replicas; a notebook prints it once more.

        Example:
            >>> from ipufit import IPUConfig, IPUModel
            >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
            >>> model = IPUModel(layers, IPUConfig(pipeline=("0", "1"), replicas=2))
            >>> model.summary(torch.zeros(1, 2)).num_ipus  # doctest: +ELLIPSIS
                        Sequential...
            4
        """
        source = self._last_source if x is None else as_source(x)
        self._executors.fetch_weights()
        example = None
        if source is None:
            host_calls.check_shapes(self.module)
        else:
            self._settle(source)
            leaves = source.example(1, inputs_only=True)
            example = source.structure.nested(leaves)
        from .summary import summarize  # few processes ask for it

        summary = summarize(self.module, self.config, example)
        say(str(summary))
        return summary

    def reset_metrics(self) -> None:
        """Reset the metrics of the run under way, in a hook of it.

        Loss and metrics of its epoch or evaluation are then those of later batches, and
        0 if there are none, as in Keras. Each epoch and evaluation begins so anyway.
        """
        self._require_compiled()
        if self._innermost_run.metrics is not None:
            self._innermost_run.metrics.forget()

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
        host_calls.check_shapes(self.module)
        state = self.module.state_dict()
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
        given: dict[str, Tensor] = {}
        for (name, tensor), value in zip(state.items(), weights):
            try:
                given[name] = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise DataError(
                    f"What is given for {name} is no array of numbers: {error}."
                ) from error
            if given[name].shape != tensor.shape:
                raise DataError(
                    f"The array for {name} has shape {tuple(given[name].shape)}, and "
                    f"the weight has {tuple(tensor.shape)}."
                )
        self._set_state(given)

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
        weights = self._fetched_state()

        if moment is not None:
            check_instance("moment", moment, files.SavedAt)

        def write() -> str:
            files.save_weights(weights, path, moment=moment)
            return str(path)

        files.written_by_one(write)

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
        host_calls.check_shapes(self.module)
        given = files.load_weights(path)
        state = self.module.state_dict()
        odd = files.names_that_differ(state, given, "shape")
        if odd:
            raise DataError(
                f"{str(path)!r} has the weights of another module: {', '.join(odd)} "
                "are only in one of the two, or have other shapes."
            )
        for name, tensor in state.items():
            if not torch.can_cast(given[name].dtype, tensor.dtype):
                raise DataError(
                    f"{str(path)!r} has {name} in {given[name].dtype}, and the weight "
                    f"is {tensor.dtype}, which can't hold it."
                )
        self._set_state(given)

    @uninterrupted
    def swap_weights(self, *, is_average: bool, is_joint: bool = False) -> None:
        """Exchange the weights for their running average, or back.

        Training on averaged weights would average the averages: swap back before.

        Args:
            is_average: True for the average, False for the weights.
            is_joint: Whether all processes of a run call it together. Then all get the
                averages of buffers from process 0, as in an evaluation.

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
        self._executors.send_weights()

    # Checkpoints: weights and the optimiser's state, and in a callback the whole run.

    def checkpoint(self, *, copied: bool = True) -> files.Checkpoint:
        """Return the state of the model and, while `fit` runs, of the whole run.

        Args:
            copied: If False, tensors may be those of the model, which training changes:
                this takes no memory for a checkpoint that is written at once.

        Returns:
            Weights, the optimiser's state, averages; in a callback also everything that
            `fit(resume=...)` needs. In `run.after_hooks` it has the state of all
            callbacks after the event.

        Raises:
            NotCompiledError: `compile` wasn't called.
        """
        check_flags(copied=copied)
        if self._snapshot is not None:
            now = self._snapshot.take()
        else:
            host_calls.check_shapes(self.module)
            now = self._trained_state().take()
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

        def write() -> str:
            files.write_checkpoint(path, taken)
            return str(path)

        files.written_by_one(write)

    def load(self, path: PathLike) -> None:
        """Load weights, the optimiser's state and averages from a checkpoint.

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
        checkpoint = files.load_checkpoint(path)
        with naming(checkpoint):
            self._trained_state().put_back(checkpoint)

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
        from . import exporting  # few processes ask for it

        check_flags(with_module=with_module)
        exporting.check_path(path)
        source = self._last_source
        if x is not None:
            source = example_of(x, inputs_only=True, **self._of_data)
        elif source is None:
            raise DataError(
                "export() needs to know the inputs' shapes: pass x, a batch or tensors "
                'on the device "meta". (After a run of the model x may be left out.)'
            )
        self._settle(source)
        self._executors.fetch_weights()
        self._executors.share_buffers()
        self._executors.detach()
        alone = replace(self.config, process_id=0, num_processes=1)
        size, _ = _rows_to_evaluate(alone, source, batch_size, None)

        def write() -> dict[str, Any]:
            before = HostRandomState()
            try:
                plan = _plan_of_pass(self.module, alone, size)
                return exporting.write_program(
                    *(self.module, alone, source, plan, path),
                    with_module=with_module,
                )
            finally:
                before.put_back()

        return files.written_by_one(write)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last call, for a callback that watches them.

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

    def detach(self) -> None:
        """Release the IPUs; the weights stay in `module`, the programs compiled."""
        self._executors.detach()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The `poptorch.optim` optimizer that trains; None before `compile`."""
        settings = self._settings
        return None if settings is None else settings.optimization.optimizer

    @property
    def has_lr_schedule(self) -> bool:
        """Whether a schedule sets the learning rates, so that callbacks must not."""
        settings = self._settings
        return settings is not None and settings.optimization.has_schedule

    @property
    def num_updates(self) -> int:
        """Number of weight updates since `compile`."""
        settings = self._settings
        return 0 if settings is None else settings.optimization.num_updates

    @property
    def weight_average(self) -> WeightAverage | None:
        """The average of the weights (`ema_momentum`); None without one."""
        return None if self._settings is None else self._settings.average

    @property
    def _innermost_run(self) -> RunState:
        """The run under way that was begun last, such as one in a callback of `fit`."""
        return self._runs[-1].run if self._runs else self._no_run

    @property
    def stop_training(self) -> bool:
        """Keras's flag: a callback sets it to end `fit` after this call."""
        return self._fit_run.is_stopping

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value:
            self._fit_run.stop("model.stop_training was set")
        else:
            self._fit_run.stop_reason = None

    @property
    def stop_evaluating(self) -> bool:
        """Keras's flag: a callback sets it to end the evaluation after this call."""
        return self._innermost_run.stop_evaluating

    @stop_evaluating.setter
    def stop_evaluating(self, value: bool) -> None:
        self._innermost_run.stop_evaluating = value

    @property
    def stop_predicting(self) -> bool:
        """Keras's flag: a callback sets it to end `predict` after this call."""
        return self._innermost_run.stop_predicting

    @stop_predicting.setter
    def stop_predicting(self, value: bool) -> None:
        self._innermost_run.stop_predicting = value

    def __repr__(self) -> str:
        """Describe the module, the layout, and the settings of `compile`."""
        settings, compiled = self._settings, "not compiled"
        if settings is not None:
            objective = settings.objective
            losses = ", ".join(loss.name for _, loss in objective.losses)
            metrics = ", ".join(one.full_name for one in objective.metrics)
            own = "of the module" if objective.steps is None else "of its own step"
            compiled = (
                f"compiled with {type(settings.optimization.optimizer).__name__}, "
                f"loss {losses or own}, metrics {metrics or 'none'}"
            )
        module = type(self.module).__name__
        return f"<{type(self).__name__}: {module} on {self.config}, {compiled}>"

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes, and say where those of a module are."""
        what = f"{type(self).__name__!r} object"
        of_module = f"model.module.{name}" if hasattr(torch.nn.Module, name) else ""
        raise unknown_attribute(what, "model", name, dir(type(self)), of_module)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to be called as a module."""
        raise UnsupportedError(
            "An IPUModel isn't called: model.predict(x) gives outputs for all samples, "
            "model.predict_on_batch(x) for a batch, and model.module(x) calls the "
            "module on the host."
        )

    # help() lists methods in the order of these names, and the others after them.
    _fields = tuple(name for name in vars() if not name.startswith("_"))

    # Copies: a model is made anew of the module as it is on the host, the config and
    # the arguments of `compile`. Then it is given what training has changed beyond the
    # weights. It has no programs and no device yet.

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
        parts = {
            "module": state["module"],
            "config": state["config"],
            **{f"compile({n}=...)": v for n, v in (state["arguments"] or {}).items()},
            **state["attributes"],
        }
        for name, part in parts.items():
            try:
                _WithoutTensors(io.BytesIO()).dump(part)
            except Exception as error:  # a user's object may raise anything
                raise UnsupportedError(
                    f"This model can't be pickled because of {name}: {error}. "
                    "Functions and classes have to be defined at the top of a module, "
                    "so that they are found by their names. copy.deepcopy(model) takes "
                    "any, and model.save(path) keeps what was learnt."
                ) from error
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        # torch.multiprocessing sends tensors as shared memory, and a copy has its own.
        trained, module = state["trained"], state["module"]
        groups = {} if trained is None else trained.tensors
        own = [tensor for group in groups.values() for tensor in group.values()]
        for tensor in (*module.parameters(), *module.buffers(), *own):
            if not is_lazy(tensor) and tensor.is_shared():
                tensor.data = tensor.data.clone()
        IPUModel.__init__(self, state["module"], state["config"])
        self._target_columns, self._columns, self._num_passes = state["data"]
        vars(self).update(state["attributes"])
        self._counterparts = Counterparts(state["counterparts"])
        if state["arguments"] is None:
            return
        self.compile(**state["arguments"])
        if trained is None:
            return
        tensors = {**groups_of_module(self.module), **trained.tensors}
        self._trained_state().put_back(files.Checkpoint(tensors, trained.state))
        if state["is_swapped"]:
            self.swap_weights(is_average=True)

    def _copied_state(self) -> dict[str, Any]:
        """Return the state from which a copy is built, with the newest weights.

        Its module, config, arguments and attributes are the model's own.
        """
        self._executors.fetch_weights()
        settings, average = self._settings, self.weight_average
        is_swapped = average is not None and average.is_swapped
        trained = None
        if settings is not None and not host_calls.lazy_layers(self.module):
            trained = self._trained_state().take().copied()
            if not is_swapped:  # the module has the weights
                own = groups_of_module(self.module)
                others = {n: t for n, t in trained.tensors.items() if n not in own}
                trained = files.Checkpoint(others, trained.state)
        # The parameters of the module that was given which the optimizer given has.
        optimizer = None if settings is None else settings.arguments["optimizer"]
        groups: Sequence[Any] = ()
        if isinstance(optimizer, torch.optim.Optimizer):
            groups = optimizer.param_groups
        given = [one for group in groups for one in group["params"]]
        own_names = IPUModel.__annotations__
        return {
            "module": self.module,
            "config": self._given_config,
            "arguments": None if settings is None else dict(settings.arguments),
            "counterparts": self._counterparts.among(given),
            "trained": trained,
            "is_swapped": is_swapped,
            "data": (self._target_columns, self._columns, self._num_passes),
            "attributes": {n: v for n, v in vars(self).items() if n not in own_names},
        }

    def _independent_copy(self: ModelT, purpose: str) -> ModelT:
        """Return a copy for a run that mustn't change this model; it releases its IPUs.

        Args:
            purpose: The run, as the beginning of an error message.

        Raises:
            UnsupportedError: The model can't be copied.
        """
        self._executors.detach()  # the copy needs them
        state = self._copied_state()
        attributes = state.pop("attributes")  # a step of its own reads them
        try:
            state = deep_copied(state)
        except Exception as error:  # a user's object may raise anything
            raise UnsupportedError(
                f"{purpose} runs on a copy of the model, so that the model doesn't "
                f"change, and it can't be copied: {error}. Take open files, locks and "
                "other objects that copy.deepcopy refuses out of the module and the "
                "arguments of compile()."
            ) from error
        other = type(self).__new__(type(self))
        other.__setstate__({**state, "attributes": attributes})
        return other

    # The model as a whole -------------------------------------------------------------

    def _require_compiled(self) -> CompileSettings:
        """Return the settings of `compile`, which must have been called."""
        if self._settings is None:
            raise NotCompiledError(
                "You must call compile() before using the model: "
                "model.compile(optimizer='adamw', loss='cross_entropy')."
            )
        return self._settings

    _compiled = property(_require_compiled)

    @property
    def _predicted_by(self) -> Inferred:
        """Return the computation of a program for `predict`, also before `compile`."""
        settings = self._settings
        return Inferred(False) if settings is None else settings.objective.predicted

    @property
    def _of_data(self) -> dict[str, Any]:
        """Return arguments that all forms of data take."""
        return {"num_workers": self.config.num_workers, "processes": self.processes}

    def _inputs(self, x: Any, left_out: Sequence[str]) -> Source:
        """Return data as a source without targets."""
        left_out = (*self._target_columns, *left_out)
        return as_source(
            x,
            inputs_only=True,
            left_out=left_out,
            columns=self._columns,
            **self._of_data,
        )

    def _refuse_other_thread(self) -> None:
        """Refuse a run beside that of another thread, before it draws or changes."""
        if self._innermost_run.thread not in (None, threading.get_ident()):
            raise ConfigError(
                "Another thread is in fit, evaluate or predict of this model, which "
                "has one program on its IPUs at a time. Call this from a callback of "
                "that run, or use a copy of the model: copy.deepcopy(model)."
            )

    def _require_ipus(self) -> None:
        """Check that the model can run a program here and now.

        Raises:
            ConfigError: The config is offline, or another thread runs the model.
        """
        self._refuse_other_thread()
        if self.config.offline:
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

    @uninterrupted
    def _set_state(self, given: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                tensor.copy_(given[name])
        self._executors.send_weights()

    def _trained_state(self) -> TrainedState:
        """Return the parts of a compiled model that training changes."""
        settings = self._compiled
        return TrainedState(self._executors, settings.optimization, settings.average)

    def _settle(self, source: Source) -> None:
        """Determine the shapes of lazy weights, and the stages, from a sample.

        Stages that `pipeline="auto"` leaves open depend only on the module, the shapes,
        the config and the optimizer, so all processes choose the same, and so do a
        resumed run, `build` and `ipufit compile`.

        Raises:
            ConfigError: Some weights still have no shapes, or there is no such split.
            DataError: `forward` can't take such a sample.
        """
        host_calls.give_shapes(self.module, source)
        if not self.config.has_open_stages:
            return
        names, in_words = self._split(self.config, source)
        now = with_stages(self._given_config, names)
        if now.pipeline != self._executors.config.pipeline:
            self._executors.place(now, in_words)
        self.config = with_stages(self.config, names)
        self._built_options = None

    def _resolved(self, config: IPUConfig, x: Any = None) -> IPUConfig:
        """Return a config with the stages it leaves open, for `config.resolved`."""
        given = self._given_config
        is_chosen = given.has_open_stages and not self.config.has_open_stages
        if x is None and is_chosen and given.ipus == config.ipus:
            return with_stages(config, self.config.pipeline or ())
        source = self._last_source if x is None else as_source(x)
        if source is None:
            raise ConfigError(
                "pipeline='auto' needs the shapes of samples, and this model has seen "
                "none: give data, config.resolved(model, x), or call fit() before."
            )
        host_calls.give_shapes(self.module, source)
        return with_stages(config, self._split(config, source)[0])

    def _split(self, config: IPUConfig, source: Source) -> tuple[tuple[str, ...], str]:
        from .costs import split_of_module  # few processes need it

        settings = self._settings
        optimizer = steps = None
        if settings is not None:
            optimizer = settings.optimization.optimizer
            steps = settings.objective.steps
        return split_of_module(self.module, config, source, optimizer, steps)

    def _resolved_steps(
        self,
        step: StepFunction | None,
        validation_step: StepFunction | None,
        predict_step: StepFunction | None,
    ) -> Steps | None:
        """Return the given steps, else methods of a subclass; None without a step.

        Raises:
            ConfigError: A step is no function, or the class has a method of Keras's.
        """
        checked_step("step", step)
        checked_step("validation_step", validation_step)
        checked_step("predict_step", predict_step)
        for name, instead in _OF_KERAS.items():
            if hasattr(type(self), name):
                raise ConfigError(
                    f"{type(self).__name__} has Keras's method {name}(), which nothing "
                    f"calls: write {instead}."
                )

        def method(name: str) -> StepFunction | None:
            own = getattr(self, name, None)
            if own is None:
                return None
            checked_step(name, own, is_method=True)
            return MethodStep(own)

        training = step or method("training_step")
        validation = validation_step or method("validation_step") or training
        prediction = predict_step or method("predict_step")
        if validation is None and prediction is None:
            return None
        if training is None or validation is None:
            raise ConfigError(
                "There is a validation_step or predict_step, and no step for training: "
                "give compile(step=...), or the class a training_step."
            )
        return Steps(training, validation, prediction)

    # The plan of training, which `fit`, `build`, `check` and `plan` share -------------

    def _training(
        self,
        source: Source,
        given: FitArguments,
        watched: Sequence[str] = (),
        num_passes: int | None = None,
    ) -> Training:
        """Plan the training of the compiled model on data, and the calls of a pass.

        Args:
            source: The data.
            given: Arguments of `fit`.
            watched: Names of parameters whose gradients are sent to the host.
            num_passes: Number of the next pass over the data; None for that of the
                model.

        Raises:
            ConfigError: The optimiser lacks a weight, or the batch size a factor.
            DataError: Targets are missing.
            UnsupportedError: The loss can't take weights or padding, or gradients are
                watched with automatic loss scaling.
        """
        settings, checkpoint = self._compiled, given.checkpoint
        optimization, objective = settings.optimization, settings.objective
        check_covers(optimization.optimizer, self.module)
        _require_targets(source, objective, "x", "train")
        if source.structure.rows is None:
            _check_weighting(objective, given)
        plan, choice = self._training_plan(source, given)
        self._check_processes(plan)
        seed = self.config.seed
        start = Position(self._num_passes if num_passes is None else num_passes)
        if checkpoint is not None:
            seed, start = checkpoint.state["data"]["seed"], position_of(checkpoint)
        if watched and optimization.automatic_loss_scaling:
            raise UnsupportedError(
                "Gradients are watched, and the loss scaling is automatic: only the "
                "device knows what it has multiplied them by. Use a fixed loss_scaling."
            )
        parameters = dict(self.module.named_parameters()) if watched else {}
        gradients = {name: parameters[name].shape for name in watched}
        options = self._training_options(plan, gradients)
        batches = TrainingBatches(
            source,
            plan,
            options,
            shuffle=given.shuffle,
            seed=seed,
            drop_last=given.drop_last,
            class_weight=given.class_weight,
            has_labels=objective.has_labels,
            mixing=settings.mixing,
            ignored=objective.ignored,
            loading=Loading(self.config.num_workers, self.config.loader_mode),
            start=start,
            processes=self.processes,
        )
        return Training(
            self._executors,
            batches,
            plan,
            options,
            optimization,
            MetricState(settings.trained.fresh(), self.processes),
            settings.average,
            gradients,
            choice,
        )

    def _training_plan(
        self, source: Source, given: FitArguments
    ) -> tuple[BatchPlan, choices.Choice | None]:
        """Plan a call of training, and choose its updates if they are left open.

        Returns:
            The factors of a call; the updates that were chosen, and why not more, or
            None if the config or its own options say how many.

        Raises:
            ConfigError: The batch size is not made of its factors.
        """
        self._settle(source)
        config, batch_size = _config_of_items(self.config, source), given.batch_size
        if batch_size is None and config.micro_batch_size is None:
            batch_size = source.batch_size
        plan = config.training_plan(batch_size, own_stages(self.module, config))
        is_set = config.device_iterations or config.training_options
        if given.updates is not None:
            return replace(plan, device_iterations=given.updates), None
        if is_set is not None:
            return plan, None
        choice = self._updates_per_call(source, plan, given)
        return replace(plan, device_iterations=choice.value), choice

    def _training_options(
        self, plan: BatchPlan, watched: Iterable[str] = ()
    ) -> poptorch.Options:
        settings, optimization = self._compiled, self._compiled.optimization
        given: dict[str, Any] = {
            "own_stages": own_stages(self.module, self.config),
            "sums_gradients": settings.objective.is_sum,
            "returns_outputs": settings.objective.is_streamed,
            "scales_automatically": optimization.automatic_loss_scaling,
            "divides_early": optimization.needs_running_mean,
            "anchors": gradient_anchors(watched),
        }
        key = plan, given
        if self._built_options is None or self._built_options[0] != key:
            options = self.config.build_training_options(plan, **given)
            self._built_options = key, options
        return self._built_options[1]

    def _updates_per_call(
        self, source: Source, plan: BatchPlan, given: FitArguments
    ) -> choices.Choice:
        """Choose the updates of a call.

        `fit` gives the same results as with one update per call. The choice is the same
        in all processes, and depends only on the arguments.
        """
        if given.checkpoint is not None:
            begun = int(given.checkpoint.state["plan"]["device_iterations"])
            return choices.Choice(begun, "the run was begun with so many")
        objective = self._compiled.objective
        multiples: dict[str, int] = {}
        most: dict[str, int] = {}

        # Callbacks of all processes.
        listening = CallbackList(given.callbacks)
        is_watching = bool(listening.watched_gradients(self.module))
        everyone = self.processes.gathered((listening.call_ends(), is_watching))
        for every, name in [end for ends, _ in everyone for end in ends]:
            if every > 1:
                multiples[f"the {every} updates that {name} counts"] = every
            else:
                most[f"{name} hears each update"] = 1
        if any(is_watching for _, is_watching in everyone):
            most["gradients are watched"] = 1

        # Settings with which something happens after each update.
        moves = self._compiled.optimization.moves_per_update
        if moves:
            most[moves] = 1
        if objective.is_streamed:
            most["outputs come back for a streamed metric, and may be large"] = 1
        if self.config.customize is not None:
            # Larger calls would return metrics of fewer samples, or sums that the
            # device rounds.
            options = self._training_options(plan)
            mode = poptorch.OutputMode(options.output_mode)
            if mode != poptorch.OutputMode.All:
                most[f"customize asks for {mode.name}"] = 1

        # Whole epochs.
        count, updates = source.num_certain, 0
        if count is None:
            most["the data doesn't say for certain how many samples come"] = 1
        else:
            if given.validation_split:
                count = num_trained_on(count, given.validation_split)
            updates = count // plan.batch_size
            if given.drop_last in ("pad", False):
                updates = -(-count // plan.batch_size)
            if not updates:
                return choices.Choice(1, "these data have fewer samples than an update")
            span = "an epoch" if given.steps_per_epoch is None else "a pass"
            words = "one update" if updates == 1 else f"{updates} updates"
            multiples = {f"the {words} of {span}": updates, **multiples}
        for name in ("steps_per_epoch", "validation_updates"):
            value = getattr(given, name)
            if isinstance(value, int) and value > 0:  # others are refused later
                multiples[f"{name}={value}"] = value

        # What a call holds, and how long it takes.
        rows, weights = plan.samples_per_update, host_calls.num_weights(self.module)
        large = host_calls.metric_bytes(
            self.module, objective, source.structure, source.example(1)
        )
        of_metrics = (_METRIC_BYTES + large) * plan.micro_batches_per_call
        held = rows * host_calls.bytes_of(source.first()) + of_metrics
        most[
            "a call's samples and metrics take "
            f"{choices.MOST_CALL_BYTES >> 20} MiB of host memory at most"
        ] = max(1, choices.MOST_CALL_BYTES // held)
        most[
            f"a larger call would take long, with {rows} samples and {weights} "
            "weights per update"
        ] = max(1, choices.MOST_WORK // max(1, rows * weights))
        if not source.is_in_memory:  # some samples are loaded while others train
            least = max(_LEAST_CALLS, 4 * self.config.num_workers)
            most[f"{least} calls or more share the data"] = max(1, updates // least)
            ahead = source.num_ahead
            if ahead is not None:
                reason = f"workers load {ahead} samples ahead"
                most[reason] = max(1, ahead // (2 * plan.batch_size))
        return choices.chosen_device_iterations(multiples, most)

    def _epoch_of_fit(
        self, arguments: Mapping[str, Any], *, is_spare: bool = False
    ) -> tuple[Source, EpochPlan]:
        """Read the data of a `fit`, and divide them into calls.

        Args:
            arguments: Arguments of `fit` by name, of which `x` is needed.
            is_spare: Whether that `fit` won't run, so that a generator may lose its
                first batch.
        """
        from ipufit.planning.schedule import EpochPlan

        given = FitArguments.of(arguments)
        data = arguments["x"], arguments.get("y"), arguments.get("sample_weight")
        source = example_of(*data, is_whole=True, is_spare=is_spare, **self._of_data)
        plan, choice = self._training_plan(source, given)
        config, own = self.config, own_stages(self.module, self.config)
        stages = 1
        if config.is_pipelined and config.training_options is None:
            stages = max(forward_stages(config), own)
        count, steps = source.num_samples, given.steps_per_epoch
        if count is not None and given.validation_split:
            count = num_trained_on(count, given.validation_split)
        is_enough = count is None or count >= plan.samples_per_call * plan.processes
        if isinstance(steps, int) and steps > 0 and is_enough:  # others, fit refuses
            count = steps * plan.batch_size
        is_padding = given.drop_last is not True
        nearest: tuple[int, ...] = ()
        if count is not None and not is_padding:
            nearest = self._nearest_batch_sizes(count, plan, choice)
        reason = "" if choice is None else choice.reason
        return source, EpochPlan(plan, count, is_padding, stages, nearest, reason)

    def _nearest_batch_sizes(
        self, count: int, plan: BatchPlan, choice: choices.Choice | None
    ) -> tuple[int, ...]:
        """Return batch sizes near a plan's that leave out none of `count` samples."""
        one = plan if choice is None else replace(plan, device_iterations=1)
        stages = own_stages(self.module, self.config)
        derive = partial(self.config.training_plan, own_stages=stages)
        return choices.nearest_batch_sizes(count, one, derive)

    def _plan_of_fit(
        self,
        arguments: Mapping[str, Any],
        device: str | Device,
        *,
        is_spare: bool = False,
    ) -> ModelPlan:
        """Return the plan of a `fit`; arguments as for `_epoch_of_fit`, and `plan`."""
        # Few processes ask for a plan, so the others don't import what makes it.
        from ipufit.planning.memory import device_named

        from .costs import plan_of_module

        settings, kind = self._compiled, device_named(device)
        source, epoch = self._epoch_of_fit(arguments, is_spare=is_spare)
        plan = plan_of_module(
            self.module,
            self.config,
            settings.optimization.optimizer,
            settings.objective.steps,
            source,
            epoch,
            kind,
        )
        try:
            _require_targets(source, settings.objective, "x", "train")
        except IpufitError as error:  # what is planned doesn't depend on targets
            return replace(plan, refusal=str(error))
        return plan

    def _build_of_fit(self, arguments: Mapping[str, Any], cache_dir: str) -> Build:
        """Compile the programs of a `fit` for IPUs that may be elsewhere.

        Args:
            arguments: Arguments of `fit` by name.
            cache_dir: Directory for the executables, if the config has none.
        """
        config = self._given_config
        self.config = self._given_config = replace(
            config, offline=True, cache_dir=config.cache_dir or cache_dir
        )
        if self._settings is not None:
            self.compile(**self._settings.arguments)
        of_build = inspect.signature(self.build).parameters
        return self.build(**{n: v for n, v in arguments.items() if n in of_build})

    def _check_of_fit(self, arguments: Mapping[str, Any]) -> CheckReport:
        """Check a `fit` with arguments by name; a generator loses its first batch.

        Data that is too little for a call is refused, and the program is checked
        nevertheless.
        """
        from . import checking  # few processes ask for it

        self._require_compiled()
        self._executors.fetch_weights()
        before = HostRandomState(generators_of(arguments.get("x")))
        given = replace(FitArguments.of(arguments), shuffle=False)
        data = (arguments.get("x"), arguments.get("y"), arguments.get("sample_weight"))
        findings, training = [], None
        title = type(self.module).__name__
        try:
            try:
                source, _ = fit_sources(
                    *data,
                    given.validation_split,
                    arguments.get("validation_data"),
                    **self._of_data,
                )
                self._target_columns = column_names(data[1]) or ()
                training = self._training(source, replace(given, validation_split=0.0))
            except DataError as error:
                findings.append(checking.finding_of(error, "data"))
                with contextlib.suppress(IpufitError):  # of which the first is known
                    source = example_of(*data, **self._of_data)
                    training = self._training(source, given)
            except IpufitError as error:
                findings.append(checking.finding_of(error, "config"))
            if training is not None:
                plan, batches = training.plan, training.batches
                title += f", {plan.samples_per_call} samples per call"
                findings += checking.findings_of_calls(training)
                with torch.no_grad():
                    seen = surveyed(
                        self.module,
                        self.config,
                        batches.structure,
                        training.metrics.objective,
                        training.options,
                        plan,
                        batches.example(),
                        self.optimizer,
                    )
                findings += checking.findings_of_program(
                    self.module, plan, batches.structure, seen
                )
        finally:
            before.put_back()
        return checking.report_of(title, findings)

    def _warn_of_tail(self, training: Training) -> None:
        """Warn of samples that are left out, and of updates without any; for `fit`."""
        batches, plan = training.batches, training.plan
        if not self.processes.is_first:
            return
        if batches.num_dropped:
            total = batches.source.num_samples
            of = "" if total is None else f" of {total}"
            whole = plan.describe_unfilled(batches.num_dropped)
            sizes: tuple[int, ...] = ()
            if total is not None:
                sizes = self._nearest_batch_sizes(total, plan, training.choice)
            other = f", or batch_size={' or '.join(map(str, sizes))}" if sizes else ""
            warn(
                f"fit() leaves out {batches.num_dropped}{of} samples in every epoch, "
                f"because they don't fill {whole}. To train on all of them: "
                f"drop_last='pad', as Keras does{other}.",
                DroppedRowsWarning,
            )
        if batches.num_empty_updates:
            warn(
                f"{batches.num_empty_updates} of the {plan.device_iterations} updates "
                "of the last call have padding only. Their gradients are zero, but "
                "momentum and weight decay go on. Fewer device_iterations avoid it.",
                EmptyUpdatesWarning,
            )

    def _check_processes(self, plan: BatchPlan) -> None:
        """Refuse processes that differ from those when the model was made.

        Raises:
            ConfigError: A process group was made, or a launcher's variables were set,
                after the model.
        """
        if plan.processes != self.processes.count:
            raise ConfigError(
                f"There are {plan.processes} processes now, and there were "
                f"{self.processes.count} when the model was made. Make the process "
                "group (torch.distributed.init_process_group) before "
                "ipufit.IPUModel(...)."
            )

    # The plan of inference ------------------------------------------------------------

    def _inference(
        self,
        source: Source,
        inferred: Inferred,
        kind: str,
        batch_size: int | None = None,
        steps: int | None = None,
        *,
        training: BatchPlan | None = None,
        beside: Sequence[Source] = (),
        max_rows: int | None = None,
        callbacks: CallbackLike = None,
        is_open: bool = True,
        is_single: bool = False,
        metrics: MetricState | None = None,
    ) -> Inference:
        """Plan the calls of a run, and choose their passes if they are left open.

        Args:
            source: The data.
            inferred: The computation of the program.
            kind: "test" or "predict", as in the names of the hooks.
            batch_size: Samples of one pass over all replicas, and of a step; None for
                the default.
            steps: Number of steps; None for all samples.
            training: Plan of the training that is validated, if there is one.
            beside: Other sets that are validated on, by the same program if possible.
            max_rows: Number of samples that later data will have, if it is known.
            callbacks: Callbacks of the run.
            is_open: Whether passes may be chosen, if the config leaves them open.
            is_single: Whether the data is a batch for one call, if the config leaves
                the micro-batch open.
            metrics: Loss and metrics of an evaluation.

        Raises:
            ConfigError: The replicas don't divide the batch size.
        """
        settings = training, batch_size, steps, self.config.micro_batch_size
        is_default = all(x is None for x in (*settings, source.structure.rows))
        copies = self.config.num_inference_replicas * self.config.process.count
        if is_default and source.num_samples == (self._trained_rows or 0) * copies:
            batch_size = source.num_samples  # one batch of `fit`: a graph, or its nodes
        sets = source, *beside
        asked = [
            _rows_to_evaluate(self.config, one, batch_size, steps, training)
            for one in sets
        ]
        batch_size, rows = asked[0]
        max_rows = rows if max_rows is None else max_rows
        limits = [max_rows, *(rows for _, rows in asked[1:])]
        counts = [_samples_to_infer(*one) for one in zip(sets, limits)]
        self._settle(source)
        config, choice = _config_of_items(self.config, source), None
        plan = _plan_of_pass(self.module, config, batch_size)
        is_set = config.inference_iterations or config.inference_options
        if is_open and not is_single and is_set is None:
            least = _plan_of_pass(self.module, config, batch_size, 1)
            # Of other output modes the number of passes says which rows come back.
            all_rows = poptorch.OutputMode.All.value
            if (
                config.customize is None
                or config.build_inference_options(least).output_mode == all_rows
            ):
                # All processes choose the same: process 0's data decide, and callbacks
                # of any process. A batch that one listens to is a call.
                hooks = f"on_{kind}_batch_begin", f"on_{kind}_batch_end"
                is_heard = CallbackList(callbacks).hears(*hooks)
                if not is_heard:
                    choice = self._chosen_passes(source, least, counts, inferred)
                everyone = self.processes.gathered((is_heard, choice))
                choice = None if any(one for one, _ in everyone) else everyone[0][1]
        if choice is not None:
            plan = _plan_of_pass(self.module, config, batch_size, choice.value)
        if is_single and config.micro_batch_size is None:
            num_micro_batches = plan.micro_batches_per_call * plan.processes
            size = -(-(source.num_samples or 0) // num_micro_batches)
            plan = replace(plan, micro_batch_size=size)
        if metrics is not None and inferred.owns_loss and counts[0]:
            # The others of a loss over a micro-batch would be padding.
            size = min(plan.micro_batch_size, counts[0])
            plan = replace(plan, micro_batch_size=size)
        self._check_processes(plan)

        def planned(
            plan: BatchPlan,
        ) -> tuple[Executors, InferenceBatches, BatchPlan, poptorch.Options, Inferred]:
            options = config.build_inference_options(plan)
            batches = InferenceBatches(
                source,
                plan,
                options,
                max_rows=max_rows,
                loading=Loading(config.num_workers, config.loader_mode),
                seed=config.seed,
                processes=self.processes,
            )
            return self._executors, batches, plan, options, inferred

        def resized(size: int) -> Inference:
            least = plan
            if choice is not None:
                least = _plan_of_pass(self.module, config, batch_size, 1)
            return Inference(*planned(replace(least, micro_batch_size=size)), None)

        run = planned(plan)
        if metrics is None:
            return Inference(*run, choice)
        left_over = run[1].left_over(counts[0]) if counts[0] else ()
        return Evaluation(*run, choice, metrics, resized, left_over)

    def _evaluation(
        self,
        source: Source,
        batch_size: int | None = None,
        steps: int | None = None,
        **how: Any,
    ) -> Evaluation:
        """Plan an evaluation of the compiled model; arguments as for `_inference`.

        Raises:
            DataError: Targets are missing.
            ConfigError: The own inference options return sums of outputs.
        """
        settings = self._compiled
        words = (
            ("validation_data", "validate") if "training" in how else ("x", "evaluate")
        )
        _require_targets(source, settings.objective, *words)
        structure, compared = source.structure, self._compared_modes
        losses = [loss for _, loss in settings.objective.losses]
        are_several = len(losses) > 1 or structure.targets.num_leaves > 1
        is_unsure = are_several or any(loss.is_function for loss in losses)
        if is_unsure and structure not in compared:
            host_calls.refuse_outputs_of_training(
                self.module, settings.objective, structure, source.example(2)
            )
            compared.append(structure)
        what = settings.objective.evaluated, "test", batch_size, steps
        metrics = MetricState(settings.objective.fresh(), self.processes)
        test = self._inference(source, *what, metrics=metrics, **how)
        assert isinstance(test, Evaluation)  # noqa: S101 - it has metrics
        if test.options.output_mode == poptorch.OutputMode.Sum.value:
            raise ConfigError(
                "inference_options or customize ask for OutputMode.Sum, which adds "
                "outputs of different samples: nothing can be evaluated from that. Use "
                "OutputMode.All, or leave the mode at its default."
            )
        return test

    def _prediction(
        self,
        source: Source,
        batch_size: int | None = None,
        steps: int | None = None,
        **how: Any,
    ) -> Inference:
        """Plan a prediction; arguments as for `_inference`.

        Raises:
            ConfigError: The own inference options don't return every row.
        """
        what = self._predicted_by, "predict", batch_size, steps
        plan = self._inference(source, *what, **how)
        mode = poptorch.OutputMode(plan.options.output_mode)
        if mode != poptorch.OutputMode.All:
            raise ConfigError(
                "predict() needs every row, and inference_options ask for OutputMode."
                f"{mode.name}. Use OutputMode.All, or leave the mode at its default."
            )
        return plan

    def _predicted(
        self, plan: Inference, callbacks: CallbackLike = None, verbose: Verbose = 0
    ) -> Iterator[Any]:
        """Run a prediction, and yield the outputs of this process call by call."""
        batches = plan.batches
        run = RunState(params={"verbose": verbose, **_params(batches)})
        with self._running(run, callbacks, verbose) as (hooks, display):
            self._last_source = batches.source
            try:
                with self._naming_rows_of_fit(plan):
                    plan.prepare(display)
                    for part in plan.outputs(hooks, run):
                        with self._paused(hooks):
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

    @contextlib.contextmanager
    def _naming_rows_of_fit(self, inference: Inference) -> Iterator[None]:
        """Say in errors of shapes that `fit` had micro-batches of another size."""
        trained, rows = self._trained_rows, inference.plan.micro_batch_size
        try:
            yield
        except (DataError, UnsupportedError) as error:
            is_of_shapes = any(
                words in str(error)
                for words in ("failed with inputs of", "samples. Outside training")
            )
            if trained in (None, rows) or not is_of_shapes:
                raise
            raise type(error)(
                f"{error} fit had micro-batches of {trained}, and this run has ones of "
                f"{rows}: if forward needs that number, give evaluate and predict "
                f"batch_size={trained} for each replica, or "
                f"IPUConfig(micro_batch_size={trained})."
            ) from error.__cause__

    def _whole_outputs(self, plan: Inference, parts: Iterator[Any]) -> Any:
        """Join the outputs of all calls and processes, in the order of the samples."""
        if not self.processes.are_several:
            return joined(parts)
        of_processes = self.processes.gathered([_plain(part) for part in parts])
        calls = zip(*of_processes)
        return joined(_in_order(call, plan.batches) for call in calls)

    def _chosen_passes(
        self,
        source: Source,
        plan: BatchPlan,
        counts: Sequence[int | None],
        inferred: Inferred,
    ) -> choices.Choice:
        least, num_workers = plan.device_iterations, self.config.num_workers
        known = [count for count in counts if count is not None]
        is_one_call = len(known) == len(counts)
        is_one_call = is_one_call and max(known) <= plan.batch_size * least
        if is_one_call and all(one % plan.micro_batch_size == 0 for one in known):
            return choices.Choice(least)

        # Bytes of inputs, labels and outputs of a pass in one process, if they can be
        # known. The module was asked before for data of the same shapes, perhaps.
        example = source.example(plan.micro_batch_size)
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in example]
        key = inferred, source.structure, shapes
        find_size = partial(
            host_calls.output_size, self.module, inferred, source.structure, example
        )
        if all(one != key for one, _ in self._output_sizes):
            self._output_sizes.append((key, find_size()))
        size = next(found for one, found in self._output_sizes if one == key)
        num_bytes = None
        if size is not None:
            rows = plan.micro_batch_size
            whole = partial(find_size, num_samples=rows)
            host_calls.refuse_other_axes(size.outputs, rows, whole)
        if is_one_call:
            return choices.Choice(least)
        if size is not None:
            num_bytes = plan.replicas * (host_calls.bytes_of(example) + size.num_bytes)
            if size.moves_buffers:
                reason = "the module changes a buffer, and would in padding, too"
                return choices.Choice(least, reason)

        passes = []
        for count in known:
            if size is None or size.has_scalars:  # the others have their own program
                count -= count % plan.micro_batch_size
            passes.append(max(1, -(-count // plan.batch_size)))
        most = choices.MOST_PASSES
        if not source.is_in_memory:  # some samples are loaded while others are computed
            most = choices.MOST_LOADED_PASSES if passes else choices.MOST_UNKNOWN_PASSES
            if passes and source.num_ahead is not None:
                most = min(most, source.num_ahead // (2 * plan.batch_size))
            elif passes and num_workers:  # each loads whole calls
                most = min(most, sum(passes) // (4 * num_workers))
        work = plan.samples_per_update * host_calls.num_weights(self.module)
        return choices.chosen_inference_iterations(
            passes, num_bytes, least, max(1, most), work
        )

    # Runs -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _running(
        self,
        run: RunState,
        callbacks: CallbackLike,
        verbose: Verbose,
        history: History | None = None,
    ) -> Iterator[tuple[CallbackList, ProgressDisplay]]:
        """Begin a run with hooks in Keras's order, and download the weights at its end.

        After an error the IPUs are released too: the user may never do so.

        Args:
            run: State of the run.
            callbacks: The user's; a display among them replaces ipufit's, as in Keras.
            verbose: As for `fit`.
            history: History of a `fit`, whose hooks are called after the user's.

        Yields:
            All callbacks, and the display among them.

        Raises:
            ConfigError: The config is offline.

        Warns:
            CopiedModuleWarning: The user's module has changed, and isn't the one that
                runs.
        """
        self._require_ipus()
        self._counterparts.warn_of_changes()
        given = CallbackList(callbacks).callbacks
        run.processes, run.thread = self.processes, threading.get_ident()
        verbose = verbose if run.processes.is_first else 0
        own_display = make_progress(verbose)
        displays = [one for one in given if isinstance(one, ProgressDisplay)]
        last = [own_display] if verbose and not displays else []
        hooks = CallbackList([given, [] if history is None else history, last])
        hooks.set_model(self)
        hooks.set_run(run)
        own_display.set_run(run)  # a silent one isn't among the hooks
        self._runs.append(hooks)
        is_failing = False
        try:
            is_shown = displays and run.processes.is_first
            yield hooks, displays[0] if is_shown else own_display
        except GeneratorExit:  # somebody doesn't want the rest of a stream
            raise
        except BaseException:
            is_failing = True
            with exchanges_off():  # other processes are elsewhere
                do_all([self._executors.detach], is_failing=True)
            raise
        finally:
            self._runs.remove(hooks)
            with exchanges_off() if is_failing else contextlib.nullcontext():
                do_all(
                    [
                        lambda: hooks.end(self._runs, is_failing=is_failing),
                        self._executors.fetch_weights,
                    ],
                    is_failing=is_failing,
                )
        run.act()  # for what was asked for in on_train_end: all has ended well

    @contextlib.contextmanager
    def _paused(self, hooks: CallbackList) -> Iterator[None]:
        """Pause a run for other code, which may run the model."""
        self._runs.remove(hooks)
        hooks.give_back(self._runs)
        self._runs.insert(0, hooks)
        hooks.run.is_paused = True
        try:
            yield
        finally:
            hooks.run.is_paused = False
            self._runs.remove(hooks)
            self._runs.append(hooks)
            hooks.give_back([hooks])

    @contextlib.contextmanager
    def _fitting(self, run: RunState) -> Iterator[None]:
        """Make a run the present `fit`; one that is under way goes on after it."""
        outer, snapshot, history = self._fit_run, self._snapshot, self.history
        self._fit_run = run
        if snapshot is None:
            yield
            return
        try:
            with self._compiled.optimization.paused():
                yield
        finally:
            self._fit_run, self._snapshot, self.history = outer, snapshot, history
            if run.was_told_to_end:
                outer.tell_to_end(run.told_by)


class MethodStep:
    """A method of a model as a function of module and batch.

    Args:
        method: Method of one argument, of the model that is trained.

    Example:
        >>> class Model:
        ...     def training_step(self, batch):
        ...         return batch
        >>> MethodStep(Model().training_step)(None, 3)
        3
    """

    def __init__(self, method: Callable[[Any], Any]) -> None:
        self.method = method
        self.__qualname__ = str(getattr(method, "__qualname__", method))

    def __call__(self, module: torch.nn.Module, batch: Any) -> Any:
        """Call the method with a batch, while `self.module` is the module."""
        owner: Any = getattr(self.method, "__self__", None)
        own = getattr(owner, "module", module)
        if own is module:
            return self.method(batch)
        owner.module = module
        try:
            return self.method(batch)
        finally:
            owner.module = own

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same method of the same model."""
        return isinstance(other, MethodStep) and self.method == other.method

    def __hash__(self) -> int:
        return hash(self.method)


class _WithoutTensors(pickle.Pickler):
    """Pickles an object without the values of tensors."""

    def persistent_id(self, part: Any) -> str | None:
        """Return a name in place of a tensor; None for other objects."""
        return "tensor" if isinstance(part, torch.Tensor) else None


# Arguments ----------------------------------------------------------------------------


def _with_steps(config: IPUConfig, steps_per_execution: int | None) -> IPUConfig:
    if steps_per_execution is None:
        return config
    check_whole("steps_per_execution", steps_per_execution, least=1)
    own = config.training_options
    now = config.device_iterations if own is None else own.device_iterations
    if now not in (None, steps_per_execution):
        raise ConfigError(
            f"steps_per_execution={steps_per_execution}, but the config has "
            f"device_iterations={now}, which is the same thing. Give one of them."
        )
    return replace(config, device_iterations=steps_per_execution)


def _check_augmentation(
    objective: Objective, mixing: Mixing | None, label_smoothing: float
) -> None:
    """Refuse mixing or label smoothing that the loss can't take.

    Raises:
        ConfigError: `augment` or `label_smoothing` is of an unusable type or number.
        UnsupportedError: The module returns its own loss, or the loss has no classes.
    """
    if mixing is not None and not isinstance(mixing, Mixing):
        raise ConfigError(
            f"augment={shown(mixing)} is no ipufit.Mixing: pass Mixing(mixup=0.2, "
            "cutmix=1.0), or one of its two numbers."
        )
    check_smoothing(label_smoothing)
    for what, is_given in (
        (f"augment={mixing!r}", mixing is not None),
        (f"label_smoothing={label_smoothing!r}", label_smoothing > 0),
    ):
        if is_given and objective.steps is not None:
            raise UnsupportedError(
                f"{what} was given, but the model has a step of its own, which "
                "computes the loss. Do it there, or leave it out."
            )
        if is_given and objective.owns_loss:
            raise UnsupportedError(
                f"{what} was given, but the module returns its own loss, of whose "
                "targets nothing is known: compile() got none. Pass "
                "loss='cross_entropy' or the like, or leave it out."
            )


def _epochs(
    initial_epoch: int, epochs: int, validation_freq: int | Sequence[int]
) -> tuple[range, Callable[[int], bool]]:
    """Return the epochs to run, 0-based, and a function that tells if one validates."""
    check_whole("epochs", epochs)
    check_whole("initial_epoch", initial_epoch)
    to_come = range(initial_epoch, epochs)
    freq = validation_freq
    if isinstance(freq, (int, str, bytes)) or not isinstance(freq, Sequence):
        check_whole("validation_freq", freq, least=1)
        every = int(freq)
        return to_come, lambda epoch: (epoch + 1) % every == 0
    for epoch in freq:
        check_whole("validation_freq", epoch, least=1)
    return to_come, lambda epoch: epoch + 1 in freq


def _calls_between(
    updates: int | None, per_call: int, validated: Mapping[str, Source]
) -> int | None:
    """Return the number of calls between validations in an epoch; None for none.

    Raises:
        ConfigError: There is no data for it, or a call ends in between.
    """
    if updates is None:
        return None
    check_whole("validation_updates", updates, least=1)
    calls, rest = divmod(updates, per_call)
    if rest:
        raise ConfigError(
            f"validation_updates={updates} is no multiple of the {per_call} updates "
            "that a call makes (device_iterations), and a validation comes between "
            "calls. Choose a multiple."
        )
    if not validated:
        raise ConfigError(
            f"validation_updates={updates} was given, and there is nothing to validate "
            "on. Pass validation_data, or leave it out."
        )
    return calls


def _check_repeats(source: Source, steps: int | None, num_validations: int) -> None:
    """Refuse to iterate over a generator several times.

    Raises:
        DataError: The data is a generator, and there are several validations.
    """
    is_one_shot = isinstance(source, StreamSource) and source.is_one_shot
    if steps is None and is_one_shot and num_validations > 1:
        raise DataError(
            f"`{source.name}` is a generator, which can be gone through once, and "
            "there are several validations. Pass a loader or a dataset, "
            "which can be begun anew."
        )


def _check_weighting(objective: Objective, given: FitArguments) -> None:
    """Refuse class weights or padding that a loss can't take.

    Raises:
        UnsupportedError: The module returns its own loss.
    """
    drop_last, class_weight = given.drop_last, given.class_weight
    if not objective.owns_loss or (class_weight is None and drop_last is True):
        return
    what = f"drop_last={drop_last!r}" if class_weight is None else "class_weight"
    whose, instead = "the module returns its own loss", "compile() with a loss"
    if objective.steps is not None:
        whose = "the model's step returns the mean loss"
        instead = "Pass sample_weight to fit(), which the step gets"
        if class_weight is None:
            instead = "Choose factors that divide the number of samples"
    raise UnsupportedError(
        f"{what} was given, but {whose}, in which samples can't be told apart. "
        f"{instead}, or leave it out."
    )


def _common_samples(source: Source) -> int | None:
    """Return the number of samples, if all processes have the same ones."""
    return None if isinstance(source, StreamSource) else source.num_samples


def _samples_to_infer(source: Source, max_rows: int | None) -> int | None:
    """Return the number of samples, `max_rows` at most; None if unknown."""
    known = source.num_certain
    known = source.num_samples if known is None else known
    counts = [count for count in (known, max_rows) if count is not None]
    return min(counts, default=None)


def _require_same_rows(processes: Processes, *sources: Source) -> None:
    """Refuse arrays in memory that differ between processes.

    Raises:
        DataError: Some of their rows, or the shapes, aren't the same everywhere.
    """
    for source in sources if processes.are_several else ():
        if len(set(processes.gathered(source.checksum()))) > 1:
            raise DataError(
                f"The arrays of `{source.name}` have other rows in some processes. "
                "Each process takes its part of the same data, so a row could be "
                "trained on in one process and validated on in another. Seed what "
                "splits or makes them: train_test_split(..., random_state=0), or "
                "random_split(..., generator=torch.Generator().manual_seed(0))."
            )


def _require_targets(
    source: Source, objective: Objective, name: str, purpose: str
) -> None:
    """Refuse samples without targets if a loss or metric needs them.

    Raises:
        DataError: Targets are missing.
        UnsupportedError: There are weights, and the module returns its own loss.
    """
    if not objective.owns_loss:
        source.require_targets(name, purpose)
    elif objective.metrics:
        source.require_targets(name, "compute metrics")
    is_of_module = objective.owns_loss and objective.steps is None
    if is_of_module and source.structure.has_weights:
        raise UnsupportedError(
            f"`{name}` has sample weights, but the module returns its own loss, in "
            "which samples can't be told apart. Give the weights to the module as an "
            "input, or compile() with a loss."
        )


def _names_in_logs(
    names: Sequence[str], validated: Sequence[tuple[str, set[str]]]
) -> set[str]:
    """Return the names of an epoch's logs; arguments as in the check of names."""
    losses = {name for name in names if name.endswith("_loss")}  # of several outputs
    return {
        *names,
        *(f"val_{part}{name}" for part, seen in validated for name in seen | losses),
    }


def _refuse_names_of_validation(
    names: Sequence[str], validated: Sequence[tuple[str, set[str]]]
) -> None:
    """Refuse metrics with the name of another one of a validation.

    Args:
        names: Names of the training's metrics.
        validated: Prefix of each validation's set, and names of its metrics.

    Raises:
        ConfigError: A name of the training begins with `val_`, or metrics of two sets
            have one name.
    """
    for name in names if validated else ():
        if name.startswith("val_"):
            raise ConfigError(
                f"The training reports {name!r}, and fit() puts val_ in front of the "
                "metrics of validation_data. Give the scalar or metric another name."
            )
    sets_of: dict[str, str] = {}
    for prefix, own in validated:
        for metric in sorted(own.union(names)):
            name, other = prefix + metric, sets_of.get(prefix + metric)
            if prefix and name in names:
                other = "the training"
            if other is not None:
                raise ConfigError(
                    f"{metric!r} of validation_data[{prefix[:-1]!r}] would be called "
                    f"'val_{name}', like a metric of {other}. Give the set another "
                    "name."
                )
            sets_of[name] = f"validation_data[{prefix[:-1]!r}]"


# Sizes --------------------------------------------------------------------------------


def _config_of_items(config: IPUConfig, source: Source) -> IPUConfig:
    """Return the config for data whose items may be whole micro-batches.

    Raises:
        ConfigError: It asks for several of these in a micro-batch.
    """
    if source.structure.rows is None or config.micro_batch_size == 1:
        return config
    if config.micro_batch_size is not None:
        raise ConfigError(
            f"micro_batch_size={config.micro_batch_size}, and each batch of "
            "FixedSizeBatches is a whole micro-batch: leave it out."
        )
    return replace(config, micro_batch_size=1)


def _plan_of_pass(
    module: torch.nn.Module,
    config: IPUConfig,
    batch_size: int,
    inference_iterations: int | None = None,
) -> BatchPlan:
    """Return the factors of a call that evaluates or predicts.

    Args:
        module: The user's module, which may begin stages itself.
        config: The layout.
        batch_size: Samples of one pass over all replicas.
        inference_iterations: Passes of a call, if the config leaves them open.

    Raises:
        ConfigError: The replicas don't divide the batch size.
    """
    count = config.process.count
    stages = own_stages(module, config.inference_config)
    size = -(-batch_size // count) * count
    return config.inference_plan(size, stages, inference_iterations)


def _rows_to_evaluate(
    config: IPUConfig,
    source: Source,
    batch_size: int | None,
    steps: int | None,
    training: BatchPlan | None = None,
) -> tuple[int, int | None]:
    """Samples of one pass over all replicas, and of all `steps`.

    Args:
        config: The layout.
        source: The data; steps are batches of its loader, if it has one.
        batch_size: Samples of a pass, and of a step; None for the default.
        steps: Number of steps; None for all samples.
        training: Plan of the training that is validated, whose micro-batch counts if
            the config has none; None outside `fit`, for Keras's 32.

    Raises:
        ConfigError: `steps` is no positive whole number.

    Example:
        >>> source = as_source(torch.zeros(100, 2))
        >>> _rows_to_evaluate(IPUConfig(replicas=2), source, None, steps=None)
        (64, None)
        >>> _rows_to_evaluate(IPUConfig(replicas=2), source, 8, steps=3)
        (8, 24)
    """
    size = batch_size
    if size is not None:
        check_whole("batch_size", size, least=1)
    if steps is not None:
        check_whole("steps" if training is None else "validation_steps", steps, least=1)
    if source.structure.rows is not None:
        copies = config.num_inference_replicas * config.process.count
        if size not in (None, copies):
            raise ConfigError(
                f"batch_size={size}, and a pass takes {copies} of the batches of "
                "FixedSizeBatches, one for each replica: leave it out."
            )
        return copies, None if steps is None else steps * copies
    if size is None:
        micro = DEFAULT_BATCH_SIZE if training is None else training.micro_batch_size
        copies = config.num_inference_replicas * config.process.count
        size = (config.micro_batch_size or micro) * copies
    if steps is None:
        return size, None
    own = size if training is None else training.batch_size
    return size, steps * (batch_size or source.batch_size or own)


# Metrics and outputs ------------------------------------------------------------------


def _as_asked(metrics: MetricState, return_dict: bool) -> Logs | float | list[float]:
    """Return metrics by name; or as Keras's list, or the loss if there is only that."""
    named = metrics.logs() if return_dict else metrics.in_order()
    values = list(named.values())
    return named if return_dict else values if len(values) > 1 else values[0]


def _params(batches: InferenceBatches) -> dict[str, Any]:
    """Return the calls and steps of a run, for Keras's callbacks."""
    rows = batches.num_samples
    steps = None if rows is None else batches.num_passes(rows)
    return {"calls": batches.num_calls, "steps": steps}


def _plain(outputs: Any) -> Any:
    """Convert PopTorch's tensors to plain ones, which can be pickled."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, outputs)


def _in_order(of_processes: Sequence[Any], batches: InferenceBatches) -> Any:
    """Join the outputs of all processes for a call: they divide each pass."""
    rows = batches.plan_of_samples.samples_per_update
    of_passes = itertools.zip_longest(*(in_passes(part, rows) for part in of_processes))
    outputs = joined(part for one in of_passes for part in one if part is not None)
    return outputs if batches.structure.rows is None else cut(*outputs)


def _warn_of_coverage(options: poptorch.Options, plan: BatchPlan, method: str) -> str:
    """Warn if metrics cover only a part of the samples; called by a public method.

    Returns:
        The samples, in words; "" for all.
    """
    coverage = describe_coverage(options, plan)
    if coverage:
        warn(
            f"{method}() reports metrics of only a part of the samples, as your "
            f"options ask: {coverage}. For all leave the output mode at its default.",
            CoverageWarning,
        )
    return coverage


# The loop -----------------------------------------------------------------------------


def _validate(
    validations: Sequence[Evaluation],
    calls: Epochs,
    hooks: CallbackList,
    run: RunState,
    display: ProgressDisplay,
) -> None:
    """Validate on all sets, unless the run was resumed after the validation.

    If the run is evicted meanwhile, random states and streams are restored: the process
    that resumes the run validates again.

    Raises:
        EvictedError: The process was told to end.
    """
    if not validations or run.validated_calls == run.calls:
        return
    generators = calls.generators
    before = HostRandomState(generators) if run.heeds_eviction else None
    sources = [validation.batches.source for validation in validations]
    streams = [one for one in sources if isinstance(one, StreamSource)]
    first_passes = [stream.first_pass() for stream in streams]
    logs: Logs = {}
    for validation in validations:
        validation.prepare(display)
        logs.update(validation.run(hooks, run))
        if before is not None and run.is_evicted:
            for stream, first_pass in zip(streams, first_passes):
                stream.go_on(first_pass, is_due=True)
            set_random_state(before.tensors(), generators)
            run.heed_eviction()
            raise EvictedError
        run.directions.update(validation.named(validation.metrics.directions))
    run.validated, run.validated_calls = logs, run.calls


class EvictedError(Exception):
    """Raised if the process was told to end; another one will resume the epoch."""


@contextlib.contextmanager
def _ended_in_order(
    training: Training, hooks: CallbackList, run: RunState
) -> Iterator[None]:
    """End the loop in this context in order, if it is interrupted.

    On Ctrl-C `on_train_end` gets the metrics of the last complete epoch, and the IPUs
    are released; then the interrupt continues. SIGTERM and SIGUSR1 tell the run of an
    eviction, if a callback saves then, and only the loop ends. Python handles signals
    in the main thread only.

    Args:
        training: The training of the loop, whose IPUs are released.
        hooks: Callbacks of the run.
        run: State of the run.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before: dict[Any, Any] = {}
    if run.heeds_eviction and is_main:
        for name in EVICTING_SIGNALS:
            number = getattr(signal, name, None)  # Windows hasn't all of them
            if number is not None:
                tell = partial(_tell_to_end, run)
                before[number] = signal.signal(number, tell)
    try:
        try:
            yield
        finally:
            for number, own in before.items():
                # None is a handler that wasn't installed from Python.
                signal.signal(number, signal.SIG_DFL if own is None else own)
    except EvictedError:
        pass
    except KeyboardInterrupt:
        run.stop("interrupted")
        with exchanges_off():  # other processes are elsewhere
            hooks.on_train_end(dict(run.logs))
            training.executors.detach()
        raise


def _tell_to_end(run: RunState, number: int, frame: Any) -> None:
    run.tell_to_end(signal.Signals(number).name)


def _has_ended(run: RunState, sync: Callable[[], None]) -> bool:
    """Save the run if requested, and return whether it ends.

    Args:
        run: State of the run.
        sync: Exchanges requests between processes.

    Raises:
        EvictedError: The process was told to end, and the run was saved.
    """
    run.act()
    sync()
    run.heed_eviction()
    if run.stop_reason == EVICTED:
        raise EvictedError
    return run.is_ending


def _check_length(calls: Epochs, training: Training, run: RunState) -> None:
    """Warn if the data ran out in the epoch; refuse an epoch without a call."""
    if calls.ran_out:
        updates = run.calls * training.plan.device_iterations
        ending = "Training ends." if calls.is_spent else "The next begins anew."
        if run.processes.is_first:
            warn(
                f"The data ran out after {updates} updates of epoch {run.epoch + 1}, "
                f"fewer than steps_per_epoch asks for. {ending}",
                DataRanOutWarning,
            )
        if calls.is_spent:
            run.stop("the data ran out")
    elif not run.calls:
        raise DataError(
            f"Epoch {run.epoch + 1} has not one call: `x` gave fewer samples than "
            f"{training.plan.describe_as_too_large()}"
        )


def _warn_if_not_finite(training: Training, run: RunState, first: int) -> None:
    """Warn once if the loss of the last call isn't finite."""
    if math.isfinite(training.metrics.loss) or not run.is_finite:
        return
    if training.metrics.is_loss_empty:
        return
    run.is_finite = False  # once is enough
    losses = training.losses_of_call()
    at = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
    is_known = len(losses) == training.plan.device_iterations
    where = f"{first + at}" if is_known else f"{first} or one of its call"
    ignored = ""
    if training.metrics.objective.owns_loss:
        ignored = (
            "In a step or forward, cross_entropy of a micro-batch whose targets are "
            "all ignored (-100) is NaN: divide its sum by their number, at least 1. "
        )
    warn(
        f"The training loss is {losses[at]} in epoch {run.epoch + 1}, at update "
        f"{where}. The weights are probably lost. "
        f"{training.batches.source.first_not_finite()}{ignored}Lower the learning "
        "rate, or look for NaN, infinite and large values in the data. `ipufit check` "
        "names operators that make NaN on a device.",
        NonFiniteLossWarning,
    )
