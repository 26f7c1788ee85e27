# SPDX-License-Identifier: Apache-2.0
"""The base of PopTorch's optimisers: constants, device state, construction.

PopTorch's optimisers are torch's with more attributes. They run on the host as torch's
do; for a training executor they are only a record of values to read.
"""

from __future__ import annotations

import inspect
import logging
import math
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, Mapping

import torch
from torch import Tensor

from ipufit.emulator._ground.torch_extras import without_compiler

logger = logging.getLogger("poptorch::python")

StateTensors = Dict[str, Tensor]

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
"""Attributes that PopTorch's optimisers have besides torch's, and their defaults."""


class VariableAttributes:
    """Which attributes of an optimiser may change once the model is compiled.

    An attribute given to the constructor, even with its default's value, is variable:
    the device streams it. The others are constants of the compiled program (PopTorch
    user guide, "Constant attributes"). Change the record before compiling.

    Args:
        variable_attributes: Names of those that may change.
        allowed_attributes: Names that may be marked at all.

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
        """Say whether an attribute is compiled in.

        Args:
            attr: Any name; one that no optimiser knows counts as constant.

        Returns:
            Whether changing the attribute after compilation is an error.

        Example:
            >>> VariableAttributes(["lr"], ["lr"]).isConstant("colour")
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
    """Base of PopTorch's optimisers: state that lives on the device.

    `state_dict()` has two entries more than torch's: `ipu_state`, the optimiser's
    tensors on the device, and `ipu_param`, its variable hyper-parameters there. Both
    are None until a model compiled with the optimiser has been attached.

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

    # Class values, so that subclasses needn't call a constructor of ours.
    _device_state: Mapping[str, Any] = MappingProxyType(
        {"ipu_state": None, "ipu_param": None}
    )
    ipu_state_is_dirty: bool = False
    """Whether the device has still to receive the state."""
    host_state_is_dirty: bool = False
    """Whether the device's state is newer, so that `state_dict` has to read it."""

    def has_state(self) -> bool:
        """Say whether a device state is held, loaded or read back.

        Returns:
            False for a new optimiser.

        Example:
            >>> from ipufit.emulator import optim
            >>> optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1).has_state()
            False
        """
        state = self._device_state
        return state.get("ipu_state") is not None and state.get("ipu_param") is not None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with values of their own, as torch's optimisers do.

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
        """Give torch's state and the device's, read back if it's newer.

        An executor puts a method of its own in this one's place, which reads the
        device first. So whoever holds the optimiser holds the executor, too.

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
        """Give torch's state, and the device's as the host knows it.

        Example:
            >>> from ipufit.emulator import optim
            >>> weights = [torch.nn.Parameter(torch.zeros(2))]
            >>> sorted(optim.SGD(weights, lr=0.1).get_state_dict())
            ['ipu_param', 'ipu_state', 'param_groups', 'state']
        """
        return {**self._device_state, **torch_state(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state made by `state_dict` of a PopTorch optimiser.

        The device gets it with the executor's next call or attach. Learning rates and
        the like stay as they are there, until `setOptimizer`.

        Args:
            state: With the entries of torch's and of the device's state. It isn't
                copied.

        Raises:
            RuntimeError: If it has no `ipu_state` and `ipu_param`, as one of a torch
                optimiser. Torch's part has been loaded then.
            KeyError: If it has no `param_groups`.
            ValueError: If its groups are others than this optimiser's.

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

    def _record(
        self,
        arguments: Mapping[str, Any],
        loss_scaling: float | None,
        **attributes: Any,
    ) -> None:
        """Keep the attributes torch has no place for, and what may vary.

        Args:
            arguments: Group variables given to the constructor, None where not given.
            loss_scaling: The constructor's argument.
            attributes: Names of `ATTRIBUTES` that the optimiser has; None for the
                default.

        Raises:
            AssertionError: A type is neither float32 nor float16.
        """
        given = {name for name, value in arguments.items() if value is not None}
        if loss_scaling is not None:
            given.add("loss_scaling")
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        for name, value in attributes.items():
            if name.endswith("accum_type"):
                _check_accumulation_type(value)
            setattr(self, name, ATTRIBUTES[name] if value is None else value)
        allowed = [*self.defaults, "loss_scaling"]
        self.variable_attrs = VariableAttributes(given, allowed)


def torch_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Give the state of an optimiser as torch has it: `state` and `param_groups`.

    Example:
        >>> sorted(torch_state(torch.optim.SGD([torch.zeros(1)], lr=0.1)))
        ['param_groups', 'state']
    """
    state: dict[str, Any] = without_compiler(torch.optim.Optimizer.state_dict)(
        optimizer
    )
    return state


def torch_arguments(
    torch_class: Callable[..., Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Keep the arguments that were given and that this torch's constructor knows.

    Args:
        torch_class: The class of torch that will be constructed.
        arguments: Values by name, None where not given.

    Returns:
        The keyword arguments to forward; torch's defaults fill in the rest.

    Example:
        >>> torch_arguments(torch.optim.SGD, {"lr": 0.1, "momentum": None, "colour": 1})
        {'lr': 0.1}
    """
    known = inspect.signature(torch_class).parameters
    return {
        name: value
        for name, value in arguments.items()
        if value is not None and name in known
    }


def _check_accumulation_type(dtype: torch.dtype | None) -> None:
    if dtype not in (None, torch.float32, torch.float16):
        raise AssertionError(
            "Accumulation types must be either torch.float32 or torch.float16, "
            f"not {dtype}."
        )
