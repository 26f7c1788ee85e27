# SPDX-License-Identifier: Apache-2.0
"""Float16 activations with float32 weights, and submodules that compute in float32.

A weight is rounded where it is used: in the block of that use, whoever owns the weight,
and however often it is used (PopART merges equal casts, `mergeduplicateops.cpp`). The
gradient goes back through the cast to the float32 weight, which the optimiser updates.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ipufit._tree import tree_map
from ipufit.config import IPUConfig
from ipufit.engine.weights.precision import change_types, float32_submodules
from ipufit.placement import is_inside

_STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
"""Functions that update buffers which they are given."""

_TAKES_THE_MASTER = frozenset(
    """
    __deepcopy__ __hash__ __len__ __repr__ dim double element_size float get_device half
    is_contiguous is_floating_point ndimension nelement numel register_hook
    register_post_accumulate_grad_hook requires_grad_ retain_grad size stride to type
    type_as
    """.split()  # noqa: SIM905 - one per line would be a page
)
"""Functions that cast themselves, or that don't compute with values."""

_PROPERTIES = frozenset({"H", "T", "data", "mH", "mT", "real"})
"""Properties that are tensors of the same values."""


@contextlib.contextmanager
def computed_in(module: torch.nn.Module, config: IPUConfig) -> Iterator[None]:
    """Compute in the types of a config, while a module is called in a trace.

    Nothing is done where weights and activations are of one type anyway.

    Args:
        module: The user's module, with its weights as they are in the trace.
        config: Has the precision, and the submodules that are float32 all the same.
    """
    names = float32_submodules(module, config.float32_patterns)
    types = config.types
    if not types.is_half or (types.weights == torch.float16 and not names):
        yield
        return
    casting = HalfWeights(module)
    handles = [
        handle
        for name in names
        for handle in casting.hook_float32(module.get_submodule(name))
    ]
    try:
        with casting:
            yield
    finally:
        for handle in handles:
            handle.remove()


def compute_in_types(module: torch.nn.Module, config: IPUConfig) -> None:
    """Have a module compute in the types of a config by itself, to be exported.

    Its weights become float16 where they would be rounded, and hooks stay at its
    submodules in float32. Both can be pickled.

    Args:
        module: A copy of the user's module, which is changed.
        config: Has the precision, and the submodules that are float32 all the same.
    """
    if not config.types.is_half:
        return
    names = float32_submodules(module, config.float32_patterns)
    in_float32 = list(map(module.get_submodule, names))
    kept = {
        *(id(weight) for part in in_float32 for weight in part.parameters()),
        *(id(buffer) for part in in_float32 for buffer in part.buffers()),
        *(
            id(buffer)
            for part in module.modules()
            if isinstance(part, torch.nn.modules.batchnorm._NormBase)
            for buffer in part.buffers()
        ),
    }
    weights = [*module.parameters(), *module.buffers()]
    floats = [one for one in weights if one.is_floating_point() and id(one) not in kept]
    change_types(module, {id(one): torch.float16 for one in floats})
    for name in names:
        if not any(is_inside(name, other) for other in names):
            part = module.get_submodule(name)
            part.register_forward_pre_hook(_widened_inputs, with_kwargs=True)
            part.register_forward_hook(_narrowed_outputs)


def _widened_inputs(_module: Any, args: Any, kwargs: Any) -> Any:
    return _as(torch.float32, args), _as(torch.float32, kwargs)


def _narrowed_outputs(_module: Any, _args: Any, outputs: Any) -> Any:
    return _as(torch.float16, outputs)


class HalfWeights(TorchFunctionMode):
    """Has functions of torch get float32 weights as float16.

    Args:
        module: Its parameters and buffers are cast; running statistics that a
            normalisation updates are not.

    Example:
        >>> layer = torch.nn.LayerNorm(3)
        >>> with HalfWeights(layer):
        ...     doubled = layer.weight * 2
        >>> doubled.dtype, layer.weight.dtype
        (torch.float16, torch.float32)
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._weights = {
            id(weight): weight
            for weight in (*module.parameters(), *module.buffers())
            if weight.dtype.is_floating_point and weight.dtype != torch.float16
        }
        self._buffers = {id(buffer) for buffer in module.buffers()}
        self._num_float32 = 0  # modules in float32 that are being called

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func` with float16 weights, unless it is in a module in float32."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._num_float32 or name in _TAKES_THE_MASTER:
            return func(*args, **kwargs)
        if name == "__get__":
            read = getattr(getattr(func, "__self__", None), "__name__", "")
            if read == "dtype" and self._is_weight(args[0]):
                return torch.float16
            if read not in _PROPERTIES:
                return func(*args, **kwargs)
        keeps = self._buffers if name in _STATISTICS else frozenset()
        count = 1 if _is_in_place(name) else 0
        given = [*args[:count], *(self._halved(one, keeps) for one in args[count:])]
        named = {
            key: one if key == "out" else self._halved(one, keeps)
            for key, one in kwargs.items()
        }
        return func(*given, **named)

    def hook_float32(self, module: torch.nn.Module) -> Sequence[Any]:
        """Have a submodule get float32 inputs, and give float16 outputs.

        A 0-d output, such as a loss, stays float32: float16 may not hold its scaling.

        Returns:
            Handles of the hooks.
        """

        def enter(_module: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
            self._num_float32 += 1
            return _as(torch.float32, args), _as(torch.float32, kwargs)

        def leave(_module: Any, _args: Any, outputs: Any) -> Any:
            self._num_float32 -= 1
            return outputs if self._num_float32 else _as(torch.float16, outputs)

        return (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        )

    def _is_weight(self, value: Any) -> bool:
        return value is not None and self._weights.get(id(value)) is value

    def _halved(self, value: Any, keeps: Any) -> Any:
        """A weight as float16, also in a tuple or list; anything else as it is."""
        if type(value) in (tuple, list) and any(map(self._is_weight, value)):
            return type(value)([self._halved(one, keeps) for one in value])
        if self._is_weight(value) and id(value) not in keeps:
            return value.to(torch.float16)
        return value


def _is_in_place(name: str) -> bool:
    """Whether a function writes to its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__set__", "__setitem__")
    return name.endswith("_")


def _as(dtype: torch.dtype, values: Any) -> Any:
    """Nested values with the floats among them in another type, but no number (0-d)."""
    other = torch.float32 if dtype == torch.float16 else torch.float16

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype != other:
            return leaf
        is_number = dtype == torch.float16 and leaf.dim() == 0
        return leaf if is_number else leaf.to(dtype)

    return tree_map(cast, values)
