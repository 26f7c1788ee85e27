# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a training executor on the device, and its link to the host's.

PopTorch's optimizers run inside the compiled program. What they compute differs from
torch's in a few places (PopTorch user guide, "Optimizers"); each rule says which.

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
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor
from torch._C import _set_grad_enabled

from .._logging import logger
from .._processes import Processes, common_random
from ..enums import MeanReductionStrategy
from ..errors import Error, createPoptorchError
from ..optim import Optimizer as PoptorchOptimizer
from ..options import Options, Settings
from .float16 import rounds_at_random, to_half
from .layout import ReplicaGroups, join_state, split_state
from .optimizer_rules import (
    OptimizerReader,
    OptimizerSettings,
    Variable,
    Variables,
    camel_case,
    check_replaceable,
    check_values,
    optimizer_log,
)

_LOSS_SCALING = "lossScaling_FLOAT"
_UPDATE_FACTOR = "lossScaleUpdateFactor"
_FINAL_LOSS_SCALE = "finalLossScale"

_LARGEST_HALF = torch.finfo(torch.float16).max
_LARGEST_SCALE = 2.0**15  # the largest power of two that float16 holds


# Rules ---------------------------------------------------------------------------

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
        state: The tensors of each slot. `Step` is written when the groups are dropped.
        step: Number of updates so far.
        counter: The number of the update that runs, as fused kernels take it.
    """

    def __init__(
        self,
        rule: UpdateRule,
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
            values = [
                g.new_empty_strided(g.shape, stride).copy_(g)
                for g, stride in zip(values, self._strides)
            ]
        weights = self.weights if self.is_wide else wide(self.weights)
        kernel(weights, values, *state, **numbers)
        if not self.is_wide:
            store(weights, self.weights)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory, in any order."""
    # Only of such tensors does a copy keep the strides.
    return bool(tensor.detach().to("meta").stride() == tensor.stride())


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


class UpdateRule(ABC):
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

    def derive(self, given: Variables, scaling: Variable) -> Variables:
        """Compute the device's hyper-parameters from the optimizer's."""
        return {camel_case(name): variable for name, variable in given.items()}

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


class PlainSGDRule(UpdateRule):
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


