# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a training executor on the device, and its link to the host's.

PopTorch's optimizers run inside the compiled program. What they compute differs from
torch's in a few places (PopTorch user guide, "Optimizers"); each rule says which.

All arithmetic is in float32. Tensors of another type are widened, updated and written
back; float32 tensors are updated in place. A fused kernel of torch's that computes the
same updates the weights in one pass over the memory. Constants are rounded to the type
of the state that they are computed with: `eps` of 1e-8 is 0 beside a float16 mean.

Adam, LAMB and RMSprop first divide gradients by the loss scaling, so that their state
has no scaling. Sources: PopART's `sgd.hpp`, `adam.hpp`, `adaptive.hpp` and
`adamvarupdatex.cpp`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Sequence

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

_UPDATE_FACTOR = "lossScaleUpdateFactor"
_LARGEST_HALF = torch.finfo(torch.float16).max
_LARGEST_SCALE = 2.0**15  # the largest power of two that float16 holds


# Rules ---------------------------------------------------------------------------

Tensors = List[Tensor]
State = Dict[str, Tensor]
"""The optimizer state of one weight, by PopART's name of the tensor."""

STEP = "Step"
"""The state tensor that counts the updates of a weight."""

_CONSTANT_ZERO = Variable(0.0, is_const=True)

Kernel = Callable[[Tensors, Tensors], Any]
"""Updates weights, and their state, from directions in one pass over the memory."""


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


_FLAGS_OF_ADAMW = {"amsgrad": False, "maximize": False}
_DEFAULTS_OF_SGD = {
    **{"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0},
    **{"nesterov": False, "maximize": False, "is_first_step": False},
}


@functools.lru_cache(maxsize=None)
def _fused_kernels() -> tuple[Any, Any]:
    """Return torch's fused AdamW and SGD kernels, or None for both if they don't run.

    torch has CPU kernels since 2.4; older versions have only the names.
    """
    of_torch: Any = torch
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1.0}
    with torch.inference_mode(False), torch.no_grad():
        weight, gradient, first, second = ([tensor] for tensor in torch.zeros(4, 1))
        try:
            adamw = functools.partial(of_torch._fused_adamw_, **_FLAGS_OF_ADAMW)
            sgd = functools.partial(of_torch._fused_sgd_, **_DEFAULTS_OF_SGD)
            adamw(weight, gradient, first, second, [], [torch.ones(())], **numbers)
            sgd(weight, gradient, first, lr=0.1, momentum=0.9)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            return None, None  # another signature, or not for processors
    return adamw, sgd


