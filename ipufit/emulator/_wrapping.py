# SPDX-License-Identifier: Apache-2.0
"""What `trainingModel` does to the user's module: weights that fetch themselves.

While a training model is compiled, the newest weights live on the device. PopTorch
gives the module, its parameters and its buffers subclasses that copy the weights
back when somebody reads them; `destroy()` takes the subclasses away again.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from .errors import createPoptorchError

if TYPE_CHECKING:
    from .executor import PoplarExecutor

_ORIGINAL = "_poptorch_original_class"


class Wrapping:
    """The subclasses given to one module for one training executor.

    Args:
        module: The user's module; its class and its weights' classes change.
        executor: Whose weights are newer; only a weak reference is kept.

    Raises:
        Error: A buffer is of a class of its own.
    """

    def __init__(self, module: torch.nn.Module, executor: PoplarExecutor) -> None:
        reference = weakref.ref(executor)
        self._module = module
        self._weights: list[tuple[Tensor, type[Tensor]]] = []
        buffer_class = _self_fetching(Tensor, reference)
        for buffer in module.buffers():
            if type(buffer) is not Tensor:
                raise createPoptorchError(
                    "All buffers must be an instance of torch.Tensor (Got "
                    f"{type(buffer)})"
                )
        self._dress(list(module.buffers()), lambda _: buffer_class)
        classes: dict[type[Any], type[Any]] = {}
        self._dress(
            list(module.parameters()),
            lambda original: classes.setdefault(
                original, _self_fetching(original, reference)
            ),
        )
        original = type(module)
        module.__class__ = _wrapped_module_class(original, reference)

    def _dress(
        self, weights: list[Tensor], choose: Callable[[type[Any]], type[Any]]
    ) -> None:
        for weight in weights:
            plain = getattr(type(weight), _ORIGINAL, type(weight))
            self._weights.append((weight, plain))
            weight.__class__ = choose(plain)

    def undo(self) -> None:
        """Give module and weights their own classes back."""
        for weight, original in self._weights:
            weight.__class__ = original
        self._module.__class__ = original_class(self._module)


def is_wrapped(module: torch.nn.Module) -> bool:
    """Whether `module` belongs to a training executor."""
    return hasattr(type(module), _ORIGINAL)


def original_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class that `module` has when no training executor holds it."""
    return getattr(type(module), _ORIGINAL, type(module))


def _fetch(reference: weakref.ReferenceType[PoplarExecutor]) -> bool:
    executor = reference()
    return executor is not None and executor.copyWeightsToHostIfNeeded()


def _self_fetching(
    original: type[Any], reference: weakref.ReferenceType[PoplarExecutor]
) -> type[Any]:
    """A subclass of `original` whose values are fetched when they are read."""

    class SelfFetching(original):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            _fetch(reference)
            return super().__getattribute__(name)

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            _fetch(reference)
            with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
                return func(*args, **(kwargs or {}))

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Somebody else's copy is an ordinary tensor.
            return (
                self.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)
                if original is Tensor
                else original(self.detach(), self.requires_grad).__reduce_ex__(protocol)
            )

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            if id(self) not in memo:
                value = self.detach().clone()
                memo[id(self)] = (
                    value.requires_grad_(self.requires_grad)
                    if original is Tensor
                    else original(value, self.requires_grad)
                )
            return memo[id(self)]

    setattr(SelfFetching, _ORIGINAL, original)
    SelfFetching.__name__ = SelfFetching.__qualname__ = f"Poptorch{original.__name__}"
    return SelfFetching


def _wrapped_module_class(
    original: type[torch.nn.Module],
    reference: weakref.ReferenceType[PoplarExecutor],
) -> type[torch.nn.Module]:
    """A subclass of `original` that knows its executor."""

    class Wrapped(original):  # type: ignore[misc, valid-type]
        def copyWeightsToHostIfNeeded(self) -> bool:
            return _fetch(reference)

        def destroy(self) -> None:
            executor = reference()
            if executor is not None:
                executor.destroy()

        @property
        def _host_weights_version(self) -> int | None:
            executor = reference()
            return None if executor is None else executor._host_weights_version

        def __getattribute__(self, name: str) -> Any:
            if name in ("_parameters", "_buffers", "forward"):
                _fetch(reference)
            return super().__getattribute__(name)

        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            if isinstance(value, torch.nn.Parameter):
                _fetch(reference)
            return value

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            _fetch(reference)
            state = super().state_dict(*args, **kwargs)
            plain: dict[int, Tensor] = {}
            for key, value in state.items():
                if hasattr(type(value), _ORIGINAL):
                    state[key] = plain.setdefault(id(value), _undressed(value))
            return state

        def __copy__(self) -> Any:
            # Part of PopTorch's contract: an inference model made from a shallow
            # copy of a wrapped module still finds the training executor.
            twin = torch.nn.Module.__new__(type(self))
            twin.__dict__.update(self.__dict__)
            return twin

        def __reduce_ex__(self, protocol: Any) -> Any:
            _fetch(reference)
            twin = torch.nn.Module.__new__(original)
            twin.__dict__.update(self.__dict__)
            return twin.__reduce_ex__(protocol)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            _fetch(reference)
            twin = torch.nn.Module.__new__(original)
            memo[id(self)] = twin
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
            return twin

    setattr(Wrapped, _ORIGINAL, original)
    Wrapped.__name__ = Wrapped.__qualname__ = f"Poptorch{original.__name__}"
    return Wrapped


def _undressed(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    original = getattr(type(tensor), _ORIGINAL)
    if original is not Tensor:
        return original(plain, tensor.requires_grad)  # type: ignore[no-any-return]
    return plain