class MomentumSGDRule(UpdateRule):
    """SGD with a velocity; dampening counts from the first update on.

    ::

        v <- mm*v + (1-dm)*vs/ls*a + (1-dm)*wd*vs*w
        w <- w - lr/vs * v                                  without Nesterov
        w <- w - lr/vs * (vs/ls*a + vs*wd*w + mm*v)         with

    `vs` is the velocity scaling, `mm` momentum, the rest as in `PlainSGDRule`. Separate
    SGD has the loss scaling for `vs`. Combined SGD computes `mm*v` and the decay at the
    end of the update before: a changed hyper-parameter reaches them one update late.
    Clipping scales the tensor that `lr/vs` multiplies, not the stored velocity.
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


class AdamRule(UpdateRule):
    """Adam, or AdamW.

    ::

        s <- a/ls                      Adam: + wd*w; clipping sees s
        m <- b1*m + (1-b1)*s           v <- b2*v + (1-b2)*s^2
        w <- w - lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)    AdamW: - lr*wd*w
    """

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


class LambRule(AdamRule):
    """LAMB: Adam's direction, with a step length in proportion to the weight's norm.

    ::

        x <- m/(sqrt(v) + eps) + wd*w            m and v corrected for bias, or not
        w <- w - lr * min(|w|, max_weight_norm)/|x| * x

    The ratio is 1 where the weight's norm, the direction's or the largest norm is 0.
    """

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


class RMSpropRule(UpdateRule):
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


def make_rule(settings: OptimizerSettings, index: int | None) -> UpdateRule:
    """Create the rule of a parameter group, or of the defaults for None."""
    kind = settings.kind
    if kind.family == "SGD":
        has_no_velocity = settings.variables(index)["momentum"] == _NO_MOMENTUM
        return (PlainSGDRule if has_no_velocity else MomentumSGDRule)(settings, index)
    if kind.family == "Adaptive":
        return RMSpropRule(settings, index)
    return (LambRule if kind.mode.startswith("Lamb") else AdamRule)(settings, index)


# The optimizer of a device --------------------------------------------------------


class DeviceOptimizer:
    """The optimizer on the device of an attached model.

    The settings the model was compiled with fix the rule of each weight, and the types
    of its state. Hyper-parameters may change.

    Args:
        settings: Settings of the host's optimizer.
        weights: The device's weights by name; they are updated in place.
        group_index: Number of each weight's parameter group, by name. A weight with
            None, or without an entry, trains with the optimizer's defaults.
        options: The executor's options, for automatic loss scaling.
        groups: Weights, by name, whose values differ between groups of replicas.

    Attributes:
        loss_scale_factor: Factor of the next loss, besides the loss scaling.
        processes: Processes that draw the same random numbers in each update, so that
            stochastic rounding gives them the same weights; None if nothing is drawn.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        weights: dict[str, Tensor],
        group_index: Mapping[str, int | None],
        options: Settings,
        groups: Mapping[str, ReplicaGroups],
    ) -> None:
        self.settings = settings
        self._options = options
        self._replica_groups = groups
        self._weights = weights
        indices = {name: group_index.get(name.partition("..")[0]) for name in weights}
        rules = {index: make_rule(settings, index) for index in indices.values()}
        self._rules = {name: rules[index] for name, index in indices.items()}
        self.loss_scale_factor = 1.0
        self._last_factor = 1.0
        self._num_updates = 0
        self.processes: Processes | None = None
        self._sent_state: dict[str, State] | None = None  # all there is if synthetic
        self.reset_state()
        self._keep_sent_state()

    def reset_state(self) -> None:
        """Reset momenta and counters to their values before the first update."""
        self._groups: list[WeightGroup] = []
        self._grouped_names: list[str] = []
        self._states = {
            name: self._rules[name].initial_state(weight)
            for name, weight in self._weights.items()
        }
        self.loss_scale_factor = 1.0

    def update(self, settings: OptimizerSettings) -> None:
        """Take hyper-parameters from new settings that `check_replaceable` accepts.

        Weights keep the groups they were compiled with.
        """
        self._forget_groups()
        self.settings = settings
        for rule in set(self._rules.values()):
            rule.take(settings)

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Update the weights.

        Args:
            gradients: Accumulated and reduced gradients, by name. They are of the loss
                times the loss scaling and `loss_scale_factor`. A weight without a
                gradient keeps its value and its state.
        """
        records = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            if self.processes is None:
                self._step(gradients)
            else:
                with common_random(self.processes):
                    self._step(gradients)
        finally:
            _set_grad_enabled(records)

    def _step(self, gradients: Mapping[str, Tensor | None]) -> None:
        names = [name for name in self._weights if gradients.get(name) is not None]
        if names != self._grouped_names:
            self._group(names)
        directions = []
        for group in self._groups:
            values: list[Tensor] = list(map(gradients.__getitem__, group.names))  # type: ignore[arg-type]
            if not group.is_wide:
                values = wide(values)
            if self.loss_scale_factor != 1.0:
                values = list(torch._foreach_mul(values, 1.0 / self.loss_scale_factor))
            directions.append(group.rule.direction(group, values))
        largest = self.settings.max_grad_norm
        if directions and not math.isinf(largest):
            directions = _clip(directions, largest)
        for group, values in zip(self._groups, directions):
            group.update(values)
        if self._options.scales_loss:
            self._adapt_loss_scale(gradients)

    def _group(self, names: list[str]) -> None:
        """Group weights by parameter group and number of updates."""
        self._forget_groups()
        together: dict[tuple[int | None, float], list[str]] = {}
        for name in names:
            step = float(self._states[name].get(STEP, 0.0))
            together.setdefault((self._rules[name].index, step), []).append(name)
        self._grouped_names = names
        self._groups = [
            WeightGroup(
                self._rules[members[0]],
                members,
                [self._weights[name] for name in members],
                [self._states[name] for name in members],
                is_clipped=not math.isinf(self.settings.max_grad_norm),
            )
            for members in together.values()
        ]

    def _forget_groups(self) -> None:
        for group in self._groups:
            for tensor in group.state.get(STEP, ()):
                tensor.fill_(group.step)
        self._groups, self._grouped_names = [], []

    def _adapt_loss_scale(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Halve or double the loss scaling, depending on the float16 gradients.

        It is halved if the share of gradient elements above an edge is too high, and
        doubled otherwise (PopART, `lossscaleupdatex.cpp`, `sessionoptions.hpp`). The
        gradients are accumulated and reduced; PopART counts them before. Without
        float16 gradients the scaling stays.
        """
        options = self._options
        self._last_factor = self.loss_scale_factor
        self._num_updates += 1
        num_large = num_elements = 0
        for name, gradient in gradients.items():
            if gradient is None or self._weights[name].dtype is not torch.float16:
                continue
            edge = options.loss_scaling_bin_edge * _LARGEST_HALF
            is_small = gradient.abs() <= edge  # false for NaN
            num_large += int(is_small.numel() - is_small.sum())
            num_elements += gradient.numel()
        if not num_elements or self._num_updates % options.loss_scaling_period:
            return
        factor = self.loss_scale_factor
        if num_large > options.loss_scaling_proportion * num_elements:
            self.loss_scale_factor *= 0.5
        elif factor * self.settings.loss_scaling.value * 2 <= _LARGEST_SCALE:
            self.loss_scale_factor *= 2.0

    def _state(self) -> State:
        """Return the weights' state by tensor names, such as `Accl1___<weight>`."""
        self._forget_groups()
        return {
            f"{slot}___{name}": tensor
            for name, state in self._states.items()
            for slot, tensor in state.items()
        }

    def _values(self, *, with_constants: bool) -> State:
        """Return the hyper-parameters by PopART's names."""
        found: Variables = {}
        for name, rule in self._rules.items():
            end = "default___FLOAT" if rule.index is None else f"specific___{name}"
            found.update({f"{n}___{end}": one for n, one in rule.scalars.items()})
        found[_LOSS_SCALING] = self.settings.loss_scaling
        return {
            name: _as_tensor(variable.value)
            for name, variable in found.items()
            if with_constants or not variable.is_const
        }

    def state_dict(self) -> dict[str, State]:
        """Copy the state and the variable hyper-parameters, as the host keeps them.

        With synthetic data it is the state that was sent.

        Returns:
            `ipu_state`, state tensors such as `Accl1___<name>`, and `ipu_param`, the
            variable hyper-parameters, such as `learningRate___specific___<name>` and
            `lossScaling_FLOAT`.
        """
        if self._sent_state is not None:
            return self._sent_state
        state = {name: tensor.clone() for name, tensor in self._state().items()}
        if self._options.scales_loss:
            state[_UPDATE_FACTOR] = _as_tensor(self.loss_scale_factor)
        values = self._values(with_constants=False)
        return join_state(
            {"ipu_state": state, "ipu_param": values}, self._replica_groups
        )

    def _keep_sent_state(self) -> None:
        if self._options.is_synthetic:
            self._sent_state = None
            self._sent_state = self.state_dict()

    def tensors(self) -> State:
        """Return all tensors of the device's optimizer, by PopART's names.

        Constant hyper-parameters are included. State tensors aren't copies.
        """
        tensors = {**self._state(), **self._values(with_constants=True)}
        if self._options.scales_loss:
            scaling = self.settings.loss_scaling.value
            tensors[_UPDATE_FACTOR] = _as_tensor(self.loss_scale_factor)
            tensors[_FINAL_LOSS_SCALE] = _as_tensor(scaling * self._last_factor)
        return tensors

    @torch.no_grad()
    def load_state(self, host_state: Mapping[str, State]) -> None:
        """Load a state that `state_dict` returned.

        A missing name is logged, and its tensor stays; an unknown name is ignored.
        Hyper-parameters stay as they are: loaded values never leave the host (PopTorch,
        `writeOptimizerState`; PopART streams hyper-parameters from the optimizer only,
        in `updateOptimizerFromHost`).

        Args:
            host_state: `ipu_state` and `ipu_param`; of the latter only missing names
                matter.

        Raises:
            Error: If a state tensor has another shape than the device's.
        """
        loaded = split_state(host_state, self._replica_groups)
        state, values = loaded["ipu_state"], loaded["ipu_param"]
        for key, tensor in self._state().items():
            if _is_missing("state", key, state):
                continue
            if state[key].shape != tensor.shape:
                raise Error(
                    f"The optimizer state {key} has shape {tuple(state[key].shape)}, "
                    f"the device's {tuple(tensor.shape)}. Was it saved from another "
                    "model?",
                    type="poptorch_cpp_error",
                )
            tensor.copy_(state[key])
        for key in self._values(with_constants=False):
            _is_missing("parameter", key, values)
        scales_loss = self._options.scales_loss
        if scales_loss and not _is_missing("parameter", _UPDATE_FACTOR, state):
            self.loss_scale_factor = float(state[_UPDATE_FACTOR])
        self._keep_sent_state()