class UpdateRule(ABC):
    """Base of the rules that update weights of a parameter group.

    An update has two halves, `direction` and `update`. The device clips the results of
    the first (PopART, `clipweightgradientsbynorm.cpp`). Neither writes to gradients,
    which may share memory.

    Args:
        settings: Settings of the optimizer.
        index: Number of the parameter group; None for weights in no group, which train
            with the optimizer's defaults.
        weights: The device's tensors by name; none if nothing is to be updated.
        states: The state of each weight, with the same number of updates.

    Attributes:
        scalars: The device's hyper-parameters, by PopART's names.
        n: Their values, and `lossScaling`.
        weights: The tensors alone.
        state: The tensors of each slot. `Step` is written by `save_step`.
        step: Number of updates so far.
        is_wide: Whether all weights are float32.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        index: int | None,
        weights: Mapping[str, Tensor] = MappingProxyType({}),
        states: Sequence[State] = (),
    ) -> None:
        self.settings, self.index = settings, index
        self.mode = settings.kind.mode
        self.scalars = self.derive(settings.variables(index), settings.loss_scaling)
        self.n = {name: variable.value for name, variable in self.scalars.items()}
        self.n["lossScaling"] = settings.loss_scaling.value
        self.names, self.weights = list(weights), list(weights.values())
        slots = states[0] if states else {}
        self.state = {slot: [state[slot] for state in states] for slot in slots}
        self._half_slots = {
            slot
            for slot, tensors in self.state.items()
            if all(tensor.dtype is torch.float16 for tensor in tensors)
        }
        self.step = float(slots.get(STEP, 0.0))
        self._counter = torch.full((), self.step)
        self.is_wide = all(weight.dtype is torch.float32 for weight in self.weights)
        self._strides = [weight.stride() for weight in self.weights]
        accumulators = [ts for slot, ts in self.state.items() if slot != STEP]
        suits_kernels = all(map(is_dense, self.weights)) and all(
            [t.stride() for t in tensors] == self._strides
            and all(t.dtype is torch.float32 for t in tensors)
            for tensors in accumulators
        )
        self._kernel = self.fused() if states and suits_kernels else None

    def derive(self, variables: Variables, scaling: Variable) -> Variables:
        """Compute the device's hyper-parameters from the optimizer's."""
        return {camel_case(name): variable for name, variable in variables.items()}

    def initial_state(self, weight: Tensor) -> State:
        """Create the state of a weight before its first update."""
        return {}

    def save_step(self) -> None:
        """Write the number of updates to the state."""
        for tensor in self.state.get(STEP, ()):
            tensor.fill_(self.step)

    def direction(self, gradients: Tensors) -> Tensors:
        """Compute the tensors that gradient clipping scales.

        Args:
            gradients: Gradients of the loss times the loss scaling, in float32.
        """
        return gradients

    @abstractmethod
    def update(self, directions: Tensors) -> None:
        """Update the weights, and the state that depends on clipped tensors."""

    def fused(self) -> Kernel | None:
        """Return a kernel that computes the same as `update`, or None."""
        return None

    def run(self, directions: Tensors) -> None:
        """Update the weights and their state, by the fused kernel if there is one."""
        self.step += 1.0
        if self._kernel is None:
            self.update(directions)
            return
        if STEP in self.state:
            self._counter.fill_(self.step)
        if list(map(Tensor.stride, directions)) != self._strides:
            directions = [
                g.new_empty_strided(g.shape, stride).copy_(g)
                for g, stride in zip(directions, self._strides)
            ]
        weights = self.weights if self.is_wide else wide(self.weights)
        self._kernel(weights, directions)
        if not self.is_wide:
            store(weights, self.weights)

    def _unscaled(self, gradients: Tensors, decay: float) -> Tensors:
        """Divide gradients by the loss scaling, and add the penalty of the weights."""
        if self.n["lossScaling"] != 1.0:
            gradients = list(torch._foreach_div(gradients, self.n["lossScaling"]))
        if decay == 0.0:
            return gradients
        return list(torch._foreach_add(gradients, wide(self.weights), alpha=decay))

    def _constant(self, value: float, slot: str) -> float:
        """Round a constant to float16 if the state that it is computed with is that.

        Poplibs gives constants of an expression the type of the other operand, and
        PopART casts streamed values to it (poplibs, `ElementWiseInternal.cpp`; PopART,
        `accumulatex.cpp`, `adamupdaterx.cpp`, `sgd1acclupdatex.cpp`).
        """
        if slot not in self._half_slots:
            return value
        return float(torch.tensor(value, dtype=torch.float16))

    def _mean(self, slot: str, decay: float, directions: Tensors) -> Tensors:
        """Update a running mean of the state, and return it."""
        means = wide(self.state[slot])
        torch._foreach_mul_(means, self._constant(decay, slot))
        share = self._constant(1.0 - decay, slot)
        torch._foreach_add_(means, directions, alpha=share)
        return store(means, self.state[slot])

    def _mean_of_squares(self, slot: str, decay: float, directions: Tensors) -> Tensors:
        """Update a running mean of squares of the state, and return it."""
        means = wide(self.state[slot])
        torch._foreach_mul_(means, self._constant(decay, slot))
        share = self._constant(1.0 - decay, slot)
        torch._foreach_addcmul_(means, directions, directions, value=share)
        return store(means, self.state[slot])


def _derived(value: float, *sources: Variable) -> Variable:
    """Return a variable that is constant if all its sources are."""
    return Variable(value, all(variable.is_const for variable in sources))


class PlainSGDRule(UpdateRule):
    """SGD without a velocity, for a momentum that is a constant zero.

    `w <- w * (1 - lr*(1-dm)*wd) - lr*(1-dm)/ls * a`, where `a` is a gradient of the
    scaled loss, `ls` the loss scaling, `dm` dampening and `wd` weight decay. Clipping
    sees `a`, which is still multiplied by the loss scaling.
    """

    def derive(self, variables: Variables, scaling: Variable) -> Variables:
        lr, dampening = variables["lr"], variables["dampening"]
        decay, rate = variables["weight_decay"], lr.value * (1.0 - dampening.value)
        sources = () if decay == _CONSTANT_ZERO else (lr, dampening, decay)
        return {
            "scaledLearningRate0": _derived(
                rate / scaling.value, lr, dampening, scaling
            ),
            "weightDecayScaleFactor0": _derived(1.0 - rate * decay.value, *sources),
        }

    def update(self, directions: Tensors) -> None:
        weights = wide(self.weights)
        if self.n["weightDecayScaleFactor0"] != 1.0:
            torch._foreach_mul_(weights, self.n["weightDecayScaleFactor0"])
        torch._foreach_add_(weights, directions, alpha=-self.n["scaledLearningRate0"])
        store(weights, self.weights)

    def fused(self) -> Kernel | None:
        _, sgd = _fused_kernels()
        lr = self.n["scaledLearningRate0"]
        if sgd is None or not lr:
            return None
        decay = (1.0 - self.n["weightDecayScaleFactor0"]) / lr
        numbers = {"lr": lr, "weight_decay": decay}
        return functools.partial(sgd, momentum_buffer_list=[], **numbers)


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

    def derive(self, variables: Variables, scaling: Variable) -> Variables:
        velocity = variables.get("velocity_scaling", scaling)  # only combined SGD's
        lr, decay = variables["lr"], variables["weight_decay"]
        dampening, vs, ls = variables["dampening"], velocity.value, scaling.value
        rest, wd = 1.0 - dampening.value, decay.value
        return {
            "scaledLearningRate1": _derived(lr.value / vs, lr, velocity),
            "scaledMomentum1": variables["momentum"],
            "dampeningScaleFactor1": _derived(
                rest * (vs / ls), dampening, velocity, scaling
            ),
            "scaledWeightDecay1": _derived(rest * wd * vs, dampening, decay, velocity),
            "nesterov": variables["nesterov"],
            "nesterovGradientScaleFactor1": _derived(vs / ls, velocity, scaling),
            "nesterovWeightDecay1": _derived(wd * vs, decay, velocity),
        }

    def initial_state(self, weight: Tensor) -> State:
        if self.mode == "separate":
            dtype = self.settings.velocity_accum_type
            return {"Accl1": torch.zeros_like(weight, dtype=dtype)}
        first = weight.detach().float() * self.n["scaledWeightDecay1"]
        return {"Accl1": torch.zeros_like(weight).copy_(first)}

    def direction(self, gradients: Tensors) -> Tensors:
        if self._kernel is not None:
            return gradients
        n, velocity = self.n, wide(self.state["Accl1"])
        if self.mode == "separate":
            self._carry_over(velocity)
        torch._foreach_add_(velocity, gradients, alpha=n["dampeningScaleFactor1"])
        velocity = store(velocity, self.state["Accl1"])
        if not n["nesterov"]:
            return velocity
        ahead = list(torch._foreach_mul(velocity, n["scaledMomentum1"]))
        torch._foreach_add_(ahead, gradients, alpha=n["nesterovGradientScaleFactor1"])
        if n["nesterovWeightDecay1"] != 0.0:
            weights = wide(self.weights)
            torch._foreach_add_(ahead, weights, alpha=n["nesterovWeightDecay1"])
        return ahead

    def update(self, directions: Tensors) -> None:
        weights = wide(self.weights)
        torch._foreach_add_(weights, directions, alpha=-self.n["scaledLearningRate1"])
        store(weights, self.weights)
        if self.mode == "combined":
            velocity = wide(self.state["Accl1"])
            self._carry_over(velocity)
            store(velocity, self.state["Accl1"])

    def _carry_over(self, velocity: Tensors) -> None:
        momentum = self._constant(self.n["scaledMomentum1"], "Accl1")
        torch._foreach_mul_(velocity, momentum)
        decay = self.n["scaledWeightDecay1"]
        if decay != 0.0:
            torch._foreach_add_(velocity, wide(self.weights), alpha=decay)

    def fused(self) -> Kernel | None:
        """Return the kernel that updates velocity and weights in one pass, or None.

        The kernel adds the decay to the gradients. So gradient and decay must have the
        same factor, in the velocity and in Nesterov's sum.
        """
        _, sgd = _fused_kernels()
        n, is_clipped = self.n, not math.isinf(self.settings.max_grad_norm)
        share = n["dampeningScaleFactor1"] * n["nesterovWeightDecay1"]
        is_same = (
            n["scaledMomentum1"] != 0.0  # else it takes no velocity
            and n["nesterovGradientScaleFactor1"] == 1.0
            and math.isclose(share, n["scaledWeightDecay1"])
        )
        if sgd is None or self.mode == "combined" or is_clipped or not is_same:
            return None
        numbers: dict[str, float] = {
            "lr": n["scaledLearningRate1"],
            "weight_decay": n["nesterovWeightDecay1"],
            "momentum": n["scaledMomentum1"],
            "dampening": 1.0 - n["dampeningScaleFactor1"],
            "nesterov": bool(n["nesterov"]),
        }
        velocity = self.state["Accl1"]
        return functools.partial(sgd, momentum_buffer_list=velocity, **numbers)


class AdamRule(UpdateRule):
    """Adam, or AdamW.

    ::

        s <- a/ls                      Adam: + wd*w; clipping sees s
        m <- b1*m + (1-b1)*s           v <- b2*v + (1-b2)*s^2
        w <- w - lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)    AdamW: - lr*wd*w
    """

    def initial_state(self, weight: Tensor) -> State:
        first = self.settings.first_order_momentum_accum_type
        second = self.settings.second_order_momentum_accum_type
        return {
            "Accl1": torch.zeros_like(weight, dtype=first),
            "Accl2": torch.zeros_like(weight, dtype=second),
            STEP: torch.zeros(()),
        }

    def direction(self, gradients: Tensors) -> Tensors:
        decay = self.n["weightDecay"] if self.mode == "Adam" else 0.0
        return self._unscaled(gradients, decay)

    def update(self, directions: Tensors) -> None:
        n, lr = self.n, self.n["learningRate"]
        first = self._mean("Accl1", n["beta1"], directions)
        second = self._mean_of_squares("Accl2", n["beta2"], directions)
        weights = wide(self.weights)
        shrinkage = 1.0 - lr * n["weightDecay"]
        if self.mode == "AdamW" and shrinkage != 1.0:
            torch._foreach_mul_(weights, shrinkage)
        correction = self._bias_correction("beta1", "Accl1")
        roots = self._roots(second)
        step_size = lr / correction if correction else math.nan
        torch._foreach_addcdiv_(weights, first, roots, value=-step_size)
        store(weights, self.weights)

    def _bias_correction(self, beta: str, slot: str) -> float:
        """Compute `1 - beta^step`; NaN, as on a device, for a loaded step below 1."""
        if self.mode == "LambNoBias":
            return 1.0
        try:
            return self._constant(1.0 - math.pow(self.n[beta], self.step), slot)
        except ValueError:
            return math.nan

    def _roots(self, squares: Tensors) -> Tensors:
        """Compute `sqrt(v / correction) + eps`; NaN for negative numbers."""
        roots = list(torch._foreach_sqrt(squares))
        correction = self._bias_correction("beta2", "Accl2")
        divisor = math.sqrt(correction) if correction >= 0.0 else math.nan
        if divisor != 1.0:
            torch._foreach_div_(roots, divisor)
        torch._foreach_add_(roots, self._constant(self.n["eps"], "Accl2"))
        return roots

    def fused(self) -> Kernel | None:
        adamw, _ = _fused_kernels()
        n, betas = self.n, {name: self.n[name] for name in ("beta1", "beta2")}
        # A loaded step that makes no sense gives NaN, not what the kernel makes of it.
        makes_sense = all(0.0 <= b < 1.0 for b in betas.values()) and self.step >= 0.0
        if adamw is None or not makes_sense or self.mode.startswith("Lamb"):
            return None
        decay = n["weightDecay"] if self.mode == "AdamW" else 0.0
        numbers = {"lr": n["learningRate"], "weight_decay": decay, "eps": n["eps"]}
        means = {
            "exp_avgs": self.state["Accl1"],
            "exp_avg_sqs": self.state["Accl2"],
            "max_exp_avg_sqs": [],
            "state_steps": [self._counter] * len(self.weights),
        }
        return functools.partial(adamw, **means, **betas, **numbers)


class LambRule(AdamRule):
    """LAMB: Adam's direction, with a step length in proportion to the weight's norm.

    ::

        x <- m/(sqrt(v) + eps) + wd*w            m and v corrected for bias, or not
        w <- w - lr * min(|w|, max_weight_norm)/|x| * x

    The ratio is 1 where the weight's norm, the direction's or the largest norm is 0.
    """

    def update(self, directions: Tensors) -> None:
        n = self.n
        first = self._mean("Accl1", n["beta1"], directions)
        second = self._mean_of_squares("Accl2", n["beta2"], directions)
        correction = self._bias_correction("beta1", "Accl1")
        updates = list(torch._foreach_div(first, correction))
        torch._foreach_div_(updates, self._roots(second))
        weights = wide(self.weights)
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
        store(weights, self.weights)


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
        settings = self.settings
        start = torch.ones_like if settings.use_tf_variant else torch.zeros_like
        dtype = settings.first_order_momentum_accum_type
        state = {"Accl1": start(weight, dtype=dtype)}
        if self.mode == "CenteredRMSProp":  # of the same type (PopART, `adaptive.cpp`)
            state["Accl2"] = torch.zeros_like(weight, dtype=dtype)
        if self.scalars["momentum"] != _CONSTANT_ZERO:
            state["Accl3"] = torch.zeros_like(weight, dtype=torch.float32)
        return state

    def direction(self, gradients: Tensors) -> Tensors:
        return self._unscaled(gradients, self.n["weightDecay"])

    def update(self, directions: Tensors) -> None:
        n, state, lr = self.n, self.state, self.n["learningRate"]
        is_tensorflow = self.settings.use_tf_variant
        squares = self._mean_of_squares("Accl1", n["alpha"], directions)
        if "Accl2" in state:
            means = self._mean("Accl2", n["alpha"], directions)
            squares = list(torch._foreach_addcmul(squares, means, means, value=-1.0))
        eps = self._constant(n["eps"], "Accl1")
        if is_tensorflow:
            roots = list(torch._foreach_add(squares, eps))
            torch._foreach_sqrt_(roots)
        else:
            roots = list(torch._foreach_sqrt(squares))
            torch._foreach_add_(roots, eps)
        weights, updates = wide(self.weights), torch._foreach_div(directions, roots)
        if "Accl3" in state:
            velocity = state["Accl3"]
            torch._foreach_mul_(velocity, n["momentum"])
            torch._foreach_add_(velocity, updates, alpha=lr if is_tensorflow else 1.0)
            torch._foreach_add_(weights, velocity, alpha=-1.0 if is_tensorflow else -lr)
        else:
            torch._foreach_add_(weights, updates, alpha=-lr)
        store(weights, self.weights)


def rule_class(settings: OptimizerSettings, index: int | None) -> type[UpdateRule]:
    """Return the rule of a parameter group, or of the defaults for None."""
    kind = settings.kind
    if kind.family == "SGD":
        has_no_velocity = settings.variables(index)["momentum"] == _CONSTANT_ZERO
        return PlainSGDRule if has_no_velocity else MomentumSGDRule
    if kind.family == "Adaptive":
        return RMSpropRule
    return LambRule if kind.mode.startswith("Lamb") else AdamRule


# The optimizer of a device --------------------------------------------------------

NOT_COMPILED = "Model has not been compiled or has been destroyed."


class DeviceOptimizer:
    """The optimizer of a training executor, on the device and on the host.

    The settings the model was compiled with fix the rule of each weight, and the types
    of its state. Hyper-parameters may change.

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
        optimizer: The host's optimizer.
        settings: The settings that the device has.
        loss_scale_factor: Factor of the next loss, besides the loss scaling.

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
        self._indices: dict[str, int | None] = {}
        self._is_attached = False
        self._kept_state: dict[str, State] | None = None  # while detached
        self._written_values: State = {}
        self._use_running_mean_if_needed()
        self._link(optimizer)

    def _link(self, optimizer: torch.optim.Optimizer) -> None:
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
        self._link(optimizer)
        settings, old = self._reader.read(optimizer), self.settings
        if is_compiled:
            check_replaceable(old, settings)
            check_values(settings)
        self.settings = settings
        self._use_running_mean_if_needed()
        if self._is_attached:
            self._forget_groups()
            self._written_values = {}
            if settings != old:
                self._log_settings()
            self.write_state()

    def _use_running_mean_if_needed(self) -> None:
        # Once compiled, `check_replaceable` sees to it that nothing is left to do.
        options, running = self._executor_options, MeanReductionStrategy.Running
        strategy = options.Training.meanAccumulationAndReplicationReductionStrategy
        if self.settings.uses_running_mean and strategy != running:
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
        self._compiled = self.settings
        self._indices = _group_indices(self.optimizer, weights)
        # On the device "meta", torch would import its compiler for zeros.
        empty = {name: torch.empty(0, dtype=weights[name].dtype) for name in trained}
        self._place(empty, groups={})
        return list(self.tensors())

    def attach(
        self,
        trained: dict[str, Tensor],
        groups: Mapping[str, ReplicaGroups],
        processes: Processes | None,
    ) -> None:
        """Take the device's weights, with the state of an earlier attach.

        Args:
            trained: The device's weights by name; they are updated in place.
            groups: Weights, by name, whose values differ between groups of replicas.
            processes: The processes that train the model. If rounding is stochastic,
                they draw the same random numbers in each update, which gives them the
                same weights.
        """
        self._processes = processes if self._options.rounds_at_random else None
        self._place(trained, groups)
        self._is_attached = True
        self._log_settings()
        if self._kept_state is not None:
            self.load_state(self._kept_state)

    def _place(
        self, weights: dict[str, Tensor], groups: Mapping[str, ReplicaGroups]
    ) -> None:
        self._weights, self._replica_groups = weights, groups
        self._index_of = {n: self._indices.get(n.partition("..")[0]) for n in weights}
        self._last_factor = 1.0
        self._num_updates = 0
        self.reset_state()

    def _rules(self, settings: OptimizerSettings) -> dict[str, UpdateRule]:
        """Return the rule of each weight, which has no weights to update."""
        indices = set(self._index_of.values())
        rules = {i: rule_class(settings, i)(settings, i) for i in indices}
        return {name: rules[index] for name, index in self._index_of.items()}

    def detach(self) -> None:
        """Leave the device; keep the state of an optimizer of PopTorch's."""
        if self._poptorch is not None:
            self._kept_state = self._copy_state()
        self._is_attached = False
        self._place({}, groups={})

    def forget(self) -> None:
        """Drop the stored state, together with the executable."""
        self._kept_state, self._written_values = None, {}

    def weights_were_uploaded(self) -> None:
        """Reset the state of a torch optimizer, as PopTorch does at each upload."""
        if self._poptorch is None:
            self.reset_state()

    def reset_state(self) -> None:
        """Reset momenta and counters to their values before the first update."""
        self._groups: list[UpdateRule] = []
        self._grouped_names: list[str] = []
        rules = self._rules(self.settings.with_types_of(self._compiled))
        self._states = {
            name: rules[name].initial_state(weight)
            for name, weight in self._weights.items()
        }
        self.loss_scale_factor = 1.0

    # Updates --------------------------------------------------------------------

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Update the weights, unless the data is synthetic: no result comes back then.

        Args:
            gradients: Accumulated and reduced gradients, by name. They are of the loss
                times the loss scaling and `loss_scale_factor`. A weight without a
                gradient keeps its value and its state.
        """
        if self._options.is_synthetic:
            return
        records = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            if self._processes is None:
                self._step(gradients)
            else:
                with common_random(self._processes):
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
            directions.append(group.direction(values))
        largest = self.settings.max_grad_norm
        if directions and not math.isinf(largest):
            directions = _clip(directions, largest)
        for group, values in zip(self._groups, directions):
            group.run(values)
        if self._options.scales_loss:
            self._adapt_loss_scale(gradients)

    def _group(self, names: list[str]) -> None:
        """Group weights by parameter group and number of updates."""
        self._forget_groups()
        together: dict[tuple[int | None, float], list[str]] = {}
        for name in names:
            step = float(self._states[name].get(STEP, 0.0))
            together.setdefault((self._index_of[name], step), []).append(name)
        self._grouped_names = names
        for (index, _), members in together.items():
            weights = {name: self._weights[name] for name in members}
            states = [self._states[name] for name in members]
            rule = rule_class(self.settings, index)
            self._groups.append(rule(self.settings, index, weights, states))

    def _forget_groups(self) -> None:
        for group in self._groups:
            group.save_step()
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
        edge = options.loss_scaling_bin_edge * _LARGEST_HALF
        num_large = num_elements = 0
        for name, gradient in gradients.items():
            if gradient is not None and self._weights[name].dtype is torch.float16:
                num_elements += gradient.numel()
                # Not `>`, which is false for NaN.
                num_large += gradient.numel() - int((gradient.abs() <= edge).sum())
        if not num_elements or self._num_updates % options.loss_scaling_period:
            return
        factor = self.loss_scale_factor
        if num_large > options.loss_scaling_proportion * num_elements:
            self.loss_scale_factor *= 0.5
        elif factor * self.settings.loss_scaling.value * 2 <= _LARGEST_SCALE:
            self.loss_scale_factor *= 2.0

    # The device's tensors -------------------------------------------------------

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
        variables: Variables = {}
        for name, rule in self._rules(self.settings).items():
            end = "default___FLOAT" if rule.index is None else f"specific___{name}"
            variables.update({f"{n}___{end}": v for n, v in rule.scalars.items()})
        variables["lossScaling_FLOAT"] = self.settings.loss_scaling
        return {
            name: _as_tensor(variable.value)
            for name, variable in variables.items()
            if with_constants or not variable.is_const
        }

    def tensors(self) -> State:
        """Return all tensors of the device's optimizer, by PopART's names.

        Constant hyper-parameters are included. State tensors aren't copies.
        """
        tensors = {**self._state(), **self._values(with_constants=True)}
        if self._options.scales_loss:
            scaling = self.settings.loss_scaling.value
            tensors[_UPDATE_FACTOR] = _as_tensor(self.loss_scale_factor)
            tensors["finalLossScale"] = _as_tensor(scaling * self._last_factor)
        return tensors

    def _copy_state(self) -> dict[str, State]:
        """Copy the state and the variable hyper-parameters, as the host keeps them.

        Returns:
            `ipu_state`, state tensors such as `Accl1___<name>`, and `ipu_param`, the
            variable hyper-parameters, such as `learningRate___specific___<name>` and
            `lossScaling_FLOAT`.
        """
        state = {name: tensor.clone() for name, tensor in self._state().items()}
        if self._options.scales_loss:
            state[_UPDATE_FACTOR] = _as_tensor(self.loss_scale_factor)
        values = self._values(with_constants=False)
        return join_state(
            {"ipu_state": state, "ipu_param": values}, self._replica_groups
        )

    @torch.no_grad()
    def load_state(self, host_state: Mapping[str, State]) -> None:
        """Load a state that `state_dict` returned.

        A missing name is logged, and its tensor stays; an unknown name is ignored.
        The device keeps its hyper-parameters; loaded ones stay on the host (PopTorch,
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
        tensors, scales_loss = self._state(), self._options.scales_loss
        for key in [key for key in tensors if key in state]:
            if state[key].shape != tensors[key].shape:
                raise Error(
                    f"The optimizer state {key} has shape {tuple(state[key].shape)}, "
                    f"the device's {tuple(tensors[key].shape)}. Was it saved from "
                    "another model?",
                    type="poptorch_cpp_error",
                )
            tensors[key].copy_(state[key])
        if scales_loss and _UPDATE_FACTOR in state:
            self.loss_scale_factor = float(state[_UPDATE_FACTOR])
        parameters = [*self._values(with_constants=False)]
        missing = [f"state {key}" for key in tensors if key not in state]
        missing += [f"parameter {key}" for key in parameters if key not in values]
        if scales_loss and _UPDATE_FACTOR not in state:
            missing.append(f"parameter {_UPDATE_FACTOR}")
        for name in missing:
            logger.warning("writeOptimizerState: ignoring missing %s", name)

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
        if not self._is_attached:
            raise createPoptorchError("Device is not attached")
        logger.info("Writing optimiser state tensors from IPU to host.")
        state = self._copy_state()
        values, written = state["ipu_param"], self._written_values
        values = {name: written.get(name, value) for name, value in values.items()}
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
            self.load_state(state)
            self._written_values = dict(state["ipu_param"] or {})
        optimizer.ipu_state_is_dirty = False

    def start(self) -> None:
        """Send the optimizer's state to a device that was just attached."""
        self.read()
        if self._poptorch is not None:
            has_state = self._poptorch.has_state()
            self._poptorch.ipu_state_is_dirty = has_state
            self._poptorch.host_state_is_dirty |= not has_state
            self.write_state()

    def begin_call(self) -> None:
        """Send a newer state of the host, and mark the device's state as newer."""
        if self._poptorch is not None:
            self.write_state()
            self._poptorch.host_state_is_dirty = True


def _clip(groups: list[list[Tensor]], largest: float) -> list[list[Tensor]]:
    """Scale all tensors by `c / max(c, norm)`, where `c` is `largest`.

    The tensors passed stay as they are: one may be a stored velocity.
    """
    norms = [norm for group in groups for norm in torch._foreach_norm(group)]
    norm = float(torch.stack(norms).norm())
    if norm <= largest:
        return groups
    return [list(torch._foreach_mul(group, largest / norm)) for group in groups]


def _as_tensor(value: float) -> Tensor:
    """Make a float32 tensor of a hyper-parameter."""
    return torch.tensor(value, dtype=torch.float32)


def _group_indices(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]
) -> dict[str, int | None]:
    """Map each weight to its parameter group; tied weights are found by memory.

    Raises:
        KeyError: If a group holds a tensor that isn't the model's.
    """
    known = {key for weight in weights.values() for key in _keys(weight)}
    indices: dict[object, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for number, tensor in enumerate(group["params"]):
            if known.isdisjoint(_keys(tensor)):
                raise KeyError(
                    f"Parameter {number} of the optimizer's group {index}, of shape "
                    f"{tuple(tensor.shape)}, is neither a parameter nor a buffer of "
                    "the model. Build the optimizer from the model's parameters."
                )
            indices.update(dict.fromkeys(_keys(tensor), index))
    return {
        name: next((indices[key] for key in _keys(weight) if key in indices), None)
        for name, weight in weights.items()
    }


def _keys(tensor: Tensor) -> list[object]:
    """Return by what a tensor is known: its identity, and its memory if it has any."""
    pointer = tensor.data_ptr()
    return [id(tensor), ("memory", pointer)] if pointer else [id(tensor)]
