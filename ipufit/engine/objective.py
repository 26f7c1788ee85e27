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
    Collection,
    Dict,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
    Tuple,
    Union,
)

import torch
from torch import Tensor

from ipufit._arguments import check_number, shown
from ipufit._poptorch import poptorch
from ipufit._tree import is_record, leaves_of, map_tensors, parts_of, without
from ipufit.data.structure import Labels
from ipufit.engine.trace_checks import Divisions, Misuse, ResultsNoted
from ipufit.errors import (
    ConfigError,
    DataError,
    IpufitError,
    IpufitWarning,
    UnsupportedError,
    warn,
)
from ipufit.losses import Loss, LossTerms, resolve_loss, smoothed
from ipufit.metrics import (
    FunctionMetric,
    Metric,
    StreamedMetric,
    listed_metrics,
    resolve_metrics,
)
from ipufit.metrics.base import IGNORED_INDEX
from ipufit.mixing import Coefficients, rolled


def named_outputs(outputs: Any) -> dict[str, Any] | None:
    """Return several outputs by name; None if there is only one.

    The names are the keys of a dict, `output_1`, `output_2` and so on for a tuple or
    list, the fields of a named tuple, and the attributes that are tensors for an
    object such as a data class.

    Example:
        >>> named_outputs((1, 2)), named_outputs({"a": 1}), named_outputs(3)
        ({'output_1': 1, 'output_2': 2}, None, None)
    """
    if isinstance(outputs, dict):
        several = {str(name): value for name, value in outputs.items()}
    elif isinstance(outputs, (tuple, list)):
        numbered = [f"output_{i}" for i in range(1, len(outputs) + 1)]
        several = dict(zip(getattr(outputs, "_fields", numbered), outputs))
    elif is_record(outputs):
        several = _tensors_of(outputs)
    else:
        return None
    return several if len(several) > 1 else None


def only(values: Any) -> Any:
    """Return the only element of a container; other values unchanged.

    Example:
        >>> only({"a": 1}), only([1, 2])
        (1, [1, 2])
    """
    if isinstance(values, dict) and len(values) == 1:
        return next(iter(values.values()))
    if isinstance(values, (tuple, list)) and len(values) == 1:
        return values[0]
    return values


def bare(outputs: Any) -> Any:
    """Return the only tensor of an object; for other values the result of `only`.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> bare(SimpleNamespace(logits=torch.tensor(1), count=3))
        tensor(1)
    """
    if is_record(outputs):
        tensors = list(_tensors_of(outputs).values())
        return tensors[0] if len(tensors) == 1 else outputs
    return only(outputs)


def _tensors_of(record: Any) -> dict[str, Any]:
    parts = parts_of(record)
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


