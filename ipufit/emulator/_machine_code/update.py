# SPDX-License-Identifier: Apache-2.0
"""Optimisers as pure functions of tensors, for updates that are compiled.

They are the formulas of `_sgd_rules.py` and `_adaptive_rules.py` once more. There each
line is a call of torch that works in place on many weights, with hyper-parameters that
are Python numbers; here a compiler makes one loop of them all, and hyper-parameters
are inputs, since they may change from call to call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Dict, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.emulator._update.adaptive import AdamRule, LambRule, RMSpropRule
from ipufit.emulator._update.sgd import MomentumSGD, PlainSGD
from ipufit.emulator._update.weight_group import STEP, UpdateRule, WeightGroup

if TYPE_CHECKING:
    from ipufit.emulator._device.weights import GradientReduction
    from ipufit.emulator._update.device_optimizer import DeviceOptimizer

Tensors = Sequence[Tensor]
Values = Dict[str, float]
Inputs = Mapping[str, Tensor]
State = Dict[str, Tensor]


_REDUCTION = ("scale", "divisor", "ratio")
"""What comes before the numbers of the optimiser."""


class Formulas(ABC):
    """An update rule for one weight, in float32.

    Both functions replace what they change in `state`.
    """

    def values(self, group: WeightGroup, step: float) -> Values:
        """The numbers that the formulas take.

        Args:
            group: Has the hyper-parameters.
            step: The number of this update, from 1.
        """
        return {**group.scalars, "lossScaling": group.loss_scaling}

    @abstractmethod
    def direction(
        self, weight: Tensor, gradient: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        """Turn a gradient into what gradient clipping applies to."""

    @abstractmethod
    def updated(
        self, weight: Tensor, direction: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        """The new weight."""


def formulas(rule: UpdateRule) -> Formulas:
    """The formulas of a rule.

    Example:
        >>> sgd = formulas(PlainSGD())
        >>> weight, gradient = torch.tensor([1.0, 2.0])
        >>> values = {
        ...     "scaledLearningRate0": torch.tensor(0.1),
        ...     "weightDecayScaleFactor0": torch.tensor(1.0),
        ... }
        >>> sgd.updated(weight, gradient, {}, values)
        tensor(0.8000)
    """
    if isinstance(rule, PlainSGD):
        return _PlainSGD()
    if isinstance(rule, MomentumSGD):
        return _MomentumSGD(rule)
    if isinstance(rule, AdamRule):
        return _Adam(rule)
    if isinstance(rule, LambRule):
        return _Lamb(rule)
    if isinstance(rule, RMSpropRule):
        return _RMSprop(rule)
    raise NotImplementedError(f"{type(rule).__name__} has no formulas")


class _PlainSGD(Formulas):
    def direction(
        self, weight: Tensor, gradient: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        return gradient

    def updated(
        self, weight: Tensor, direction: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        decayed = weight * inputs["weightDecayScaleFactor0"]
        return torch.sub(decayed, direction * inputs["scaledLearningRate0"])


class _MomentumSGD(Formulas):
    def __init__(self, rule: MomentumSGD) -> None:
        self._is_combined = rule.is_combined

    def direction(
        self, weight: Tensor, gradient: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        velocity = state["Accl1"]
        if not self._is_combined:
            velocity = _carried_over(weight, velocity, inputs)
        velocity = velocity + gradient * inputs["dampeningScaleFactor1"]
        state["Accl1"] = velocity
        ahead = (
            velocity * inputs["scaledMomentum1"]
            + gradient * inputs["nesterovGradientScaleFactor1"]
            + weight * inputs["nesterovWeightDecay1"]
        )
        return torch.where(torch.ne(inputs["nesterov"], 0.0), ahead, velocity)

    def updated(
        self, weight: Tensor, direction: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        weight = weight - direction * inputs["scaledLearningRate1"]
        if self._is_combined:
            state["Accl1"] = _carried_over(weight, state["Accl1"], inputs)
        return weight


def _carried_over(weight: Tensor, velocity: Tensor, inputs: Inputs) -> Tensor:
    decay = weight * inputs["scaledWeightDecay1"]
    return torch.add(velocity * inputs["scaledMomentum1"], decay)


class _Moments(Formulas):
    def direction(
        self, weight: Tensor, gradient: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        return torch.div(gradient, inputs["lossScaling"])

    def _update_moments(self, direction: Tensor, state: State, inputs: Inputs) -> None:
        beta1, beta2 = inputs["beta1"], inputs["beta2"]
        state["Accl1"] = state["Accl1"] * beta1 + direction * inputs["1-beta1"]
        squares = direction * direction * inputs["1-beta2"]
        state["Accl2"] = state["Accl2"] * beta2 + squares


def _betas(scalars: Mapping[str, float]) -> Values:
    # Rounded to float32, 1 - beta has few digits left.
    return {"1-beta1": 1.0 - scalars["beta1"], "1-beta2": 1.0 - scalars["beta2"]}


class _Adam(_Moments):
    def __init__(self, rule: AdamRule) -> None:
        self._decays_gradient = rule.decays_gradient

    def values(self, group: WeightGroup, step: float) -> Values:
        scalars = group.scalars
        lr, decay = scalars["learningRate"], scalars["weightDecay"]
        first = _correction(scalars["beta1"], step)
        return {
            **super().values(group, step),
            **_betas(scalars),
            "shrinkage": 1.0 - lr * decay,
            "stepSize": lr / first if first else math.nan,
            "root": _root(_correction(scalars["beta2"], step)),
        }

    def direction(
        self, weight: Tensor, gradient: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        direction = super().direction(weight, gradient, state, inputs)
        if not self._decays_gradient:
            return direction
        return torch.add(direction, weight * inputs["weightDecay"])

    def updated(
        self, weight: Tensor, direction: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        self._update_moments(direction, state, inputs)
        if not self._decays_gradient:
            weight = weight * inputs["shrinkage"]
        denominator = state["Accl2"].sqrt() / inputs["root"] + inputs["eps"]
        return torch.sub(weight, state["Accl1"] / denominator * inputs["stepSize"])


class _Lamb(_Moments):
    def __init__(self, rule: LambRule) -> None:
        self._corrects_bias = rule.corrects_bias

    def values(self, group: WeightGroup, step: float) -> Values:
        scalars = group.scalars
        first = second = 1.0
        if self._corrects_bias:
            first = _correction(scalars["beta1"], step)
            second = _correction(scalars["beta2"], step)
        return {
            **super().values(group, step),
            **_betas(scalars),
            "firstCorrection": first,
            "root": _root(second),
        }

    def updated(
        self, weight: Tensor, direction: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        self._update_moments(direction, state, inputs)
        denominator = state["Accl2"].sqrt() / inputs["root"] + inputs["eps"]
        update = state["Accl1"] / inputs["firstCorrection"] / denominator
        update = update + weight * inputs["weightDecay"]
        length = torch.minimum(_norm(weight), inputs["maxWeightNorm"])
        update_length = _norm(update)
        is_zero = torch.logical_or(torch.eq(length, 0.0), torch.eq(update_length, 0.0))
        ratio = torch.where(is_zero, torch.ones_like(length), length / update_length)
        return torch.sub(weight, update * (inputs["learningRate"] * ratio))


class _RMSprop(Formulas):
    def __init__(self, rule: RMSpropRule) -> None:
        self._rule = rule

    def values(self, group: WeightGroup, step: float) -> Values:
        alpha = group.scalars["alpha"]
        return {**super().values(group, step), "1-alpha": 1.0 - alpha}

    def direction(
        self, weight: Tensor, gradient: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        unscaled = gradient / inputs["lossScaling"]
        return torch.add(unscaled, weight * inputs["weightDecay"])

    def updated(
        self, weight: Tensor, direction: Tensor, state: State, inputs: Inputs
    ) -> Tensor:
        lr = inputs["learningRate"]
        update = direction / self._root(direction, state, inputs)
        if not self._rule.has_momentum:
            return torch.sub(weight, update * lr)
        is_tensorflow = self._rule.is_tensorflow
        velocity = state["Accl3"] * inputs["momentum"]
        velocity = velocity + (update * lr if is_tensorflow else update)
        state["Accl3"] = velocity
        return torch.sub(weight, velocity if is_tensorflow else velocity * lr)

    def _root(self, direction: Tensor, state: State, inputs: Inputs) -> Tensor:
        alpha, rest = inputs["alpha"], inputs["1-alpha"]
        squares = state["Accl1"] * alpha + direction * direction * rest
        state["Accl1"] = squares
        if self._rule.is_centered:
            mean = state["Accl2"] * alpha + direction * rest
            state["Accl2"] = mean
            squares = squares - mean * mean
        if self._rule.is_tensorflow:
            return torch.sqrt(squares + inputs["eps"])
        return torch.add(squares.sqrt(), inputs["eps"])


def clipping_factor(directions: list[Tensor], largest: float) -> Tensor:
    """What clips directions: `c / norm` where their norm is above `c`, else 1.

    Example:
        >>> clipping_factor([torch.tensor([3.0]), torch.tensor([4.0])], 1.0)
        tensor(0.2000)
    """
    norm = torch.stack([(d * d).sum() for d in directions]).sum().sqrt()
    # Not the other way round: NaN is to spread.
    return torch.where(torch.le(norm, largest), torch.ones_like(norm), largest / norm)


def _norm(tensor: Tensor) -> Tensor:
    return torch.sqrt((tensor * tensor).sum())


def _correction(beta: float, step: float) -> float:
    """`1 - beta^step`; NaN for a loaded state that makes no sense."""
    try:
        return 1.0 - math.pow(beta, step)
    except ValueError:
        return math.nan


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0.0 else math.nan


@dataclass(frozen=True)
class Update:
    """An optimiser's update of the weights.

    Attributes:
        groups: Weights that are updated together: what is asked of them are rules,
            names and slots of the state, not tensors.
        max_grad_norm: The largest norm of the gradients.
    """

    groups: tuple[WeightGroup, ...]
    max_grad_norm: float

    def is_of(self, groups: Sequence[WeightGroup]) -> bool:
        """Whether it is the update of these too."""
        shapes = [_shape(group) for group in groups]
        return [_shape(group) for group in self.groups] == shapes

    @property
    def num_values(self) -> int:
        """How many numbers it takes."""
        values = (formulas(g.rule).values(g, 1.0) for g in self.groups)
        return len(_REDUCTION) + sum(map(len, values))

    def table(
        self,
        optimizer: DeviceOptimizer,
        groups: Sequence[WeightGroup],
        reduction: GradientReduction,
        updates: int,
    ) -> Tensor:
        """The numbers of some updates: a row for each.

        Args:
            optimizer: The device's.
            groups: Its own, of which `is_of` is true.
            reduction: Of the gradients.
            updates: How many will follow.
        """
        first = [reduction.scale, float(reduction.divisor), optimizer.gradient_ratio]
        rows = []
        for index in range(updates):
            row = list(first)
            for group in groups:
                step = group.step + 1.0 + index
                row += formulas(group.rule).values(group, step).values()
            rows.append(row)
        return torch.tensor(rows, dtype=torch.float32)

    def apply(
        self, weights: Tensors, states: Tensors, values: Tensor, gradients: Tensors
    ) -> None:
        """Update weights and states in place.

        Args:
            weights: Of all groups, one after the other.
            states: What `states(groups)` gives.
            values: A row of the table.
            gradients: The sums over the micro-batches; for each weight one.
        """
        numbers = iter(values.unbind(0))
        _, divisor, ratio = (next(numbers) for _ in _REDUCTION)
        remaining = iter(states)
        work = []
        for group, start in self._starts():
            rule = formulas(group.rule)
            names = rule.values(group, 1.0)
            inputs = {name: next(numbers) for name in names}
            for index in range(start, start + len(group.names)):
                before = {slot: next(remaining) for slot in _slots(group)}
                after = dict(before)
                gradient = gradients[index] / divisor * ratio
                direction = rule.direction(weights[index], gradient, after, inputs)
                work.append((rule, weights[index], direction, before, after, inputs))
        factor = None
        if self.max_grad_norm != float("inf"):
            factor = clipping_factor([w[2] for w in work], self.max_grad_norm)
        for rule, weight, direction, before, after, inputs in work:
            clipped = direction if factor is None else direction * factor
            updated = rule.updated(weight, clipped, after, inputs)
            weight.copy_(updated)
            for slot, state in before.items():
                state.copy_(after[slot])

    def _starts(self) -> Iterator[tuple[WeightGroup, int]]:
        start = 0
        for group in self.groups:
            yield group, start
            start += len(group.names)


def states(groups: Sequence[WeightGroup]) -> list[Tensor]:
    """The state tensors of groups, weight by weight."""
    return [
        group.state[slot][index]
        for group in groups
        for index in range(len(group.names))
        for slot in _slots(group)
    ]


def _slots(group: WeightGroup) -> list[str]:
    return [slot for slot in group.state if slot != STEP]


def _shape(group: WeightGroup) -> tuple[object, ...]:
    return group.rule, tuple(group.names), tuple(group.state)
