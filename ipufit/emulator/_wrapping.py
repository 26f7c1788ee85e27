# SPDX-License-Identifier: Apache-2.0
"""What `trainingModel` does to the user's module: weights that fetch themselves.

While a training model is compiled, the newest weights live on the device. PopTorch
gives the module, its parameters and its buffers subclasses that copy the weights
back when somebody reads them; `destroy()` takes the subclasses away again.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from ._replica_groups import Grouping
from .enums import CommGroupType, VariableRetrievalMode
from .errors import createPoptorchError

if TYPE_CHECKING:
    from ._lifecycle import Lifecycle

logger = logging.getLogger("poptorch::python")

_ORIGINAL = "_poptorch_original_class"


class Wrapping:
    """The subclasses given to one module for one training executor.

    Args:
        module: The user's module; its class and its weights' classes change.
        executor: Whose weights are newer; only a weak reference is kept.

    Raises:
        Error: A buffer is of a class of its own.
    """

    def __init__(self, module: torch.nn.Module, executor: Lifecycle) -> None:
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


class ParameterView:
    """What an executor shows of a parameter of the top-level module.

    As in PopTorch it isn't a tensor: it only passes attributes on.

    Args:
        parameter: The parameter.
        executor: Whose module has it.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> view = inferenceModel(torch.nn.Linear(2, 3)).weight
        >>> isinstance(view, torch.Tensor), view.shape
        (False, torch.Size([3, 2]))
    """

    def __init__(self, parameter: torch.nn.Parameter, executor: Lifecycle) -> None:
        self._parameter = parameter
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        """Attributes of the parameter."""
        return getattr(self._parameter, name)

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Let groups of replicas have values of their own for this parameter.

        The parameter must have a leading dimension, one element for each group; the
        module is traced with `parameter[0]`. Each group sums its own gradients. A mean
        still divides by the number of all replicas, unless it is a running mean,
        which divides by the size of the group. The state of PopTorch's optimisers has
        the leading dimension too. `max_grad_norm` counts the gradients of all groups.

        Call it before the model is compiled.

        Args:
            comm_group_type: How replicas form groups.
            shards: Replicas in each group; of no effect with `All` (one group) and
                `NoGrouping` (a group each).
            variable_retrieval_mode: With `AllReplicas` the leading dimension is the
                number of replicas, and the value of each is read back into it; groups
                start from the value of their first replica.

        Raises:
            AssertionError: An argument is of another type.

        Example:
            >>> from ipufit.emulator import CommGroupType, Options
            >>> from ipufit.emulator import VariableRetrievalMode, inferenceModel
            >>> class Scale(torch.nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.factor = torch.nn.Parameter(torch.tensor([[2.0], [3.0]]))
            ...     def forward(self, x):
            ...         return self.factor * x
            >>> inference = inferenceModel(Scale(), Options().replicationFactor(2))
            >>> inference.factor.replicaGrouping(
            ...     CommGroupType.NoGrouping, 0, VariableRetrievalMode.OnePerGroup
            ... )
            >>> inference(torch.ones(2)).tolist()
            [2.0, 3.0]
        """
        if self._executor.isCompiled():
            logger.warning(
                "replicaGrouping() has no effect on an executable that is already "
                "compiled: it counts for the next compilation, after destroy()"
            )
        self._executor._grouped_parameters.add(
            self._parameter,
            Grouping(comm_group_type, shards, variable_retrieval_mode).check(),
        )


def _fetch(reference: weakref.ReferenceType[Lifecycle]) -> bool:
    executor = reference()
    return executor is not None and executor.copyWeightsToHostIfNeeded()


@contextlib.contextmanager
def _undressed(dressed: Any) -> Iterator[None]:
    """Give a dressed weight or module its own class for a while."""
    dressed_class = dressed.__class__  # read as an attribute: it fetches the values
    dressed.__class__ = getattr(dressed_class, _ORIGINAL)
    try:
        yield
    finally:
        dressed.__class__ = dressed_class


def _copied_with_class(dressed: Any) -> Any:
    """A shallow copy stays dressed: what is made of it finds the executor too."""
    with _undressed(dressed):
        twin = copy.copy(dressed)
    twin.__class__ = type(dressed)
    return twin


def _deeply_copied(dressed: Any, memo: dict[int, Any]) -> Any:
    """A deep copy has weights of its own, of no executor."""
    with _undressed(dressed):
        return copy.deepcopy(dressed, memo)


def _pickled(dressed: Any, protocol: Any) -> Any:
    """What is unpickled elsewhere knows nothing of us."""
    with _undressed(dressed):
        function, arguments, *rest = dressed.__reduce_ex__(protocol)
    if function.__name__ == "__newobj__":
        # Pickle demands the object's very class, which is ours, next to it.
        function = arguments[0].__new__
    return (function, arguments, *rest)


def _self_fetching(
    original: type[Any], reference: weakref.ReferenceType[Lifecycle]
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

        __copy__ = _copied_with_class
        __deepcopy__ = _deeply_copied
        __reduce_ex__ = _pickled

    setattr(SelfFetching, _ORIGINAL, original)
    SelfFetching.__name__ = SelfFetching.__qualname__ = f"Poptorch{original.__name__}"
    return SelfFetching


def _wrapped_module_class(
    original: type[torch.nn.Module],
    reference: weakref.ReferenceType[Lifecycle],
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
            twins: dict[int, Tensor] = {}  # tied weights stay tied
            for key, value in state.items():
                if hasattr(type(value), _ORIGINAL):
                    if id(value) not in twins:
                        with _undressed(value):
                            twins[id(value)] = copy.copy(value)
                    state[key] = twins[id(value)]
            return state

        __copy__ = _copied_with_class
        __deepcopy__ = _deeply_copied
        __reduce_ex__ = _pickled

    setattr(Wrapped, _ORIGINAL, original)
    Wrapped.__name__ = Wrapped.__qualname__ = f"Poptorch{original.__name__}"
    return Wrapped
