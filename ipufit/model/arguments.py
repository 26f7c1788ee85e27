# SPDX-License-Identifier: Apache-2.0
"""Arguments of `compile` and `fit`, and checks of them."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, Sequence

import torch

from ipufit import checkpoint as files
from ipufit._arguments import (
    check_choice,
    check_flags,
    check_integer,
    check_number,
    shown,
)
from ipufit._tree import leaves_of
from ipufit.batching import BatchPlan
from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike
from ipufit.config import IPUConfig
from ipufit.data.datasets import Source
from ipufit.data.streams import StreamSource
from ipufit.distributed import Processes
from ipufit.engine.objective import Objective, StepFunction, Steps, checked_step
from ipufit.errors import ConfigError, DataError, UnsupportedError
from ipufit.losses import check_smoothing
from ipufit.mixing import Mixing
from ipufit.optimizers import Optimization, WeightAverage


@dataclass(frozen=True)
class CompileSettings:
    """The settings that `compile` makes from its arguments.

    Attributes:
        objective: Losses and metrics of `evaluate` and of validations.
        trained: Losses and metrics of `fit`.
        optimization: The optimizer and its schedule.
        average: The running average of the weights; None for none.
        mixing: Mixup and CutMix in training; None for no mixing.
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


_POSITIVE = (
    *("batch_size", "steps_per_epoch", "validation_updates"),
    *("validation_batch_size", "validation_steps"),
)
"""Arguments of `fit` that are None, or a whole number of 1 or more."""


