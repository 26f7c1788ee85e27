# SPDX-License-Identifier: Apache-2.0
"""The loops of a run: training, evaluation and prediction call by call.

Output modes `Final` and `EveryN` return some micro-batches only. Targets are cut to
their rows, and every report says how many rows it covers (PopTorch user guide,
"Efficient data batching").
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence, TypeVar

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._signals import uninterrupted
from ipufit._tree import leaves_of, map_tensors, tree_map
from ipufit.batching import BatchPlan, Choice
from ipufit.callbacks import CallbackList, ProgressDisplay
from ipufit.data.calls import Call, InferenceBatches, TrainingBatches, pad
from ipufit.data.datasets import Source
from ipufit.data.random_state import HostRandomState, set_random_state
from ipufit.data.streams import StreamSource
from ipufit.data.structure import Labels
from ipufit.distributed import warn_in_first_process
from ipufit.engine.host_calls import refuse_sums
from ipufit.engine.metric_state import (
    MetricState,
    Scalars,
    vector_of,
    widened_all,
)
from ipufit.engine.objective import (
    OWN_LOSS,
    BoundObjective,
    Computation,
    Objective,
    dominant_labels,
)
from ipufit.engine.program import (
    GRADIENT_OF,
    Executors,
    Program,
    ProgramSpec,
    TrainingProgram,
    TrainingSpec,
)
from ipufit.engine.rows import RowBuffer, Rows, check_rows, cut, returned_rows
from ipufit.engine.step import CountsMissingError, Packing
from ipufit.engine.stopping import EvictedError, ProcessSync
from ipufit.engine.weights import mode
from ipufit.errors import (
    ConfigError,
    DataError,
    DataRanOutWarning,
    NonFiniteLossWarning,
    UnsupportedError,
    warn,
)
from ipufit.losses import TO_PROBABILITIES
from ipufit.optimizers import Optimization, WeightAverage
from ipufit.state import RunState, awaited, span
from ipufit.types import Logs

T = TypeVar("T")


@dataclass(eq=False)
class Training:
    """The program, optimizer and metrics that a training call uses and changes.

    Attributes:
        executors: The programs.
        batches: The calls, whose shapes are compiled for.
        plan: The factors of a call.
        options: Options of the training program.
        optimization: The optimizer and its schedule.
        metrics: Loss and metrics to report.
        average: The running average of the weights; None for none.
        watched: Shapes of the parameters whose gradients are sent to the host, by name.
        choice: The updates of a call, and why not more if ipufit chose them.
        program: The program; set by `prepare`.
    """

    executors: Executors
    batches: TrainingBatches
    plan: BatchPlan
    options: poptorch.Options
    optimization: Optimization
    metrics: MetricState
    average: WeightAverage | None
    watched: Mapping[str, torch.Size]
    choice: Choice
    program: TrainingProgram = field(init=False)
    _display: ProgressDisplay = field(init=False)
    _last_call: int = field(default=0, init=False)

    def prepare(self, display: ProgressDisplay) -> None:
        """Attach the program, with the weights of the user's module."""
        self._display = display
        # A call of the losses on the host may have shown what they ignore.
        self.batches.count(self.metrics.objective.ignored)
        try:
            self.program = self.executors.prepare_training(self.spec, display)
        except CountsMissingError:
            self.batches.count(self.metrics.objective.ignored)
            self.program = self.executors.prepare_training(self.spec, display)
        findings = self.program.step.findings
        self.metrics.adopt(findings.metrics, findings.entries)

    @property
    def spec(self) -> TrainingSpec:
        """All that the program is built for."""
        return TrainingSpec(
            module=self.executors.module,
            config=self.executors.config,
            structure=self.batches.structure,
            plan=self.batches.plan_of_samples,
            options=self.options,
            example=self.batches.example(),
            remark=self.remark,
            computation=self.metrics.objective.trained,
            objective=self.metrics.objective,
            optimization=self.optimization,
            watched=sorted(self.watched),
        )

    @property
    def remark(self) -> str:
        """Updates of a call and why not more, as text; "" if ipufit didn't choose."""
        return self.choice.remark("update", "device_iterations")

    @uninterrupted
    def run(self, call: Call, *, is_scheduled: bool = True) -> None:
        """Train on one call, and add to the metrics.

        Args:
            call: The call.
            is_scheduled: False to leave learning rates and the count of updates
                unchanged.
        """
        updates, source = self.plan.device_iterations, self.batches.source
        if is_scheduled:
            with span("optimizer"):
                self.optimization.before_call()
        try:  # a context manager would cost more in each call
            sums, outputs = self.train(call.batch)
        except DataError as error:
            with naming_data(source):
                raise error
        if is_scheduled:
            with span("optimizer"):
                self.optimization.after_call(updates)
        if self.average is not None:
            with span("weights"):
                self.average.update(updates, self.executors.weights_shown)
        with span("metrics"):
            self.metrics.add(sums)
            self.metrics.note_refused_target(
                sums,
                partial(self._zeros_and_labels, call),
                partial(naming_data, source),
            )
            if outputs is not None:
                self._stream(outputs, call)

    def train(self, batch: list[Tensor]) -> tuple[Tensor, Any]:
        """Make one call of the program; see `Executors.train`."""
        if not self.executors.has(self.program):  # another run has displaced it
            self.program.check()
            self.prepare(self._display)
        results = self.executors.train(self.program, batch)
        self._last_call = self.program.num_trained
        return results

    def device_random_state(self) -> list[int] | None:
        """Return the device's random state; None without program or seed."""
        if not self.executors.has(self.program):
            return None
        return self.program.executor.rng_state

    def losses_of_call(self) -> list[float]:
        """Return the running loss after each update of the last call.

        If not every micro-batch is returned, only the loss after the last update is
        known.
        """
        is_each = self.options.output_mode == poptorch.OutputMode.All.value
        return self.metrics.losses(self.plan.device_iterations if is_each else 1)

    @uninterrupted
    def finish(self) -> None:
        """Replace the weights by their average, as Keras does after `fit`."""
        if self.average is not None:
            self.executors.fetch_weights()
            self.average.apply()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Compute the mean of the watched gradients of the last call, by parameter.

        An anchored gradient is that of one micro-batch on one replica, multiplied by
        the loss scaling (PopART, `tensornames.hpp`); under `OutputMode.Sum` these are
        summed on each replica. An update's gradient is their mean, or their sum if the
        options reduce gradients by sums.

        Returns:
            float32 tensors of the parameters' shapes: the mean over the updates of the
            call and over all processes.

        Raises:
            ConfigError: No call was made yet, or another run has made one since.
        """
        if not self._last_call or self._last_call != self.program.num_trained:
            raise ConfigError(
                "The device has no gradients of a call of this run: ask for them in "
                "on_train_batch_end, before anything else is trained there."
            )
        plan, options = self.plan, self.options
        scale = float(getattr(self.optimization.optimizer, "loss_scaling", 1.0))
        kind = options.Training.accumulation_and_replication_reduction_type
        is_mean = kind != poptorch.ReductionType.Sum
        per_update = plan.gradient_accumulation * plan.replicas
        executor, means = self.program.executor, {}
        for name, shape in self.watched.items():
            seen = executor.getAnchoredTensor(GRADIENT_OF + name).to(torch.float32)
            seen = seen.reshape(seen.numel() // max(shape.numel(), 1), *shape)
            count = max(len(seen), 1)
            if options.output_mode == poptorch.OutputMode.Sum.value:
                count = per_update * plan.device_iterations
            factor = 1 if is_mean else per_update
            means[name] = seen.sum(0).mul(factor / (count * scale))
        processes = self.metrics.processes
        if processes.are_several and means:
            total: Any = processes.summed(
                torch.cat([m.flatten() for m in means.values()])
            )
            total.div_(processes.count if is_mean else 1)
            parts = total.split([mean.numel() for mean in means.values()])
            for (name, mean), part in zip(means.items(), parts):
                means[name] = part.reshape(mean.shape)
        return means

    def _labels(self, call: Call) -> Labels:
        """Return the labels that metrics take."""
        structure = self.batches.structure
        labels, mixing = structure.labels(call.batch), structure.mixing(call.batch)
        if mixing is None:
            return labels
        size = self.batches.plan_of_samples.micro_batch_size
        return dominant_labels(labels, mixing, size)

    def _zeros_and_labels(self, call: Call) -> tuple[Any, Labels]:
        """Return zeros in place of the outputs of a call, and its labels."""
        (outputs, _), *_ = self.program.step.examples
        num_rows = self.batches.structure.num_rows(call.batch)

        def zeros(leaf: Any) -> Any:
            example = leaf() if isinstance(leaf, partial) else leaf
            if not isinstance(example, Tensor):
                return example
            return example.new_zeros((num_rows, *example.shape[1:]))

        return widened_all(tree_map(zeros, outputs), self._labels(call))

    def _stream(self, outputs: Any, call: Call) -> None:
        """Pass the unpadded rows that were returned to streamed metrics."""
        plan = self.batches.plan_of_samples
        rows = returned_rows(self.options, plan)
        if rows is None:
            rows = torch.arange(plan.samples_per_call)
        tensors = [leaf for leaf in leaves_of(outputs) if isinstance(leaf, Tensor)]
        check_rows(tensors, rows.numel(), self.batches.structure.rows)
        is_real, labels = self.batches.is_real(call), self._labels(call)
        of_update = rows.div(plan.samples_per_update, rounding_mode="floor")
        for update in range(plan.device_iterations):
            # A metric that rounds gives the same value, however many updates come.
            is_taken = of_update.eq(update)
            if is_real is not None:
                is_taken = is_taken.logical_and(is_real[rows])
            if not is_taken.any():
                continue
            plain = labels._replace(share=None, counted=None)
            taken = cut(plain, rows[is_taken])
            self.metrics.stream(*widened_all(cut(outputs, is_taken), taken))


_TARGET = re.compile(r"\b[Tt]arget (-?[0-9.e+]+)(?: is out of bounds|, and takes)")
"""A target in a message of torch's or a metric's."""


@contextlib.contextmanager
def naming_data(source: Source) -> Iterator[None]:
    """Add the name of validation data, and a target's row, to errors of the data."""
    try:
        yield
    except DataError as error:
        target, name = _TARGET.search(str(error)), source.name
        row = source.row_of_target(float(target[1])) if target else None
        if (row is None and name == "x") or f"`{name}`" in str(error):
            raise
        place = f"`{name}`" if row is None else f"row {row} of `{name}`"
        raise DataError(f"{error} (In {place}.)") from error.__cause__


