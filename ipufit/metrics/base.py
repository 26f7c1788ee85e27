# SPDX-License-Identifier: Apache-2.0
"""Base classes of metrics, and functions that fit outputs, targets and weights.

A `Metric` is a function of sums over samples. A training program computes the sums of
each micro-batch and adds them up on the device, so that the exact value over all
samples costs a few scalars per call. `evaluate` runs the same functions. A
`StreamedMetric` can't be computed from sums: the host computes it from all outputs.

Outputs, targets and weights are reshaped to fit each other. The class axis is the last,
or the second, as in torch's losses, if class indices fit only that. Only shapes are
read, never values, so that a device can trace it.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import math
import operator
import re
from contextvars import ContextVar
from typing import (
    Any,
    Callable,
    Iterator,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ipufit._arguments import ArgumentRepr, number_in, refuse, shown
from ipufit._tree import Structure, leaves_of, map_tensors
from ipufit.errors import ConfigError, DataError

from .target_means import TargetMeans, unknown_number

_KERAS = ("update_state", "reset_state", "reset_states")


def _refuse_keras_words(kind: type) -> None:
    """Refuse a class with methods of Keras's metrics, which nothing would call.

    Raises:
        ConfigError: The class has a method of Keras's metrics.
    """
    methods = [name for name in _KERAS if name in vars(kind)]
    if methods:
        raise ConfigError(
            f"{kind.__name__} has {methods[0]}, which is Keras's. An ipufit.Metric has "
            "sums(outputs, targets, weights), which are added over batches, and "
            "result(sums); an ipufit.StreamedMetric has update(outputs, targets, "
            "weights), result() and reset()."
        )


class NamedMetric(ArgumentRepr):
    """Base of all metrics: the name, and settings that follow from the loss.

    Args:
        name: Key in logs and History; None for the class's name in snake_case.

    The attributes are described in `Metric`.
    """

    direction: str | None = None
    ignore_index: int | None = None
    has_binary_loss: bool | None = None
    has_probabilities = False
    has_parts = False
    is_matrix = False
    _default_name: str | None = None
    _from_logits: bool | None = None
    _is_multi_label = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class with methods of Keras's metrics."""
        super().__init_subclass__(**kwargs)
        _refuse_keras_words(cls)

    def __init__(self, name: str | None = None) -> None:
        if name is None:
            return
        if not isinstance(name, str) or not name:
            refuse("name", name, "a name", type(self).__name__)
        self.name = name

    @functools.cached_property
    def name(self) -> str:
        """Key in logs and History, also if a subclass doesn't call `__init__`."""
        return self._default_name or snake_case(type(self).__name__)

    @property
    def _takes_logits(self) -> bool:
        if self._from_logits is None:
            return not self.has_probabilities
        return self._from_logits

    @property
    def _has_labels(self) -> bool | None:
        return self._is_multi_label or self.has_binary_loss


def named_figures(name: str, value: Any) -> dict[str, Any]:
    """Name the values of a metric; those of a dict by the metric's name and their key.

    Single numbers become Python's.

    Example:
        >>> named_figures("recall", {"0.3": {"0": 1.0, "1": 0.5}})
        {'recall_0.3_0': 1.0, 'recall_0.3_1': 0.5}
    """
    if not isinstance(value, dict):
        number = number_in(value)
        return {name: value if number is None else number}
    parts = [named_figures(f"{name}_{key}", part) for key, part in value.items()]
    return {key: part for named in parts for key, part in named.items()}


def snake_case(name: str) -> str:
    """Convert the name of a class to snake_case.

    Example:
        >>> snake_case("BinaryAUROC"), snake_case("MulticlassF1Score")
        ('binary_auroc', 'multiclass_f1_score')
    """
    border = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return re.sub(border, "_", name).lower()


class Metric(NamedMetric, abc.ABC):
    """Base of metrics that are functions of sums over samples or elements.

    Args:
        name: Key in logs and History; None for the class's name in snake_case.

    Attributes:
        direction: `"max"` or `"min"` if larger or smaller values are better, else None.
            Callbacks that monitor the metric use it.
        has_binary_loss: Whether the loss of the same output is binary, so that each
            number of the output is a separate 0 or 1; None if unknown. ipufit sets it
            in copies of the metric.
        has_probabilities: Whether the outputs are probabilities: they come from a
            sigmoid or softmax, or their loss takes probabilities. ipufit sets it in
            copies of the metric.
        ignore_index: Class index of targets that don't count; None if all count. If
            it is -100, targets that the loss of the same output ignores are -100, too.
    """

    @abc.abstractmethod
    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Compute the sums of a batch, with operations that a device can trace.

        Args:
            outputs: Outputs of the model, one row per sample.
            targets: Targets, one row per sample.
            weights: Weight of each row, `[rows]`, or of each position, `[rows, ...]`.
                Rows of weight 0 are ignored. None weights all rows alike.

        Returns:
            1-d float32, of the same length for every batch. The sums of several
            batches are added up.
        """

    def result(self, sums: Tensor) -> float:
        """Compute the metric's value from sums.

        Args:
            sums: The results of `sums`, added over all batches, float64; zeros without
                batches.

        Returns:
            The value. In the base class it is the first sum divided by the second; NaN
            if the second is 0.
        """
        return float(sums[0] / sums[1])


class StreamedMetric(NamedMetric, abc.ABC):
    """Base of metrics that need the outputs themselves, on the host.

    A training program then returns the outputs of every micro-batch; a metric that is
    a function of sums is much cheaper.

    Args:
        name: Key in logs and History; None for the class's name in snake_case.

    Attributes:
        direction: `"max"`, `"min"` or None, as in `Metric`.
        ignore_index: As in `Metric`.
        has_binary_loss: As in `Metric`, but set in the metric itself, not in a copy.
        has_probabilities: As in `Metric`, but set in the metric itself, not in a copy.
    """

    @abc.abstractmethod
    def update(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> None:
        """Add a batch without padded rows; `weights` are as in `Metric.sums`."""

    @abc.abstractmethod
    def result(self) -> float:
        """Return the metric's value over all batches since `reset`."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Discard all batches."""