@dataclass(frozen=True, eq=False)
class FitArguments:
    """Arguments of `fit`, and the checks of them.

    Each is checked by itself when this is made. `check_loss`, `check_processes` and
    `calls_between_validations` check whether they fit the loss, all processes, and the
    validation sets. Numbers of samples are checked where they are divided:
    `derive_plan` for `batch_size`, `TrainingBatches.set_epochs` for `steps_per_epoch`.

    Attributes:
        updates_per_call: Number of updates of each call; None to let ipufit choose.
        checkpoint: Checkpoint of the run to resume; None for a new run.
    """

    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    callbacks: CallbackLike = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: bool = True
    class_weight: Mapping[int, float] | None = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | Sequence[int] = 1
    validation_updates: int | None = None
    drop_last: bool | str = True
    updates_per_call: int | None = None
    checkpoint: files.Checkpoint | None = None

    def __post_init__(self) -> None:
        check_flags(shuffle=self.shuffle)
        check_choice("drop_last", self.drop_last, (True, False, "pad"))
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least=1)
        check_integer("epochs", self.epochs)
        check_integer("initial_epoch", self.initial_epoch)
        freq: Any = self.validation_freq
        for every in freq if _is_listed(freq) else [freq]:
            check_integer("validation_freq", every, least=1)
        if self.validation_split is not None:
            check_number("validation_split", self.validation_split, least=0, below=1)
        if self.callbacks is not None:
            CallbackList(self.callbacks)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> FitArguments:
        """Create the arguments from all arguments of a `fit`, by name."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{n: value for n, value in arguments.items() if n in names})

    @property
    def data(self) -> tuple[Any, Any, Any]:
        """Inputs, targets and weights of samples."""
        return self.x, self.y, self.sample_weight

    def is_validated(self, epoch: int) -> bool:
        """Return whether a validation follows the epoch with this index."""
        freq: Any = self.validation_freq
        if _is_listed(freq):
            return epoch + 1 in freq
        return (epoch + 1) % int(freq) == 0

    @property
    def pads(self) -> bool:
        """Whether the last call of an epoch is filled up with padding."""
        return self.drop_last is not True

    def check_loss(self, objective: Objective, source: Source) -> None:
        """Refuse data, class weights or padding that the loss can't take.

        Raises:
            DataError: Targets are missing.
            UnsupportedError: The module returns its own loss.
        """
        require_targets(source, objective, "train")
        class_weight = self.class_weight
        is_weighted = class_weight is not None or self.pads
        are_samples = source.structure.rows is None
        if not (are_samples and objective.owns_loss and is_weighted):
            return
        what = "class_weight"
        if class_weight is None:
            what = f"drop_last={self.drop_last!r}"
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

    def check_processes(
        self, processes: Processes, source: Source, validated: Mapping[str, Source]
    ) -> None:
        """Refuse arguments or arrays in memory that differ between processes.

        Raises:
            ProcessError: Some of the arguments aren't the same everywhere.
            DataError: Some rows of the arrays, or the shapes, aren't.
        """
        if not processes.are_several:
            return
        counts = {name: common_samples(set_) for name, set_ in validated.items()}
        callbacks = CallbackList(self.callbacks).callbacks
        processes.require_same(
            "fit",
            samples=common_samples(source),
            batch_size=self.batch_size,
            epochs=self.epochs,
            steps_per_epoch=self.steps_per_epoch,
            shuffle=self.shuffle,
            validation_samples=counts.get("", counts or None),
            callbacks=[type(callback).__name__ for callback in callbacks],
        )
        for set_ in (source, *validated.values()):
            if len(set(processes.gathered(set_.checksum()))) > 1:
                raise DataError(
                    f"The arrays of `{set_.name}` have other rows in some processes. "
                    "Each process takes its part of the same data, so a row could be "
                    "trained on in one process and validated on in another. Seed what "
                    "splits or makes them: train_test_split(..., random_state=0), or "
                    "random_split(..., generator=torch.Generator().manual_seed(0))."
                )

    def calls_between_validations(
        self, updates_per_call: int, validated: Mapping[str, Source]
    ) -> int | None:
        """Return the number of training calls between two validations in an epoch.

        Returns:
            The number; None if `validation_updates` isn't set.

        Raises:
            ConfigError: There is no validation data, or validations don't fall between
                calls.
            DataError: A validation set is a generator, and there are several
                validations.
        """
        calls, updates = None, self.validation_updates
        if updates is not None:
            calls, rest = divmod(updates, updates_per_call)
            if rest:
                raise ConfigError(
                    f"validation_updates={updates} isn't a multiple of the "
                    f"{updates_per_call} updates that a call makes (device_iterations),"
                    " and a validation comes between calls. Choose a multiple."
                )
            if not validated:
                raise ConfigError(
                    f"validation_updates={updates} was given, and there is nothing to "
                    "validate on. Pass validation_data, or leave it out."
                )
        for set_ in validated.values():
            if self.validation_steps is not None or not set_.is_one_shot:
                continue
            epochs = range(self.initial_epoch, self.epochs)
            times = len([*itertools.islice(filter(self.is_validated, epochs), 2)])
            if calls is not None or times > 1:
                raise DataError(
                    f"`{set_.name}` is a generator, which can be gone through once, "
                    "and there are several validations. Pass a loader or a dataset, "
                    "which can be begun anew."
                )
        return calls


def _is_listed(freq: Any) -> bool:
    return isinstance(freq, Sequence) and not isinstance(freq, (str, bytes))


@dataclass(frozen=True, eq=False)
class InferenceArguments:
    """Arguments of an evaluation or prediction, on which its calls depend.

    Attributes:
        batch_size: Samples of one pass, or step, over all replicas; None for the
            default.
        steps: Number of steps; None for all samples.
        callbacks: Callbacks of the run.
        training: Plan of the training that is validated; None outside `fit`.
        beside: Further validation sets, which use the same program if possible.
        max_rows: Number of samples of later data; None if unknown.
        is_open: Whether ipufit may choose the passes of a call, if the config leaves
            them open.
        is_single: Whether the data is a batch for one call, if the config leaves the
            micro-batch open.
    """

    batch_size: int | None = None
    steps: int | None = None
    callbacks: CallbackLike = None
    training: BatchPlan | None = None
    beside: Sequence[Source] = ()
    max_rows: int | None = None
    is_open: bool = True
    is_single: bool = False


def common_samples(source: Source) -> int | None:
    """Return the number of samples, or None if processes have different samples."""
    return None if isinstance(source, StreamSource) else source.num_samples


def require_targets(source: Source, objective: Objective, purpose: str) -> None:
    """Refuse samples without the targets that losses and metrics need.

    Raises:
        DataError: Targets are missing, or a binary loss can't take those in memory.
        UnsupportedError: There are weights, and the module returns its own loss.
    """
    if not objective.owns_loss:
        source.require_targets(purpose)
        _require_labels(source, objective)
    elif objective.metrics:
        source.require_targets("compute metrics")
    is_of_module = objective.owns_loss and objective.steps is None
    if is_of_module and source.structure.has_weights:
        raise UnsupportedError(
            f"`{source.name}` has sample weights, but the module returns its own loss, "
            "in which samples can't be told apart. Give the weights to the module as "
            "an input, or compile() with a loss."
        )


def _require_labels(source: Source, objective: Objective) -> None:
    """Refuse targets that are far from the 0s and 1s of a binary loss.

    Samples with weights may have any targets, because a weight of 0 leaves them out. So
    may batches of fixed size, whose mask does.

    Raises:
        DataError: Data in memory has such a target.
    """
    structure = source.structure
    if structure.has_weights or structure.rows is not None:
        return
    first = structure.num_inputs
    places = range(first, first + structure.targets.num_leaves)
    nested, losses = structure.targets.rebuild(places), {}
    for key, loss in objective.losses:
        parts = leaves_of([nested] if key is None else _at(nested, key))
        if loss.is_binary:
            losses.update({part: loss.name for part in parts if part in places})
    source.require_labels(losses)


def _at(targets: Any, key: str | int) -> list[Any]:
    """List the target of an output; no target if it can't be told by the key alone."""
    if isinstance(targets, dict):
        return [targets[key]] if key in targets else []
    if isinstance(key, int) and isinstance(targets, (list, tuple)):
        return [*targets[key : key + 1]]
    return []


