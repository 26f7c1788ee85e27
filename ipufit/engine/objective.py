# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of `compile()`, and the outputs and labels that each uses."""

from __future__ import annotations

import contextlib
import copy
import inspect
from dataclasses import dataclass, field, replace
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
    Tuple,
    Union,
)

import torch
from torch import Tensor

from ipufit._arguments import check_number, refuse, shown
from ipufit._poptorch import poptorch
from ipufit._tree import is_record, leaves_of, map_tensors, parts_of, without
from ipufit.data.structure import Labels
from ipufit.distributed import warn_in_first_process
from ipufit.engine.trace_checks import Divisions, LossRecorder, Misuse
from ipufit.errors import (
    ConfigError,
    DataError,
    IpufitError,
    IpufitWarning,
    UnsupportedError,
)
from ipufit.losses import (
    TO_PROBABILITIES,
    Loss,
    LossTerms,
    resolve_loss,
    smoothed,
)
from ipufit.metrics import (
    FunctionMetric,
    Metric,
    StreamedMetric,
    listed_metrics,
    resolve_metrics,
)
from ipufit.metrics.base import IGNORED_INDEX, call_by_rows
from ipufit.mixing import Coefficients, rolled

_ALL: Any = ...
"""The key of a value as a whole."""


def _pick(values: Any, key: Any) -> Any:
    """Return the element or attribute of a key."""
    if key is _ALL:
        return values
    has_items = isinstance(values, (dict, tuple, list))
    return values[key] if has_items else getattr(values, key)


def _output_keys(outputs: Any) -> dict[str, Any]:
    """Return the keys of several outputs by their names; empty if there is only one."""
    if isinstance(outputs, dict):
        keys = {str(name): name for name in outputs}
    elif isinstance(outputs, (tuple, list)):
        numbered = [f"output_{i}" for i in range(1, len(outputs) + 1)]
        keys = dict(zip(getattr(outputs, "_fields", numbered), range(len(outputs))))
    else:
        keys = {name: name for name in _tensors_of(outputs)}
    return keys if len(keys) > 1 else {}


def named_outputs(outputs: Any) -> dict[str, Any] | None:
    """Return several outputs by name; None if there is only one.

    The names are the keys of a dict, `output_1`, `output_2` and so on for a tuple or
    list, the fields of a named tuple, and the attributes that are tensors for an
    object such as a data class.

    Example:
        >>> named_outputs((1, 2)), named_outputs({"a": 1}), named_outputs(3)
        ({'output_1': 1, 'output_2': 2}, None, None)
    """
    keys = _output_keys(outputs)
    return {name: _pick(outputs, key) for name, key in keys.items()} or None


def _only_key(values: Any) -> Any:
    if isinstance(values, (dict, tuple, list)) and len(values) == 1:
        return next(iter(values)) if isinstance(values, dict) else 0
    return _ALL


def only(values: Any) -> Any:
    """Return the only element of a container; other values unchanged.

    Example:
        >>> only({"a": 1}), only([1, 2])
        (1, [1, 2])
    """
    return _pick(values, _only_key(values))


def _bare_key(outputs: Any) -> Any:
    """Return the key of an object's only tensor, or of a container's only element."""
    if is_record(outputs):
        names = list(_tensors_of(outputs))
        return names[0] if len(names) == 1 else _ALL
    return _only_key(outputs)


def _tensors_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, such as a data class, that are tensors."""
    parts = parts_of(value) if is_record(value) else {}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


def _label_key(values: Any, name: str, position: int, count: int, what: str) -> Any:
    """Return the key of the targets or weights of one of several outputs.

    Args:
        values: A dict by name or a sequence by position.
        name: Name of the output.
        position: Position of the output.
        count: Number of outputs.
        what: Name of the values in messages.

    Raises:
        DataError: The values have no part for this output.
    """
    if isinstance(values, dict):
        if name not in values:
            raise DataError(
                f"The {what} have no {name!r}, which the model returns and which has "
                f"a loss or metric. They have: {', '.join(map(str, values))}."
            )
        return name
    if isinstance(values, (tuple, list)):
        if len(values) != count:
            raise DataError(
                f"There are {len(values)} {what} for {count} outputs: give one for "
                "each, or a dict by the outputs' names."
            )
        return position
    every = ", ".join("abcdefgh"[:count])
    none = ", ".join(["a", *["None"] * (count - 1)])
    raise DataError(
        f"The model returns {count} outputs, and the {what} are one tensor: give "
        "one for each output, in a list or in a dict by name. A dataset's item is "
        f"(x, [{every}]), and a third part is the weight. An output without a loss "
        f"has None, as in [{none}]."
    )


def shapes_of(values: Any) -> str:
    """Describe types and shapes of nested tensors, for messages.

    Example:
        >>> import torch
        >>> shapes_of((torch.zeros(2, 3), None))
        'float32 [2, 3]'
    """
    shapes = [
        f"{str(leaf.dtype).replace('torch.', '')} {list(leaf.shape)}"
        for leaf in leaves_of(values)
        if isinstance(leaf, Tensor)
    ]
    return ", ".join(shapes) or "nothing"


OWN_LOSS = (
    "'loss' in a dict or an object, as transformers have it; the result of "
    "poptorch.identity_loss; a scalar alone, or one that a tuple begins or ends with, "
    "such as (output, loss)"
)
"""The forms of a module's own loss, for messages."""