Weights = Optional[Tensor]
"""Weights of rows or positions, as in `Metric.sums`; None if all count alike."""

Weighted = Tuple[Tensor, Tensor]
"""Values, and the weight of each."""


class MeanMetric(Metric):
    """Base of metrics that are the weighted mean of a value for each target.

    Args:
        name: Key in logs; None for the name that the class has.
    """

    direction = "min"

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the sum of the values, and the weight of the targets that count."""
        return mean_sums(*self._values(outputs, targets, weights))

    @abc.abstractmethod
    def _values(self, outputs: Tensor, targets: Tensor, weights: Weights) -> Weighted:
        """Return a value and a weight for each target; NaN weights invalid targets."""

    def result(self, sums: Tensor) -> float:
        """Compute the mean; NaN if no target counts."""
        refuse_parts(self.name, sums[1])
        return super().result(sums)


class CollectingMetric(StreamedMetric):
    """Base of streamed metrics that are computed from all rows at the end.

    Args:
        name: Key in logs and History; None for the name that the class has.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.reset()

    def update(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> None:
        """Store what the metric needs of a batch."""
        rows = map_tensors(Tensor.detach, self._rows(outputs, targets, weights))
        if rows_of(rows):
            self._batches.append(rows)

    def result(self) -> float:
        """Return the metric's value over all batches; NaN without rows."""
        if not self._batches:
            return float("nan")
        structure = Structure.of_outputs(self._batches[0])
        columns = zip(*map(structure.flatten, self._batches))
        return self._compute(*structure.rebuild(torch.cat(list(c)) for c in columns))

    def reset(self) -> None:
        """Discard all batches."""
        self._batches: list[Any] = []

    @abc.abstractmethod
    def _rows(self, outputs: Any, targets: Any, weights: Tensor | None) -> Any:
        """Return a list or tuple of nested tensors with the same number of rows."""

    @abc.abstractmethod
    def _compute(self, *rows: Any) -> float:
        """Compute the metric's value from the rows of all batches."""


class FunctionMetric(Metric):
    """Mean of a plain function over samples or elements.

    Args:
        name: Key in logs and History.
        function: `function(outputs, targets)`. Returns one value per sample or element,
            or one value for the batch, which counts as the mean over its samples.
        direction: `"max"`, `"min"` or None, as in `Metric`.

    Example:
        >>> def bias(outputs, targets):
        ...     return outputs - targets
        >>> FunctionMetric("bias", bias).sums(torch.ones(2, 1), torch.zeros(2, 1))
        tensor([2., 2.])
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Any, Any], Tensor],
        direction: str | None = None,
    ) -> None:
        super().__init__(name)
        self.function = outputs_first(function)
        self.direction = direction
        home = str(getattr(function, "__module__", ""))
        self._is_users = not home.startswith("ipufit.")

    def sums(self, outputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return the sum of the values and their number, both weighted."""
        target_means = TargetMeans()  # ipufit's functions ignore no targets
        with target_means if self._is_users else contextlib.nullcontext():
            values = self.function(outputs, targets)
        if not isinstance(values, Tensor):
            raise DataError(
                f"The metric {self.name!r} returns {values!r}, which isn't a tensor. A "
                "device traces metrics: compute with torch's operations, without "
                ".item() or .numpy(), or write an ipufit.StreamedMetric."
            )
        if values.dim() == 0 and weights is not None:
            raise DataError(
                f"The metric {self.name!r} returns one value for the whole batch, so "
                "that its rows can't be weighted. Let it return one value per sample."
            )
        mean = target_means.origin_of(values)
        if mean is not None:
            return torch.stack([mean.total, mean.num_targets])
        rows = rows_of(outputs if values.dim() == 0 else values)
        total, count = mean_sums(values, weights, rows)
        return torch.stack([total, target_means.checked(count)])

    def result(self, sums: Tensor) -> float:
        """Compute the mean."""
        if sums[1].isnan() and not sums[0].isnan():
            raise unknown_number(f"Metric {self.name!r}")
        return super().result(sums)


_OUTPUT_WORDS = (
    "forecast hat logits out output outputs pred predicted prediction predictions "
    "preds proba recon reconstructed reconstruction scores student yhat ypred"
)
_TARGET_WORDS = (
    "actual actuals expected gt label labels ref reference target targets teacher "
    "tgt true truth ytrue"
)


def outputs_first(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the function with its arguments in torch's order: outputs, targets.

    Keras has the other order. A name such as `y_true` or `outputs` of a parameter says
    which order the function has. If neither name is known, or both names are of the
    same argument, the function is taken to have torch's order.

    Example:
        >>> def pinball(y_true, y_pred):
        ...     return torch.maximum(0.9 * (y_true - y_pred), 0.1 * (y_pred - y_true))
        >>> outputs, targets = torch.tensor(1.0), torch.tensor(2.0)
        >>> outputs_first(pinball)(outputs, targets)
        tensor(0.9000)

    Raises:
        ConfigError: `function` isn't a function.
    """
    if not callable(function):
        raise ConfigError(f"{shown(function)} isn't a function of outputs and targets.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # torch's functions in C++ have outputs first.
        return function
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    names = [parameter.name for parameter in parameters if parameter.kind in positional]
    if len(names) < 2 or _target_rank(names[0]) <= _target_rank(names[1]):
        return function
    return functools.partial(_call_with_targets_first, function)


def _target_rank(name: str) -> int:
    """Rank the name of a parameter: -1 means outputs, 1 targets, 0 neither or both."""
    words = set(name.lower().split("_"))
    return bool(words.intersection(_TARGET_WORDS.split())) - bool(
        words.intersection(_OUTPUT_WORDS.split())
    )


def _call_with_targets_first(function: Any, outputs: Any, targets: Any) -> Any:
    return function(targets, outputs)


_MARK_OR_IGNORE_ADVICE = (
    "Mark those that don't count by -100, or by ignore_index={0} of "
    "torch.nn.CrossEntropyLoss, or of a metric that has it (ignore_class={0} of "
    "ipufit.metrics.MeanIoU)."
)
_MARK = "Mark those that don't count by -100."
_MORE_CLASSES = "For more than two classes the model must have an output for each."
_BINARY_ADVICE = (
    "If each output has a 0 or 1 of its own, use a binary loss such as 'bce', metric "
    "'binary_accuracy', one such as ipufit.metrics.F1Score(multi_label=True), or masks "
    "with a channel axis, [N, 1, H, W]. If classes are on axis 1, give class indices."
)


def refuse_parts(name: str, sums: Tensor) -> None:
    """Refuse sums that are NaN because targets were neither one-hot nor classes.

    Raises:
        DataError: The sums are NaN.
    """
    if sums.isnan().any():
        raise DataError(
            f"The metric {name!r} takes targets of the outputs' shape for one-hot, "
            "with classes on the last axis, and others for class indices. Here some "
            "rows don't sum to 1, some indices aren't classes of the outputs (from 0), "
            "or some 0s and 1s are other numbers. "
            f"{_MARK_OR_IGNORE_ADVICE.format(255)} {_BINARY_ADVICE}"
        )


_naming: ContextVar[str | None] = ContextVar("naming", default=None)
"""Name of the metric whose targets are checked in this thread; None for no check."""


@contextlib.contextmanager
def naming_targets(name: str) -> Iterator[None]:
    """Raise an error that names the target where a device would compute NaN.

    Inside the context, checks of targets run on the host.

    Args:
        name: Name of the metric, for messages.

    Example:
        >>> with naming_targets("mine"):
        ...     counted(torch.tensor([0, 9]), [], None, bounds=(0, 2))
        Traceback (most recent call last):
        ipufit.errors.DataError: The metric 'mine' got the target 9, and takes...
    """
    token = _naming.set(name)
    try:
        yield
    finally:
        _naming.reset(token)


def _name_target(targets: Tensor, counts: Tensor, bounds: tuple[int, int]) -> None:
    name = _naming.get()
    if name is None or not counts.isnan().any():
        return
    value = targets[counts.isnan()][0].item()
    what, kind, advice = (
        f"the target {value:g}",
        "classes",
        _MARK_OR_IGNORE_ADVICE.format(f"{value:g}"),
    )
    if targets.is_floating_point():
        kind, advice = "numbers", f"{_MARK} {_MORE_CLASSES}"
    elif value == FRACTION:
        what, advice = "a target that is a fraction or NaN", _MARK
    raise DataError(
        f"The metric {name!r} got {what}, and takes {kind} from {bounds[0]} to "
        f"{bounds[1]}. "
        f"{advice}"
    )


def _name_row(targets: Tensor, is_wrong: Tensor) -> None:
    name = _naming.get()
    if name is None or not is_wrong.any():
        return
    row = targets[is_wrong][0]
    strange = row[row.ge(0).logical_not()].tolist()
    has = f"have {strange[0]:g}" if strange else f"sum to {float(row.sum()):g}"
    raise DataError(
        f"The metric {name!r} got targets of the outputs' shape that {has} along the "
        f"last axis, and takes one-hot rows or probabilities. {_BINARY_ADVICE}"
    )


def mean_sums(values: Tensor, weights: Tensor | None = None, rows: int = 1) -> Tensor:
    """Return the sum of values and their number, for a mean.

    Args:
        values: `[rows, ...]`, a value for each sample, position or element; or 0-d, a
            mean over `rows`.
        weights: `[rows]` or `[rows, ...]`, over the first axes of `values`.
        rows: Number of samples that a 0-d value is the mean of.

    Returns:
        `[total, count]`, float32.

    Example:
        >>> mean_sums(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 0.0]))
        tensor([3., 1.])
        >>> mean_sums(torch.tensor(0.5), rows=4)
        tensor([2., 4.])
    """
    values = in_float32(detached(values))
    if values.dim() and weights is not None:
        spread = spread_weights(weights, values)
        return torch.stack([weighted(values, spread).sum(), spread.sum()])
    if values.dim():
        total, count = values.sum(), values.numel()
    else:  # PopTorch gives built-in losses the shape [1], except the final loss
        total, count = values.reshape(()).mul(rows), rows
    counts = torch.full_like(total, float(count), device=total.device)
    return torch.stack([total, counts])


def zeros_like(values: Tensor) -> Tensor:
    """Return zeros of the shape and on the device of `values`.

    PopTorch warns of functions that create tensors without a device argument.

    Example:
        >>> zeros_like(torch.ones(2))
        tensor([0., 0.])
    """
    return torch.zeros_like(values, device=values.device)


def detached(tensor: Tensor) -> Tensor:
    """Detach a tensor; return a tensor without gradients as it is."""
    return tensor.detach() if tensor.requires_grad else tensor


def in_float32(tensor: Tensor) -> Tensor:
    """Cast a tensor to float32; return a float32 tensor as it is."""
    return tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32)


def flat(tensor: Tensor) -> Tensor:
    """Flatten a tensor; return a 1-d tensor as it is."""
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Multiply values by weights of the same shape; weight 0 gives 0, even for NaN.

    Example:
        >>> weighted(torch.tensor([3.0, float("nan")]), torch.tensor([2.0, 0.0]))
        tensor([6., 0.])
    """
    return values.mul(weights).masked_fill(weights.eq(0), 0.0)