def part_of(values: Any, name: str, position: int, count: int, what: str) -> Any:
    """Return the part of targets or weights for one of several outputs.

    Args:
        values: A dict by name or a sequence by position.
        name: Name of the output.
        position: Position of the output.
        count: Number of outputs.
        what: Name of the values in messages.

    Raises:
        DataError: The values have no part for this output.

    Example:
        >>> part_of({"a": 1}, "a", 0, 2, "targets"), part_of([1, 2], "b", 1, 2, "")
        (1, 2)
    """
    if isinstance(values, dict):
        if name not in values:
            raise DataError(
                f"The {what} have no {name!r}, which the model returns and which has "
                f"a loss or metric. They have: {', '.join(map(str, values))}."
            )
        return values[name]
    if isinstance(values, (tuple, list)):
        if len(values) != count:
            raise DataError(
                f"There are {len(values)} {what} for {count} outputs: give one for "
                "each, or a dict by the outputs' names."
            )
        return values[position]
    raise DataError(
        f"The model returns {count} outputs, and the {what} are one tensor: give "
        "one for each output, in a list or in a dict by name."
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
"""Everything that is understood as a module's own loss, for messages."""


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
        is_loss = outputs.dim() == 0 or any(outputs is one for one in marked)
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
    """Return the key "loss", or that of the scalar marked last; else None."""
    if "loss" in outputs:
        return "loss" if isinstance(outputs["loss"], (Tensor, type(None))) else None
    for tensor in reversed(marked):
        for key, value in outputs.items():
            if value is tensor and tensor.numel() == 1:
                return key
    return None


def _scalar_end(outputs: Sequence[Any]) -> int | None:
    """Return the first or last position of a tuple if a scalar is there; else None."""
    ends = sorted({0, len(outputs) - 1}) if outputs else []
    found = [
        end
        for end in ends
        if isinstance(outputs[end], Tensor)
        and outputs[end].dim() == 0
        and outputs[end].is_floating_point()
    ]
    if len(found) > 1:
        raise ConfigError(
            f"The module returns {len(outputs)} values, of which the first and the "
            "last are scalars: either may be its loss. Return a dict with 'loss', or "
            "mark the loss with poptorch.identity_loss(loss, reduction='none')."
        )
    return found[0] if found else None


StepFunction = Callable[[torch.nn.Module, Any], Any]
"""Computes from the module and a batch what the program needs of them."""

RETURNS = (
    "the loss, a tuple (loss, outputs), or a dict with 'loss', 'outputs' and scalars "
    "to report"
)


class Steps(NamedTuple):
    """The user's steps of a model.

    Attributes:
        training: Called with the module and a batch; returns the loss, and values to
            report.
        validation: The same in eval mode, for `evaluate`.
        prediction: Called with the module and inputs; returns outputs. None to call the
            module.
    """

    training: StepFunction
    validation: StepFunction
    prediction: StepFunction | None = None


class Inferred(NamedTuple):
    """The computation of a program.

    Attributes:
        owns_loss: Whether a loss is among what is computed.
        step: The user's function; None to call the module.
        takes_labels: Whether the program gets targets and weights besides inputs.
        gives_outputs: Whether outputs are needed beside the scalars.
    """

    owns_loss: bool
    step: StepFunction | None = None
    takes_labels: bool = False
    gives_outputs: bool = True


def checked_step(name: str, function: Any, *, is_method: bool = False) -> None:
    """Refuse a step that can't be called as one.

    Args:
        name: Name of the argument or method.
        function: The function; None is accepted.
        is_method: Whether it takes only a batch, as a method of a model does.

    Raises:
        ConfigError: It is no function, or has other arguments.

    Example:
        >>> checked_step("step", "mse")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: step='mse' is no function ...
    """
    if function is not None and not callable(function):
        raise ConfigError(
            f"{name}={shown(function)} is no function of the module and a batch: write "
            f"`def {name}(module, batch)`, which returns {RETURNS}."
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


class LabelledOutput(NamedTuple):
    """One output with its labels.

    Attributes:
        name: Name of the output; "" if the model has one output.
        output: The tensor, or another value that the module returns there.
        target: Target of the same output.
        weights: Weights of its samples; None without weights.
        counted: For each index that is ignored the mean number of targets of a
            micro-batch that aren't, `[rows]`, nested as the target; None to count those
            of the micro-batch itself.
        is_only: Whether it was taken out of a dict, tuple or list of one output.
    """

    name: str
    output: Any
    target: Any
    weights: Tensor | None
    counted: Any = None
    is_only: bool = False


def _names_of(key: OutputKey, names: list[str], targets: Any) -> list[str]:
    """Return the names of a key's outputs; without a key, of those with targets."""
    if key is None:
        is_listed = isinstance(targets, (tuple, list)) and len(targets) == len(names)
        by_name = dict(zip(names, targets)) if is_listed else targets
        if not isinstance(by_name, dict):
            return names
        return [name for name in names if by_name.get(name) is not None] or names
    if isinstance(key, str):
        _check_key(key, names)
        return [key]
    if key >= len(names):
        raise ConfigError(
            f"A loss or metric is given for output {key + 1}, and the model "
            f"returns {len(names)}: {', '.join(names)}."
        )
    return [names[key]]


def _check_single(key: OutputKey, outputs: Any) -> None:
    if isinstance(key, int) and key > 0:
        raise ConfigError(
            f"A loss or metric is given for output {key + 1}, and the model returns "
            "one."
        )
    if isinstance(key, str) and (isinstance(outputs, dict) or is_record(outputs)):
        _check_key(key, list(parts_of(outputs)))


def _check_key(key: str, names: Sequence[Any]) -> None:
    if key not in names:
        raise ConfigError(
            f"A loss or metric is given for output {key!r}, and the model returns "
            f"{', '.join(map(str, names))}."
        )


def probability_outputs(outputs: Any, noted: ResultsNoted) -> dict[str, str]:
    """Return the outputs that are probabilities, and the functions that they come from.

    Args:
        outputs: Everything that the module returned.
        noted: Results of the module's operations.

    Returns:
        "sigmoid" or "softmax" by the output's name, which is empty for a single
        output.
    """
    parts = _by_name(outputs).items()
    functions = {name: noted.function_of(part) for name, part in parts}
    return {name: function for name, function in functions.items() if function}


def _by_name(outputs: Any) -> dict[str, Any]:
    return named_outputs(outputs) or {"": bare(outputs)}


def _instead_of(misuse: Misuse, loss: Loss, part: LabelledOutput) -> str:
    """Return what to do about probabilities that a loss doesn't take."""
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
    if misuse.function == "log_softmax":
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
        output: The output that it is for.
        name: Key in logs, without the output's name.
        metric: The metric.
        is_weighted: Whether sample weights are used.
        listed_at: Index and length of the list that it was given in, if that isn't a
            list per output and the metric is about one output; with several outputs
            such a list must have one metric for each.
        given: Name, metric or function that it was made from. Equal ones make equal
            programs.
    """

    output: OutputKey
    name: str
    metric: AnyMetric
    is_weighted: bool
    listed_at: tuple[int, int] | None = None
    given: object = None

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
        loss_weights: Weights by output; a loss without one has weight 1.
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
    def trained(self) -> Inferred:
        """The computation of a program for `fit`."""
        step = None if self.steps is None else self.steps.training
        return Inferred(self.owns_loss, step, takes_labels=True)

    @property
    def evaluated(self) -> Inferred:
        """The computation of a program for `evaluate`."""
        if self.steps is None:
            return Inferred(self.owns_loss)
        return Inferred(
            True,
            self.steps.validation,
            takes_labels=True,
            gives_outputs=bool(self.metrics),
        )

    @property
    def predicted(self) -> Inferred:
        """The computation of a program for `predict`."""
        if self.steps is None:
            return Inferred(self.owns_loss)
        return Inferred(False, self.steps.prediction)

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
        """Indices of targets that losses ignore, without doubles."""
        indices = [loss.ignored for _, loss in self.losses if not loss.is_sum]
        return tuple(sorted(set().union(*indices)))

    def ignore_as(self, traced: Objective) -> None:
        """Take over the indices that the same functions ignored in a trace."""
        for (_, loss), (_, other) in zip(self.losses, traced.losses):
            loss.indices.update(other.indices)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Losses that are modules, for their buffers."""
        functions: list[Any] = [loss.function for _, loss in self.losses]
        return [f for f in functions if isinstance(f, torch.nn.Module)]

    @property
    def is_streamed(self) -> bool:
        """Whether a metric needs the outputs."""
        return any(isinstance(m.metric, StreamedMetric) for m in self.metrics)

    @property
    def is_additive(self) -> bool:
        """Whether sums over many rows are surely the sums of fewer rows.

        A user's function may return one value for all rows.
        """
        return all(loss.each is not None for _, loss in self.losses) and all(
            isinstance(m.metric, Metric) and not isinstance(m.metric, FunctionMetric)
            for m in self.metrics
        )

    @property
    def program_key(self) -> tuple[object, ...]:
        """The parts that are compiled in, without streamed metrics."""
        metrics = [
            (
                *(m.output, m.name, m.is_weighted, m.listed_at),
                StreamedMetric if isinstance(m.metric, StreamedMetric) else m.given,
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

    # Losses -----------------------------------------------------------------

    def loss_terms(
        self,
        outputs: Any,
        labels: Labels,
        rows: int,
        probabilities: Mapping[str, str] | None = None,
    ) -> dict[str, tuple[LossTerms, float]]:
        """Compute the terms of every loss, with its weight, by the name of its output.

        Args:
            outputs: Everything that the module returned.
            labels: Targets and weights.
            rows: Number of samples, padding included.
            probabilities: Result of `probability_outputs`; None to check none.

        Raises:
            ConfigError: The losses don't fit the outputs.
            DataError: The targets don't fit the losses.
        """
        self._check_length(outputs)
        weights = self._weights_of(outputs)
        terms = {}
        for key, loss in self.losses:
            for part in self._parts_of_loss(key, loss, outputs, labels):
                noted = ResultsNoted()
                for name, function in (probabilities or {}).items():
                    noted.note(_by_name(outputs)[name], function)
                with contextlib.ExitStack() as stack:
                    stack.enter_context(
                        shapes_in_errors(f"The loss {loss.name!r}", part)
                    )
                    if probabilities:
                        stack.enter_context(noted)
                    if loss.is_per_output:
                        _check_tensors(loss.name, part)
                    term = loss.terms(
                        *(part.output, part.target, rows, part.weights),
                        *(labels.share, part.counted),
                    )
                self._check_probabilities(loss, part, noted.misuses)
                terms[part.name] = term, weights.get(key, weights.get(part.name, 1.0))
        return terms

    def names_of_losses(self, names: list[str]) -> list[str]:
        """Return which of a module's outputs have losses of their own."""
        wanted = []
        for key, loss in self.losses:
            if key is not None or loss.is_per_output:
                wanted += _names_of(key, names, names)
        return wanted

    def functions(self, outputs: Any, labels: Labels) -> Iterator[tuple[Loss, Any]]:
        """Yield the users' own losses, with the output and target that each gets.

        Args:
            outputs: Everything that the module returned.
            labels: Targets and weights.
        """
        for key, loss in self.losses:
            if loss.is_function:
                for part in self._parts_of_loss(key, loss, outputs, labels):
                    yield loss, (part.output, part.target)

    def _check_probabilities(
        self, loss: Loss, part: LabelledOutput, misuses: Sequence[Misuse]
    ) -> None:
        """Refuse probabilities where a loss takes no such, or warn once.

        Raises:
            ConfigError: The name of the loss means one of probabilities in Keras.
        """
        for misuse in misuses[:1]:
            output = f"output {part.name!r}" if part.name else "output"
            message = (
                f"The loss {loss.name!r} takes {misuse.taken}, and the module's "
                f"{output} comes from a {misuse.squashing}: they are probabilities. "
                f"{_instead_of(misuse, loss, part)}"
            )
            if loss.refuses_probabilities:
                raise ConfigError(message)
            if message not in self.warned:  # as torch has it, and hardly meant
                self.warned.add(message)
                warn(message, IpufitWarning)

    def _check_length(self, outputs: Any) -> None:
        several = named_outputs(outputs)
        if several is None or self.num_listed in (None, len(several)):
            return
        raise ConfigError(
            f"The model returns {len(several)} outputs ({', '.join(several)}), and "
            f"loss is a list of {self.num_listed}: give one for each, None for those "
            "without a loss, or a dict by the outputs' names."
        )

    def _weights_of(self, outputs: Any) -> dict[OutputKey, float]:
        """Return the weights of the losses, by output if one loss is for all."""
        given = self.loss_weights
        if not given or list(dict(self.losses)) != [None] or list(given) == [None]:
            return given
        names = list(named_outputs(outputs) or ())
        by_place = all(isinstance(key, int) for key in given)
        strangers = [key for key in given if key not in names]
        if (by_place and len(given) != len(names)) or (not by_place and strangers):
            raise ConfigError(
                f"loss_weights are given for {', '.join(map(repr, given))}, and the "
                f"model returns {', '.join(names) or 'one output'}: give one weight "
                "for each output, or a dict by the outputs' names."
            )
        return dict(zip(names, given.values())) if by_place else given

    # Metrics ----------------------------------------------------------------

    def metrics_of(
        self, outputs: Any, labels: Labels, probabilities: Collection[str] = ()
    ) -> Iterator[tuple[str, OutputMetric, LabelledOutput, Tensor | None]]:
        """Yield every metric with its full name, its output and the weights to use.

        Args:
            outputs: Everything that the module returned.
            labels: Targets and weights; shares of 0 mark padding, which is ignored.
            probabilities: Names of outputs that are probabilities.
        """
        labels = labels._replace(counted=None)
        mask = None if labels.share is None else labels.share.gt(0).to(torch.float32)
        loss_of = {
            part.name: loss
            for key, loss in self.losses
            if self.metrics and (loss.is_binary or loss.ignored)
            for part in self._parts_of_loss(key, loss, outputs, labels)
        }
        for output_metric in self.metrics:
            output = self._output_of(output_metric, outputs)
            is_named = not isinstance(output_metric.metric, FunctionMetric)
            (part,) = self._parts(
                output, outputs, labels, splits=False, is_named=is_named
            )
            loss, metric = loss_of.get(part.name), output_metric.metric
            is_squashed = part.name in probabilities
            is_streamed = isinstance(metric, StreamedMetric)
            if loss is not None or is_squashed or is_streamed:
                if isinstance(metric, Metric):
                    metric = copy.copy(metric)
                    output_metric = output_metric._replace(metric=metric)
                metric.has_probabilities = is_squashed or (
                    loss is not None and loss.takes_probabilities
                )
                metric.has_binary_loss = None if loss is None else loss.is_binary
            ignored = output_metric.metric.ignore_index
            if loss is not None and ignored == IGNORED_INDEX:
                target = loss.marked(part.output, part.target)
                part = part._replace(target=target)
            weights = part.weights if output_metric.is_weighted else None
            if weights is not None:
                weights = weights.to(torch.float32)
            if mask is not None:
                if weights is None:
                    weights = mask
                else:
                    missing = (1,) * (weights.dim() - 1)
                    weights = weights.mul(mask.reshape((-1, *missing)))
            if not part.name:
                name = output_metric.name
            elif output_metric.output is None:
                name = f"{part.name}_{output_metric.metric.name}"
            else:
                name = f"{part.name}_{output_metric.name}"
            yield name, output_metric, part, weights

    @staticmethod
    def _output_of(output_metric: OutputMetric, outputs: Any) -> OutputKey:
        """Return the output of a metric; in a plain list of metrics its position."""
        several = named_outputs(outputs)
        if (
            output_metric.output is not None
            or output_metric.listed_at is None
            or several is None
        ):
            return output_metric.output
        position, length = output_metric.listed_at
        if length != len(several):
            raise ConfigError(
                f"The model returns {len(several)} outputs ({', '.join(several)}), and "
                f"metrics are a list of {length}: give one for each output, a list of "
                "lists, or a dict by the outputs' names."
            )
        return position

    def _parts_of_loss(
        self, key: OutputKey, loss: Loss, outputs: Any, labels: Labels
    ) -> list[LabelledOutput]:
        is_one = loss.is_per_output
        return self._parts(key, outputs, labels, splits=is_one, is_named=is_one)

    def _parts(
        self,
        key: OutputKey,
        outputs: Any,
        labels: Labels,
        *,
        splits: bool,
        is_named: bool,
    ) -> list[LabelledOutput]:
        """Return the outputs that a loss or metric is for.

        Args:
            key: The output that it was given for.
            outputs: Everything that the module returned.
            labels: Targets and weights.
            splits: Without a key it is for each of several outputs, and not for all at
                once.
            is_named: Whether it has a name, such as "mse", and takes the only tensor of
                an object; a user's function takes the object.

        Raises:
            ConfigError: The model has no such output.
            DataError: There are no targets for it.
            UnsupportedError: Weights are per output, and the outputs are taken at once.
        """
        several, counted = named_outputs(outputs), labels.counted
        if several is None:
            _check_single(key, outputs)
            output = bare(outputs) if is_named or key is not None else only(outputs)
            if counted is not None:
                counted = {index: only(nested) for index, nested in counted.items()}
            target, weights = only(labels.targets), only(labels.weights)
            is_only = output is not outputs and not is_named
            return [LabelledOutput("", output, target, weights, counted, is_only)]
        weights = labels.weights
        if key is None and not splits:
            if weights is not None and not isinstance(weights, Tensor):
                raise UnsupportedError(
                    "Sample weights are given per output, and a loss or metric takes "
                    "all outputs at once: give losses and metrics per output too."
                )
            return [LabelledOutput("", outputs, labels.targets, weights, counted)]
        names, parts = list(several), []
        for name in _names_of(key, names, labels.targets):
            position = names.index(name)
            target, of_index = labels.targets, counted
            # The target of the only output that has a loss.
            loss_keys = [one for one, _ in self.losses]
            if not (isinstance(target, Tensor) and loss_keys in ([name], [position])):
                where = name, position, len(names), "targets"
                target = part_of(target, *where)
                if counted is not None:
                    of_index = {i: part_of(one, *where) for i, one in counted.items()}
            its = weights
            if weights is not None and not isinstance(weights, Tensor):
                its = part_of(weights, name, position, len(names), "sample weights")
            parts.append(LabelledOutput(name, several[name], target, its, of_index))
        return parts


def _check_tensors(loss: str, part: LabelledOutput) -> None:
    """Refuse an output or target that isn't one tensor with a row for each sample."""
    output, target = part.output, part.target
    place = f"output {part.name!r}" if part.name else "output"
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


@contextlib.contextmanager
def shapes_in_errors(what: str, part: LabelledOutput) -> Iterator[None]:
    """Add the name of a loss or metric to errors, and shapes to those of torch.

    Args:
        what: Subject of the message: the loss or metric.
        part: Output, target and weights that it gets.

    Raises:
        DataError: It, or torch, has raised an error.
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
        targets = shapes_of(part.target)
        is_key = isinstance(error, KeyError)
        advice, cause = "", f"there is no {error}" if is_key else str(error)
        are_classes = any(words in cause for words in ("type Long but", "to be Long"))
        if "out of bounds" in str(error):
            advice = ". Classes begin at 0, and a target of -100 doesn't count."
        elif are_classes or "bool" in targets or "class probabilities" in cause:
            way, kind = ("long", "int64") if are_classes else ("float", "float32")
            advice = f'. Give numbers: y.{way}() of a tensor, or y.astype("{kind}").'
        elif part.is_only:
            advice = ". A function gets the only output of a dict or tuple itself."
        raise DataError(
            f"{what} can't take outputs of {shapes_of(part.output)} with targets of "
            f"{targets}: {cause.rstrip('.') if advice else cause}{advice}"
        ) from error


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
        weighted_metrics: The same, for metrics with sample weights.
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
        (key, resolve_loss(item)) for key, item in _per_output(loss) if item is not None
    )
    if loss is not None and not losses:
        raise ConfigError(f"loss={loss!r} has no loss in it.")
    if len({item.is_sum for _, item in losses}) > 1:
        raise UnsupportedError(
            "Some losses add over samples (reduction='sum') and some average: the "
            "gradients of an update are either added or averaged. Use one kind."
        )
    resolved: list[OutputMetric] = []
    for given, is_weighted in ((metrics, False), (weighted_metrics, True)):
        for key, items in _metrics_per_output(given):
            taken = {m.name for m in resolved if m.output == key}
            listed = listed_metrics(items)
            by_name = resolve_metrics([item for _, item in listed])
            length = len(items) if isinstance(items, (list, tuple)) else 1
            for (position, item), (name, metric) in zip(listed, by_name.items()):
                full = f"weighted_{name}" if is_weighted and name in taken else name
                listed_at = (position, length) if _is_about_one(item) else None
                resolved.append(
                    OutputMetric(key, full, metric, is_weighted, listed_at, item)
                )
    num_listed = len(loss) if isinstance(loss, (list, tuple)) else None
    weights = _weights(loss_weights, losses)
    return Objective(losses, weights, tuple(resolved), num_listed, steps)


def _per_output(loss: Any) -> list[tuple[OutputKey, Any]]:
    if isinstance(loss, dict):
        return list(loss.items())
    if isinstance(loss, (list, tuple)):
        return list(enumerate(loss))
    return [(None, loss)]


def _metrics_per_output(metrics: Any) -> list[tuple[OutputKey, Any]]:
    if isinstance(metrics, dict):
        return list(metrics.items())
    is_nested = isinstance(metrics, (list, tuple)) and any(
        isinstance(item, (list, tuple, type(None))) for item in metrics
    )
    return list(enumerate(metrics)) if is_nested else [(None, metrics)]


def _is_about_one(item: Any) -> bool:
    """Return whether a metric is about one output: all but users' functions."""
    return isinstance(item, (str, Metric, StreamedMetric)) or hasattr(item, "compute")


def _weights(
    loss_weights: Any, losses: Sequence[tuple[OutputKey, Loss]]
) -> dict[OutputKey, float]:
    if loss_weights is None:
        return {}
    if isinstance(loss_weights, dict):
        weights: dict[OutputKey, float] = dict(loss_weights)
    elif isinstance(loss_weights, (list, tuple)):
        weights = dict(enumerate(loss_weights))
    else:
        weights = {None: loss_weights}
    for key, weight in weights.items():
        check_number(f"the weight of {key!r}", weight, least=0, of="loss_weights")
        weights[key] = float(weight)
    keys = [key for key, _ in losses]
    strangers = [key for key in weights if key not in keys]
    if strangers and keys != [None]:
        raise ConfigError(
            f"loss_weights has {strangers[0]!r}, for which there is no loss. Losses "
            f"are given for {', '.join(map(repr, keys))}."
        )
    return weights


def sum_instead_of_mean(what: str, rows: int, *, is_all: bool = True) -> str:
    """Return the message about a loss or metric that is a sum over samples.

    Args:
        what: The loss or metric.
        rows: Samples of a micro-batch.
        is_all: Whether there is no mean beside the sum.

    Example:
        >>> sum_instead_of_mean("The loss 'mine'", 4)[:45]
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


TermsByOutput = Dict[str, Tuple[LossTerms, float]]
"""Terms and weight of each loss, by the name of its output."""


def mixed_loss_terms(
    objective: Objective,
    outputs: Any,
    labels: Labels,
    rows: int,
    mixing: Tensor,
    probabilities: Mapping[str, str] | None = None,
) -> TermsByOutput:
    """Compute the losses of mixed samples, against both targets of each; traceable.

    A sample's weight is used wherever its target is.

    Args:
        objective: Losses and their weights.
        outputs: Everything that the module returned.
        labels: Targets, weights and shares of a micro-batch.
        rows: Number of samples, padding included.
        mixing: `[rows, 1 or 6]`, of `Mixing.coefficients`.
        probabilities: As for `Objective.loss_terms`.

    Raises:
        UnsupportedError: A loss gives no value per sample.
    """
    share = Coefficients.of(mixing).share
    plain = labels._replace(share=None, counted=None)
    others: Labels = map_tensors(rolled, plain)
    others = others._replace(share=labels.share, counted=labels.counted)
    own_labels = _weighed(labels, share)
    terms = objective.loss_terms(outputs, own_labels, rows, probabilities)
    more = objective.loss_terms(outputs, _weighed(others, 1.0 - share), rows)
    mixed = {}
    for name, (own, weight) in terms.items():
        other = more[name][0]  # each sample counts once
        term = LossTerms(own.value + other.value, own.total + other.total, own.divisor)
        mixed[name] = term, weight
    return mixed


def dominant_labels(
    labels: Labels, mixing: Tensor, micro_batch_size: int | None = None
) -> Labels:
    """Return labels for metrics: of each mixed pair those with the larger share.

    Args:
        labels: Targets, weights and shares of rows.
        mixing: As for `mixed_loss_terms`.
        micro_batch_size: Rows of a micro-batch; None if the rows are one.

    Example:
        >>> labels = Labels(torch.tensor([5, 6]))
        >>> dominant_labels(labels, torch.tensor([[0.9], [0.3]])).targets
        tensor([5, 5])
    """
    is_own = Coefficients.of(mixing).share.ge(0.5)

    def chosen(own: Tensor) -> Any:
        shape = (-1, *(1,) * (own.dim() - 1))
        is_taken = is_own.reshape(shape).expand(own.shape)
        return torch.where(is_taken, own, rolled(own, micro_batch_size))

    plain = labels._replace(share=None, counted=None)
    mixed: Labels = map_tensors(chosen, plain)
    return mixed._replace(share=labels.share)


def _weighed(labels: Labels, share: Tensor) -> Labels:
    """Multiply the weights of labels by parts of the loss, `[rows]`."""

    def weigh(weights: Tensor) -> Any:
        shape = (-1, *(1,) * (weights.dim() - 1))
        return weights.to(torch.float32).mul(share.reshape(shape))

    weights = share if labels.weights is None else map_tensors(weigh, labels.weights)
    return labels._replace(weights=weights)