@dataclass(eq=False)
class Inference:
    """The calls of an inference program, for `evaluate` or `predict`.

    Attributes:
        executors: The programs.
        batches: The calls that contain each sample once.
        plan: The factors of a call.
        options: Options of the program.
        computation: The computation of the program.
        choice: The passes of a call, if ipufit chose the number.
        program: The program; set by `prepare`.
    """

    executors: Executors
    batches: InferenceBatches
    plan: BatchPlan
    options: poptorch.Options
    computation: Computation
    choice: Choice | None
    program: Program = field(init=False)
    _display: ProgressDisplay = field(init=False)

    @property
    def remark(self) -> str:
        """Passes of a call and why not more, as text; "" if ipufit didn't choose."""
        return self.choice.remark("pass", "inference_iterations") if self.choice else ""

    def prepare(self, display: ProgressDisplay) -> None:
        """Attach the program, with the newest weights."""
        self._display = display
        self.program = self.executors.prepare_inference(self.spec, display)

    @property
    def spec(self) -> ProgramSpec:
        """All that the program is built for."""
        inputs_only = not self.computation.takes_labels
        return ProgramSpec(
            module=self.executors.module,
            config=self.executors.config.inference_config,
            structure=self.batches.structure,
            plan=self.batches.plan_of_samples,
            options=self.options,
            example=self.batches.example(inputs_only=inputs_only),
            remark=self.remark,
            computation=self.computation,
            objective=None,
        )

    def infer(self, batch: list[Tensor]) -> tuple[list[Tensor], Scalars]:
        """Make one call of the program; see `Executors.infer`."""
        if not self.executors.has(self.program):  # another run has displaced it
            self.program.check()
            self.prepare(self._display)
        return self.executors.infer(self.program, batch)

    def outputs(self, hooks: CallbackList, run: RunState) -> Iterator[Any]:
        """Call the prepared program on all data, and yield the outputs of each call.

        Args:
            hooks: Callbacks, whose hooks are called for each call.
            run: State of the run; `run.stop_predicting` ends the prediction.

        Yields:
            Tensors, nested as the module returns them, one row per sample. If items are
            whole micro-batches and there are several processes: pairs of all rows, and
            a mask of the rows that are samples.
        """
        run.stop_predicting = False
        is_whole = self.batches.structure.rows is not None
        hook = "on_predict_batch_end"
        sync = ProcessSync(hooks, run, hook, is_stopped=lambda: run.stop_predicting)
        hooks.on_predict_begin({})
        for number, call in enumerate(awaited(self.batches)):
            first = number * self.batches.passes_per_call
            hooks.on_predict_batch_begin(first, {})
            tensors, _ = self.infer(call.batch)
            if number == 0:  # every call has the same shapes
                num_rows = self.batches.plan_of_samples.samples_per_call
                check_rows(tensors, num_rows, self.batches.structure.rows)
            outputs = self.program.step.findings.packing.nest(tensors)
            is_real = self.batches.is_real(call)
            every_row = outputs, is_real
            if is_real is not None:
                outputs = cut(outputs, is_real)
            last = first + self.batches.num_passes(call.num_real_of_all) - 1
            hooks.on_predict_batch_end(last, {"outputs": outputs})
            yield every_row if is_whole and run.processes.are_several else outputs
            if sync.ends_pass():
                break
        hooks.on_predict_end({})