def _clip(groups: list[list[Tensor]], largest: float) -> list[list[Tensor]]:
    """Scale all tensors by `c / max(c, norm)`, where `c` is `largest`.

    The tensors given stay as they are: one may be a stored velocity.
    """
    norms = [norm for group in groups for norm in torch._foreach_norm(group)]
    norm = float(torch.stack(norms).norm())
    if norm <= largest:
        return groups
    return [list(torch._foreach_mul(group, largest / norm)) for group in groups]


def _as_tensor(value: float) -> Tensor:
    """Make a float32 tensor of a hyper-parameter."""
    return torch.tensor(value, dtype=torch.float32)


def _is_missing(what: str, key: str, given: Mapping[str, Tensor]) -> bool:
    """Return whether a loaded state lacks a name, and log it."""
    if key not in given:
        logger.warning("writeOptimizerState: ignoring missing %s %s", what, key)
    return key not in given


NOT_COMPILED = "Model has not been compiled or has been destroyed."


class OptimizerSync:
    """Keeps the host's optimizer and the device's optimizer in step.

    The state of PopTorch's optimizers survives detach and attach: it is stored on the
    host. Two flags of such an optimizer say which side is newer (PopTorch,
    `python/_poplar_executor.py`, `python/optim.py`). Torch's optimizers have no flags:
    PopTorch can't store their state, so each attach starts with a new one.

    Args:
        optimizer: The host's optimizer. If it accumulates in 16 bits, the reduction
            strategy of the options becomes `Running`.
        options: The options of the executor that trains with the optimizer.
        is_compiled: Whether this executor has a program. A method of the executor:
            whoever keeps the optimizer keeps its device as well.
        download_weights: Copies the device's weights to the host if they are newer.

    Attributes:
        settings: The settings that the device has.

    Raises:
        AssertionError: The optimizer is of a type that PopTorch doesn't take.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: Options,
        *,
        is_compiled: Callable[[], bool],
        download_weights: Callable[[], bool],
    ) -> None:
        self._executor_options = options
        self._is_compiled = is_compiled
        self._download_weights = download_weights
        self._options = Settings(options)
        self._reader = OptimizerReader(
            relax_attribute_checks=options._relax_optimizer_checks,
            automatic_loss_scaling=self._options.scales_loss,
        )
        self.settings = self._reader.read(optimizer)
        self._device: DeviceOptimizer | None = None
        self._indices: dict[str, int | None] = {}
        self._kept_state: dict[str, State] | None = None  # while detached
        self._written_values: State = {}
        self._use_running_mean_if_needed()
        self._take(optimizer)

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        """Link `optimizer.state_dict()` to the device, and keep the executor alive."""
        self.optimizer = optimizer
        self._poptorch: PoptorchOptimizer | None = None  # the same, if it has a state
        if isinstance(optimizer, PoptorchOptimizer):
            self._poptorch = optimizer
            optimizer.state_dict = self.state_dict  # type: ignore[method-assign]

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the settings of an optimizer, and link it to this device.

        Raises:
            Error: A constant, the type or the clip norm changed after compilation, or
                PopART takes a hyper-parameter for an error.
        """
        is_compiled, before = self._is_compiled(), self._poptorch
        if is_compiled and optimizer is not self.optimizer:
            if before is not None:
                self.read_state()
                before.state_dict = before.get_state_dict  # type: ignore[method-assign]
            if isinstance(optimizer, PoptorchOptimizer):
                optimizer.ipu_state_is_dirty = True
        self._take(optimizer)
        settings = self._reader.read(optimizer)
        is_changed = settings != self.settings
        if is_compiled:
            check_replaceable(self.settings, settings)
            check_values(settings)
        self.settings = settings
        if self._device is not None:
            self._device.update(settings)
            self._written_values = {}
            if is_changed:
                self._log_settings()
        self._use_running_mean_if_needed()
        if self._device is not None:
            self.write_state()

    def _use_running_mean_if_needed(self) -> None:
        options, running = self._executor_options, MeanReductionStrategy.Running
        strategy = options.Training.meanAccumulationAndReplicationReductionStrategy
        if not self.settings.uses_running_mean or strategy == running:
            return
        if self._is_compiled():
            raise ValueError(
                "An optimizer with a 16-bit accum_type needs "
                "MeanReductionStrategy.Running, but the executable is already compiled."
            )
        options._unfreeze()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(running)
        options._freeze()

    def _log_settings(self) -> None:
        for line in optimizer_log(self.settings):
            logger.debug(line)

    # Compile, attach, detach ----------------------------------------------------

    def compile(self, weights: Mapping[str, Tensor], trained: list[str]) -> list[str]:
        """Assign weights to parameter groups; return the names of optimizer tensors.

        Args:
            weights: All weights of the host by name.
            trained: Names of the weights that are updated.

        Raises:
            KeyError: A parameter of the optimizer is not among the weights.
            Error: PopART takes a hyper-parameter for an error.
        """
        check_values(self.settings)
        self._indices = _group_indices(self.optimizer, weights)
        # On the device "meta", torch would import its compiler for zeros.
        empty = {name: torch.empty(0, dtype=weights[name].dtype) for name in trained}
        device = DeviceOptimizer(
            self.settings, empty, self._indices, self._options, groups={}
        )
        return list(device.tensors())

    def attach(
        self, trained: dict[str, Tensor], groups: Mapping[str, ReplicaGroups]
    ) -> DeviceOptimizer:
        """Create the device's optimizer, with the state of an earlier one.

        Args:
            trained: The device's weights.
            groups: Weights, by name, whose values differ between groups of replicas.
        """
        self._device = DeviceOptimizer(
            self.settings, trained, self._indices, self._options, groups
        )
        self._log_settings()
        if self._kept_state is not None:
            self._device.load_state(self._kept_state)
        return self._device

    def detach(self) -> None:
        """Drop the device's optimizer; keep the state of an optimizer of PopTorch's."""
        if self._poptorch is not None:
            self._kept_state = self._attached().state_dict()
        self._device = None

    def forget(self) -> None:
        """Drop the stored state, together with the executable."""
        self._kept_state, self._written_values = None, {}

    def weights_were_uploaded(self) -> None:
        """Reset the state of a torch optimizer, as PopTorch does at each upload."""
        if self._poptorch is None and self._device is not None:
            self._device.reset_state()

    # State of PopTorch's optimizers ---------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the executor's present optimizer."""
        if self._poptorch is None:
            raise AssertionError(
                "This optimizer's executor now trains with an optimizer of torch."
            )
        self.read_state()
        return self._poptorch.get_state_dict()

    def read(self) -> None:
        """Refresh the optimizer's state from the device that trained with it last."""
        if self._poptorch is not None:
            self._poptorch.state_dict()  # another executor's, if that was linked later

    def read_state(self) -> None:
        """Copy this device's state to the optimizer if it is newer.

        Hyper-parameters that were loaded are read back, though the device has others:
        PopTorch keeps both in the host's memory (PopTorch, `poptorch.cpp`).
        """
        optimizer = self._poptorch
        if optimizer is None:
            return
        if not optimizer.host_state_is_dirty:
            logger.debug("Using cached optimiser state dict")
            return
        if not self._is_compiled():
            raise createPoptorchError(NOT_COMPILED)
        logger.info("Writing optimiser state tensors from IPU to host.")
        state = self._attached().state_dict()
        values = dict(state["ipu_param"])
        values.update({n: v for n, v in self._written_values.items() if n in values})
        of_device = {"ipu_state": state["ipu_state"], "ipu_param": values}
        optimizer.set_state_dict({**optimizer.get_state_dict(), **of_device})
        optimizer.ipu_state_is_dirty = False

    def write_state(self) -> None:
        """Send a state that was loaded on the host to the device, if it is newer.

        Hyper-parameters stay as they are.
        """
        optimizer = self._poptorch
        if optimizer is None or not optimizer.ipu_state_is_dirty:
            return
        if optimizer.host_state_is_dirty:
            raise AssertionError(
                "Both host and ipu states cannot be dirty at the same time: another "
                "executor trains with this optimizer. Read its state_dict() first."
            )
        if optimizer.has_state():
            # Together with the state all weights go to the device.
            self._download_weights()
            state = optimizer.state_dict()
            logger.info("Writing optimiser state tensors from host to IPU memory.")
            self._attached().load_state(state)
            self._written_values = dict(state["ipu_param"] or {})
        optimizer.ipu_state_is_dirty = False

    def start(self) -> None:
        """Send the optimizer's state to a device that was just attached."""
        self.read()
        optimizer = self._poptorch
        if optimizer is None:
            return
        if optimizer.has_state():
            optimizer.ipu_state_is_dirty = True
            self.write_state()
        else:
            optimizer.host_state_is_dirty = True
            optimizer.ipu_state_is_dirty = False

    def begin_call(self) -> None:
        """Send a newer state of the host, and mark the device's state as newer."""
        optimizer = self._poptorch
        if optimizer is not None:
            self.write_state()
            optimizer.host_state_is_dirty = True

    def _attached(self) -> DeviceOptimizer:
        if self._device is None:
            raise createPoptorchError("Device is not attached")
        return self._device


def _group_indices(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]
) -> dict[str, int | None]:
    """Map each weight to its parameter group; tied weights are found by memory.

    Raises:
        KeyError: If a group holds a tensor that isn't the model's.
    """
    by_identity: dict[int, int] = {}
    by_memory: dict[int, int] = {}
    own_identities = {id(tensor) for tensor in weights.values()}
    own_memory = {tensor.data_ptr() for tensor in weights.values()} - {0}
    for index, group in enumerate(optimizer.param_groups):
        for number, tensor in enumerate(group["params"]):
            pointer = tensor.data_ptr()
            if id(tensor) not in own_identities and pointer not in own_memory:
                raise KeyError(
                    f"Parameter {number} of the optimizer's group {index}, of shape "
                    f"{tuple(tensor.shape)}, is neither a parameter nor a buffer of "
                    "the model. Build the optimizer from the model's parameters."
                )
            by_identity[id(tensor)] = index
            if pointer:
                by_memory[pointer] = index
    return {
        name: by_identity.get(id(tensor), by_memory.get(tensor.data_ptr()))
        for name, tensor in weights.items()
    }
