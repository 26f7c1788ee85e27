# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the device's optimizers, for many weights in each operation.

All arithmetic is in float32. Tensors of another type are widened, updated and written
back; float32 tensors are updated in place. A fused kernel of torch's that computes the
same updates the weights in one pass over the memory.

Adam, LAMB and RMSprop first divide gradients by the loss scaling, so that their state
has no scaling. Sources: PopART's `sgd.hpp`, `adam.hpp`, `adaptive.hpp` and
`adamvarupdatex.cpp`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.emulator._optimizers.settings import (
    OptimizerSettings,
    Variable,
    Variables,
)
from ipufit.emulator._tracing.half import rounds_at_random, to_half

Tensors = List[Tensor]
State = Dict[str, Tensor]
"""The optimizer state of one weight, by PopART's name of the tensor."""

STEP = "Step"
"""The state tensor that counts the updates of a weight."""

_NO_MOMENTUM = Variable(0.0, is_const=True)


Fused = Tuple[Callable[..., Any], Tuple[Tensors, ...], Dict[str, float]]
"""A kernel of torch, called as `kernel(weights, directions, *state, **numbers)`."""


class WeightGroup:
    """Weights of one parameter group with the same number of updates.

    Args:
        rule: The rule that updates them.
        names: Names of the weights.
        weights: The device's tensors.
        states: The state of each weight.
        is_clipped: Whether the norm of the gradients is clipped.

    Attributes:
        state: The tensors of each slot. `write_step` writes the number of updates into
            `Step`.
        step: Number of updates so far.
        counter: The number of the update that runs, as fused kernels take it.
    """

    def __init__(
        self,
        rule: Rule,
        names: list[str],
        weights: Tensors,
        states: Sequence[State],
        is_clipped: bool,
    ) -> None:
        self.rule = rule
        self.names = names
        self.weights = weights
        self.state = {slot: [state[slot] for state in states] for slot in states[0]}
        self.step = float(states[0].get(STEP, 0.0))
        self.counter = torch.full((), self.step)
        self.is_wide = all(weight.dtype is torch.float32 for weight in weights)
        self._strides = [weight.stride() for weight in weights]
        accumulators = [ts for slot, ts in self.state.items() if slot != STEP]
        suits_kernels = all(map(is_dense, weights)) and all(
            [t.stride() for t in tensors] == self._strides
            and all(t.dtype is torch.float32 for t in tensors)
            for tensors in accumulators
        )
        self.fused = rule.fused(self, is_clipped) if suits_kernels else None

    def update(self, values: Tensors) -> None:
        """Update the weights and their state."""
        self.step += 1.0
        if self.fused is None:
            self.rule.update(self, values)
            return
        kernel, state, numbers = self.fused
        if STEP in self.state:
            self.counter.fill_(self.step)
        if list(map(Tensor.stride, values)) != self._strides:
            values = [_laid_out(*pair) for pair in zip(values, self._strides)]
        weights = self.weights if self.is_wide else wide(self.weights)
        kernel(weights, values, *state, **numbers)
        if not self.is_wide:
            store(weights, self.weights)

    def write_step(self) -> None:
        """Write the number of updates into the state."""
        for tensor in self.state.get(STEP, ()):
            tensor.fill_(self.step)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory, in any order."""
    # Only of such tensors does a copy keep the strides.
    return bool(tensor.detach().to("meta").stride() == tensor.stride())


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the tensor with the given strides, copied if it has others."""
    if tensor.stride() == stride:
        return tensor
    copy: Tensor = tensor.new_empty_strided(tensor.shape, stride)
    copy.copy_(tensor)
    return copy


def wide(tensors: Sequence[Tensor]) -> Tensors:
    """Return float32 versions of tensors; a float32 tensor is returned itself."""
    return [t if t.dtype is torch.float32 else t.float() for t in tensors]


