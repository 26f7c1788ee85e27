# SPDX-License-Identifier: Apache-2.0
"""The objective of a model: losses, their weights, and metrics, by output."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any, Iterator, NamedTuple, Union

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.data import Labels
from ipufit.engine.observers.divisions import divisions_refused
from ipufit.errors import ConfigError, DataError, IpufitError
from ipufit.losses import Loss, LossTerms, smoothed
from ipufit.metrics import FunctionMetric, Metric, StreamedMetric

from .logits import check_logits
from .outputs import named_outputs, shapes_of
from .parts import OutputKey, Part, find_parts
from .steps import Inferred, Steps

AnyMetric = Union[Metric, StreamedMetric]


class Measure(NamedTuple):
    """A metric of one output.

    Attributes:
        output: The output that it is given for.
        name: Key in logs, without the output's name.
        metric: The metric itself.
        is_weighted: Whether sample weights count.
        listed_at: Index and length of the list that it was given in, if that isn't a
            list per output and the metric is about one output; with several outputs
            such a list must have one metric for each.
        given: Name, metric or function that it was made from. Measures made from the
            same ones make the same program.
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
        measures: Metrics, in the order in which they were given.
        num_listed: Length of the list of losses, None among them counted; None if
            losses aren't given in a list.
        steps: Functions that compute the loss in the place of the module; None if the
            module is called.
    """

    losses: tuple[tuple[OutputKey, Loss], ...]
    loss_weights: dict[OutputKey, float]
    measures: tuple[Measure, ...] = ()
    num_listed: int | None = None
    steps: Steps | None = None

    @property
    def owns_loss(self) -> bool:
        """Whether the module, or a step of the user's, returns its own loss."""
        return not self.losses

    @property
    def evaluated(self) -> Inferred:
        """The computation of a program for `evaluate`."""
        if self.steps is None:
            return Inferred(self.owns_loss)
        return Inferred(
            True,
            self.steps.validation,
            takes_labels=True,
            gives_outputs=bool(self.measures),
        )

    @property
    def predicted(self) -> Inferred:
        """The computation of a program for `predict`."""
        if self.steps is None:
            return Inferred(self.owns_loss)
        return Inferred(False, self.steps.prediction)

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
        """Whether the figures of many rows are surely the sums of those of fewer rows.

        A function of the user's may give one value for all rows that it gets.
        """
        return all(loss.each is not None for _, loss in self.losses) and all(
            isinstance(m.metric, Metric) and not isinstance(m.metric, FunctionMetric)
            for m in self.measures
        )

    @property
    def program_key(self) -> tuple[object, ...]:
        """The parts that are compiled in, which streamed metrics aren't."""
        measures = [
            (
                *(m.output, m.name, m.is_weighted, m.listed_at),
                StreamedMetric if isinstance(m.metric, StreamedMetric) else m.given,
            )
            for m in self.measures
        ]
        losses = [(key, loss.function, loss.is_sum) for key, loss in self.losses]
        return losses, self.loss_weights, self.num_listed, measures, self.steps

    def fresh(self) -> Objective:
        """A copy whose streamed metrics share no state with these."""
        measures = tuple(
            m._replace(metric=copy.deepcopy(m.metric))
            if isinstance(m.metric, StreamedMetric)
            else m
            for m in self.measures
        )
        return replace(self, measures=measures)

    def smoothed(self, amount: float) -> Objective:
        """The objective with smoothed labels in its losses, which must have classes.

        Args:
            amount: As for `ipufit.losses.smoothed`.
        """
        if not amount:
            return self
        losses = tuple((key, smoothed(loss, amount)) for key, loss in self.losses)
        return replace(self, losses=losses)

    @property
    def _keys(self) -> list[OutputKey]:
        """Outputs that losses are given for."""
        return [key for key, _ in self.losses]

    # Losses -----------------------------------------------------------------

    def loss_terms(
        self, outputs: Any, labels: Labels, rows: int
    ) -> dict[str, tuple[LossTerms, float]]:
        """Compute the terms of every loss, with its weight, by the name of its output.

        Args:
            outputs: Everything that the module returned.
            labels: Targets and weights.
            rows: Number of samples, padding included.

        Raises:
            ConfigError: The losses don't fit the outputs.
            DataError: The targets don't fit the losses.
        """
        self._check_length(outputs)
        weights = self._weights_of(outputs)
        terms = {}
        for key, loss in self.losses:
            for part in self._parts_of_loss(key, loss, outputs, labels):
                with shapes_in_errors(f"The loss {loss.name!r}", part):
                    term = loss.terms(
                        part.output, part.target, rows, part.weights, labels.share
                    )
                terms[part.name] = term, weights.get(key, weights.get(part.name, 1.0))
        return terms

    def check_logits(
        self, outputs: Any, labels: Labels, probabilities: dict[str, str]
    ) -> None:
        """Refuse losses of logits for outputs that are probabilities.

        Args:
            outputs: Everything that the module returned.
            labels: Targets and weights.
            probabilities: Result of `probability_outputs`.

        Raises:
            ConfigError: There is such a loss.
        """
        for key, loss in self.losses if probabilities else ():
            for part in self._parts_of_loss(key, loss, outputs, labels):
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
        """The weights of the losses, by the names of outputs if one loss is for all."""
        given = self.loss_weights
        if not given or self._keys != [None] or list(given) == [None]:
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
        self, outputs: Any, labels: Labels
    ) -> Iterator[tuple[str, Measure, Part, Tensor | None]]:
        """Every metric with its full name, its output and the weights that count.

        Args:
            outputs: Everything that the module returned.
            labels: Targets and weights; shares of 0 mark padding, which doesn't count.
        """
        mask = None if labels.share is None else labels.share.gt(0).to(torch.float32)
        for measure in self.measures:
            output = self._output_of(measure, outputs)
            is_named = not isinstance(measure.metric, FunctionMetric)
            (part,) = find_parts(
                output, outputs, labels, self._keys, splits=False, is_named=is_named
            )
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
        """The output of a metric; in a plain list of metrics that is its position."""
        several = named_outputs(outputs)
        if measure.output is not None or measure.listed_at is None or several is None:
            return measure.output
        position, length = measure.listed_at
        if length != len(several):
            raise ConfigError(
                f"The model returns {len(several)} outputs ({', '.join(several)}), and "
                f"metrics are a list of {length}: give one for each output, a list of "
                "lists, or a dict by the outputs' names."
            )
        return position

    def _parts_of_loss(
        self, key: OutputKey, loss: Loss, outputs: Any, labels: Labels
    ) -> list[Part]:
        is_one = loss.is_per_output
        return find_parts(
            key, outputs, labels, self._keys, splits=is_one, is_named=is_one
        )


@contextlib.contextmanager
def shapes_in_errors(what: str, part: Part) -> Iterator[None]:
    """Raise errors of torch's with the shapes that a loss or metric can't take.

    Args:
        what: Subject of the message: the loss or metric.
        part: Output, target and weights that it gets.

    Raises:
        DataError: torch has raised an error.
        ConfigError: Whole numbers were divided in a program.
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