def split_own_loss(
    outputs: Any, marked: Sequence[Tensor] = ()
) -> tuple[Tensor | None, Any]:
    """Split outputs into the module's own loss and the others.

    The own loss is called "loss" in a dict, a named tuple or an object, as in
    transformers; else it is the result of `identity_loss`; the first or the last of a
    tuple if that is a scalar; or the only output if that is a scalar. Objects keep
    their class, without the loss.

    Args:
        outputs: Everything that the module returned.
        marked: Results of `identity_loss`, in the order of the calls. If several are
            returned the last is taken, because it may be computed from the others.

    Raises:
        ConfigError: Two values might be the loss.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> split_own_loss({"loss": torch.tensor(2.0), "logits": 1})
        (tensor(2.), {'logits': 1})
        >>> split_own_loss(SimpleNamespace(loss=torch.tensor(2.0), logits=1))
        (tensor(2.), namespace(loss=None, logits=1))
        >>> split_own_loss(("logits", torch.tensor(2.0)))
        (tensor(2.), 'logits')
        >>> split_own_loss([5])
        (None, [5])
    """
    if isinstance(outputs, Tensor):
        is_loss = outputs.dim() == 0 or any(outputs is tensor for tensor in marked)
        return (outputs, ()) if is_loss else (None, outputs)
    if isinstance(outputs, (tuple, list)):
        names = list(getattr(outputs, "_fields", range(len(outputs))))
        name = _loss_key(dict(zip(names, outputs)), marked)
        index = _scalar_end(outputs) if name is None else names.index(name)
        if index is not None:
            return outputs[index], only((*outputs[:index], *outputs[index + 1 :]))
    elif isinstance(outputs, dict) or is_record(outputs):
        parts = parts_of(outputs)
        key = _loss_key(parts, marked)
        if key is not None:
            return parts[key], without(outputs, key)
    return None, outputs


def _loss_key(outputs: Mapping[Any, Any], marked: Sequence[Tensor]) -> Any:
    """Return the key "loss", or else the key of the scalar that was marked last."""
    if "loss" in outputs:
        return "loss" if isinstance(outputs["loss"], (Tensor, type(None))) else None
    for tensor in reversed(marked):
        for key, value in outputs.items():
            if value is tensor and tensor.numel() == 1:
                return key
    return None


def _scalar_end(outputs: Sequence[Any]) -> int | None:
    """Return the index of the scalar at the start or end of a tuple, or None."""
    ends = sorted({0, len(outputs) - 1}) if outputs else []
    scalars = [
        end
        for end in ends
        if isinstance(outputs[end], Tensor)
        and outputs[end].dim() == 0
        and outputs[end].is_floating_point()
    ]
    if len(scalars) > 1:
        raise ConfigError(
            f"The module returns {len(outputs)} values, of which the first and the "
            "last are scalars: either may be its loss. Return a dict with 'loss', or "
            "mark the loss with poptorch.identity_loss(loss, reduction='none')."
        )
    return scalars[0] if scalars else None


StepFunction = Callable[[torch.nn.Module, Any], Any]
"""A user's function of the module and a batch."""

RETURNS = (
    "the loss, a tuple (loss, outputs), or a dict with 'loss', 'outputs' and scalars "
    "to report"
)


class Steps(NamedTuple):
    """The user's steps of a model.

    Attributes:
        training: Called with the module and a batch; returns the loss, and values to
            report.
        validation: As `training`, called in eval mode for `evaluate`.
        prediction: Called with the module and inputs; returns outputs. None to call the
            module.
    """

    training: StepFunction
    validation: StepFunction
    prediction: StepFunction | None = None


class Computation(NamedTuple):
    """The computation of a program.

    Attributes:
        owns_loss: Whether the module or the step returns a loss.
        step: The user's function; None to call the module.
        takes_labels: Whether the program gets targets and weights besides inputs.
        gives_outputs: Whether outputs are returned besides the scalars.
    """

    owns_loss: bool
    step: StepFunction | None = None
    takes_labels: bool = False
    gives_outputs: bool = True


def checked_step(name: str, function: Any, *, is_method: bool = False) -> None:
    """Refuse a step that can't be called with a module and a batch.

    Args:
        name: Name of the argument or method.
        function: The function; None is accepted.
        is_method: Whether the function takes only a batch, as a method of a model does.

    Raises:
        ConfigError: `function` isn't a function, or has other arguments.

    Example:
        >>> checked_step("step", "mse")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: step='mse' must be a function ...
    """
    if function is not None and not callable(function):
        raise ConfigError(
            f"{name}={shown(function)} must be a function of the module and a batch: "
            f"write `def {name}(module, batch)`, which returns {RETURNS}."
        )
    if function is None:
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code has none
        return
    try:
        signature.bind(*[None] * (1 if is_method else 2))
    except TypeError:
        takes = "(self, batch)" if is_method else "(module, batch)"
        raise ConfigError(
            f"{name} has the arguments {signature}, and is called as {name}{takes}. "
            "An index of the batch would be baked into the program: leave it out."
        ) from None


OutputKey = Union[str, int, None]
"""Name or position of the output that a loss or metric is for; None for all outputs."""


class Slot(NamedTuple):
    """The place of an output among those of a module, and of its labels.

    Attributes:
        name: Name of the output; "" if the model has one output, and for all outputs.
        output: Key of the output in the results of the module.
        target: Key of its target in the targets.
        weights: Key of its weights in the weights.
        is_only: Whether the output is the only element of a dict, tuple or list.
    """

    name: str = ""
    output: Any = _ALL
    target: Any = _ALL
    weights: Any = _ALL
    is_only: bool = False

    @property
    def in_words(self) -> str:
        """The output, with its name if it has one."""
        return f"output {self.name!r}" if self.name else "output"

    def part(self, outputs: Any, labels: Labels) -> LabeledOutput:
        """Return the output and its labels from those of a batch."""
        counted = labels.counted
        if counted is not None:
            counted = {i: _pick(nested, self.target) for i, nested in counted.items()}
        output, target = _pick(outputs, self.output), _pick(labels.targets, self.target)
        return LabeledOutput(
            self, output, target, _pick(labels.weights, self.weights), counted
        )