@dataclass(eq=False)
class Evaluation(Inference):
    """An evaluation on a set of samples, run once or after every epoch.

    A loss of the module or a step, and logged scalars, are means over a micro-batch.
    So rows that don't fill one run in a program of their size.

    Attributes:
        metrics: Loss and metrics to report.
        resized: Returns the same evaluation with another micro-batch size.
        left_over: Numbers of rows that don't fill a micro-batch, as far as they are
            known before the first call.
        prefix: Text before the names of metrics: the name of the set, or "".
    """

    metrics: MetricState
    resized: Callable[[int], Inference]
    left_over: Sequence[int] = ()
    prefix: str = ""
    _shorter: dict[int, Inference] = field(default_factory=dict, init=False)
    _waiting: RowBuffer = field(init=False)
    _packing: Packing = field(default=Packing(), init=False)  # of the buffered rows
    _bound: BoundObjective | None = field(default=None, init=False)  # to their outputs
    _seen: tuple[int, Tensor] = field(init=False)  # number of rows there, their sums
    _is_checked: bool = field(init=False)  # that losses and metrics are no sums
    _is_finite: bool = field(default=True, init=False)  # each loss so far

    def prepare(self, display: ProgressDisplay) -> None:
        """Attach the program; refuse it if it reports neither loss nor scalars."""
        super().prepare(display)
        has_scalars = bool(self.program.step.findings.packing.names)
        if self.metrics.objective.steps is not None and not has_scalars:
            raise ConfigError(
                "The step of the validation returned no loss and reports nothing. "
                "Return the loss, or a dict with 'loss' or other scalars."
            )
        if self.metrics.objective.owns_loss and not has_scalars:
            raise ConfigError(
                "There is no loss: compile() got none, and in eval mode the module "
                f"returns none in a form that ipufit knows ({OWN_LOSS}). Return it in "
                "eval mode too, with `if labels is not None` in the place of `if "
                "self.training`; or pass loss='cross_entropy' or the like to compile()."
            )
        if has_scalars and self.options.output_mode != poptorch.OutputMode.All.value:
            raise UnsupportedError(
                "The module returns its own loss, or logs scalars, and inference_"
                "options don't ask for OutputMode.All: it isn't known "
                "which samples they cover. Leave the mode at its default."
            )
        for rows in self.left_over if has_scalars else ():
            if rows not in self._shorter:  # compiled before the run begins
                self._smaller_evaluation(rows)

    def _smaller_evaluation(self, rows: int) -> Inference:
        """Return the prepared evaluation for micro-batches of fewer rows."""
        if rows not in self._shorter:
            self._shorter[rows] = self.resized(rows)
        try:
            self._shorter[rows].prepare(self._display)
        except (DataError, UnsupportedError) as error:
            size = self.plan.micro_batch_size
            raise type(error)(
                f"{error} {rows} of the samples don't fill a micro-batch of {size}, "
                "and run in a smaller one, so that the loss and scalars are exact. If "
                "forward needs its size, take a batch_size that leaves none over."
            ) from error.__cause__
        return self._shorter[rows]

    def run(self, hooks: CallbackList, run: RunState) -> Logs:
        """Return the metrics over every sample, or over the samples that come back.

        The host computes the metrics from the outputs. Padding is removed first, and
        targets are cut to the rows that the output mode returns. Rows are grouped
        independently of the size of calls, so that the size changes no bit.

        Args:
            hooks: Callbacks, whose hooks are called for each call.
            run: State of the run; `run.stop_evaluating` ends the evaluation, and so
                does an eviction.
        """
        self.metrics.reset()
        outer, run.metrics = run.metrics, self.metrics
        # A user's function may return one value for all rows of a micro-batch, as in
        # training. And rows of several processes are joined pass by pass.
        objective, plan = self.metrics.objective, self.batches.plan_of_samples
        is_joined = objective.is_streamed and self.metrics.processes.are_several
        is_additive = objective.is_additive
        self._waiting = RowBuffer(
            plan.samples_per_update if is_additive else plan.micro_batch_size,
            by_pass=is_joined or not is_additive,
        )
        self._seen = 0, torch.zeros(0)
        program, key = self.program, objective.program_key
        self._is_checked = program.evaluated == key
        run.stop_evaluating = False
        hooks.on_test_begin({})
        hook = "on_test_batch_end"
        sync = ProcessSync(hooks, run, hook, is_stopped=lambda: run.stop_evaluating)
        for number, call in enumerate(awaited(self.batches)):
            first = number * self.batches.passes_per_call
            hooks.on_test_batch_begin(first, {})
            self._add_call(call)
            if not number and not self.metrics.samples:
                # Unfit targets fail now, and metrics get names.
                self._sums_of_waiting()
            last = first + self.batches.num_passes(call.num_real_of_all) - 1
            logs = sync.running(self.metrics, self._sums_of_waiting)
            hooks.on_test_batch_end(last, self.named(logs))
            if sync.ends_pass():
                break
        self._count_waiting()
        self.metrics.gather()
        logs = self.metrics.logs()
        self._warn_if_not_finite(logs.get("loss", 0.0), run)
        logs = self.named(logs)
        hooks.on_test_end(dict(logs))
        run.metrics = outer
        return logs

    def _warn_if_not_finite(self, loss: float, run: RunState) -> None:
        """Warn once in a fit, and not if the loss of its training was NaN before."""
        if math.isfinite(loss) or not (self._is_finite and run.is_finite):
            return
        if not self.metrics.samples or self.metrics.is_loss_empty:
            return
        self._is_finite, source = False, self.batches.source
        advice = source.first_not_finite() or (
            f"{_cause_of_nan(self.metrics.objective)}Look for NaN, infinite and large "
            "values in the data and in the weights."
        )
        text = f"The loss of `{source.name}` is {loss}. {advice.rstrip()}"
        warn_in_first_process(text, NonFiniteLossWarning)

    def names(self, trained: MetricState) -> set[str]:
        """Return the metrics' names that are known before the first call."""
        names, parts = {"loss"}, trained.parts
        for one in self.metrics.objective.metrics:
            names.update(parts.get(one.full_name, [one.full_name]))
        return {*names, *self.program.step.findings.packing.names}

    def named(self, of_metrics: Mapping[str, T]) -> dict[str, T]:
        """Prefix the names of metrics with the name of the set."""
        return {self.prefix + name: value for name, value in of_metrics.items()}

    def _sums_of_waiting(self) -> Tensor | None:
        """Return the sums of buffered rows; None if there are none."""
        num_rows = self._waiting.num_rows
        if num_rows and self._seen[0] != num_rows:
            self._seen = num_rows, self._vector(self._waiting.all())
        return self._seen[1] if num_rows else None

    def _count_waiting(self) -> None:
        """Count all buffered rows."""
        vector = self._sums_of_waiting()
        if vector is not None:
            self._count(self._waiting.all(), vector)
            self._waiting.clear()

    def _count(self, rows: Rows, vector: Tensor) -> None:
        self._seen = 0, vector
        self.metrics.add(vector)
        self.metrics.stream(*widened_all(*self._nested(rows)))

    def _add_call(self, call: Call) -> None:
        """Run a call.

        Rows that don't fill a micro-batch run in smaller programs. All processes run
        the same programs; a process without such rows adds nothing.
        """
        size = self.batches.plan_of_samples.micro_batch_size
        left_over: Sequence[int] = ()
        if self.program.step.findings.packing.names:
            left_over = self.batches.left_over(call.num_real_of_each)
        if not left_over:
            self._add_rows(self, call)
            return
        own = call.num_real % size
        if max(call.num_real_of_each) >= size:
            self._add_rows(self, call._replace(num_real=call.num_real - own))
        for rows in left_over:
            count = rows if rows == own else 0
            first = call.num_real - own if count else 0
            short = self._smaller_evaluation(rows)
            batch = [leaf[first : first + rows] for leaf in call.batch]
            batch = pad(batch, short.plan.samples_per_call)
            self._add_rows(short, Call(batch, count, call.num_real_of_each))

    def _add_rows(self, program: Inference, call: Call) -> None:
        batch, is_real = call.batch, program.batches.is_real(call)
        with naming_data(self.batches.source):
            outputs, scalars = program.infer(batch)
        plan = program.batches.plan_of_samples
        returned = returned_rows(program.options, plan)
        num_rows = plan.samples_per_call if returned is None else returned.numel()
        check_rows(outputs, num_rows, self.batches.structure.rows)
        if scalars:
            self._add_scalars(scalars, _counts(program, call, is_real))
        labels = self.batches.structure.tensors_of_labels(batch)
        if returned is not None:
            labels = [tensor[returned] for tensor in labels]
            is_real = None if is_real is None else is_real[returned]
        packing = program.program.step.findings.packing
        rows = Rows([*outputs, *labels], num_rows)
        if packing is not self._packing:
            # Outputs may have an axis of the micro-batch.
            shapes = [_row_shapes(part) for part in self._waiting.parts[:1]]
            are_alike = shapes == [_row_shapes(rows)]
            if not are_alike or packing.structure != self._packing.structure:
                self._count_waiting()
            self._packing, self._bound = packing, None
        if is_real is not None:
            num_real = int(is_real.sum())
            if not num_real:  # no real row came back: NaN under the right names
                self.metrics.add(torch.zeros_like(self._vector(rows)))
                return
            is_prefix = bool(is_real[:num_real].all())  # a slice copies nothing
            chosen = slice(num_real) if is_prefix else is_real
            rows = Rows([tensor[chosen] for tensor in rows.tensors], num_real)
        for group in self._waiting.groups(rows):
            self._count(group, self._vector(group))

    def _nested(self, rows: Rows) -> tuple[Any, Labels]:
        """Nest outputs and labels as the module and the data do."""
        rest, structure = iter(rows.tensors), self.batches.structure
        outputs, targets = self._packing.nest(rest), structure.targets.rebuild(rest)
        weights = structure.weights.rebuild(rest) if structure.has_weights else None
        return outputs, Labels(targets, weights)

    def _vector(self, rows: Rows) -> Tensor:
        num_rows, (outputs, labels) = rows.num_rows, self._nested(rows)
        # Programs of other calls may lay out the same outputs otherwise, and a sum goes
        # over memory in its order.
        outputs, labels = widened_all(map_tensors(Tensor.contiguous, outputs), labels)
        objective = self.metrics.objective
        with contextlib.ExitStack() as stack:
            stack.enter_context(naming_data(self.batches.source))
            stack.enter_context(torch.no_grad())
            for loss in objective.modules:
                stack.enter_context(mode(loss, training=False))
            if not self._is_checked and num_rows > 1:
                refuse_sums(objective, outputs, labels, num_rows)
                self._is_checked = True
                self.program.evaluated = objective.program_key
            probabilities = self.program.step.findings.probabilities
            if self._bound is None:
                self._bound = objective.bind(outputs, labels, probabilities)
            terms = self._bound.terms(outputs, labels, num_rows)
            vector, entries = vector_of(
                self._bound, outputs, labels, num_rows, terms, {}
            )
        self.metrics.adopt(self._bound.metrics, entries)
        self.metrics.note_refused_target(
            vector,
            lambda: (outputs, labels),
            partial(naming_data, self.batches.source),
        )
        return vector

    def _add_scalars(self, scalars: Scalars, counts: Sequence[int]) -> None:
        """Add means over micro-batches, from the first on.

        Args:
            scalars: Means over the micro-batches of a call, by name.
            counts: Number of samples of each micro-batch that counts.
        """
        values = {name: tensor.tolist() for name, tensor in scalars.items()}
        for index, count in enumerate(counts):
            if count:  # the mean of a micro-batch without samples is none
                means = {name: column[index] for name, column in values.items()}
                self.metrics.add_means(means, count)


