# SPDX-License-Identifier: Apache-2.0
"""Plan the calls of a model: the samples, updates and passes of each."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    TypeVar,
)

import torch

from ipufit._arguments import check_integer
from ipufit._poptorch import poptorch
from ipufit.batching import (
    DEFAULT_BATCH_SIZE,
    BatchPlan,
    Choice,
    nearest_batch_sizes,
)
from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike
from ipufit.config import IPUConfig, forward_stages, with_stages
from ipufit.data.calls import InferenceBatches, TrainingBatches
from ipufit.data.datasets import Source
from ipufit.data.sources import as_source, example_of, num_trained_on
from ipufit.data.structure import SampleStructure
from ipufit.distributed import Processes, warn_in_first_process
from ipufit.engine.host_calls import HostProgram, OutputSize, give_shapes
from ipufit.engine.loop import Evaluation, Inference, Training, naming_data
from ipufit.engine.metric_state import MetricState
from ipufit.engine.objective import Computation
from ipufit.engine.program import Executors, gradient_anchors
from ipufit.engine.rows import describe_coverage
from ipufit.engine.weights import learning_batch_norms
from ipufit.errors import (
    ConfigError,
    CoverageWarning,
    DataError,
    DroppedRowsWarning,
    EmptyUpdatesWarning,
    IpufitError,
    IpufitWarning,
    NotCompiledError,
    UnsupportedError,
)
from ipufit.optimizers import check_covers
from ipufit.placement import own_stages
from ipufit.planning.schedule import EpochPlan

from .arguments import (
    CompileSettings,
    FitArguments,
    InferenceArguments,
    require_targets,
)
from .call_size import choose_passes_per_call, choose_updates_per_call

if TYPE_CHECKING:
    from ipufit.planning.memory import Device
    from ipufit.planning.plan import ModelPlan

T = TypeVar("T")

_SIZE = r"(?<!float)(?<!int)(?<![0-9])[0-9]+"
"""A number in a message, but none of a dtype."""


class CallPlanner:
    """Plans training, evaluation and prediction of a model, call by call.

    Args:
        module: The module that runs.
        config: Layout on IPUs.
        executors: Programs of the module.
        processes: Processes of the run.

    Attributes:
        user_config: The user's config. `config` also has the updates of a call that
            `compile` set, and the stages that were chosen from data.
        settings: The settings of `compile`; None before the first `compile`.
        num_passes: Passes over training data so far, so that no fit repeats an order.
        trained_rows: Samples of a micro-batch of the last fit.
        last_source: Data of the last run.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig,
        executors: Executors,
        processes: Processes,
    ) -> None:
        self.module, self.executors, self.processes = module, executors, processes
        self.user_config = self.config = config
        self.settings: CompileSettings | None = None
        self.num_passes = 0
        self.trained_rows: int | None = None
        self.last_source: Source | None = None
        self._forget()

    def _forget(self) -> None:
        """Reset the choices that depend on the settings of the last `compile`."""
        self._output_sizes: list[tuple[Any, OutputSize | None]] = []
        self._metric_sizes: list[tuple[Any, int]] = []
        self._compared_modes: list[SampleStructure] = []  # outputs of both modes fit
        self._options: dict[tuple[str, BatchPlan, str], poptorch.Options] = {}

    def compile(self, config: IPUConfig, settings: CompileSettings) -> None:
        """Use new settings for all later plans."""
        self.config, self.settings = config, settings
        self._forget()

    def compile_offline(self, cache_dir: str) -> None:
        """Make all later plans for IPUs of another host.

        Args:
            cache_dir: Directory for the executables, if the config has none.
        """
        config = self.user_config
        self.config = self.user_config = replace(
            config, offline=True, cache_dir=config.cache_dir or cache_dir
        )

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments that all forms of data take."""
        return {"num_workers": self.config.num_workers, "processes": self.processes}

    @property
    def predicted(self) -> Computation:
        """The computation of a program for `predict`, known before `compile`, too."""
        settings = self.settings
        return Computation(False) if settings is None else settings.objective.predicted

    def count_passes(self, batches: TrainingBatches) -> None:
        """Count the passes of batches, so that the next fit draws other orders."""
        number, done = batches.position
        self.num_passes = max(self.num_passes, number + (done > 0))

    def require_compiled(self) -> CompileSettings:
        """Return the settings of `compile`; raise an error if it wasn't called."""
        if self.settings is None:
            raise NotCompiledError(
                "You must call compile() before using the model: "
                "model.compile(optimizer='adamw', loss='cross_entropy')."
            )
        return self.settings

    def settle(self, source: Source) -> None:
        """Determine the shapes of lazy weights, and the stages, from a sample.

        Stages that `pipeline="auto"` leaves open depend only on the module, the shapes,
        the config and the optimizer, so all processes choose the same, and so do a
        resumed run, `build` and `ipufit compile`.

        Raises:
            ConfigError: Some weights still have no shapes, or there is no such split.
            DataError: `forward` can't take such a sample.
        """
        give_shapes(self.module, source)
        if not self.config.has_open_stages:
            return
        names, in_words = self._split(self.config, source)
        now = with_stages(self.user_config, names)
        if now.pipeline != self.executors.config.pipeline:
            self.executors.place(now, in_words)
        self.config = with_stages(self.config, names)
        self._options.clear()

    def resolved(self, config: IPUConfig, x: Any = None) -> IPUConfig:
        """Return a config with its open stages filled in, for `config.resolved`."""
        is_open = self.user_config.has_open_stages
        is_chosen = is_open and not self.config.has_open_stages
        if x is None and is_chosen and self.user_config.ipus == config.ipus:
            return with_stages(config, self.config.pipeline or ())
        source = self.last_source if x is None else as_source(x)
        if source is None:
            raise ConfigError(
                "pipeline='auto' needs the shapes of samples, and this model has seen "
                "none: give data, config.resolved(model, x), or call fit() before."
            )
        give_shapes(self.module, source)
        return with_stages(config, self._split(config, source)[0])

    def _split(self, config: IPUConfig, source: Source) -> tuple[tuple[str, ...], str]:
        from .costs import split_of_module  # few processes need it

        settings = self.settings
        optimizer = steps = None
        if settings is not None:
            optimizer = settings.optimization.optimizer
            steps = settings.objective.steps
        return split_of_module(self.module, config, source, optimizer, steps)

    def training(
        self,
        source: Source,
        arguments: FitArguments,
        num_passes: int | None = None,
        watched: Sequence[str] | None = None,
    ) -> Training:
        """Plan the training of the compiled model on data, and the calls of a pass.

        Args:
            source: The data.
            arguments: Arguments of `fit`.
            num_passes: Number of the next pass over the data; None for that of the
                model.
            watched: Names of parameters whose gradients are sent to the host; None for
                those that a callback watches.

        Raises:
            ConfigError: The optimizer lacks a weight, or the batch size a factor.
            DataError: Targets are missing.
            UnsupportedError: The loss can't take weights or padding, or gradients are
                watched with automatic loss scaling.
        """
        settings, checkpoint = self.require_compiled(), arguments.checkpoint
        optimization, objective = settings.optimization, settings.objective
        check_covers(optimization.optimizer, self.module)
        arguments.check_loss(objective, source)
        plan, choice = self.training_plan(settings, source, arguments)
        self._check_processes(plan)
        seed = self.config.seed
        if checkpoint is not None:
            seed = checkpoint.state["data"]["seed"]
        if watched is None:
            watched = CallbackList(arguments.callbacks).watched_gradients(self.module)
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
            shuffle=arguments.shuffle,
            seed=seed,
            drop_last=arguments.drop_last,
            class_weight=arguments.class_weight,
            has_labels=objective.has_labels,
            mixing=settings.mixing,
            ignored=objective.ignored,
            num_workers=self.config.num_workers,
            loader_mode=self.config.loader_mode,
            num_passes=self.num_passes if num_passes is None else num_passes,
            processes=self.processes,
        )
        return Training(
            self.executors,
            batches,
            plan,
            options,
            optimization,
            MetricState(settings.trained.fresh(), self.processes),
            settings.average,
            gradients,
            choice,
        )

    def training_plan(
        self, settings: CompileSettings, source: Source, arguments: FitArguments
    ) -> tuple[BatchPlan, Choice]:
        """Plan a call of training.

        Returns:
            The factors of a call; its updates, and why not more if ipufit chose them.

        Raises:
            ConfigError: The batch size is not made of its factors.
        """
        self.settle(source)
        config, batch_size = _config_of_items(self.config, source), arguments.batch_size
        if batch_size is None and config.micro_batch_size is None:
            batch_size = source.batch_size
        plan = config.training_plan(batch_size, own_stages(self.module, config))
        facts = self.module, config, settings, self.processes, source, plan, arguments
        choice = choose_updates_per_call(
            *facts, partial(self._training_options, plan), self._metric_bytes
        )
        if choice.value != plan.device_iterations:
            plan = replace(plan, device_iterations=choice.value)
        return plan, choice

    def _options_for(
        self, phase: str, plan: BatchPlan, **settings: Any
    ) -> poptorch.Options:
        """Return the options of a program, which are made once."""
        key = phase, plan, repr(settings)
        if key not in self._options:
            build: Any = self.config.build_inference_options
            if phase == "training":
                build = self.config.build_training_options
            self._options[key] = build(plan, **settings)
        return self._options[key]

    def _training_options(
        self, plan: BatchPlan, watched: Iterable[str] = ()
    ) -> poptorch.Options:
        settings = self.require_compiled()
        optimization = settings.optimization
        return self._options_for(
            "training",
            plan,
            own_stages=own_stages(self.module, self.config),
            sums_gradients=settings.objective.is_sum,
            returns_outputs=settings.objective.is_streamed,
            scales_automatically=optimization.automatic_loss_scaling,
            divides_early=optimization.needs_running_mean,
            anchors=gradient_anchors(watched),
        )

    def epoch_plan(
        self, arguments: FitArguments, *, is_spare: bool = False
    ) -> tuple[Source, EpochPlan]:
        """Plan the calls of an epoch of a `fit` from its data.

        Args:
            arguments: Arguments of the `fit`.
            is_spare: Whether that `fit` won't run, so that a generator may lose its
                first batch.
        """
        settings = self.require_compiled()
        source = example_of(
            *arguments.data, is_whole=True, is_spare=is_spare, **self.loading
        )
        plan, choice = self.training_plan(settings, source, arguments)
        count = source.num_samples
        if count is not None and arguments.validation_split:
            count = num_trained_on(count, arguments.validation_split)
        return source, self.describe_epoch(arguments, plan, choice, count)

    def describe_epoch(
        self,
        arguments: FitArguments,
        plan: BatchPlan,
        choice: Choice,
        count: int | None,
    ) -> EpochPlan:
        """Return the calls of an epoch of a `fit` whose call is planned.

        Args:
            arguments: Arguments of the `fit`.
            plan: The factors of a call.
            choice: The updates of a call, and why not more if ipufit chose them.
            count: Number of samples to train on; None if unknown.
        """
        config, stages = self.config, 1
        if config.is_pipelined and config.training_options is None:
            stages = max(forward_stages(config), own_stages(self.module, config))
        steps = arguments.steps_per_epoch
        is_enough = count is None or count >= plan.samples_per_call * plan.processes
        if steps is not None and is_enough:
            count = steps * plan.batch_size
        nearest: tuple[int, ...] = ()
        if count is not None and not arguments.pads:
            nearest = self._nearest_batch_sizes(count, plan, choice)
        return EpochPlan(plan, count, arguments.pads, stages, nearest, choice.reason)

    def model_plan(
        self, arguments: FitArguments, device: str | Device, *, is_spare: bool = False
    ) -> ModelPlan:
        """Plan the memory and the pipeline of a `fit`; arguments as for `epoch_plan`.

        Args:
            arguments: Arguments of the `fit`.
            device: Kind of IPU, or its numbers.
            is_spare: As for `epoch_plan`.
        """
        # Few processes ask for a plan, so the others don't import what makes it.
        from ipufit.planning.memory import device_named

        from .costs import plan_of_module

        settings, kind = self.require_compiled(), device_named(device)
        source, epoch = self.epoch_plan(arguments, is_spare=is_spare)
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
            require_targets(source, settings.objective, "train")
        except IpufitError as error:  # what is planned doesn't depend on targets
            return replace(plan, refusal=str(error))
        return plan

    def _nearest_batch_sizes(
        self, count: int, plan: BatchPlan, choice: Choice
    ) -> tuple[int, ...]:
        """Return batch sizes near a plan's that leave out none of `count` samples."""
        least = replace(plan, device_iterations=1) if choice.reason else plan
        stages = own_stages(self.module, self.config)
        derive = partial(self.config.training_plan, own_stages=stages)
        return nearest_batch_sizes(count, least, derive)

    def warn_of_tail(self, training: Training) -> None:
        """Warn of samples that `fit` leaves out, and of updates without samples."""
        batches, plan = training.batches, training.plan
        if not (batches.num_dropped or batches.num_padded):
            return
        total = batches.source.num_samples
        ways: list[str] = []
        if total is not None:
            sizes = self._nearest_batch_sizes(total, plan, training.choice)
            ways += [f"batch_size={' or '.join(map(str, sizes))}"] if sizes else []
        norms = learning_batch_norms(self.module)
        if batches.num_dropped:
            of = "" if total is None else f" of {total}"
            whole = plan.describe_unfilled(batches.num_dropped)
            if not (training.metrics.objective.owns_loss or norms):  # they'd see it
                ways.insert(0, "drop_last='pad', as Keras does")
            advice = f" To train on all of them: {', or '.join(ways)}." if ways else ""
            warn_in_first_process(
                f"fit() leaves out {batches.num_dropped}{of} samples in every epoch, "
                f"because they don't fill {whole}.{advice}",
                DroppedRowsWarning,
            )
        if batches.num_padded and norms:
            warn_in_first_process(
                f"drop_last='pad' fills the last call with {batches.num_padded} copies "
                f"of a sample, and batch norm ({', '.join(norms[:3])}) counts them in "
                "its statistics, which evaluate and predict use, too. Without them: "
                f"{', '.join([*ways, 'drop_last=True'])}; or group or layer norm.",
                IpufitWarning,
            )
        if batches.num_empty_updates:
            warn_in_first_process(
                f"{batches.num_empty_updates} of the {plan.device_iterations} updates "
                "of the last call have padding only. Their gradients are zero, but "
                "momentum and weight decay go on. Fewer device_iterations avoid it.",
                EmptyUpdatesWarning,
            )

    def _check_processes(self, plan: BatchPlan) -> None:
        """Refuse to run with other processes than those at the model's creation.

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

    def inference(
        self,
        source: Source,
        computation: Computation,
        kind: str,
        arguments: InferenceArguments,
        metrics: MetricState | None = None,
    ) -> Inference:
        """Plan the calls of an inference run; choose their passes if left open.

        Args:
            source: The data.
            computation: The computation of the program.
            kind: "test" or "predict", as in the names of the hooks.
            arguments: Batch size, steps, callbacks and other arguments of the run.
            metrics: Loss and metrics of an evaluation.

        Raises:
            ConfigError: The replicas don't divide the batch size.
        """
        batch_size, steps = arguments.batch_size, arguments.steps
        training = arguments.training
        settings = training, batch_size, steps, self.config.micro_batch_size
        is_default = all(x is None for x in (*settings, source.structure.rows))
        copies = self.config.num_inference_replicas * self.config.process.count
        if is_default and source.num_samples == (self.trained_rows or 0) * copies:
            batch_size = source.num_samples  # one batch of `fit`: a graph, or its nodes
        sets = source, *arguments.beside
        asked = [
            rows_to_evaluate(self.config, set_, batch_size, steps, training)
            for set_ in sets
        ]
        batch_size, rows = asked[0]
        max_rows = rows if arguments.max_rows is None else arguments.max_rows
        limits = [max_rows, *(rows for _, rows in asked[1:])]
        counts = [_num_samples_to_infer(*set_) for set_ in zip(sets, limits)]
        self.settle(source)
        config, choice = _config_of_items(self.config, source), None
        plan = plan_of_pass(self.module, config, batch_size)
        user_setting = config.inference_iterations or config.inference_options
        if arguments.is_open and not arguments.is_single and user_setting is None:
            least = plan_of_pass(self.module, config, batch_size, 1)
            # Of other output modes the number of passes says which rows come back.
            all_rows = poptorch.OutputMode.All.value
            if (
                config.customize is None
                or self._options_for("inference", least).output_mode == all_rows
            ):
                # All processes choose the same: process 0's data decide, and callbacks
                # of any process. A batch that one listens to is a call.
                hooks = f"on_{kind}_batch_begin", f"on_{kind}_batch_end"
                is_heard = CallbackList(arguments.callbacks).hears(*hooks)
                if not is_heard:
                    choice = choose_passes_per_call(
                        *(self.module, computation, source, least, counts),
                        config.num_workers,
                        self._output_size,
                    )
                everyone = self.processes.gathered((is_heard, choice))
                choice = None if any(heard for heard, _ in everyone) else everyone[0][1]
        if choice is not None:
            plan = plan_of_pass(self.module, config, batch_size, choice.value)
        if arguments.is_single and config.micro_batch_size is None:
            num_micro_batches = plan.micro_batches_per_call * plan.processes
            size = -(-(source.num_samples or 0) // num_micro_batches)
            plan = replace(plan, micro_batch_size=size)
        if metrics is not None and computation.owns_loss and counts[0]:
            # The others of a loss over a micro-batch would be padding.
            size = min(plan.micro_batch_size, counts[0])
            plan = replace(plan, micro_batch_size=size)
        self._check_processes(plan)

        def planned(
            plan: BatchPlan,
        ) -> tuple[
            Executors, InferenceBatches, BatchPlan, poptorch.Options, Computation
        ]:
            options = self._options_for("inference", plan)
            batches = InferenceBatches(
                source,
                plan,
                options,
                max_rows=max_rows,
                num_workers=config.num_workers,
                loader_mode=config.loader_mode,
                seed=config.seed,
                processes=self.processes,
            )
            return self.executors, batches, plan, options, computation

        def resized(size: int) -> Inference:
            least = plan
            if choice is not None:
                least = plan_of_pass(self.module, config, batch_size, 1)
            return Inference(*planned(replace(least, micro_batch_size=size)), None)

        run = planned(plan)
        if metrics is None:
            return Inference(*run, choice)
        left_over = run[1].left_over(counts[0]) if counts[0] else ()
        return Evaluation(*run, choice, metrics, resized, left_over)

    def evaluation(self, source: Source, arguments: InferenceArguments) -> Evaluation:
        """Plan an evaluation of the compiled model.

        Raises:
            DataError: Targets are missing.
            ConfigError: The user's own inference options return sums of outputs.
        """
        settings = self.require_compiled()
        purpose = "evaluate" if arguments.training is None else "validate"
        require_targets(source, settings.objective, purpose)
        structure, compared = source.structure, self._compared_modes
        losses = [loss for _, loss in settings.objective.losses]
        are_several = len(losses) > 1 or structure.targets.num_leaves > 1
        is_unsure = are_several or any(loss.is_function for loss in losses)
        if is_unsure and structure not in compared:
            on_host = HostProgram(
                self.module, Computation(False), structure, source.example(2)
            )
            on_host.refuse_outputs_of_training(settings.objective)
            compared.append(structure)
        metrics = MetricState(settings.objective.fresh(), self.processes)
        computation = settings.objective.evaluated
        test = self.inference(source, computation, "test", arguments, metrics)
        assert isinstance(test, Evaluation)  # noqa: S101 - it has metrics
        if test.options.output_mode == poptorch.OutputMode.Sum.value:
            raise ConfigError(
                "inference_options or customize ask for OutputMode.Sum, which adds "
                "outputs of different samples: nothing can be evaluated from that. Use "
                "OutputMode.All, or leave the mode at its default."
            )
        return test

    def validations(
        self,
        sources: Mapping[str, Source],
        batch_size: int | None,
        steps: int | None,
        training: BatchPlan,
        callbacks: CallbackLike,
    ) -> list[Evaluation]:
        """Plan a validation on each set of data.

        Args:
            sources: Data by the name of the set; "" for a set without a name.
            batch_size: Samples of one pass over all replicas.
            steps: Number of steps; None for all samples.
            training: Plan of the training.
            callbacks: Callbacks of the run.
        """
        planned = []
        for name, source in sources.items():
            arguments = InferenceArguments(
                batch_size,
                steps,
                callbacks,
                training,
                beside=[other for other in sources.values() if other is not source],
            )
            with naming_data(source):
                validation = self.evaluation(source, arguments)
            validation.prefix = f"{name}_" if name else ""
            planned.append(validation)
        return planned

    def refuse_unfit_labels(self, source: Source, trained: Source) -> None:
        """Refuse labels of validation data of shapes that the losses can't take.

        Args:
            source: The validation data.
            trained: The data of training, whose labels are checked in the trace.

        Raises:
            DataError: The losses and metrics take the labels of training alone.
        """
        objective = self.require_compiled().objective
        if objective.owns_loss or source.structure.rows is not None:
            return
        programs, forms = [], []
        for data in (source, trained):
            structure, example = data.structure, data.example(2)
            programs.append(
                HostProgram(self.module, Computation(False), structure, example)
            )
            labels = example[structure.num_inputs :]
            forms.append([(t.shape[1:], t.dtype) for t in labels])
        if forms[0] != forms[1]:
            programs[0].refuse_unfit_labels(objective, programs[1], source.name)

    def prediction(self, source: Source, arguments: InferenceArguments) -> Inference:
        """Plan a prediction.

        Raises:
            ConfigError: The user's own inference options don't return every row.
        """
        plan = self.inference(source, self.predicted, "predict", arguments)
        mode = poptorch.OutputMode(plan.options.output_mode)
        if mode != poptorch.OutputMode.All:
            raise ConfigError(
                "predict() needs every row, and inference_options ask for OutputMode."
                f"{mode.name}. Use OutputMode.All, or leave the mode at its default."
            )
        return plan

    def _output_size(self, on_host: HostProgram) -> OutputSize | None:
        """Return the size of a program's results, measured once for data of a shape."""
        return _once(self._output_sizes, on_host, on_host.output_size)

    def _metric_bytes(self, on_host: HostProgram) -> int:
        """Return the bytes of metrics, measured once for data of a shape."""
        objective = self.require_compiled().objective
        measure = partial(on_host.metric_bytes, objective)
        return _once(self._metric_sizes, on_host, measure)

    @contextlib.contextmanager
    def naming_rows_of_fit(self, inference: Inference) -> Iterator[None]:
        """Add to errors of shapes that `fit` had micro-batches of another size.

        A size that `forward` needs, or a multiple of it, is a number in the error.
        """
        trained, rows = self.trained_rows, inference.plan.micro_batch_size
        try:
            yield
        except (DataError, UnsupportedError) as error:
            is_of_shapes = any(
                words in str(error)
                for words in ("failed with inputs of", "samples. Outside training")
            )
            if trained is None or trained == rows or not is_of_shapes:
                raise
            sizes = map(int, re.findall(_SIZE, str(error)))
            if all(size in (0, rows) or size % trained for size in sizes):
                raise
            raise type(error)(
                f"{error} fit had micro-batches of {trained}, and this run has ones of "
                f"{rows}: if forward needs that number, give evaluate and predict "
                f"batch_size={trained} for each replica, or "
                f"IPUConfig(micro_batch_size={trained})."
            ) from error.__cause__