class LabeledOutput(NamedTuple):
    """An output of a batch with its labels.

    Attributes:
        slot: Where the output and its labels were.
        output: The tensor, or another value that the module returns there.
        target: Target of the same output.
        weights: Weights of its samples; None without weights.
        counted: For each ignored index the mean number of targets per micro-batch that
            aren't ignored, `[rows]`, nested as the target; None to count the targets of
            the micro-batch itself.
    """

    slot: Slot
    output: Any
    target: Any
    weights: Tensor | None
    counted: Any


def _output_names_for(key: OutputKey, names: list[str], targets: Any) -> list[str]:
    """Return the output names of a key, or of all outputs with targets."""
    if key is None:
        is_listed = isinstance(targets, (tuple, list)) and len(targets) == len(names)
        by_name = dict(zip(names, targets)) if is_listed else targets
        if not isinstance(by_name, dict):
            return names
        return [name for name in names if by_name.get(name) is not None] or names
    _check_key(key, names)
    return [key if isinstance(key, str) else names[key]]


def _check_key(key: str | int, names: Sequence[Any]) -> None:
    """Refuse the name or position of an output that the model doesn't return."""
    known = range(len(names)) if isinstance(key, int) else names
    if key not in known:
        output = key + 1 if isinstance(key, int) else repr(key)
        returned = ", ".join(map(str, names))
        if isinstance(key, int):
            returned = f"{len(names)}: {returned}" if len(names) > 1 else "one"
        raise ConfigError(
            f"A loss or metric is given for output {output}, and the model returns "
            f"{returned}."
        )


def probability_outputs(outputs: Any, noted: LossRecorder) -> dict[str, str]:
    """Return which outputs are probabilities, and the function that made each.

    Args:
        outputs: Everything that the module returned.
        noted: Results of the module's operations.

    Returns:
        "sigmoid" or "softmax" by the output's name, which is empty for a single
        output.
    """
    parts = _outputs_by_name(outputs).items()
    functions = {name: noted.function_of(part) for name, part in parts}
    return {name: function for name, function in functions.items() if function}


def _outputs_by_name(outputs: Any) -> dict[str, Any]:
    return named_outputs(outputs) or {"": _pick(outputs, _bare_key(outputs))}


def _misuse_advice(misuse: Misuse, loss: Loss, part: LabeledOutput) -> str:
    """Return the advice for a loss that doesn't take probabilities."""
    squashing, output, target = misuse.squashing, part.output, part.target
    if misuse.taken != "logits":
        return (
            f"Let the module end in log_softmax in the place of the {squashing}, or "
            "leave it out and use a loss of logits, such as 'cross_entropy'."
        )
    advice = (
        f"They would be squashed once more. Leave the {squashing} out of the module "
        "and apply it to what predict() gives"
    )
    is_focal = loss.refuses_probabilities and "focal" in loss.name.lower()
    if misuse.function in ("sigmoid", "expit", "softmax"):
        if not loss.refuses_probabilities:
            return f"{advice}, or leave it out of the loss."
        code = "1 - 2 * (x * y).flatten(1).sum(1) / (x + y).flatten(1).sum(1)"
        if is_focal:
            entropies = (
                "torch.nn.functional.binary_cross_entropy(x, y, reduction='none')"
            )
            code = f"{entropies} * (x - y) ** 2"
        return f"{advice}, or compile with loss=lambda x, y: {code}."
    if misuse.function not in ("cross_entropy", "log_softmax"):
        return f"{advice}, or compile with loss=torch.nn.BCELoss()."
    if squashing == "sigmoid":
        return (
            f"{advice}; or, if each output is a label of its own, give targets of the "
            "outputs' shape, 0.0 or 1.0, and loss=torch.nn.BCELoss()."
        )
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        return f"{advice}."
    logs, function = "x.clamp(min=1e-7).log()", "torch.nn.functional.nll_loss"
    axis = -1 if loss.class_axis == -1 else 1
    if is_focal:
        code = f"-0.25 * (y * {logs} * (1 - x) ** 2).sum(-1)"
    elif misuse.function == "log_softmax":
        code = f"torch.nn.functional.kl_div({logs}, y, reduction='none').sum(-1)"
    elif target.shape == output.shape:
        code = f"-(y * {logs}).sum({axis})"
    else:
        moved = ".movedim(-1, 1)" if axis == -1 and output.dim() > 2 else ""
        classes = "y" if target.dim() < output.dim() else f"y.squeeze({axis})"
        code = f"{function}({logs}{moved}, {classes})"
    return f"{advice}, or compile with loss=lambda x, y: {code}."


AnyMetric = Union[Metric, StreamedMetric]


class OutputMetric(NamedTuple):
    """A metric of one output.

    Attributes:
        output: The output that the metric is for.
        name: Key in logs, without the output's name.
        metric: The metric.
        is_weighted: Whether sample weights are used.
        listed_at: Index of the metric and length of its list, if the list isn't per
            output and the metric is about one output; with several outputs such a list
            must have one metric per output.
        source: Name, metric or function that the metric was made from. Equal sources
            make equal programs.
    """

    output: OutputKey
    name: str
    metric: AnyMetric
    is_weighted: bool
    listed_at: tuple[int, int] | None = None
    source: object = None

    @property
    def full_name(self) -> str:
        """Key in logs if the model has several outputs."""
        if self.output is None:
            return self.name
        output = self.output
        prefix = f"output_{output + 1}" if isinstance(output, int) else output
        return f"{prefix}_{self.name}"