def spread_weights(weights: Tensor, values: Tensor) -> Tensor:
    """Expand weights of rows to the shape of `values`, in float32.

    Args:
        weights: `[rows]` or `[rows, ...]`, over the first axes of `values`, or over all
            but the channels of `[rows, channels, ...]`. Axes of size 1 make no
            difference.
        values: `[rows, ...]`.

    Raises:
        DataError: The shapes don't fit, or fit in two ways.

    Example:
        >>> spread_weights(torch.tensor([1.0, 0.0]), torch.zeros(2, 3)).sum()
        tensor(3.)
        >>> spread_weights(torch.ones(2, 8, 8), torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 3, 8, 8])
    """
    shape, whole = tuple(weights.shape), tuple(values.shape)
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    shapes = {(*shape, *(1,) * (len(whole) - len(shape)))}
    if len(whole) in (4, 5):  # images with a channel axis
        shapes.add((shape[0], 1, *shape[1:]))
    if is_like(weights.shape, values.shape):
        shapes.add(whole)
    fitting = [candidate for candidate in shapes if _expands(candidate, whole)]
    if len(fitting) != 1:
        raise unfit_weights(weights, values)
    return weights.to(torch.float32).reshape(fitting[0]).expand(whole)


def _expands(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether a shape has the rows of another, and its sizes or 1."""
    return (
        len(shape) == len(whole)
        and shape[0] == whole[0]
        and all(size in (1, of_all) for size, of_all in zip(shape, whole))
    )


def unfit_weights(weights: Tensor, values: Tensor) -> DataError:
    """Build the error for weights that don't fit values."""
    return DataError(
        f"Sample weights of shape {tuple(weights.shape)} don't fit values of shape "
        f"{tuple(values.shape)}: give one weight per sample, or one per position, with "
        "an axis of size 1 in the place of each axis that they don't have."
    )


def rows_of(values: Any) -> int:
    """Return the number of samples in nested tensors: the size of their first axis.

    Example:
        >>> rows_of({"a": torch.zeros(3, 2)})
        3
    """
    while not isinstance(values, Tensor):
        values = next(iter(values.values() if isinstance(values, dict) else values))
    return int(values.shape[0])


def checked_flag(setting: str, value: Any) -> Any:
    """Return a setting, which must be True, False or None.

    Raises:
        ConfigError: The setting is something else, such as a metric's name: it is the
            first argument in Keras.

    Example:
        >>> checked_flag("from_logits", True)
        True
    """
    if value is not None and not isinstance(value, bool):
        words = "True or False, and the keyword name= for the name of a metric"
        refuse(setting, value, words)
    return value


def score_above(threshold: float, from_logits: bool) -> float:
    """Return the score above which a 1 is predicted: the threshold or its logit.

    Args:
        threshold: A probability above 0.
        from_logits: Whether scores are logits; else they are probabilities.

    Example:
        >>> score_above(0.5, from_logits=True)
        0.0
    """
    if not from_logits:
        return float(threshold)
    return math.log(threshold / (1 - threshold)) if threshold < 1 else math.inf


# Shapes -----------------------------------------------------------------------------

IGNORED_INDEX = -100
"""The class index of targets that are ignored, as in torch's losses."""


FRACTION = -(2**30)
"""Replaces a class index that isn't a whole number."""


class Elements(NamedTuple):
    """Outputs, targets and weights; float32 tensors of one shape, if none are classes.

    Attributes:
        outputs: Numbers `[...]`, or scores of classes `[..., C]`.
        targets: Numbers; or class indices, integers that may be out of range where the
            weight is 0 or NaN.
        weights: Float32; 0 if the target is ignored, NaN if it is invalid.
    """

    outputs: Tensor
    targets: Tensor
    weights: Tensor


def is_binary(outputs: Tensor) -> bool:
    """Return whether there is one output per sample or position.

    Raises:
        DataError: The outputs aren't one tensor.

    Example:
        >>> is_binary(torch.zeros(4, 1)), is_binary(torch.zeros(4, 2))
        (True, False)
    """
    _check_tensors(outputs=outputs)
    return outputs.dim() == 1 or int(outputs.shape[-1]) == 1


def is_of_bits(
    outputs: Tensor, targets: Tensor, *, has_binary_loss: bool | None
) -> bool:
    """Return whether each output is a separate binary problem, with a target 0 or 1.

    Args:
        outputs: Outputs of the model.
        targets: Their targets.
        has_binary_loss: Whether the loss of the outputs is binary; None if unknown.

    Example:
        >>> masks = torch.zeros(2, 1, 8, 8)
        >>> is_of_bits(masks, torch.zeros(2, 8, 8), has_binary_loss=None)
        True
    """
    _check_tensors(outputs=outputs, targets=targets)
    if not is_like(outputs.shape, targets.shape):
        if not is_binary(outputs):
            return False
        return bool(has_binary_loss or not _class_axes(outputs, targets))
    if is_binary(outputs):
        return has_binary_loss is not False or not _has_one_position(outputs)
    # [N, 1, L] with targets of the same shape may also be sequences of one step.
    is_channel = outputs.dim() > 2 and outputs.shape[1] == 1
    has_channel = is_channel and (outputs.dim() > 3 or targets.shape != outputs.shape)
    return has_channel if has_binary_loss is None else has_binary_loss


def weights_like(values: Tensor, weights: Tensor | None) -> Tensor:
    """Expand weights to the shape of `values`, in float32; 1 everywhere for None."""
    if weights is None:
        return torch.ones_like(values, dtype=torch.float32)
    return spread_weights(weights, values)


def matched_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """Reshape targets to the outputs' shape, in float32.

    Axes of size 1 make no difference: `[N]` targets fit `[N, 1]` outputs.

    Raises:
        DataError: The shapes differ in other axes.

    Example:
        >>> matched_targets(torch.zeros(2, 1), torch.tensor([1, 2])).tolist()
        [[1.0], [2.0]]
    """
    _check_tensors(outputs=outputs, targets=targets)
    if not is_like(outputs.shape, targets.shape):
        advice = ""
        if targets.dim() < outputs.dim() and not targets.is_floating_point():
            advice = (
                " For class indices use a metric of classes, such as 'accuracy' or one "
                "of torchmetrics, or give one-hot targets."
            )
        raise DataError(
            f"Targets of shape {tuple(targets.shape)} don't fit outputs of shape "
            f"{tuple(outputs.shape)}: this metric needs a target for each output."
            f"{advice}"
        )
    matched = in_float32(targets)
    return matched if matched.shape == outputs.shape else matched.reshape(outputs.shape)


def elements(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Elements:
    """Reshape targets and weights to the outputs' shape, all in float32.

    Args:
        outputs: Numbers of any shape, one row per sample.
        targets: Numbers of the same shape, up to axes of size 1.
        weights: `[rows]` or `[rows, ...]`; None weights all alike.

    Raises:
        DataError: The shapes don't fit.
    """
    matched = matched_targets(outputs, targets)
    return Elements(in_float32(outputs), matched, weights_like(matched, weights))


def bits(
    outputs: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    lowest: int = -1,
    ignored: Sequence[int] = (IGNORED_INDEX,),
) -> Elements:
    """Reshape targets of 0 and 1 as `elements` does; ignored targets get the weight 0.

    Args:
        outputs: Outputs of the model.
        targets: Numbers from `lowest` to 1.
        weights: `[rows]` or `[rows, ...]`; None weights all alike.
        lowest: -1 if targets may be -1 and 1, else 0.
        ignored: Targets that don't count.

    Example:
        >>> bits(torch.zeros(2, 1), torch.tensor([1, -100]), None).weights.flatten()
        tensor([1., 0.])
    """
    truths = matched_targets(outputs, targets)
    counts = counted(truths, ignored, weights, (lowest, 1))
    return Elements(in_float32(outputs), truths, counts)


def labels_last(
    values: Tensor, *, has_labels: bool | None, is_set: bool = False
) -> Tensor:
    """Reshape values of 0s and 1s to `[..., labels]`; without labels to `[..., 1]`.

    Args:
        values: `[N, labels]`, or with `has_labels` images `[N, labels, ..., W]`.
        has_labels: Whether the loss, or a setting, makes each output a 0 or 1.
        is_set: Whether a setting does so; then sequences `[N, T, labels]` have labels,
            too.

    Example:
        >>> labels_last(torch.zeros(2, 3, 8, 8), has_labels=True).shape
        torch.Size([2, 8, 8, 3])
        >>> labels_last(torch.zeros(2, 8, 8), has_labels=True).shape
        torch.Size([128, 1])
    """
    is_last = values.shape[-1] == 1 and set(values.shape[2:]) != {1}
    if has_labels and values.dim() in (4, 5) and not is_last:
        return values.movedim(1, -1)
    is_kept = values.dim() in ((2, 3) if is_set else (2,))
    return values if is_kept else values.reshape(-1, 1)


AVERAGES = ("macro", "micro", "weighted")
"""Averages over classes or labels."""


def classified(
    outputs: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    ignored: Sequence[int] = (IGNORED_INDEX,),
) -> Elements:
    """Reshape scores of classes, class indices and weights to fit each other.

    Args:
        outputs: Scores `[..., C]`.
        targets: Class indices `[...]`, or one-hot `[..., C]`.
        weights: `[rows]` or `[rows, ...]`; None weights all alike.
        ignored: Class indices that don't count.

    Raises:
        DataError: The shapes don't fit.

    Example:
        >>> classified(torch.eye(2), torch.tensor([1, -100]), None)[1:]
        (tensor([   1, -100]), tensor([1., 0.]))
    """
    outputs, targets = at_one_position(outputs, targets)
    if has_class_axis(outputs, targets):
        targets = in_float32(targets)
        labels = targets.argmax(dim=-1)
        counts = counted(labels, [i for i in ignored if i >= 0], weights)
        return Elements(in_float32(outputs), labels, whole_rows(targets, counts))
    labels = class_indices(outputs, targets)
    if labels.shape != outputs.shape[:-1]:
        outputs = outputs.movedim(1, -1)
    counts = counted(labels, ignored, weights, (0, outputs.shape[-1] - 1))
    return Elements(in_float32(outputs), labels, counts)


def counted(
    targets: Tensor,
    ignored: Sequence[int],
    weights: Tensor | None,
    bounds: tuple[int, int] | None = None,
) -> Tensor:
    """Return the weights of targets: 0 for ignored, NaN for targets that can't be.

    A compiled program can't raise an error; `Metric.result` raises it for NaN.

    Args:
        targets: Class indices, or numbers.
        ignored: Values of ignored targets.
        weights: `[rows]` or `[rows, ...]`; None to weight all alike. A target of weight
            0 may be any.
        bounds: Least and greatest target; None for targets that are right.

    Returns:
        Tensor of the targets' shape, float32.

    Example:
        >>> counted(torch.tensor([3, -100]), [-100], None)
        tensor([1., 0.])
        >>> counted(torch.tensor([0, 3, 9]), [9], None, bounds=(0, 2))
        tensor([1., nan, 0.])
    """
    counts = weights_like(targets, weights)
    if bounds is not None:
        is_wrong = targets.clamp(*bounds).ne(targets)  # True for NaN, too
        if weights is not None:
            is_wrong = is_wrong.logical_and(counts.ne(0))
        counts = counts.masked_fill(is_wrong, float("nan"))
    for index in ignored:
        counts = counts.masked_fill(targets.eq(index), 0.0)
    if bounds is not None:
        _name_target(targets, counts, bounds)
    return counts


def whole_rows(targets: Tensor, weights: Tensor) -> Tensor:
    """Replace the weights of targets that aren't one-hot or probabilities by NaN.

    Probabilities are numbers from 0 that sum to 1. A compiled program can't raise an
    error; `Metric.result` raises it for NaN.

    Example:
        >>> whole_rows(torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.ones(2))
        tensor([1., nan])
    """
    is_share = targets.ge(0)  # False for NaN, too
    sums = targets.masked_fill(is_share.logical_not(), float("inf")).sum(dim=-1)
    is_wrong = sums.sub(1.0).abs().gt(0.01).logical_and(weights.ne(0))
    _name_row(targets, is_wrong)
    return weights.masked_fill(is_wrong, float("nan"))


def has_class_axis(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether targets are one-hot or probabilities, not class indices.

    Example:
        >>> has_class_axis(torch.zeros(4, 3), torch.zeros(4, 3))
        True
        >>> has_class_axis(torch.zeros(4, 3), torch.zeros(4, 1))
        False
    """
    _check_tensors(outputs=outputs, targets=targets)
    outputs, targets = at_one_position(outputs, targets)
    return targets.shape == outputs.shape and not is_binary(outputs)


def at_one_position(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape scores `[N, C, 1, ...]`, and their one-hot targets, to `[N, C]`.

    Example:
        >>> scores, one_hot = torch.zeros(2, 3, 1), torch.zeros(2, 3)
        >>> [part.shape for part in at_one_position(scores, one_hot)]
        [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    if not _has_one_position(outputs):
        return outputs, targets
    outputs = outputs.flatten(1)
    if is_like(outputs.shape, targets.shape):
        targets = targets.reshape(outputs.shape)
    return outputs, targets


def _has_one_position(outputs: Tensor) -> bool:
    """Return whether outputs are `[N, C, 1, ...]`, with classes on axis 1."""
    if outputs.dim() < 3:
        return False
    return set(outputs.shape[2:]) == {1} and outputs.shape[1] > 1


def _class_axes(outputs: Tensor, targets: Tensor) -> list[int]:
    """List the axes that the classes may be on if targets are class indices."""
    last = outputs.dim() - 1
    like = [
        axis
        for axis in ((1, last) if last > 1 else (last,))
        if axis and outputs.shape[axis] > 1
        if is_like(targets.shape, _shape_without_axis(outputs, axis))
    ]
    shape = targets.shape
    same = [a for a in like if _shape_without_axis(outputs, a) in (shape, shape[:-1])]
    return same or like


def _shape_without_axis(outputs: Tensor, axis: int) -> torch.Size:
    """Return the outputs' shape without an axis."""
    return outputs.shape[:axis] + outputs.shape[axis + 1 :]


def class_indices(outputs: Tensor, targets: Tensor) -> Tensor:
    """Reshape class indices to the outputs' shape without class axis, as integers.

    Args:
        outputs: Scores `[..., C]`, or `[rows, C, ...]`.
        targets: Class indices `[...]`, of any type. Axes of size 1 make no difference.

    Raises:
        DataError: The shapes don't fit, or classes could be on either axis.

    Example:
        >>> class_indices(torch.zeros(2, 5, 3), torch.ones(2, 3, 1)).shape
        torch.Size([2, 3])
    """
    _check_tensors(outputs=outputs, targets=targets)
    axes = _class_axes(outputs, targets)
    if not axes:
        raise DataError(
            f"Targets of shape {tuple(targets.shape)} can't be class indices for "
            f"outputs of shape {tuple(outputs.shape)}: with classes on the last axis "
            f"they would have shape {tuple(outputs.shape[:-1])}."
        )
    if len(axes) > 1:
        positions = (-1, *outputs.shape[1:-1], 1)
        raise DataError(
            f"Outputs of shape {tuple(outputs.shape)} have as many classes as "
            f"positions, so their classes may be on axis 1 or {outputs.dim() - 1}: "
            "give them and their targets another axis of size 1. For classes on the "
            f"last it is outputs.unsqueeze(-2) and targets.reshape{positions}."
        )
    # In 8 bits, different numbers are equal: -100 is 156.
    is_wide = targets.dtype in (torch.int32, torch.int64)
    indices = targets if is_wide else targets.to(torch.int32)
    if targets.is_floating_point():
        are_whole = indices.to(torch.float32).eq(in_float32(targets))
        indices = torch.where(are_whole, indices, zeros_like(indices).add(FRACTION))
    wanted = _shape_without_axis(outputs, axes[0])
    return indices if indices.shape == wanted else indices.reshape(wanted)


def dense_targets(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs, and their targets in float32, both of the same shape.

    Outputs `[N, C, 1, ...]` are reshaped to `[N, C]`.

    Raises:
        DataError: The shapes differ.
    """
    if not has_class_axis(outputs, targets):
        raise DataError(
            f"Targets of shape {tuple(targets.shape)} aren't one-hot or probabilities "
            f"for outputs of shape {tuple(outputs.shape)}: both have one shape, with "
            "two classes or more on the last axis. Names with 'sparse_' take class "
            "indices, names with 'binary_' one output per sample."
        )
    outputs, targets = at_one_position(outputs, targets)
    return outputs, in_float32(targets)


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Turn class indices into one-hot bools `[..., C]`.

    Example:
        >>> one_hot(torch.tensor([1, 0]), 2)
        tensor([[False,  True],
                [ True, False]])
    """
    classes = torch.arange(num_classes, device=labels.device, dtype=torch.int32)
    return labels.to(torch.int32).unsqueeze(-1).eq(classes)


def total_marked(marks: Tensor, weights: Tensor) -> Tensor:
    """Sum the weights of the marks in each column.

    Args:
        marks: Bools `[..., C]`.
        weights: Float32, of a shape that expands to that of `marks`.

    Returns:
        Tensor `[C]`, float32.

    Example:
        >>> total_marked(torch.eye(2).bool(), torch.tensor([[2.0], [3.0]]))
        tensor([2., 3.])
    """
    values = weighted(marks.to(torch.float32), weights.expand(marks.shape))
    return values.reshape(-1, marks.shape[-1]).sum(dim=0)


def call_by_rows(function: Callable[..., Any], *values: Any) -> Any:
    """Call a function so that tensors are aligned by sample, as in Keras.

    torch aligns the last axes: `outputs - targets` of `[N, 1]` and `[N]` are N x N
    differences. Inside the function such elementwise operations return `[N, 1]`. Axes
    that the function removes or adds itself aren't changed.

    Args:
        function: A loss or metric.
        *values: Outputs, targets and perhaps weights: nested tensors, one row per
            sample.

    Raises:
        DataError: Values of different samples would be combined, or a loss function of
            torch gets outputs and targets that differ in more than axes of size 1.

    Example:
        >>> call_by_rows(torch.sub, torch.ones(3, 1), torch.ones(3)).shape
        torch.Size([3, 1])
    """
    owner = getattr(function, "__self__", function)  # the object of a method
    owner = getattr(owner, "function", owner)
    # ipufit's functions align by sample themselves.
    if str(getattr(owner, "__module__", "")).startswith("ipufit."):
        return function(*values)
    origins = _list_tensors(values)
    if len({tensor.shape for tensor, _ in origins}) < 2:
        return function(*values)
    with RowByRow(origins):
        return function(*values)


def _list_tensors(values: Sequence[Any]) -> list[tuple[Tensor, int]]:
    """List the tensors with axes in values, each with a bit that marks the value."""
    return [
        (leaf, 1 << position)
        for position, value in enumerate(values)
        for leaf in leaves_of(value)
        if isinstance(leaf, Tensor) and leaf.dim()
    ]


def _align_at_last_axis(shape: torch.Size, other: torch.Size) -> bool:
    """Return whether torch would align two shapes of equal first axes at the last."""
    return shape[0] == other[0] > 1 and all(
        a == b or 1 in (a, b) for a, b in zip(reversed(shape), reversed(other))
    )


class RowByRow(TorchFunctionMode):
    """Reshapes the arguments of elementwise operations so that samples are aligned.

    It tracks the arguments of the function, tensors of the same shape that are computed
    from these arguments, and columns such as `outputs[:, :1]`. A tensor to which the
    function adds an axis isn't tracked.

    Args:
        origins: Tensors that the function gets, each with a bit for the argument that
            contains it.

    Attributes:
        depth: Number of modules that are running; inside modules nothing is reshaped.
    """

    def __init__(self, origins: list[tuple[Tensor, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._known = {id(tensor): (tensor, bit) for tensor, bit in origins}
        self._arguments = frozenset(self._known)
        self.depth = 0

    @classmethod
    @contextlib.contextmanager
    def in_step(cls, module: torch.nn.Module, batch: Any) -> Iterator[None]:
        """Align outputs of modules that a step calls with the parts of its batch."""
        parts = batch if isinstance(batch, tuple) else (batch,)
        rows = cls(_list_tensors([None, *parts]))
        of_inputs = 1 << 1  # the second bit; the first marks outputs

        def begin(part: torch.nn.Module, inputs: Any, by_name: Any) -> None:
            values = (*inputs, *by_name.values())
            known = [value for value in values if id(value) in rows._known]
            if rows.depth or all(rows._bits(value) == of_inputs for value in known):
                rows.depth += 1  # a module that gets outputs or targets is a loss

        def end(part: torch.nn.Module, inputs: Any, outputs: Any) -> None:
            rows.depth = max(rows.depth - 1, 0)
            if not rows.depth:
                made = _list_tensors([outputs])
                rows._known.update({id(tensor): (tensor, bit) for tensor, bit in made})

        with contextlib.ExitStack() as hooks:
            for part in module.modules():
                before = part.register_forward_pre_hook(begin, with_kwargs=True)
                hooks.enter_context(before)
                hooks.enter_context(part.register_forward_hook(end))
            with rows:
                yield

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reshape the arguments to the same shape, and call a function of torch."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self.depth:
            return func(*args, **kwargs)
        known = [v for v in (*args, *kwargs.values()) if id(v) in self._known]
        if len({tensor.shape for tensor in known}) > 1 and _is_elementwise(name):
            like = max(known, key=Tensor.dim)
            args = [self._aligned(name, at, v, like) for at, v in enumerate(args)]
            kwargs = {at: self._aligned(name, at, v, like) for at, v in kwargs.items()}
        results = func(*args, **kwargs)
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, Tensor) and _keeps_samples(name, result, known):
                bits = functools.reduce(operator.or_, map(self._bits, known))
                self._known[id(result)] = result, bits
        return results

    def _bits(self, tensor: Tensor) -> int:
        return self._known[id(tensor)][1]

    def _aligned(self, name: str, argument: int | str, value: Any, like: Tensor) -> Any:
        if id(value) not in self._known or value.shape == like.shape:
            return value
        are_parts = self._bits(value) == self._bits(like)  # of the outputs, say
        if len(value) != len(like) or (are_parts and value.dim() == like.dim()):
            return value
        if is_like(value.shape, like.shape):
            return value.reshape(like.shape)
        is_pair = name in _LOSSES_OF_ELEMENTS and argument in (0, 1, "input", "target")
        is_strict = is_pair and self._arguments.issuperset((id(value), id(like)))
        is_wrong = value.dim() < like.dim() and _align_at_last_axis(
            value.shape, like.shape
        )
        if is_strict or (is_wrong and name != "gaussian_nll_loss"):
            raise DataError(
                f"{name}() gets outputs and targets of shapes {tuple(like.shape)} and "
                f"{tuple(value.shape)}, whose elements don't belong together one by "
                "one: only axes of size 1 may differ. Reshape or expand one of them"
            )
        return value


def _keeps_samples(name: str, result: Tensor, known: list[Tensor]) -> bool:
    if known and name in _SELECTING and result.dim() == known[0].dim():
        return result.shape[:1] == known[0].shape[:1]
    return any(result.shape == tensor.shape for tensor in known)


_SELECTING = frozenset({"__getitem__", "chunk", "narrow", "split", "tensor_split"})
"""Functions of one tensor that may return some of its columns, for all rows."""
_LOSSES_OF_ELEMENTS = frozenset(
    """
    binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss
    huber_loss kl_div l1_loss mse_loss multilabel_soft_margin_loss poisson_nll_loss
    smooth_l1_loss soft_margin_loss
    """.split()  # noqa: SIM905 - one per line would be a page
)
_OF_ELEMENTS = _LOSSES_OF_ELEMENTS.union(
    """
    arctan2 broadcast_tensors complex cosine_similarity dist divide floor_divide
    gaussian_nll_loss greater greater_equal isclose less less_equal masked_select
    multiply not_equal pairwise_distance polar special_gammainc special_gammaincc
    special_xlogy subtract
    """.split()  # noqa: SIM905
)
"""Elementwise functions that torch's table doesn't list as pointwise."""


@functools.lru_cache(maxsize=None)
def _is_elementwise(name: str) -> bool:
    """Return whether a function of torch works element by element."""
    if name.startswith("__"):  # __rsub__, __and__
        name = name.strip("_")
        name = name[1:] if name.startswith("r") else name
        name = "floor_divide" if name == "floordiv" else name
        name = f"bitwise_{name}" if name in ("and", "or", "xor") else name
    function = getattr(torch.ops.aten, name, None)  # type: ignore[attr-defined,unused-ignore]
    return name in _OF_ELEMENTS or any(
        torch.Tag.pointwise in getattr(function, overload).tags  # type: ignore[attr-defined,unused-ignore]
        for overload in getattr(function, "overloads", tuple)()
    )


def _check_tensors(**values: Any) -> None:
    for kind, value in values.items():
        if value is None:
            raise DataError(
                f"There are no {kind}, and the metric needs them. Pass {kind}, or drop "
                "the metric (None in a list of metrics)."
            )
        if not isinstance(value, Tensor):
            raise DataError(
                f"The {kind} are of type {type(value).__name__}, not one tensor. If "
                "the model has several outputs, name the output of each metric: "
                "metrics={output: [...]}. For parts of an output pass a function, "
                "such as lambda outputs, targets: (outputs[0] - targets[0]).abs()."
            )


def is_like(shape: torch.Size, other: torch.Size) -> bool:
    """Return whether two shapes differ, after the first axis, in axes of size 1 only.

    Example:
        >>> is_like(torch.Size([4, 1]), torch.Size([4]))
        True
    """
    return shape[0] == other[0] and [size for size in shape[1:] if size != 1] == [
        size for size in other[1:] if size != 1
    ]
