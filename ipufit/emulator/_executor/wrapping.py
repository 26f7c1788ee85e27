# SPDX-License-Identifier: Apache-2.0
"""Wrapper classes that make the weights of a training model fetch themselves.

While a training model is compiled, the newest weights live on the device. PopTorch
gives the module, its parameters and its buffers wrapper classes that copy the weights
back when somebody reads them; `destroy()` takes them off again.
"""

from __future__ import annotations

import collections
import copy
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from ipufit.emulator._executor.wrapper_registry import register_wrapper_class, unwrap
from ipufit.emulator.errors import createPoptorchError


class TrainingExecutor(Protocol):
    """The training executor of a wrapped module, as the wrapper classes use it."""

    @property
    def _host_weights_version(self) -> Any: ...

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Fetch the weights if the host's are out of date."""

    def destroy(self) -> None:
        """Fetch the weights and unwrap the module."""


def wrap_module(module: torch.nn.Module, executor: TrainingExecutor) -> None:
    """Give a module and its weights the wrapper classes of a training executor.

    Args:
        module: The user's module; its class and its weights' classes change.
        executor: Has the newest weights; only a weak reference to it is kept.

    Raises:
        Error: A buffer is of a subclass of `torch.Tensor`. As in PopTorch, parameters
            and the buffers before it keep wrapper classes then.
    """
    reference = weakref.ref(executor)
    parameter_class = _weight_class(torch.nn.Parameter, "PoptorchParameter", reference)
    for parameter in module.parameters():
        parameter.__class__ = parameter_class
    buffer_class = _weight_class(Tensor, "PoptorchBuffer", reference)
    for buffer in module.buffers():
        if buffer.__class__ is not Tensor:  # of another executor: this fetches
            raise createPoptorchError(
                "All buffers must be an instance of torch.Tensor (Got "
                f"{type(buffer)}). A buffer keeps the class of a training model that "
                "was destroyed if an inference model is compiled afterwards."
            )
        buffer.__class__ = buffer_class
    module_class = _module_class(type(module), reference)
    module.__class__ = module_class
    for wrapper in (module_class, parameter_class, buffer_class):
        register_wrapper_class(wrapper)


def _fetch(reference: weakref.ReferenceType[TrainingExecutor]) -> bool:
    executor = reference()
    return executor is not None and executor.copyWeightsToHostIfNeeded()


def _weight_class(
    base: type[Tensor], name: str, reference: weakref.ReferenceType[TrainingExecutor]
) -> type[Tensor]:
    """Make a subclass of `base` whose attributes are read after a fetch.

    As torch does for all subclasses, results computed from a buffer have its class.
    """

    class PoptorchWeight(base):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            _fetch(reference)
            return object.__getattribute__(self, name)

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # That it exists makes torch's functions read an attribute first.
            return super().__torch_function__(func, types, args, kwargs or {})

    PoptorchWeight.__name__ = PoptorchWeight.__qualname__ = name
    return PoptorchWeight


def _module_class(
    original: type[torch.nn.Module],
    reference: weakref.ReferenceType[TrainingExecutor],
) -> type[torch.nn.Module]:
    """Make a subclass of the user's class whose weights are fetched when read."""

    class PoptorchModel(original):  # type: ignore[misc, valid-type]
        def copyWeightsToHostIfNeeded(self) -> bool:
            return _fetch(reference)

        def destroy(self) -> None:
            executor = reference()
            if executor is not None:
                executor.destroy()

        def __getattribute__(self, name: str) -> Any:
            if name == "_host_weights_version":
                executor = reference()
                return None if executor is None else executor._host_weights_version
            if name in ("_parameters", "_buffers", "forward"):
                _fetch(reference)
            return object.__getattribute__(self, name)

        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            if isinstance(value, torch.nn.Parameter):
                _fetch(reference)
            return value

        def state_dict(
            self,
            *args: Any,
            destination: Any = None,
            prefix: str = "",
            keep_vars: bool = False,
        ) -> Any:
            """Give a dictionary of its own, with plain tensors in the same memory."""
            state = super().state_dict(
                *args, destination=destination, prefix=prefix, keep_vars=keep_vars
            )
            twins: dict[int, Any] = {}  # tied weights stay tied
            for value in state.values():
                if id(value) not in twins:
                    twins[id(value)] = unwrap(copy.copy(value))
            return collections.OrderedDict(
                (key, twins[id(value)]) for key, value in state.items()
            )

    PoptorchModel.__name__ = PoptorchModel.__qualname__ = f"Poptorch{original.__name__}"
    return PoptorchModel