@dataclass(frozen=True)
class Objective:
    """Losses and metrics of a model.

    Attributes:
        losses: Losses and their outputs; empty if the module returns its own loss.
        loss_weights: Weights by output; other losses have weight 1.
        metrics: Metrics, in the order in which they were given.
        num_listed: Length of the list of losses, None entries included; None if losses
            aren't given in a list.
        steps: Functions that compute the loss in place of the module; None if the
            module is called.
        warned: Warnings of losses of logits, each of which is shown once.
    """

    losses: tuple[tuple[OutputKey, Loss], ...]
    loss_weights: dict[OutputKey, float]
    metrics: tuple[OutputMetric, ...] = ()
    num_listed: int | None = None
    steps: Steps | None = None
    warned: set[str] = field(default_factory=set, compare=False)

    @property
    def owns_loss(self) -> bool:
        """Whether the module, or a user's step, returns its own loss."""
        return not self.losses

    @property
    def trained(self) -> Computation:
        """The computation of a program for `fit`."""
        step = None if self.steps is None else self.steps.training
        return Computation(self.owns_loss, step, takes_labels=True)

    @property
    def evaluated(self) -> Computation:
        """The computation of a program for `evaluate`."""
        if self.steps is None:
            return Computation(self.owns_loss)
        return Computation(
            True,
            self.steps.validation,
            takes_labels=True,
            gives_outputs=bool(self.metrics),
        )

    @property
    def predicted(self) -> Computation:
        """The computation of a program for `predict`."""
        if self.steps is None:
            return Computation(self.owns_loss)
        return Computation(False, self.steps.prediction)

    @property
    def is_sum(self) -> bool:
        """Whether the losses sum over samples."""
        return any(loss.is_sum for _, loss in self.losses)

    @property
    def has_labels(self) -> bool:
        """Whether the targets are labels, each of them 0 or 1."""
        return any(loss.is_binary for _, loss in self.losses)

    @property
    def ignored(self) -> tuple[int, ...]:
        """Indices of targets that losses ignore, each once."""
        indices = [loss.ignored for _, loss in self.losses if not loss.is_sum]
        return tuple(sorted(set().union(*indices)))

    def ignore_as(self, traced: Objective) -> None:
        """Take over the indices that the same functions ignored in a trace."""
        for (_, loss), (_, other) in zip(self.losses, traced.losses):
            loss.indices.update(other.indices)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The losses that are torch modules, and so may have buffers."""
        functions: list[Any] = [loss.function for _, loss in self.losses]
        return [f for f in functions if isinstance(f, torch.nn.Module)]

    @property
    def is_streamed(self) -> bool:
        """Whether a metric needs the outputs."""
        return any(isinstance(m.metric, StreamedMetric) for m in self.metrics)

    @property
    def is_additive(self) -> bool:
        """Whether the metrics can be computed in groups of any size.

        A user's function may return one value for all rows.
        """
        return all(loss.each is not None for _, loss in self.losses) and all(
            isinstance(m.metric, Metric) and not isinstance(m.metric, FunctionMetric)
            for m in self.metrics
        )

    @property
    def program_key(self) -> tuple[object, ...]:
        """The losses and metrics that are compiled in, without streamed metrics."""
        metrics = [
            (
                *(m.output, m.name, m.is_weighted, m.listed_at),
                StreamedMetric if isinstance(m.metric, StreamedMetric) else m.source,
            )
            for m in self.metrics
        ]
        losses = [(key, loss.function, loss.is_sum) for key, loss in self.losses]
        modes = [part.training for loss in self.modules for part in loss.modules()]
        return losses, modes, self.loss_weights, self.num_listed, metrics, self.steps

    def fresh(self) -> Objective:
        """Return a copy whose streamed metrics have a state of their own."""
        metrics = tuple(
            m._replace(metric=copy.deepcopy(m.metric))
            if isinstance(m.metric, StreamedMetric)
            else m
            for m in self.metrics
        )
        return replace(self, metrics=metrics)

    def smoothed(self, amount: float) -> Objective:
        """Return the objective with label smoothing in its losses.

        Args:
            amount: As for `ipufit.losses.smoothed`.
        """
        if not amount:
            return self
        losses = tuple((key, smoothed(loss, amount)) for key, loss in self.losses)
        return replace(self, losses=losses)

    def names_of_losses(self, names: list[str]) -> list[str]:
        """Return which of a module's outputs have losses of their own."""
        wanted = []
        for key, loss in self.losses:
            if key is not None or loss.is_per_output:
                wanted += _output_names_for(key, names, names)
        return wanted

    def bind(
        self,
        outputs: Any,
        labels: Labels,
        probabilities: Mapping[str, str] | None = None,
    ) -> BoundObjective:
        """Assign an output, target and weights to each loss and metric.

        Args:
            outputs: Everything that the module returned, of any batch.
            labels: Targets and weights of the batch.
            probabilities: Result of `probability_outputs`.

        Raises:
            ConfigError: The losses or metrics don't fit the outputs.
            DataError: The targets or weights don't fit the outputs.
            UnsupportedError: Weights are per output, and a loss or metric takes all
                outputs at once.
        """
        if outputs is None and self.losses:
            raise DataError(
                "The module returned None, and the loss takes its outputs: is there no "
                "`return` in its forward?"
            )
        names = list(_output_keys(outputs))
        rest = ", None for those without a loss,"
        _check_length("loss is", self.num_listed, names, rest)
        weights = self._weights_of(names)
        losses, probabilities = [], probabilities or {}
        for key, loss in self.losses:
            is_each = loss.is_per_output
            how = {"is_named": is_each, "splits": is_each}
            for slot in self._slots(key, outputs, labels, **how):
                if is_each:
                    _check_tensors(loss.name, slot.part(outputs, labels))
                weight = weights.get(key, weights.get(slot.name, 1.0))
                losses.append(BoundLoss(slot, loss, weight))
        loss_of = {bound.slot.name: bound.loss for bound in losses}
        metrics = []
        for m in self.metrics:
            key = m.output
            if key is None and m.listed_at is not None and names:
                key, length = m.listed_at  # a plain list has one for each output
                rest = " output, a list of lists,"
                _check_length("metrics are", length, names, rest)
            is_named = not isinstance(m.metric, FunctionMetric)
            (slot,) = self._slots(key, outputs, labels, is_named=is_named)
            name = m.metric.name if m.output is None else m.name
            metrics.append(
                BoundMetric(
                    slot,
                    f"{slot.name}_{name}" if slot.name else m.name,
                    m.metric,
                    m.is_weighted,
                    loss_of.get(slot.name),
                    slot.name in probabilities,
                )
            )
        return BoundObjective(tuple(losses), tuple(metrics), probabilities, self.warned)

    def _weights_of(self, names: Sequence[str]) -> dict[OutputKey, float]:
        """Return the losses' weights, by output if one loss is for all outputs."""
        weights = self.loss_weights
        if not weights or list(dict(self.losses)) != [None] or list(weights) == [None]:
            return weights
        by_place = all(isinstance(key, int) for key in weights)
        strangers = [key for key in weights if key not in names]
        if (by_place and len(weights) != len(names)) or (not by_place and strangers):
            raise ConfigError(
                f"loss_weights are given for {_keys_in_words(weights)}, and the "
                f"model returns {', '.join(names) or 'one output'}: give one weight "
                "for each output, or a dict by the outputs' names."
            )
        return dict(zip(names, weights.values())) if by_place else weights

    def _slots(
        self,
        key: OutputKey,
        outputs: Any,
        labels: Labels,
        *,
        is_named: bool,
        splits: bool = False,
    ) -> list[Slot]:
        """Return the slots that a loss or metric is for.

        Args:
            key: Name or position of the output; None for all outputs.
            outputs: Everything that the module returned.
            labels: Targets and weights.
            is_named: Whether the loss or metric is built in: it gets the only tensor of
                an object. A user's function gets the whole object.
            splits: If no key is given, return one slot per output instead of one for
                all.
        """
        names, targets, weights = list(_output_keys(outputs)), *labels[:2]
        if not names:
            if isinstance(key, int):
                _check_key(key, [""])
            elif key is not None and (isinstance(outputs, dict) or is_record(outputs)):
                _check_key(key, list(parts_of(outputs)))
            is_bare = is_named or key is not None
            output = _bare_key(outputs) if is_bare else _only_key(outputs)
            is_only = output is not _ALL and not is_named
            return [Slot("", output, _only_key(targets), _only_key(weights), is_only)]
        are_nested = weights is not None and not isinstance(weights, Tensor)
        if key is None and not splits:
            if are_nested:
                raise UnsupportedError(
                    "Sample weights are given per output, and a loss or metric takes "
                    "all outputs at once: give losses and metrics per output too."
                )
            return [Slot()]
        slots, loss_keys = [], [loss_key for loss_key, _ in self.losses]
        for name in _output_names_for(key, names, targets):
            position = names.index(name)
            where = name, position, len(names)
            # The target of the only output that has a loss.
            is_sole = isinstance(targets, Tensor) and loss_keys in ([name], [position])
            target = _ALL if is_sole else _label_key(targets, *where, "targets")
            weight = _ALL
            if are_nested:
                weight = _label_key(weights, *where, "sample weights")
            slots.append(Slot(name, _output_keys(outputs)[name], target, weight))
        return slots


