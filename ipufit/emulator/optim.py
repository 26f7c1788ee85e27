# SPDX-License-Identifier: Apache-2.0
"""PopTorch's optimizers: `poptorch.optim`.

Each is torch's optimizer of the same name with additional arguments; torch has no LAMB,
so LAMB has its own implementation on the host. A training executor reads the values of
an optimizer and never calls `step`. On the host the optimizers step as torch's do, and
ignore the additional arguments. Arguments left None take the default *and* become
constants of the compiled program: see `VariableAttributes`.

The arguments, their order and their defaults are those of PopTorch 3.4 (PopTorch user
guide, "Optimizers").
"""

from __future__ import annotations

import inspect
import math
from types import MappingProxyType
from typing import Any, Callable, Iterable, Mapping

import torch
from torch import Tensor

from ._logging import logger as logger
from .core.graph import without_compiler

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "RMSprop",
    "VariableAttributes",
]

ATTRIBUTES: Mapping[str, Any] = MappingProxyType(
    {
        "use_combined_accum": False,
        "bias_correction": True,
        "use_tf_variant": False,
        "max_grad_norm": math.inf,
        "max_weight_norm": 65500.0,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "first_order_momentum_accum_type": torch.float32,
        "second_order_momentum_accum_type": torch.float32,
    }
)
"""Attributes that PopTorch's optimizers have besides torch's, and their defaults."""

_ACCUM_TYPES = (torch.float32, torch.float16)


class VariableAttributes:
    """Attributes of an optimizer that may change after the model is compiled.

    An attribute given to the constructor, even with its default's value, is variable:
    the device streams it. The others are constants of the compiled program (PopTorch
    user guide, "Constant attributes"). Change the record before compiling.

    Args:
        variable_attributes: Names of the attributes that may change.
        allowed_attributes: Names of the attributes that may be marked.

    Example:
        >>> attributes = VariableAttributes(["lr"], ["lr", "eps"])
        >>> attributes.isConstant("lr"), attributes.isConstant("eps")
        (False, True)
    """

    def __init__(
        self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]
    ) -> None:
        # Named as PopTorch's are: scripts reach for them to make all variable.
        variable = set(variable_attributes)
        self._allowed_attributes = list(allowed_attributes)
        self._variable_attributes = [
            name for name in self._allowed_attributes if name in variable
        ]

    def isConstant(self, attr: str) -> bool:
        """Return whether an attribute is compiled in.

        Args:
            attr: Any name; one that no optimizer knows counts as constant.

        Returns:
            Whether changing the attribute after compilation is an error.

        Example:
            >>> VariableAttributes(["lr"], ["lr"]).isConstant("color")
            True
        """
        return attr not in self._variable_attributes

    def markAsConstant(self, attr: str) -> None:
        """Compile the attribute's value into the program.

        Args:
            attr: One of the allowed names.

        Raises:
            AssertionError: If the name is not allowed.

        Example:
            >>> attributes = VariableAttributes(["lr"], ["lr"])
            >>> attributes.markAsConstant("lr")
            >>> attributes.isConstant("lr")
            True
        """
        self._check_allowed(attr)
        if attr in self._variable_attributes:
            self._variable_attributes.remove(attr)

    def markAsVariable(self, attr: str) -> None:
        """Let the attribute change through `setOptimizer` after compilation.

        Args:
            attr: One of the allowed names.

        Raises:
            AssertionError: If the name is not allowed.

        Example:
            >>> attributes = VariableAttributes([], ["lr"])
            >>> attributes.markAsVariable("lr")
            >>> attributes.isConstant("lr")
            False
        """
        self._check_allowed(attr)
        if attr not in self._variable_attributes:
            self._variable_attributes.append(attr)

    def _check_allowed(self, attr: str) -> None:
        allowed = self._allowed_attributes
        if attr not in allowed:
            raise AssertionError(f"Unknown attribute {attr}, allowed values: {allowed}")


