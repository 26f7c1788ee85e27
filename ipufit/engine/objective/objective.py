# SPDX-License-Identifier: Apache-2.0
"""What `compile` was told: losses, their weights, metrics, and of which output."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any, Iterator, NamedTuple, Union

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._tree import is_record, parts_of
from ipufit.data import Labels
from ipufit.engine.observers.divisions import divisions_refused
from ipufit.errors import ConfigError, DataError, IpufitError, UnsupportedError
from ipufit.losses import Loss, LossTerms
from ipufit.metrics import FunctionMetric, Metric, StreamedMetric

from .logits import check_logits
from .outputs import bare, named_outputs, only, part_of, shapes_of

AnyMetric = Union[Metric, StreamedMetric]
OutputKey = Union[str, int, None]
"""The output that something is about, by name or position; None for all there is."""


class Measure(NamedTuple):
    """A metric of one output.

    Attributes:
        output: Of which.
        name: Its key in logs, without the output's name.
        metric: How it is computed.
        is_weighted: Whether sample weights count.
        place: Index and length of a list that isn't per output, for a metric that is
            about one; with several outputs such a list must have one for each.
        given: What it was made from: a name, a metric, a function. Measures that are
            made from the same make the same program.
    """

    output: OutputKey
    name: str
    metric: AnyMetric
    is_weighted: bool
    place: tuple[int, int] | None = None
    given: object = None

    @property
    def full_name(self) -> str:
        """Its key in logs if the model has several outputs."""
        if self.output is None:
            return self.name
        output = self.output
        prefix = f"output_{output + 1}" if isinstance(output, int) else output
        return f"{prefix}_{self.name}"


class Part(NamedTuple):
    """One output with what is known of it.

    Attributes:
        name: Its name; empty if the model has one output.
        output: The model's.
        target: Its target.
        weights: Its sample weights.
    """

    name: str
    output: Any
    target: Any
    weights: Tensor | None


@dataclass(frozen=True)
class Objective:
    """Losses and metrics of a model.

    Attributes:
        losses: By output; empty if the module returns its own loss.
        loss_weights: By output, for those that have one.
        measures: Metrics, in the order they were given.
        num_listed: How many outputs a list of losses is for, None among them counted;
            None if it is no list.
    """

    losses: tuple[tuple[OutputKey, Loss], ...]
    loss_weights: dict[OutputKey, float]
    measures: tuple[Measure, ...] = ()
    num_listed: int | None = None

    @property
    def owns_loss(self) -> bool:
        """Whether the module returns its own loss."""
        return not self.losses

    @property
    def is_sum(self) -> bool:
        """Whether the losses add over samples."""
        return any(loss.is_sum for _, loss in self.losses)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Losses that are modules, for their buffers."""
        functions: list[Any] = [loss.function for _, loss in self.losses]
        return [f for f in functions if isinstance(f, torch.nn.Module)]

    @property
    def is_streamed(self) -> bool:
        """Whether some metric needs the outputs themselves."""
        return any(isinstance(m.metric, StreamedMetric) for m in self.measures)

    @property
    def is_additive(self) -> bool:
        """Whether what many rows give is for sure the sum of what few of them give.

        A function of the user's may give one value for all rows that it gets.
        """
        return all(loss.each is not None for _, loss in self.losses) and all(
            isinstance(m.metric, Metric) and not isinstance(m.metric, FunctionMetric)
            for m in self.measures
        )

    @property
    def program_key(self) -> tuple[object, ...]:
        """What a program has compiled in of it; streamed metrics stay on the host."""
        return (
            [(key, loss.function, loss.is_sum) for key, loss in self.losses],
            self.loss_weights,
            self.num_listed,
            [
                (m.output, m.name, m.is_weighted, m.place, StreamedMetric)
                if isinstance(m.metric, StreamedMetric)
                else (m.output, m.name, m.is_weighted, m.place, m.given)
                for m in self.measures
            ],
        )

    def fresh(self) -> Objective:
        """The same with metrics that share no state with these."""
        measures = tuple(
            m._replace(metric=copy.deepcopy(m.metric))
            if isinstance(m.metric, StreamedMetric)
            else m
            for m in self.measures
        )
        return replace(self, measures=measures)

    # Losses -----------------------------------------------------------------

    def loss_terms(
        self, outputs: Any, known: Labels, rows: int
    ) -> dict[str, tuple[LossTerms, float]]:
        """What every loss adds, with its weight, by the name of its output.

        Args:
            outputs: The model's.
            known: Targets and weights.
            rows: Samples.

        Raises:
            ConfigError: The losses don't fit the outputs.
            DataError: The targets don't.
        """
        self._check_length(outputs)
        weights = self._weights_of(outputs)
        terms = {}
        for key, loss in self.losses:
            for part in self._parts_of_loss(key, loss, outputs, known):
                with said(f"The loss {loss.name!r}", part):
                    term = loss.terms(
                        part.output, part.target, rows, part.weights, known.share
                    )
                terms[part.name] = term, weights.get(key, weights.get(part.name, 1.0))
        return terms

    def check_logits(
        self, outputs: Any, known: Labels, probabilities: dict[str, str]
    ) -> None:
        """Refuse losses of logits for outputs that are probabilities.

        Args:
            outputs: The model's.
            known: Targets and weights.
            probabilities: Result of `probability_outputs`.

        Raises:
            ConfigError: There is one.
        """
        for key, loss in self.losses if probabilities else ():
            for part in self._parts_of_loss(key, loss, outputs, known):
                check_logits(loss, part.name, probabilities)

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
        """The losses' weights, by the names of outputs if one loss is for all."""
        given = self.loss_weights
        if not given or [key for key, _ in self.losses] != [None]:
            return given
        if list(given) == [None]:
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

    def measured(
        self, outputs: Any, known: Labels
    ) -> Iterator[tuple[str, Measure, Part, Tensor | None]]:
        """Every metric with its full name, its output and the weights that count.

        Args:
            outputs: The model's.
            known: Targets and weights.
        """
        mask = None if known.share is None else known.share.gt(0).to(torch.float32)
        for measure in self.measures:
            output = self._output_of(measure, outputs)
            is_named = not isinstance(measure.metric, FunctionMetric)
            (part,) = self._parts(output, False, outputs, known, is_named=is_named)
            weights = part.weights if measure.is_weighted else None
            if weights is not None:
                weights = weights.to(torch.float32)
            if mask is not None:
                if weights is None:
                    weights = mask
                else:
                    missing = (1,) * (weights.dim() - 1)
                    weights = weights.mul(mask.reshape((-1, *missing)))
            if not part.name:
                name = measure.name
            elif measure.output is None:
                name = f"{part.name}_{measure.metric.name}"
            else:
                name = f"{part.name}_{measure.name}"
            yield name, measure, part, weights

    @staticmethod
    def _output_of(measure: Measure, outputs: Any) -> OutputKey:
        """The output of a metric, which a plain list tells by position."""
        several = named_outputs(outputs)
        if measure.output is not None or measure.place is None or several is None:
            return measure.output
        position, length = measure.place
        if length != len(several):
            raise ConfigError(
                f"The model returns {len(several)} outputs ({', '.join(several)}), and "
                f"metrics are a list of {length}: give one for each output, a list of "
                "lists, or a dict by the outputs' names."
            )
        return position

    # Outputs ----------------------------------------------------------------

    def _parts_of_loss(
        self, key: OutputKey, loss: Loss, outputs: Any, known: Labels
    ) -> list[Part]:
        is_named = loss.is_per_output
        return self._parts(key, is_named, outputs, known, is_named=is_named)

    def _parts(
        self,
        key: OutputKey,
        is_per_output: bool,
        outputs: Any,
        known: Labels,
        *,
        is_named: bool,
    ) -> list[Part]:
        """The output that `key` means, or each, with its targets and weights.

        What has a name, such as "mse", takes the only tensor of an object; a function
        of the user's takes the object.
        """
        several = named_outputs(outputs)
        if several is None:
            if isinstance(key, int) and key > 0:
                raise ConfigError(
                    f"A loss or metric is given for output {key + 1}, and the model "
                    "returns one."
                )
            if isinstance(key, str) and (
                isinstance(outputs, dict) or is_record(outputs)
            ):
                _check_key(key, parts_of(outputs))
            has_name = is_named or key is not None
            output = bare(outputs) if has_name else only(outputs)
            return [Part("", output, only(known.targets), only(known.weights))]
        if key is None and not is_per_output:
            weights = known.weights
            if weights is not None and not isinstance(weights, Tensor):
                raise UnsupportedError(
                    "Sample weights are given per output, and a loss or metric takes "
                    "all outputs at once: give losses and metrics per output too."
                )
            return [Part("", outputs, known.targets, weights)]
        names = list(several)
        if key is None:
            return [
                self._part(names.index(name), several, known)
                for name in self._with_targets(names, known.targets)
            ]
        if isinstance(key, int):
            if key >= len(names):
                raise ConfigError(
                    f"A loss or metric is given for output {key + 1}, and the model "
                    f"returns {len(names)}: {', '.join(names)}."
                )
            return [self._part(key, several, known)]
        _check_key(key, several)
        return [self._part(names.index(key), several, known)]

    @staticmethod
    def _with_targets(names: list[str], targets: Any) -> list[str]:
        if isinstance(targets, dict):
            return [name for name in names if name in targets] or names
        return names

    def _part(self, position: int, several: dict[str, Any], known: Labels) -> Part:
        name, count = list(several)[position], len(several)
        is_only = [key for key, _ in self.losses] in ([name], [position])
        if isinstance(known.targets, Tensor) and is_only:
            target: Any = known.targets  # the only output with a loss
        else:
            target = part_of(known.targets, name, position, count, "targets")
        weights = known.weights
        if weights is not None and not isinstance(weights, Tensor):
            weights = part_of(weights, name, position, count, "sample weights")
        return Part(name, several[name], target, weights)


@contextlib.contextmanager
def said(what: str, part: Part) -> Iterator[None]:
    """Say which shapes something can't take, if it raises an error of torch's.

    Raises:
        DataError: It did.
        ConfigError: It divides whole numbers in a program.
    """
    try:
        with divisions_refused(what):
            yield
    except (IpufitError, poptorch.Error):
        raise
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{what} can't take outputs of {shapes_of(part.output)} with targets of "
            f"{shapes_of(part.target)}: {error}"
        ) from error


def _check_key(key: str, outputs: Any) -> None:
    if key not in outputs:
        raise ConfigError(
            f"A loss or metric is given for output {key!r}, and the model returns "
            f"{', '.join(map(str, outputs))}."
        )