class BoundLoss(NamedTuple):
    """A loss of an output.

    Attributes:
        slot: The output of the loss, with its labels.
        loss: The loss.
        weight: Weight of the loss in the sum of all losses.
    """

    slot: Slot
    loss: Loss
    weight: float


class BoundMetric(NamedTuple):
    """A metric of an output.

    Attributes:
        slot: The output of the metric, with its labels.
        name: Key in logs.
        metric: The metric.
        is_weighted: Whether sample weights are used.
        loss: The loss of the same output; None without one.
        is_squashed: Whether the output comes from a sigmoid or softmax.
    """

    slot: Slot
    name: str
    metric: AnyMetric
    is_weighted: bool
    loss: Loss | None
    is_squashed: bool

    def informed(self) -> Any:
        """Return the metric with its loss set, as a copy unless it is streamed."""
        metric, loss = self.metric, self.loss
        if isinstance(metric, Metric):
            metric = copy.copy(metric)
        takes_probabilities = loss is not None and loss.takes_probabilities
        metric.has_probabilities = self.is_squashed or takes_probabilities
        metric.has_binary_loss = None if loss is None else loss.has_binary_targets
        return metric

    def add(self, outputs: Any, labels: Labels, mask: Tensor | None = None) -> Any:
        """Return the metric's sums of a batch, or update a streamed metric; traceable.

        Args:
            outputs: Everything that the module returned.
            labels: Targets and weights.
            mask: 0 for padding, else 1, `[rows]`; None without padding.
        """
        metric, part = self.informed(), self.slot.part(outputs, labels)
        if self.loss is not None and metric.ignore_index == IGNORED_INDEX:
            target = self.loss.marked(part.output, part.target)
            part = part._replace(target=target)
        weights = part.weights if self.is_weighted else None
        if weights is not None:
            weights = weights.to(torch.float32)
        if mask is not None:
            weights = mask if weights is None else _multiply_rows(weights, mask)
        is_streamed = isinstance(metric, StreamedMetric)
        function = metric.update if is_streamed else metric.sums
        with shapes_in_errors(f"The metric {self.name!r}", part):
            return call_by_rows(function, part.output, part.target, weights)


TermsByOutput = Dict[str, Tuple[LossTerms, float]]
"""Terms and weight of each loss, by the name of its output."""