def names_in_logs(
    names: Sequence[str], validated: Sequence[tuple[str, set[str]]]
) -> set[str]:
    """Return the names in an epoch's logs; refuse a name that two metrics would have.

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
                f"The training reports {name!r}, but names that begin with val_ are "
                "those of validation_data. Give the scalar or metric another name."
            )
    in_logs, set_of = set(names), dict.fromkeys(names, "the training")
    for prefix, metrics in validated:
        for metric in sorted(metrics.union(names)):
            name, this = prefix + metric, f"validation_data[{prefix[:-1]!r}]"
            if prefix and name in set_of:
                raise ConfigError(
                    f"{metric!r} of {this} would be called 'val_{name}', like a metric "
                    f"of {set_of[name]}. Give the set another name."
                )
            set_of.setdefault(name, this)
            if metric in metrics or metric.endswith("_loss"):  # of several outputs
                in_logs.add(f"val_{name}")
    return in_logs


def with_steps(config: IPUConfig, steps_per_execution: int | None) -> IPUConfig:
    """Return a config with the `steps_per_execution` of `compile`."""
    if steps_per_execution is None:
        return config
    check_integer("steps_per_execution", steps_per_execution, least=1)
    now = config.updates_per_call
    if now not in (None, steps_per_execution):
        raise ConfigError(
            f"steps_per_execution={steps_per_execution}, but the config has "
            f"device_iterations={now}, which is the same thing. Give one of them."
        )
    return replace(config, device_iterations=steps_per_execution)


def check_augmentation(
    objective: Objective, mixing: Mixing | None, label_smoothing: float
) -> None:
    """Refuse mixing or label smoothing that the loss can't take.

    Raises:
        ConfigError: `augment` or `label_smoothing` is of an unusable type or number.
        UnsupportedError: The module returns its own loss, or the loss has no classes.
    """
    if mixing is not None and not isinstance(mixing, Mixing):
        raise ConfigError(
            f"augment={shown(mixing)} must be an ipufit.Mixing: pass Mixing(mixup=0.2, "
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
        """Call the method with a batch, while `self.module` is `module`."""
        owner: Any = getattr(self.method, "__self__", None)
        before = getattr(owner, "module", module)
        if before is module:
            return self.method(batch)
        owner.module = module
        try:
            return self.method(batch)
        finally:
            owner.module = before

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same method of the same model."""
        return isinstance(other, MethodStep) and self.method == other.method

    def __hash__(self) -> int:
        return hash(self.method)


_OF_KERAS = {
    "train_step": "training_step(self, batch), which returns the loss. Gradients and "
    "the update are the device's",
    "test_step": "validation_step(self, batch), which returns the loss",
    "compute_loss": "training_step(self, batch), which returns the loss",
    "compute_metrics": "training_step(self, batch), which returns metrics beside the "
    "loss, {'loss': loss, 'error': error}",
}
"""Methods that users override in Keras, and their replacements in ipufit."""


def resolve_steps(
    model: Any,
    step: StepFunction | None,
    validation_step: StepFunction | None,
    predict_step: StepFunction | None,
) -> Steps | None:
    """Return the steps from `compile` or from methods of the model; None without.

    Raises:
        ConfigError: A step isn't a function, or the class has a method of Keras's.
    """
    checked_step("step", step)
    checked_step("validation_step", validation_step)
    checked_step("predict_step", predict_step)
    for name, instead in _OF_KERAS.items():
        if hasattr(type(model), name):
            raise ConfigError(
                f"{type(model).__name__} has Keras's method {name}(), which nothing "
                f"calls: write {instead}."
            )

    def method(name: str) -> StepFunction | None:
        bound = getattr(model, name, None)
        if bound is None:
            return None
        checked_step(name, bound, is_method=True)
        return MethodStep(bound)

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