class Optimizer(torch.optim.Optimizer):
    """Base of PopTorch's optimizers, whose state lives on the device.

    `state_dict()` has two more entries than torch's: `ipu_state`, the optimizer's
    tensors on the device, and `ipu_param`, its variable hyper-parameters there. Both
    are None until a model compiled with the optimizer has been attached.

    It is not meant to be constructed by itself.

    Example:
        >>> from ipufit.emulator import optim
        >>> weights = [torch.nn.Parameter(torch.zeros(2))]
        >>> optimizer = optim.SGD(weights, lr=0.1)
        >>> sorted(optimizer.state_dict())
        ['ipu_param', 'ipu_state', 'param_groups', 'state']
        >>> isinstance(optimizer, optim.Optimizer)
        True
    """

    variable_attrs: VariableAttributes
    loss_scaling: float
    # Each optimizer has those of these that its constructor takes.
    use_combined_accum: bool
    bias_correction: bool
    use_tf_variant: bool
    max_grad_norm: float
    max_weight_norm: float
    accum_type: torch.dtype
    velocity_accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype

    # Class values, so that subclasses needn't call a constructor of ours.
    _device_state: Mapping[str, Any] = MappingProxyType(
        {"ipu_state": None, "ipu_param": None}
    )
    ipu_state_is_dirty: bool = False
    """Whether the device has still to receive the state."""
    host_state_is_dirty: bool = False
    """Whether the device's state is newer, so that `state_dict` has to read it."""

    def has_state(self) -> bool:
        """Return whether a device state is stored, loaded or read back.

        Returns:
            False for a new optimizer.

        Example:
            >>> from ipufit.emulator import optim
            >>> optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1).has_state()
            False
        """
        state = self._device_state
        return state.get("ipu_state") is not None and state.get("ipu_param") is not None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with values of their own, as torch's optimizers do.

        Args:
            param_group: The parameters as `params`, and values by name.

        Example:
            >>> from ipufit.emulator import optim
            >>> one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
            >>> optimizer = optim.SGD([one], lr=0.1)
            >>> optimizer.add_param_group({"params": [other], "lr": 0.2})
            >>> [group["lr"] for group in optimizer.param_groups]
            [0.1, 0.2]
        """
        add = without_compiler(super().add_param_group.__func__)  # type: ignore[attr-defined]
        add(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state and the device's, read back from the device if newer.

        A training executor replaces this method by its own, which reads the device
        first. So a reference to the optimizer keeps the executor alive.

        Returns:
            Torch's `state` and `param_groups`, and `ipu_state` and `ipu_param`: names
            to tensors, or None before the first attach.

        Example:
            >>> from ipufit.emulator import optim
            >>> weights = [torch.nn.Parameter(torch.zeros(2))]
            >>> print(optim.SGD(weights, lr=0.1).state_dict()["ipu_state"])
            None
        """
        return self.get_state_dict()

    def get_state_dict(self) -> dict[str, Any]:
        """Return torch's state, and the device's as last read, without reading it.

        Example:
            >>> from ipufit.emulator import optim
            >>> weights = [torch.nn.Parameter(torch.zeros(2))]
            >>> sorted(optim.SGD(weights, lr=0.1).get_state_dict())
            ['ipu_param', 'ipu_state', 'param_groups', 'state']
        """
        of_torch = without_compiler(torch.optim.Optimizer.state_dict)(self)
        return {**self._device_state, **of_torch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state made by `state_dict` of a PopTorch optimizer.

        The device gets it with the executor's next call or attach. Learning rates and
        the like stay as they are there, until `setOptimizer`.

        Args:
            state: State with torch's entries and the device's. It isn't copied.

        Raises:
            RuntimeError: If it has no `ipu_state` and `ipu_param`, as one of a torch
                optimizer. Torch's part has been loaded then.
            KeyError: If it has no `param_groups`.
            ValueError: If its groups differ from this optimizer's.

        Example:
            >>> from ipufit.emulator import optim
            >>> weights = [torch.nn.Parameter(torch.zeros(2))]
            >>> state = optim.SGD(weights, lr=0.1).state_dict()
            >>> optimizer = optim.SGD(weights, lr=0.2)
            >>> optimizer.load_state_dict(state)
            >>> optimizer.param_groups[0]["lr"]
            0.1
        """
        names = ("state", "param_groups")
        of_torch = {name: state[name] for name in names if name in state}
        load = without_compiler(super().load_state_dict.__func__)  # type: ignore[attr-defined]
        load(self, of_torch)
        self.set_state_dict(state)

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the device's part of a state, and leave torch's alone.

        Args:
            state: As for `load_state_dict`.

        Raises:
            RuntimeError: If it is empty, or has no `ipu_state` and `ipu_param`.

        Example:
            >>> from ipufit.emulator import optim
            >>> weights = [torch.nn.Parameter(torch.zeros(2))]
            >>> optimizer = optim.SGD(weights, lr=0.2)
            >>> optimizer.set_state_dict({"ipu_state": {}, "ipu_param": {}})
            >>> optimizer.has_state()
            True
        """
        if not state:
            raise RuntimeError(
                "Cannot load optimizer state dictionary because it is empty."
            )
        if "ipu_state" not in state or "ipu_param" not in state:
            raise RuntimeError(
                "Only IPU optimizer states can be loaded onto the IPU. This one has "
                f"{sorted(state)}, but not both 'ipu_state' and 'ipu_param'."
            )
        self._device_state = state
        self.ipu_state_is_dirty = True
        self.host_state_is_dirty = False

    def __getstate__(self) -> dict[str, Any]:
        names = ("defaults", "state", "param_groups", "variable_attrs", "loss_scaling")
        kept = {name: getattr(self, name) for name in names}
        kept.update({n: value for n, value in vars(self).items() if n in ATTRIBUTES})
        kept["_device_state"] = dict(self._device_state)
        kept["ipu_state_is_dirty"] = self.has_state()
        return kept

    def _build(
        self, torch_class: Any, arguments: Mapping[str, Any], **group_values: float
    ) -> None:
        """Construct torch's part, and store what torch's optimizer lacks.

        Args:
            torch_class: The class of torch, which takes those arguments that it knows.
            arguments: All arguments of the constructor by name, None for the default.
            **group_values: Values of parameter groups that torch's class lacks.

        Raises:
            AssertionError: A type is neither float32 nor float16.
        """
        passed = {name: v for name, v in arguments.items() if v is not None}
        known = inspect.signature(torch_class).parameters
        of_torch = {name: value for name, value in passed.items() if name in known}
        torch_class.__init__(self, **of_torch)
        self.defaults.update(group_values)
        for group in self.param_groups:
            group.update({**group_values, **group})
        self.loss_scaling = passed.get("loss_scaling", 1.0)
        for name in [name for name in ATTRIBUTES if name in arguments]:
            value = passed.get(name, ATTRIBUTES[name])
            if name.endswith("accum_type") and value not in _ACCUM_TYPES:
                raise AssertionError(
                    "Accumulation types must be either torch.float32 or torch.float16, "
                    f"not {value}."
                )
            setattr(self, name, value)
        allowed = [*self.defaults, "loss_scaling"]
        self.variable_attrs = VariableAttributes(passed, allowed)


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent, with momentum if it isn't a constant zero.

    On the device dampening counts from the first step on and without momentum too,
    unlike in torch.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate; always variable, since it must be given.
        momentum: Factor of the velocity, 0 by default.
        dampening: Lessens what a gradient adds to the velocity, 0 by default.
        weight_decay: L2 penalty, 0 by default.
        nesterov: Whether to look ahead; off by default.
        maximize: Honored on the host only.
        foreach: Honored on the host only.
        differentiable: Honored on the host only.
        loss_scaling: Factor of the loss, taken out before the update; 1 by default.
        velocity_scaling: Factor of the stored velocity, 1 by default; only with
            `use_combined_accum`.
        use_combined_accum: Keep accumulated gradient and velocity in one tensor.
        accum_type: Type of the accumulated gradient, float32 by default.
        velocity_accum_type: Type of the velocity, float32 by default.
        max_grad_norm: Largest global norm; infinite by default.

    Raises:
        AssertionError: If an accumulation type is neither float32 nor float16.

    Example:
        >>> optimizer = SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
        >>> optimizer.variable_attrs.isConstant("momentum")
        False
        >>> optimizer.variable_attrs.isConstant("weight_decay")
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        arguments, group_values = locals(), {}
        if use_combined_accum:
            scaling = 1.0 if velocity_scaling is None else velocity_scaling
            group_values = {"velocity_scaling": scaling}
        elif velocity_scaling is not None:
            logger.warning(
                "Ignoring velocity_scaling=%s: it needs use_combined_accum=True",
                velocity_scaling,
            )
        self._build(torch.optim.SGD, arguments, **group_values)


class Adam(Optimizer, torch.optim.Adam):
    """Adam, with the weight decay added to the gradient.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, 1e-3 by default; constant unless given.
        betas: Pair of decay rates, (0.9, 0.999) by default.
        eps: Added to the denominator, 1e-8 by default.
        weight_decay: L2 penalty, 0 by default.
        amsgrad: Refused by training executors.
        foreach: Honored on the host only.
        maximize: Honored on the host only.
        capturable: Honored on the host only.
        differentiable: Honored on the host only.
        fused: Honored on the host only.
        loss_scaling: Factor of the loss, taken out before the update; 1 by default.
        accum_type: Type of the accumulated gradient, float32 by default.
        first_order_momentum_accum_type: Type of the mean, float32 by default.
        second_order_momentum_accum_type: Type of the squares' mean, float32 by default.
        max_grad_norm: Largest global norm of the gradients; infinite by default.

    Raises:
        AssertionError: If an accumulation type is neither float32 nor float16.

    Example:
        >>> optimizer = Adam([torch.nn.Parameter(torch.zeros(2))])
        >>> optimizer.variable_attrs.isConstant("lr")
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._build(torch.optim.Adam, locals())


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, 1e-3 by default; constant unless given.
        betas: Pair of decay rates, (0.9, 0.999) by default.
        eps: Added to the denominator, 1e-8 by default.
        weight_decay: Decay of the weights, 1e-2 by default.
        amsgrad: Refused by training executors.
        maximize: Honored on the host only.
        foreach: Honored on the host only.
        capturable: Honored on the host only.
        differentiable: Honored on the host only.
        fused: Honored on the host only.
        loss_scaling: Factor of the loss, taken out before the update; 1 by default.
        bias_correction: Has no effect: the device corrects the bias either way.
        accum_type: Type of the accumulated gradient, float32 by default.
        first_order_momentum_accum_type: Type of the mean, float32 by default.
        second_order_momentum_accum_type: Type of the squares' mean, float32 by default.
        max_grad_norm: Largest global norm of the gradients; infinite by default.

    Raises:
        AssertionError: If an accumulation type is neither float32 nor float16.

    Example:
        >>> AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1).bias_correction
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._build(torch.optim.AdamW, locals())


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop, as torch or as TensorFlow defines it.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, 1e-2 by default; constant unless given.
        alpha: Decay rate of the squares' mean, 0.99 by default.
        eps: Added to the denominator, 1e-8 by default.
        weight_decay: L2 penalty, 0 by default.
        momentum: Factor of the velocity, 0 by default.
        centered: Divide by the variance instead; off by default, equal in all groups.
        foreach: Honored on the host only.
        maximize: Honored on the host only.
        differentiable: Honored on the host only.
        loss_scaling: Factor of the loss, taken out before the update; 1 by default.
        accum_type: Type of the accumulated gradient, float32 by default.
        first_order_momentum_accum_type: Type of the first mean, float32 by default.
        second_order_momentum_accum_type: Type of the second mean, float32 by default.
        use_tf_variant: On the device, start the squares' mean at one, put `eps` inside
            the root and `lr` inside the velocity; off by default.

    Raises:
        AssertionError: If an accumulation type is neither float32 nor float16.

    Example:
        >>> RMSprop([torch.nn.Parameter(torch.zeros(2))]).use_tf_variant
        False
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        self._build(torch.optim.RMSprop, locals())


class LAMB(Optimizer, torch.optim.Optimizer):
    """Layer-wise adaptive moments: Adam's step, scaled by each weight's norm.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", 2020.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, 1e-3 by default; constant unless given.
        betas: Pair of decay rates, (0.9, 0.999) by default.
        eps: Added to the denominator, 1e-8 by default.
        weight_decay: Decay of the weights, 1e-2 by default.
        bias_correction: Whether to correct the means' bias; on by default.
        loss_scaling: Factor of the loss, taken out before the update; 1 by default.
        max_weight_norm: Largest norm of a weight in the trust ratio, 65500 by default.
            On the host the constructor's value serves all groups.
        accum_type: Type of the accumulated gradient, float32 by default.
        first_order_momentum_accum_type: Type of the mean, float32 by default.
        second_order_momentum_accum_type: Type of the squares' mean, float32 by default.

    Raises:
        ValueError: If a value is negative, or a beta not below 1.
        AssertionError: If an accumulation type is neither float32 nor float16.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> weight.grad = torch.ones(4)
        >>> LAMB([weight], lr=0.5, weight_decay=0.0).step()
        >>> weight.data
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        arguments = locals()
        defaults = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "max_weight_norm": ATTRIBUTES["max_weight_norm"],
        }
        passed = {name: value for name, value in arguments.items() if value is not None}
        defaults.update({name: passed[name] for name in defaults if name in passed})
        for name, value in defaults.items():
            if name != "betas" and not value >= 0.0:
                raise ValueError(f"LAMB's {name} must not be negative, got {value}.")
        if not all(0.0 <= beta < 1.0 for beta in defaults["betas"]):
            raise ValueError(
                f"LAMB's betas must lie in [0, 1), got {defaults['betas']}."
            )
        self._build(torch.optim.Optimizer, {**arguments, "defaults": defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters on the host, from their `grad`.

        Args:
            closure: Function that recomputes the loss and the gradients.

        Returns:
            What the closure returned, or None.

        Example:
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> LAMB([weight]).step()  # no gradient, no update
            >>> weight.data
            tensor([1.])
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(
        self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]
    ) -> None:
        state: Any = self.state[parameter]  # type: ignore[index,unused-ignore]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        mean, squares = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.bias_correction:
            mean = mean / (1 - beta1 ** state["step"])
            squares = squares / (1 - beta2 ** state["step"])
        direction = mean / squares.sqrt().add_(group["eps"])
        direction.add_(parameter, alpha=group["weight_decay"])
        norm = min(float(parameter.norm()), self.max_weight_norm)
        direction_norm = float(direction.norm())
        is_zero = norm == 0.0 or direction_norm == 0.0
        ratio = 1.0 if is_zero else norm / direction_norm
        parameter.add_(direction, alpha=-group["lr"] * ratio)