class BoundObjective(NamedTuple):
    """Losses and metrics, each with its output of a module.

    Attributes:
        losses: All losses; empty if the module returns its own loss.
        metrics: All metrics, in the order in which they were given.
        probabilities: Result of `probability_outputs`.
        warned: As in `Objective`.
    """

    losses: tuple[BoundLoss, ...]
    metrics: tuple[BoundMetric, ...]
    probabilities: Mapping[str, str]
    warned: set[str]

    def terms(
        self, outputs: Any, labels: Labels, rows: int, own_loss: Tensor | None = None
    ) -> TermsByOutput:
        """Compute the terms of every loss, by the name of its output; traceable.

        Args:
            outputs: Everything that the module returned.
            labels: Targets, weights and shares.
            rows: Number of samples, padding included.
            own_loss: The module's own loss, 0-d; used if there are no other losses.

        Raises:
            ConfigError: A loss takes logits, though its name means probabilities.
            DataError: The outputs or targets don't fit a loss.
        """
        if own_loss is not None and not self.losses:
            return {"": (_own_terms(own_loss, rows, labels.share), 1.0)}
        terms = {}
        for slot, loss, weight in self.losses:
            part, noted = slot.part(outputs, labels), LossRecorder()
            of_output = f" of {slot.in_words}" if slot.name else ""
            what = f"The loss {loss.name!r}{of_output}"
            for name, function in self.probabilities.items():
                noted.note(_outputs_by_name(outputs)[name], function)
            noting = noted if self.probabilities else contextlib.nullcontext()
            with shapes_in_errors(what, part), noting:
                term = loss.terms(
                    *(part.output, part.target, rows, part.weights),
                    *(labels.share, part.counted),
                )
            self._check_probabilities(loss, part, noted.misuses)
            terms[slot.name] = term, weight
        return terms

    def mixed_terms(
        self, outputs: Any, labels: Labels, rows: int, mixing: Tensor
    ) -> TermsByOutput:
        """Compute the terms of mixed samples against both of their targets; traceable.

        A sample's weight is used wherever its target is.

        Args:
            outputs: Everything that the module returned.
            labels: Targets, weights and shares of a micro-batch.
            rows: Number of samples, padding included.
            mixing: `[rows, 1 or 6]`, of `Mixing.coefficients`.

        Raises:
            UnsupportedError: A loss gives no value per sample.
        """
        share = Coefficients.of(mixing).share
        plain = labels._replace(share=None, counted=None)
        others: Labels = map_tensors(rolled, plain)
        others = others._replace(share=labels.share, counted=labels.counted)
        terms = self.terms(outputs, weighed(labels, share), rows)
        more = self.terms(outputs, weighed(others, 1.0 - share), rows)
        mixed = {}
        for name, (term, weight) in terms.items():
            other = more[name][0]  # each sample counts once
            value, total = term.value + other.value, term.total + other.total
            mixed[name] = LossTerms(value, total, term.divisor), weight
        return mixed

    def _check_probabilities(
        self, loss: Loss, part: LabeledOutput, misuses: Sequence[Misuse]
    ) -> None:
        """Refuse probabilities in a loss that takes logits, or warn once.

        Raises:
            ConfigError: In Keras the name of the loss means a loss of probabilities.
        """
        for misuse in misuses[:1]:
            message = (
                f"The loss {loss.name!r} takes {misuse.taken}, and the module's "
                f"{part.slot.in_words} comes from a {misuse.squashing}: they are "
                "probabilities. "
                f"{_misuse_advice(misuse, loss, part)}"
            )
            if loss.refuses_probabilities:
                raise ConfigError(message)
            if message not in self.warned:  # as torch has it, and hardly meant
                self.warned.add(message)
                warn_in_first_process(message, IpufitWarning)


def _own_terms(loss: Tensor, rows: int, share: Tensor | None) -> LossTerms:
    value, total = loss.to(torch.float32), loss.detach().to(torch.float32)
    if share is None:
        count = torch.full_like(total, float(rows), device=total.device)
        return LossTerms(value, total.mul(rows), count)
    count = share.gt(0).to(torch.float32).sum()  # of a whole micro-batch
    return LossTerms(value.mul(share.mean()), total.mul(count), count)


def _check_length(
    what: str, length: int | None, names: Sequence[str], advice: str
) -> None:
    """Refuse a list of losses or metrics that has another length than the outputs."""
    if names and length not in (None, len(names)):
        raise ConfigError(
            f"The model returns {len(names)} outputs ({', '.join(names)}), and {what} "
            f"a list of {length}: give one for each{advice} or a dict by the outputs' "
            "names."
        )


def _check_tensors(loss: str, part: LabeledOutput) -> None:
    """Refuse an output or target that isn't one tensor with a row for each sample."""
    output, target = part.output, part.target
    place = part.slot.in_words
    if not isinstance(output, Tensor):
        raise DataError(
            f"The loss {loss!r} takes one tensor, and the module's {place} is a "
            f"{type(output).__name__} of {shapes_of(output)}. Return its tensors as "
            "outputs of their own, in one tuple or dict without others inside, or "
            "pass a function of this output and its targets as its loss."
        )
    if not output.dim():
        raise DataError(
            f"The loss {loss!r} takes a row for each sample, and the module's {place} "
            "is a single number. Return a tensor [N, ...]; or, if the number is a "
            "loss, pass loss=lambda outputs, targets: outputs for this output."
        )
    if target is None:
        raise DataError(
            f"The loss {loss!r} is for the module's {place}, whose target is None: "
            "give a target, or None as its loss."
        )
    if not isinstance(target, Tensor):
        advice = "Give one tensor, or a function of output and targets as the loss."
        if isinstance(target, dict):
            names = list(target)
            advice = (
                f"For one target of {len(names)} columns pass y=frame[{names}] and "
                f"x=frame.drop(columns={names})."
            )
        raise DataError(
            f"The loss {loss!r} takes one target for the module's {place}, and got a "
            f"{type(target).__name__} of {shapes_of(target)}. {advice}"
        )