def _counts(program: Inference, call: Call, is_real: Tensor | None) -> list[int]:
    """Return the number of samples of each micro-batch whose means count.

    In a micro-batch of `FixedSizeBatches` the module itself leaves padding out.
    """
    size = program.batches.plan_of_samples.micro_batch_size
    if program.batches.structure.rows is None or is_real is None:
        return [size] * (call.num_real // size)
    return [int(count) for count in is_real.reshape(-1, size).sum(dim=1)]


def _row_shapes(rows: Rows) -> list[torch.Size]:
    return [tensor.shape[1:] for tensor in rows.tensors]


# Training, epoch after epoch ----------------------------------------------------------


@dataclass(frozen=True)
class Validations:
    """The validations of a fit.

    Attributes:
        sets: The evaluation of each set of validation data.
        is_after_epoch: Returns whether a validation follows the epoch with this index.
        calls_between: Number of calls between validations within an epoch; None for
            validations at its end only.
    """

    sets: Sequence[Evaluation]
    is_after_epoch: Callable[[int], bool]
    calls_between: int | None

    def prepare(self, display: ProgressDisplay) -> None:
        """Compile the programs, or take those that are kept."""
        for validation in self.sets:
            with naming_data(validation.batches.source):
                validation.prepare(display)

    def close(self) -> None:
        """End the loading of all data."""
        for validation in self.sets:
            validation.batches.close()

    def names(self, trained: MetricState) -> list[tuple[str, set[str]]]:
        """Return the prefix of each set, and the names of its metrics."""
        return [(each.prefix, each.names(trained)) for each in self.sets]

    def directions(self, trained: MetricState) -> dict[str, str]:
        """Return the better direction of each metric, those of training included."""
        directions: dict[str, str] = {}
        for validation in self.sets:
            of_set = {**validation.metrics.directions, **trained.directions}
            directions.update(validation.named(of_set))
        return {**directions, **trained.directions}

    def are_due(self, num_calls: int) -> bool:
        """Return whether validations are due after this number of calls of an epoch."""
        return self.calls_between is not None and num_calls % self.calls_between == 0

    def run(
        self,
        generators: Sequence[torch.Generator],
        hooks: CallbackList,
        run: RunState,
        display: ProgressDisplay,
    ) -> None:
        """Validate on all sets, unless the resumed run has done so before.

        If the run is evicted meanwhile, random states and streams are restored: the
        process that resumes the run validates again.

        Args:
            generators: Random generators of the user's loader of training data.
            hooks: Callbacks of the run.
            run: State of the run.
            display: Shows what is compiled.

        Raises:
            EvictedError: The process was told to end.
        """
        if not self.sets or run.validated_calls == run.calls:
            return
        before = HostRandomState(generators) if run.heeds_eviction else None
        sources = [validation.batches.source for validation in self.sets]
        streams = [source for source in sources if isinstance(source, StreamSource)]
        states = [stream.state_dict() if before else None for stream in streams]
        logs: Logs = {}
        for validation in self.sets:
            validation.prepare(display)
            logs.update(validation.run(hooks, run))
            if before is not None and run.is_evicted:
                for stream, state in zip(streams, states):
                    stream.load_state_dict(state, is_due=True)
                set_random_state(before.tensors(), generators)
                run.evict()
                raise EvictedError
            run.directions.update(validation.named(validation.metrics.directions))
        for stream in streams:
            stream.count_validated()
        run.validated, run.validated_calls = logs, run.calls


def train(
    training: Training,
    epochs: Iterable[int],
    validations: Validations,
    hooks: CallbackList,
    run: RunState,
    display: ProgressDisplay,
    sync: ProcessSync,
) -> None:
    """Train for some epochs, and validate within and after them.

    Args:
        training: The training; its program is prepared.
        epochs: Indices of the epochs. The first may be under way, in a resumed run.
        validations: Validations between calls and after epochs.
        hooks: Callbacks of the run.
        run: State of the run.
        display: Shows what is compiled for a validation.
        sync: Exchanges logs and requests between processes.
    """
    updates, batches = training.plan.device_iterations, training.batches
    validate = partial(validations.run, batches.source.generators, hooks, run, display)
    for epoch in epochs:
        if not run.calls:  # else it began before the interruption
            run.begin_epoch(epoch)
            training.metrics.reset()
            hooks.on_epoch_begin(epoch, {})
        elif validations.are_due(run.calls):
            validate()
        uninterrupted.remember_signals()  # a hook may have set a handler
        for call in awaited(batches.epoch(run.calls)):
            first = run.calls * updates
            hooks.on_train_batch_begin(first, {})
            with uninterrupted:
                training.run(call)
                run.count_call(updates, call.num_samples_of_all)
            _warn_if_not_finite(training, run, first)
            logs = sync.running(training.metrics)
            hooks.on_train_batch_end(first + updates - 1, logs)
            if sync.ends_fit():
                break
            # Before the next call is taken from the data: a run that is saved meanwhile
            # goes on with the validation.
            if validations.are_due(run.calls):
                validate()
        _check_length(training, run)
        if validations.is_after_epoch(epoch):
            validate()
        # An eviction before this saves each process's own sums.
        training.metrics.gather()
        logs = training.metrics.logs()
        for name, value in run.validated.items():
            logs[f"val_{name}"] = value
        logs = dict(sorted(logs.items()))
        hooks.on_epoch_end(epoch, dict(logs))
        with uninterrupted:
            run.end_epoch(logs)
            training.optimization.end_epoch()
        if sync.ends_fit(is_due=True):
            break


def _check_length(training: Training, run: RunState) -> None:
    """Warn if the data ended within the epoch; refuse an epoch without a call."""
    batches = training.batches
    if batches.ran_out:
        updates = run.calls * training.plan.device_iterations
        ending = "Training ends." if batches.is_spent else "The next begins anew."
        warn_in_first_process(
            f"The data ran out after {updates} updates of epoch {run.epoch + 1}, "
            f"fewer than steps_per_epoch asks for. {ending}",
            DataRanOutWarning,
        )
        if batches.is_spent:
            run.stop("the data ran out")
    elif not run.calls:
        raise DataError(
            f"Epoch {run.epoch + 1} has no complete call: `x` gave fewer samples than "
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
    source, objective = training.batches.source, training.metrics.objective
    warn(
        f"The training loss is {losses[at]} in epoch {run.epoch + 1}, at update "
        f"{where}. The weights are probably lost. "
        f"{source.first_not_finite()}{_cause_of_nan(objective)}Lower the learning "
        "rate, or look for NaN, infinite and large values in the data. `ipufit check` "
        "names operators that make NaN on a device.",
        NonFiniteLossWarning,
    )


def _cause_of_nan(objective: Objective) -> str:
    """Return a sentence on what makes a loss of this kind NaN; "" if it is unknown."""
    if objective.owns_loss:
        return (
            "In a step or forward, cross_entropy of a micro-batch whose targets are "
            "all ignored (-100) is NaN: divide its sum by their number, at least 1. "
        )
    if any(loss.takes_probabilities for _, loss in objective.losses):
        return (
            "BCELoss is NaN unless all outputs are above 0 and below 1: "
            f"{TO_PROBABILITIES}. "
        )
    return ""