def _once(
    known: list[tuple[Any, T]], on_host: HostProgram, measure: Callable[[], T]
) -> T:
    """Return what is known of a program with data of a shape, or measure it."""
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in on_host.example]
    key = on_host.computation, on_host.structure, shapes
    if all(known_key != key for known_key, _ in known):
        known.append((key, measure()))
    return next(size for known_key, size in known if known_key == key)


def _config_of_items(config: IPUConfig, source: Source) -> IPUConfig:
    """Return the config for data whose items may be whole micro-batches.

    Raises:
        ConfigError: The config asks for several such items in a micro-batch.
    """
    if source.structure.rows is None or config.micro_batch_size == 1:
        return config
    if config.micro_batch_size is not None:
        raise ConfigError(
            f"micro_batch_size={config.micro_batch_size}, and each batch of "
            "FixedSizeBatches is a whole micro-batch: leave it out."
        )
    return replace(config, micro_batch_size=1)


def plan_of_pass(
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


def rows_to_evaluate(
    config: IPUConfig,
    source: Source,
    batch_size: int | None,
    steps: int | None,
    training: BatchPlan | None = None,
) -> tuple[int, int | None]:
    """Return the samples of one pass over all replicas, and of all `steps`.

    Args:
        config: The layout.
        source: The data; steps are batches of its loader, if it has one.
        batch_size: Samples of a pass, and of a step; None for the default.
        steps: Number of steps; None for all samples.
        training: Plan of the training that is validated, whose micro-batch counts if
            the config has none; None outside `fit`, for Keras's 32.

    Raises:
        ConfigError: `steps` isn't a positive whole number.

    Example:
        >>> source = as_source(torch.zeros(100, 2))
        >>> rows_to_evaluate(IPUConfig(replicas=2), source, None, steps=None)
        (64, None)
        >>> rows_to_evaluate(IPUConfig(replicas=2), source, 8, steps=3)
        (8, 24)
    """
    size = batch_size
    if size is not None:
        check_integer("batch_size", size, least=1)
    if steps is not None:
        check_integer(
            "steps" if training is None else "validation_steps", steps, least=1
        )
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
    default = size if training is None else training.batch_size
    return size, steps * (batch_size or source.batch_size or default)


def _num_samples_to_infer(source: Source, max_rows: int | None) -> int | None:
    """Return the number of samples, `max_rows` at most; None if unknown."""
    known = source.num_certain
    known = source.num_samples if known is None else known
    counts = [count for count in (known, max_rows) if count is not None]
    return min(counts, default=None)


def warn_of_coverage(options: poptorch.Options, plan: BatchPlan, method: str) -> str:
    """Warn if metrics cover only a part of the samples.

    Returns:
        The samples, in words; "" for all.
    """
    coverage = describe_coverage(options, plan)
    if coverage:
        warn_in_first_process(
            f"{method}() reports metrics of only a part of the samples, as your "
            f"options ask: {coverage}. For all leave the output mode at its default.",
            CoverageWarning,
        )
    return coverage


def warn_of_coverage_of_fit(
    training: Training, validations: Sequence[Evaluation]
) -> str:
    """Warn if the metrics of a fit cover only a part of the samples.

    Returns:
        The parts that training and validation report, in words; "" for all.
    """
    parts = [warn_of_coverage(training.options, training.plan, "fit")]
    total, dropped = training.batches.source.num_samples, training.batches.num_dropped
    if total and total <= 10 * (dropped or 0):  # not to be overlooked
        parts.append(f"training on {total - (dropped or 0)} of {total} samples")
    for validation in validations[:1]:  # all have the same options
        of_set = warn_of_coverage(
            validation.options, validation.plan, "fit's validation"
        )
        parts.append(of_set and f"validation {of_set}")
    return ", ".join(part for part in parts if part)