_OTHER_SIZES = "Expected target size", "size mismatch (got input"
"""What torch's `cross_entropy` and `nll_loss` say of targets of other sizes."""


_ARE_CLASSES = "scalar type Long but", "to be Long"
_ARE_NUMBERS = (
    "class probabilities",
    "Long but expected Float",
    "desired output type Long",
    "Integral inputs",
)
"""What torch says of targets that aren't whole numbers, or are."""


@contextlib.contextmanager
def shapes_in_errors(what: str, part: LabeledOutput) -> Iterator[None]:
    """Add the name of a loss or metric to errors, and its shapes to errors of torch.

    Args:
        what: Subject of the message: the loss or metric.
        part: Output, target and weights that the loss or metric gets.

    Raises:
        DataError: The loss, the metric or torch has raised an error.
        ConfigError: Whole numbers were divided in a program.
    """
    try:
        # On the host torch divides exactly.
        with Divisions(what) if poptorch.isRunningOnIpu() else contextlib.nullcontext():
            yield
    except DataError as error:
        if what in str(error):
            raise
        raise DataError(f"{what}: {error}") from error
    except (IpufitError, poptorch.Error):
        raise
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        is_key = isinstance(error, KeyError)
        cause = f"there is no {error}" if is_key else str(error)
        advice = _advice_on_targets(cause, part)
        raise DataError(
            f"{what} can't take outputs of {shapes_of(part.output)} with targets of "
            f"{shapes_of(part.target)}: {cause.rstrip('.') if advice else cause}"
            f"{advice}"
        ) from error


def _advice_on_targets(cause: str, part: LabeledOutput) -> str:
    """Return advice on an error of torch's about outputs and targets, or nothing."""
    output, target = part.output, part.target
    are_tensors = isinstance(output, Tensor) and isinstance(target, Tensor)
    if "out of bounds" in cause:
        classes = "Classes begin at 0"
        if are_tensors and output.dim() == 2 and output.shape[1] == 1:
            return ". There is one output, for class 0: 'bce' takes targets of 0 and 1."
        if are_tensors and output.dim() == 2:
            classes = f"The outputs are for classes 0 to {output.shape[1] - 1}"
        return f". {classes}, and a target of -100 doesn't count."
    if "should be between 0 and 1" in cause:
        return f": {TO_PROBABILITIES}."
    if any(words in cause for words in _OTHER_SIZES):
        if are_tensors and target.shape == output.shape[:-1]:
            return (
                ". torch's losses have classes on axis 1. If yours are on the last "
                "axis, move them, outputs.movedim(-1, 1), or use the loss "
                "'sparse_categorical_crossentropy' of logits."
            )
        if are_tensors and output.dim() > 2 and target.shape == output[:, 0].shape:
            return (
                ". This loss has classes on the last axis, and the outputs have them "
                "on axis 1, as torch's losses: use 'cross_entropy'."
            )
        return ""
    are_of_classes = "only batches of spatial targets", "multi-target not supported"
    if any(words in cause for words in are_of_classes) and 1 in target.shape[1:2]:
        return ". Leave out the axis of classes in the targets: y.squeeze(1)."
    are_classes = any(words in cause for words in _ARE_CLASSES)
    is_bool = "bool" in shapes_of(target)
    if are_classes or is_bool or any(words in cause for words in _ARE_NUMBERS):
        way, kind = ("long", "int64") if are_classes else ("float", "float32")
        return (
            f". Convert the targets: y.{way}() of a tensor, "
            f'y.astype("{kind}") of an array.'
        )
    if part.slot.is_only:
        return ". A function gets the only output of a dict or tuple itself."
    return ""


def resolve_objective(
    loss: Any,
    loss_weights: Any = None,
    metrics: Any = None,
    weighted_metrics: Any = None,
    steps: Steps | None = None,
) -> Objective:
    """Create the objective from the arguments of `compile()`.

    Args:
        loss: A name, module or function; a list or dict of them, or None, per output;
            None if the module returns its own loss.
        loss_weights: Numbers, a list or dict of them per output.
        metrics: Names, metrics and functions in a list, or such lists per output in
            a list or dict.
        weighted_metrics: As `metrics`, computed with sample weights.
        steps: Functions that compute the loss in place of the module.

    Raises:
        ConfigError: A loss, metric or weight is of an unusable type or number.
        UnknownNameError: A name stands for no loss or metric.
        UnsupportedError: Some losses add over samples, and some average.

    Example:
        >>> objective = resolve_objective("mse", None, ["mae", "mae"])
        >>> [output_metric.name for output_metric in objective.metrics]
        ['mae', 'mae_1']
    """
    losses = tuple(
        (key, resolve_loss(item))
        for key, item in _key_by_output(loss, are_listed=True).items()
        if item is not None
    )
    if loss is not None and not losses:
        raise ConfigError(f"loss={loss!r} has no loss in it.")
    if len({item.is_sum for _, item in losses}) > 1:
        raise UnsupportedError(
            "Some losses add over samples (reduction='sum') and some average: the "
            "gradients of an update are either added or averaged. Use one kind."
        )
    resolved: list[OutputMetric] = []
    for of_kind, is_weighted in ((metrics, False), (weighted_metrics, True)):
        are_nested = isinstance(of_kind, (list, tuple)) and any(
            isinstance(item, (list, tuple, type(None))) for item in of_kind
        )
        for key, items in _key_by_output(of_kind, are_listed=are_nested).items():
            taken = {m.name for m in resolved if m.output == key}
            listed = listed_metrics(items)
            by_name = resolve_metrics([item for _, item in listed])
            length = len(items) if isinstance(items, (list, tuple)) else 1
            for (position, item), (name, metric) in zip(listed, by_name.items()):
                full = f"weighted_{name}" if is_weighted and name in taken else name
                listed_at = (position, length) if _has_single_output(item) else None
                resolved.append(
                    OutputMetric(key, full, metric, is_weighted, listed_at, item)
                )
    num_listed = len(loss) if isinstance(loss, (list, tuple)) else None
    weights = _weights(loss_weights, loss)
    return Objective(losses, weights, tuple(resolved), num_listed, steps)