def store(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensors:
    """Write values to tensors of any type, and return the result in float32.

    A value computed in place isn't copied. All tensors to round stochastically are
    rounded in one operation.
    """
    pairs = [(v, t) for v, t in zip(values, tensors) if v is not t]
    if rounds_at_random():
        halves = [(v, t) for v, t in pairs if t.dtype is torch.float16]
        if halves:
            flat = to_half(torch.cat([value.reshape(-1) for value, _ in halves]))
            parts = torch.split(flat, [value.numel() for value, _ in halves])
            for part, (_, tensor) in zip(parts, halves):
                tensor.copy_(part.view(tensor.shape))
        pairs = [(v, t) for v, t in pairs if t.dtype is not torch.float16]
    for value, tensor in pairs:
        tensor.copy_(value)
    return wide(tensors)


@functools.lru_cache(maxsize=None)
def _fused_kernels() -> tuple[Any, Any]:
    """Return torch's fused AdamW and SGD kernels, or None for both if they don't run.

    torch has CPU kernels since 2.4; older versions have only the names.
    """
    adamw: Any = getattr(torch, "_fused_adamw_", None)
    sgd: Any = getattr(torch, "_fused_sgd_", None)
    with torch.inference_mode(False), torch.no_grad():
        weight, gradient, first, second = ([tensor] for tensor in torch.zeros(4, 1))
        numbers = _adam_numbers(lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1.0)
        try:
            adamw(weight, gradient, first, second, [], [torch.ones(())], **numbers)
            sgd(weight, gradient, first, **_sgd_numbers(lr=0.1, momentum=0.9))
        except (NotImplementedError, RuntimeError, TypeError):
            return None, None  # another signature, or not for processors
    return adamw, sgd


def _adam_numbers(**numbers: float) -> dict[str, float]:
    return {**numbers, "amsgrad": False, "maximize": False}


def _sgd_numbers(**numbers: float) -> dict[str, float]:
    defaults = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    return {**defaults, **flags, **numbers}


class Rule(ABC):
    """Base of the rules that update the weights of a parameter group.

    The settings that the model was compiled with fix the class, and the types of the
    state. Hyper-parameters may change.

    An update has two halves, `direction` and `update`. The device clips the results of
    the first (PopART, `clipweightgradientsbynorm.cpp`). Neither writes to gradients,
    which may share memory.

    Attributes:
        index: Number of the parameter group; None for weights in no group, which train
            with the optimizer's defaults.
        scalars: The device's hyper-parameters, by PopART's names.
        n: Their values, and `lossScaling`.
    """

    def __init__(self, settings: OptimizerSettings, index: int | None) -> None:
        self.index = index
        self._compiled = settings
        self.take(settings)

    def take(self, settings: OptimizerSettings) -> None:
        """Take new hyper-parameters from settings."""
        variables = settings.variables(self.index)
        self.scalars = self.derive(variables, settings.loss_scaling)
        self.n = {name: variable.value for name, variable in self.scalars.items()}
        self.n["lossScaling"] = settings.loss_scaling.value

    @abstractmethod
    def derive(self, given: Variables, scaling: Variable) -> Variables:
        """Compute the device's hyper-parameters from the optimizer's."""

    def initial_state(self, weight: Tensor) -> State:
        """Create the state of a weight before its first update."""
        return {}

    def direction(self, group: WeightGroup, gradients: Tensors) -> Tensors:
        """Compute the tensors that gradient clipping scales.

        Args:
            group: The weights and their state.
            gradients: Gradients of the loss times the loss scaling, in float32.
        """
        return gradients

    @abstractmethod
    def update(self, group: WeightGroup, directions: Tensors) -> None:
        """Update the weights, and the state that depends on clipped tensors."""

    def fused(self, group: WeightGroup, is_clipped: bool) -> Fused | None:
        """Return a fused kernel that computes this update, or None."""
        return None

    def _unscaled(self, gradients: Tensors) -> Tensors:
        scaling = self.n["lossScaling"]
        return gradients if scaling == 1.0 else torch._foreach_div(gradients, scaling)

    def _with_penalty(self, group: WeightGroup, gradients: Tensors) -> Tensors:
        decay = self.n["weightDecay"]
        if decay == 0.0:
            return gradients
        return torch._foreach_add(gradients, wide(group.weights), alpha=decay)


def _derived(value: float, *sources: Variable) -> Variable:
    """Return a variable that is constant if all its sources are."""
    return Variable(value, all(variable.is_const for variable in sources))


class PlainSGD(Rule):
    """SGD without a velocity, for a momentum that is a constant zero.

    `w <- w * (1 - lr*(1-dm)*wd) - lr*(1-dm)/ls * a`, where `a` is a gradient of the
    scaled loss, `ls` the loss scaling, `dm` dampening and `wd` weight decay. Clipping
    sees `a`, which is still multiplied by the loss scaling.
    """

    def derive(self, given: Variables, scaling: Variable) -> Variables:
        lr, dampening, decay = given["lr"], given["dampening"], given["weight_decay"]
        rate = lr.value * (1.0 - dampening.value)
        factor = _derived(1.0 - rate * decay.value, lr, dampening, decay)
        if decay == Variable(0.0, is_const=True):
            factor = factor._replace(is_const=True)
        return {
            "scaledLearningRate0": _derived(
                rate / scaling.value, lr, dampening, scaling
            ),
            "weightDecayScaleFactor0": factor,
        }

    def update(self, group: WeightGroup, directions: Tensors) -> None:
        weights = wide(group.weights)
        if self.n["weightDecayScaleFactor0"] != 1.0:
            torch._foreach_mul_(weights, self.n["weightDecayScaleFactor0"])
        torch._foreach_add_(weights, directions, alpha=-self.n["scaledLearningRate0"])
        store(weights, group.weights)

    def fused(self, group: WeightGroup, is_clipped: bool) -> Fused | None:
        _, kernel = _fused_kernels()
        lr = self.n["scaledLearningRate0"]
        if kernel is None or not lr:
            return None
        decay = (1.0 - self.n["weightDecayScaleFactor0"]) / lr
        return kernel, ([],), _sgd_numbers(lr=lr, weight_decay=decay)


class MomentumSGD(Rule):
    """SGD with a velocity; dampening counts from the first update on.

    ::

        v <- mm*v + (1-dm)*vs/ls*a + (1-dm)*wd*vs*w
        w <- w - lr/vs * v                                  without Nesterov
        w <- w - lr/vs * (vs/ls*a + vs*wd*w + mm*v)         with

    `vs` is the velocity scaling, `mm` momentum, the rest as in `PlainSGD`. Separate SGD
    has the loss scaling for `vs`. Combined SGD computes `mm*v` and the decay at the end
    of the update before: a changed hyper-parameter reaches them one update late.
    Clipping scales the tensor that `lr/vs` multiplies, not the
    stored velocity.
    """

    @property
    def is_combined(self) -> bool:
        """Whether velocity and accumulated gradient are one tensor."""
        return self._compiled.kind.mode == "combined"

    def derive(self, given: Variables, scaling: Variable) -> Variables:
        velocity = given["velocity_scaling"] if self.is_combined else scaling
        dampening, decay = given["dampening"], given["weight_decay"]
        vs, ls, wd = velocity.value, scaling.value, decay.value
        rest = 1.0 - dampening.value
        return {
            "scaledLearningRate1": _derived(
                given["lr"].value / vs, given["lr"], velocity
            ),
            "scaledMomentum1": given["momentum"],
            "dampeningScaleFactor1": _derived(
                rest * (vs / ls), dampening, velocity, scaling
            ),
            "scaledWeightDecay1": _derived(rest * wd * vs, dampening, decay, velocity),
            "nesterov": given["nesterov"],
            "nesterovGradientScaleFactor1": _derived(vs / ls, velocity, scaling),
            "nesterovWeightDecay1": _derived(wd * vs, decay, velocity),
        }

    def initial_state(self, weight: Tensor) -> State:
        if not self.is_combined:
            dtype = self._compiled.velocity_accum_type
            return {"Accl1": torch.zeros_like(weight, dtype=dtype)}
        first = weight.detach().float() * self.n["scaledWeightDecay1"]
        return {"Accl1": torch.zeros_like(weight).copy_(first)}

    def direction(self, group: WeightGroup, gradients: Tensors) -> Tensors:
        if group.fused is not None:
            return gradients
        n, velocity = self.n, wide(group.state["Accl1"])
        if not self.is_combined:
            self._carry_over(group, velocity)
        torch._foreach_add_(velocity, gradients, alpha=n["dampeningScaleFactor1"])
        velocity = store(velocity, group.state["Accl1"])
        if not n["nesterov"]:
            return velocity
        ahead = list(torch._foreach_mul(velocity, n["scaledMomentum1"]))
        torch._foreach_add_(ahead, gradients, alpha=n["nesterovGradientScaleFactor1"])
        if n["nesterovWeightDecay1"] != 0.0:
            weights = wide(group.weights)
            torch._foreach_add_(ahead, weights, alpha=n["nesterovWeightDecay1"])
        return ahead

    def update(self, group: WeightGroup, directions: Tensors) -> None:
        weights = wide(group.weights)
        torch._foreach_add_(weights, directions, alpha=-self.n["scaledLearningRate1"])
        store(weights, group.weights)
        if self.is_combined:
            velocity = wide(group.state["Accl1"])
            self._carry_over(group, velocity)
            store(velocity, group.state["Accl1"])

    def _carry_over(self, group: WeightGroup, velocity: Tensors) -> None:
        torch._foreach_mul_(velocity, self.n["scaledMomentum1"])
        decay = self.n["scaledWeightDecay1"]
        if decay != 0.0:
            torch._foreach_add_(velocity, wide(group.weights), alpha=decay)

    def fused(self, group: WeightGroup, is_clipped: bool) -> Fused | None:
        """Return the kernel that updates velocity and weights in one pass, or None.

        The kernel adds the decay to the gradients. So gradient and decay must have the
        same factor, in the velocity and in Nesterov's sum.
        """
        _, kernel = _fused_kernels()
        if kernel is None or self.is_combined or is_clipped:
            return None
        n = self.n
        share = n["dampeningScaleFactor1"] * n["nesterovWeightDecay1"]
        is_same = (
            n["scaledMomentum1"] != 0.0  # else it takes no velocity
            and n["nesterovGradientScaleFactor1"] == 1.0
            and math.isclose(share, n["scaledWeightDecay1"])
        )
        if not is_same:
            return None
        numbers = _sgd_numbers(
            lr=n["scaledLearningRate1"],
            weight_decay=n["nesterovWeightDecay1"],
            momentum=n["scaledMomentum1"],
            dampening=1.0 - n["dampeningScaleFactor1"],
            nesterov=bool(n["nesterov"]),
        )
        return kernel, (group.state["Accl1"],), numbers


class Adam(Rule):
    """Adam, or AdamW.

    ::

        s <- a/ls                      Adam: + wd*w; clipping sees s
        m <- b1*m + (1-b1)*s           v <- b2*v + (1-b2)*s^2
        w <- w - lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)    AdamW: - lr*wd*w
    """

    def derive(self, given: Variables, scaling: Variable) -> Variables:
        return {
            "learningRate": given["lr"],
            "weightDecay": given["weight_decay"],
            "beta1": given["beta1"],
            "beta2": given["beta2"],
            "eps": given["eps"],
        }

    def initial_state(self, weight: Tensor) -> State:
        first = self._compiled.first_order_momentum_accum_type
        second = self._compiled.second_order_momentum_accum_type
        return {
            "Accl1": torch.zeros_like(weight, dtype=first),
            "Accl2": torch.zeros_like(weight, dtype=second),
            STEP: torch.zeros(()),
        }

    @property
    def _decays_gradient(self) -> bool:
        return self._compiled.kind.mode == "Adam"

    def direction(self, group: WeightGroup, gradients: Tensors) -> Tensors:
        gradients = self._unscaled(gradients)
        if self._decays_gradient:
            return self._with_penalty(group, gradients)
        return gradients

    def _update_means(
        self, group: WeightGroup, direction: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Update both means; return the mean of gradients, and the denominators."""
        n, state = self.n, group.state
        first, second = wide(state["Accl1"]), wide(state["Accl2"])
        torch._foreach_mul_(first, n["beta1"])
        torch._foreach_add_(first, direction, alpha=1.0 - n["beta1"])
        torch._foreach_mul_(second, n["beta2"])
        torch._foreach_addcmul_(second, direction, direction, value=1.0 - n["beta2"])
        return store(first, state["Accl1"]), store(second, state["Accl2"])

    def update(self, group: WeightGroup, directions: Tensors) -> None:
        n, lr = self.n, self.n["learningRate"]
        first, second = self._update_means(group, directions)
        weights = wide(group.weights)
        shrinkage = 1.0 - lr * n["weightDecay"]
        if not self._decays_gradient and shrinkage != 1.0:
            torch._foreach_mul_(weights, shrinkage)
        correction = _bias_correction(n["beta1"], group.step)
        roots = self._roots(second, _bias_correction(n["beta2"], group.step))
        step_size = lr / correction if correction else math.nan
        torch._foreach_addcdiv_(weights, first, roots, value=-step_size)
        store(weights, group.weights)

    def _roots(self, squares: Tensors, correction: float) -> Tensors:
        """Compute `sqrt(v / correction) + eps`; NaN for negative numbers."""
        roots = list(torch._foreach_sqrt(squares))
        divisor = math.sqrt(correction) if correction >= 0.0 else math.nan
        if divisor != 1.0:
            torch._foreach_div_(roots, divisor)
        torch._foreach_add_(roots, self.n["eps"])
        return roots

    def fused(self, group: WeightGroup, is_clipped: bool) -> Fused | None:
        kernel, _ = _fused_kernels()
        n = self.n
        # A loaded step that makes no sense gives NaN, not what the kernel makes of it.
        makes_sense = (
            0.0 <= n["beta1"] < 1.0 and 0.0 <= n["beta2"] < 1.0 and group.step >= 0.0
        )
        if kernel is None or not makes_sense:
            return None
        numbers = _adam_numbers(
            lr=n["learningRate"],
            beta1=n["beta1"],
            beta2=n["beta2"],
            weight_decay=0.0 if self._decays_gradient else n["weightDecay"],
            eps=n["eps"],
        )
        counters = [group.counter] * len(group.weights)
        first, second = group.state["Accl1"], group.state["Accl2"]
        return kernel, (first, second, [], counters), numbers


def _bias_correction(beta: float, step: float) -> float:
    """Compute `1 - beta^step`; NaN, as on a device, for a loaded step below 1."""
    try:
        return 1.0 - math.pow(beta, step)
    except ValueError:
        return math.nan


class Lamb(Adam):
    """LAMB: Adam's direction, with a step length in proportion to the weight's norm.

    ::

        x <- m/(sqrt(v) + eps) + wd*w            m and v corrected for bias, or not
        w <- w - lr * min(|w|, max_weight_norm)/|x| * x

    The ratio is 1 where the weight's norm, the direction's or the largest norm is 0.
    """

    def derive(self, given: Variables, scaling: Variable) -> Variables:
        values = super().derive(given, scaling)
        return {**values, "maxWeightNorm": given["max_weight_norm"]}

    def update(self, group: WeightGroup, directions: Tensors) -> None:
        n = self.n
        first, second = self._update_means(group, directions)
        first_correction = second_correction = 1.0
        if self._compiled.kind.mode == "Lamb":
            first_correction = _bias_correction(n["beta1"], group.step)
            second_correction = _bias_correction(n["beta2"], group.step)
        updates = list(torch._foreach_div(first, first_correction))
        torch._foreach_div_(updates, self._roots(second, second_correction))
        weights = wide(group.weights)
        if n["weightDecay"] != 0.0:
            torch._foreach_add_(updates, weights, alpha=n["weightDecay"])
        lengths = torch.stack(list(torch._foreach_norm(weights)))
        lengths = lengths.clamp(max=n["maxWeightNorm"])
        update_lengths = torch.stack(list(torch._foreach_norm(updates)))
        is_zero = torch.eq(lengths, 0.0) | torch.eq(update_lengths, 0.0)
        ones = torch.ones_like(lengths)
        ratios = torch.where(is_zero, ones, lengths / update_lengths).tolist()
        torch._foreach_mul_(updates, [-n["learningRate"] * ratio for ratio in ratios])
        torch._foreach_add_(weights, updates)
        store(weights, group.weights)

    def fused(self, group: WeightGroup, is_clipped: bool) -> Fused | None:
        return None


class RMSprop(Rule):
    """RMSprop, as torch or as TensorFlow defines it.

    ::

        s  <- a/ls + wd*w
        v1 <- alpha*v1 + (1-alpha)*s^2           v1 starts at 0; TensorFlow: 1
        v2 <- alpha*v2 + (1-alpha)*s             if centered
        q  <- v1 - v2^2                          not centered: v1
        x  <- s/(sqrt(q) + eps)                  TensorFlow: s/sqrt(q + eps)
        v3 <- momentum*v3 + x                    TensorFlow: + lr*x
        w  <- w - lr*v3                          TensorFlow: - v3

    Without momentum, a constant zero, there is no `v3`: `w <- w - lr*x`. `v3` is always
    float32.
    """

    def derive(self, given: Variables, scaling: Variable) -> Variables:
        return {
            "learningRate": given["lr"],
            "weightDecay": given["weight_decay"],
            "alpha": given["alpha"],
            "momentum": given["momentum"],
            "eps": given["eps"],
        }

    def initial_state(self, weight: Tensor) -> State:
        compiled = self._compiled
        start = torch.ones_like if compiled.use_tf_variant else torch.zeros_like
        first = compiled.first_order_momentum_accum_type
        state = {"Accl1": start(weight, dtype=first)}
        if compiled.kind.mode == "CenteredRMSProp":
            second = compiled.second_order_momentum_accum_type
            state["Accl2"] = torch.zeros_like(weight, dtype=second)
        if self.scalars["momentum"] != _NO_MOMENTUM:
            state["Accl3"] = torch.zeros_like(weight, dtype=torch.float32)
        return state

    def direction(self, group: WeightGroup, gradients: Tensors) -> Tensors:
        return self._with_penalty(group, self._unscaled(gradients))

    def update(self, group: WeightGroup, directions: Tensors) -> None:
        n, state, lr = self.n, group.state, self.n["learningRate"]
        is_tensorflow = self._compiled.use_tf_variant
        alpha, rest = n["alpha"], 1.0 - n["alpha"]
        squares = wide(state["Accl1"])
        torch._foreach_mul_(squares, alpha)
        torch._foreach_addcmul_(squares, directions, directions, value=rest)
        squares = store(squares, state["Accl1"])
        if "Accl2" in state:
            means = wide(state["Accl2"])
            torch._foreach_mul_(means, alpha)
            torch._foreach_add_(means, directions, alpha=rest)
            means = store(means, state["Accl2"])
            squares = list(torch._foreach_addcmul(squares, means, means, value=-1.0))
        if is_tensorflow:
            roots = list(torch._foreach_add(squares, n["eps"]))
            torch._foreach_sqrt_(roots)
        else:
            roots = list(torch._foreach_sqrt(squares))
            torch._foreach_add_(roots, n["eps"])
        weights, updates = wide(group.weights), torch._foreach_div(directions, roots)
        if "Accl3" in state:
            velocity = state["Accl3"]
            torch._foreach_mul_(velocity, n["momentum"])
            torch._foreach_add_(velocity, updates, alpha=lr if is_tensorflow else 1.0)
            torch._foreach_add_(weights, velocity, alpha=-1.0 if is_tensorflow else -lr)
        else:
            torch._foreach_add_(weights, updates, alpha=-lr)
        store(weights, group.weights)


def make_rule(settings: OptimizerSettings, index: int | None) -> Rule:
    """Create the rule of a parameter group, or of the defaults for None."""
    kind = settings.kind
    if kind.family == "SGD":
        has_no_velocity = settings.variables(index)["momentum"] == _NO_MOMENTUM
        return (PlainSGD if has_no_velocity else MomentumSGD)(settings, index)
    if kind.family == "Adaptive":
        return RMSprop(settings, index)
    return (Lamb if kind.mode.startswith("Lamb") else Adam)(settings, index)