def _key_by_output(values: Any, *, are_listed: bool) -> dict[OutputKey, Any]:
    """Return the values by `OutputKey`: per output, or one value for all outputs.

    Args:
        values: A dict by name; a list, by position if `are_listed`; or anything for all
            outputs.
        are_listed: Whether a list has an element for each output.
    """
    if isinstance(values, dict):
        return dict(values)
    if are_listed and isinstance(values, (list, tuple)):
        return dict(enumerate(values))
    return {None: values}


def _has_single_output(item: Any) -> bool:
    """Return whether a metric is about one output: all but users' functions."""
    return isinstance(item, (str, Metric, StreamedMetric)) or hasattr(item, "compute")


def _weights(loss_weights: Any, loss: Any) -> dict[OutputKey, float]:
    """Return the weights of losses by output; None is a weight of 1."""
    if loss_weights is None:
        return {}
    if loss is None:
        raise ConfigError(
            f"loss_weights={shown(loss_weights)}, and compile() got no loss: pass "
            "loss=, or weigh terms where the module computes its loss."
        )
    weights = _key_by_output(loss_weights, are_listed=True)
    losses = _key_by_output(loss, are_listed=True)
    for key, weight in weights.items():
        if weight is not None:
            place = "loss_weights" if key is None else f"loss_weights[{key!r}]"
            if isinstance(weight, str):
                refuse(place, weight, "a number; names of metrics go to metrics=[...]")
            check_number(place, weight, least=0)
            weights[key] = float(weight)
    is_short = isinstance(loss_weights, (tuple, list)) and len(weights) != len(losses)
    if list(losses) != [None] and (is_short or not weights.keys() <= losses.keys()):
        raise ConfigError(
            f"loss_weights are given for {_keys_in_words(weights)}, and losses for "
            f"{_keys_in_words(losses)}: give a weight for each loss, in a list or dict "
            "as the losses are."
        )
    return {key: 1.0 if value is None else value for key, value in weights.items()}


def _keys_in_words(keys: Iterable[OutputKey]) -> str:
    """Name outputs in a message.

    Example:
        >>> _keys_in_words(["a", "b"]), _keys_in_words([0, 1]), _keys_in_words([None])
        ("'a', 'b'", 'output 1, output 2', 'all outputs together')
    """
    return ", ".join(
        "all outputs together"
        if key is None
        else f"output {key + 1}"
        if isinstance(key, int)
        else repr(key)
        for key in keys
    )


def sum_loss_message(what: str, rows: int, *, is_all: bool = True) -> str:
    """Return the message about a loss or metric that is a sum over samples.

    Args:
        what: The loss or metric.
        rows: Samples of a micro-batch.
        is_all: Whether the value is only a sum, without a mean besides.

    Example:
        >>> sum_loss_message("The loss 'mine'", 4)[:45]
        "The loss 'mine' is a sum over the 4 samples o"
    """
    return (
        f"{what} {'is' if is_all else 'has a part that is'} a sum over the {rows} "
        "samples of a micro-batch (.sum(), .norm(), reduction='sum'), and has to be "
        "their mean: gradients and metrics would depend on how samples are split into "
        "micro-batches. Take one value per sample, and their mean: x.flatten(1).sum(1)"
        ".mean() in the place of x.sum(), likewise .norm(dim=1).mean(), or "
        "reduction='mean'."
    )


def dominant_labels(
    labels: Labels, mixing: Tensor, micro_batch_size: int | None = None
) -> Labels:
    """Return, for each mixed pair, the label with the larger share.

    Args:
        labels: Targets, weights and shares of rows.
        mixing: As for `BoundObjective.mixed_terms`.
        micro_batch_size: Rows of a micro-batch; None if all rows are one micro-batch.

    Example:
        >>> labels = Labels(torch.tensor([5, 6]))
        >>> dominant_labels(labels, torch.tensor([[0.9], [0.3]])).targets
        tensor([5, 5])
    """
    is_kept = Coefficients.of(mixing).share.ge(0.5)

    def chosen(values: Tensor) -> Any:
        shape = (-1, *(1,) * (values.dim() - 1))
        is_taken = is_kept.reshape(shape).expand(values.shape)
        return torch.where(is_taken, values, rolled(values, micro_batch_size))

    plain = labels._replace(share=None, counted=None)
    mixed: Labels = map_tensors(chosen, plain)
    return mixed._replace(share=labels.share)


def weighed(labels: Labels, factors: Tensor) -> Labels:
    """Multiply the weights of labels by factors of the rows, `[rows]`."""

    def weigh(weights: Tensor) -> Tensor:
        return _multiply_rows(weights.to(torch.float32), factors)

    weights = labels.weights
    weights = factors if weights is None else map_tensors(weigh, weights)
    return labels._replace(weights=weights)


def _multiply_rows(values: Tensor, factors: Tensor) -> Tensor:
    """Multiply rows by factors, `[rows]`."""
    return values.mul(factors.reshape((-1, *(1,) * (values.dim() - 1))))


def real_rows(labels: Labels) -> Tensor | None:
    """Return 1 for samples and 0 for padding, `[rows]`; None without padding."""
    return None if labels.share is None else labels.share.gt(0).to(torch.float32)
