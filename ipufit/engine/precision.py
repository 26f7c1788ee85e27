# SPDX-License-Identifier: Apache-2.0
"""Run a module in the precision that the config asks for.

A weight is rounded where it is used: in the block of that use, whichever module owns
the weight, and at every use (PopART merges equal casts, `mergeduplicateops.cpp`). The
gradient goes back through the cast to the float32 weight, which the optimizer updates.
"""

from __future__ import annotations

import contextlib
import fnmatch
from typing import Any, Callable, Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from ipufit._modules import weights_of
from ipufit._tree import map_tensors
from ipufit.config import IPUConfig
from ipufit.engine.weights import (
    Counterparts,
    deep_copied,
    original_class,
    unfetched,
)
from ipufit.errors import (
    ConfigError,
    UnknownNameError,
    UnsupportedError,
)
from ipufit.optimizers import is_norm
from ipufit.placement import is_inside


def _is_loss(part: torch.nn.Module) -> bool:
    return isinstance(part, torch.nn.modules.loss._Loss)


_WORDS = {"norm": is_norm, "loss": _is_loss}
"""Kinds of submodules that `float32_modules` has words for."""


def float32_submodules(module: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of submodules that compute in float32.

    Args:
        patterns: `"norm"` for normalization layers, `"loss"` for torch's losses, and
            names or patterns of submodules, as in `fnmatch`.

    Raises:
        UnknownNameError: A pattern matches no submodule.
        ConfigError: A word matches no layer.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> float32_submodules(module, ["norm"])
        ['1']
    """
    parts = {name: part for name, part in module.named_modules() if name}
    names: set[str] = set()
    for word in patterns:
        is_kind = _WORDS.get(word)
        matching = set(fnmatch.filter(parts, word))
        if is_kind is not None:
            matching.update(name for name, part in parts.items() if is_kind(part))
        if not matching and is_kind is not None:
            raise ConfigError(
                f"float32_modules has {word!r}, and the module has no such layers. "
                "Leave it out: losses and metrics of compile() are float32 anyway."
            )
        if not matching:
            known = (*parts, *_WORDS)
            raise UnknownNameError("submodule in float32_modules", word, known)
        names |= matching
    return [name for name in parts if name in names]


def _refuse_bfloat16(module: torch.nn.Module, changed: Container[int]) -> None:
    """Refuse bfloat16 weights, which PopTorch would silently compute in another type.

    Args:
        module: The user's module.
        changed: Ids of the weights whose types will change.

    Raises:
        UnsupportedError: Another weight is bfloat16.
    """
    for name, weight in module.named_parameters():
        if weight.dtype == torch.bfloat16 and id(weight) not in changed:
            raise UnsupportedError(
                f"{name} is bfloat16, which IPUs don't have: they compute in float16 "
                "and float32. Use module.float(), and for half precision IPUConfig("
                "precision='float16'), whose range is smaller: the loss is scaled."
            )


def in_own_types(
    module: torch.nn.Module, config: IPUConfig, *, in_place: bool
) -> tuple[torch.nn.Module, Counterparts]:
    """Return a module whose weights have the types that a config asks for.

    Args:
        module: The user's module, which changes only if `in_place`.
        config: The precision, and the submodules that stay float32.
        in_place: Change the types of this module's own weights.

    Returns:
        The module itself if no type has to change, or if `in_place`; else a copy. Also
        the pairs of its parameters and their counterparts in the copy.

    Raises:
        UnknownNameError: `float32_modules` has a pattern that matches nothing.
        ConfigError: A copy is needed, and the module can't be copied.
        UnsupportedError: Weights would be left in bfloat16.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> half, _ = in_own_types(module, IPUConfig(precision="16.16"), in_place=False)
        >>> half.weight.dtype, module.weight.dtype
        (torch.float16, torch.float32)
    """
    names = float32_submodules(module, config.float32_patterns)
    wanted = {id(w): (w, dtype) for w, dtype in _changes(module, config, names)}
    _refuse_bfloat16(module, wanted)
    if not wanted:
        return module, Counterparts()
    if in_place:
        change_types(module, {key: dtype for key, (_, dtype) in wanted.items()})
        return module, Counterparts()
    for weight in weights_of(module):
        if _is_lazy(weight):  # torch can't copy lazy buffers
            wanted.setdefault(id(weight), (weight, weight.dtype))
    memo: dict[int, Any] = {
        id(value): value.detach().clone() for value in computed_attributes(module)
    }
    memo.update({key: _converted(*change) for key, change in wanted.items()})
    try:
        copied = deep_copied(module, memo)
    except Exception as error:  # a user's attribute may raise anything
        raise ConfigError(
            f"precision={config.precision!r} makes a copy of the module in these "
            f"types, and {type(module).__name__} can't be copied: {error}. Give "
            "IPUModel(..., in_place=True) to have its own weights changed."
        ) from error
    return copied, Counterparts([(p, memo[id(p)]) for p in module.parameters()])


def change_types(module: torch.nn.Module, dtypes: Mapping[int, torch.dtype]) -> None:
    """Change the types of some weights of a module, as `Module.half` does for all.

    Args:
        dtypes: Types of parameters and buffers, by their ids; other weights keep their
            types.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> change_types(layer, {id(layer.bias): torch.float16})
        >>> layer.weight.dtype, layer.bias.dtype
        (torch.float32, torch.float16)
    """

    def change(weight: Tensor) -> Tensor:
        dtype = dtypes.get(id(weight))
        return weight if dtype is None else weight.to(dtype)

    module._apply(change)  # type: ignore[no-untyped-call,unused-ignore]


def _changes(
    module: torch.nn.Module, config: IPUConfig, float32_names: Sequence[str]
) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Yield weights that must change their types, and the new types."""
    if not config.types.is_half:
        return
    kept = {
        id(weight)
        for name in float32_names
        for weight in _floating(module.get_submodule(name))
    }
    for weight in _floating(module):
        is_kept = id(weight) in kept  # a tied weight is kept by any of its names
        dtype = torch.float32 if is_kept else config.types.weights
        now = unfetched(weight, "dtype")
        if now != dtype and not (now == torch.float64 and dtype == torch.float32):
            yield weight, dtype


def _floating(module: torch.nn.Module) -> list[Tensor]:
    weights = weights_of(module)
    return [w for w in weights if unfetched(w, "dtype").is_floating_point]


def computed_attributes(module: torch.nn.Module) -> Iterator[Tensor]:
    """Yield attributes computed from weights, such as those of `weight_norm`.

    torch can't copy them; `forward` computes them anew.
    """
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield value


def _is_lazy(weight: Tensor) -> bool:
    return issubclass(type(weight), (UninitializedBuffer, UninitializedParameter))


def _converted(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a weight in another type, with its class, as `copy.deepcopy` does."""
    kind: Any = original_class(weight)
    if _is_lazy(weight):
        return kind(weight.requires_grad, device=weight.device, dtype=dtype)
    value: Tensor = weight.detach().to(dtype)
    if issubclass(kind, torch.nn.Parameter):
        value = kind(value, weight.requires_grad)
    return value


_STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
"""Functions that update the buffers in their arguments."""

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
    """Compute in the types that a config asks for inside the context, in a trace.

    The context does nothing if weights and activations have the same type.

    Args:
        module: The user's module, with its weights as they are in the trace.
        config: The precision, and the submodules that stay float32.
    """
    names = float32_submodules(module, config.float32_patterns)
    types = config.types
    if not types.is_half or (types.weights == torch.float16 and not names):
        yield
        return
    casting = HalfWeights(module)
    with contextlib.ExitStack() as hooks:
        for name in names:
            for handle in casting.hook_float32(module.get_submodule(name)):
                hooks.enter_context(handle)
        with casting:
            yield


def compute_in_types(module: torch.nn.Module, config: IPUConfig) -> None:
    """Change a module for an export, so that it computes in the types of a config.

    Weights that a trace would round become float16, and submodules in float32 get
    hooks. Weights and hooks can be pickled.

    Args:
        module: A copy of the user's module, which is changed.
        config: The precision, and the submodules that stay float32.
    """
    if not config.types.is_half:
        return
    names = float32_submodules(module, config.float32_patterns)
    in_float32 = list(map(module.get_submodule, names))
    kept = {
        *(id(weight) for part in in_float32 for weight in weights_of(part)),
        *(
            id(buffer)
            for part in module.modules()
            if isinstance(part, torch.nn.modules.batchnorm._NormBase)
            for buffer in part.buffers()
        ),
    }
    floats = [weight for weight in weights_of(module) if weight.is_floating_point()]
    changed = [id(weight) for weight in floats if id(weight) not in kept]
    change_types(module, dict.fromkeys(changed, torch.float16))
    for name in names:
        if not any(is_inside(name, other) for other in names):
            part = module.get_submodule(name)
            part.register_forward_pre_hook(_widened_inputs, with_kwargs=True)
            part.register_forward_hook(_narrowed_outputs)


def _widened_inputs(_module: Any, args: Any, kwargs: Any) -> Any:
    return _cast(torch.float32, args), _cast(torch.float32, kwargs)


def _narrowed_outputs(_module: Any, _args: Any, outputs: Any) -> Any:
    return _cast(torch.float16, outputs)


class HalfWeights(TorchFunctionMode):
    """Casts float32 weights to float16 for torch's functions.

    Args:
        module: Its parameters and buffers are cast; running statistics that a
            normalization updates are not.

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
            for weight in weights_of(module)
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
        """Call `func` with float16 weights, unless a float32 module is running."""
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
        halved = [self._halved(value, keeps) for value in args[count:]]
        named = {
            key: value if key == "out" else self._halved(value, keeps)
            for key, value in kwargs.items()
        }
        return func(*args[:count], *halved, **named)

    def hook_float32(self, module: torch.nn.Module) -> Sequence[Any]:
        """Cast a submodule's inputs to float32, and its outputs to float16.

        A 0-d output, such as a loss, stays float32: float16 may not hold its scaling.

        Returns:
            Handles of the hooks.
        """

        def enter(_module: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
            self._num_float32 += 1
            return _cast(torch.float32, args), _cast(torch.float32, kwargs)

        def leave(_module: Any, _args: Any, outputs: Any) -> Any:
            self._num_float32 -= 1
            return outputs if self._num_float32 else _cast(torch.float16, outputs)

        return (
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        )

    def _is_weight(self, value: Any) -> bool:
        return value is not None and self._weights.get(id(value)) is value

    def _halved(self, value: Any, keeps: Any) -> Any:
        """Return a weight as float16, also in a tuple or list."""
        if type(value) in (tuple, list) and any(map(self._is_weight, value)):
            return type(value)([self._halved(part, keeps) for part in value])
        if self._is_weight(value) and id(value) not in keeps:
            return value.to(torch.float16)
        return value


def _is_in_place(name: str) -> bool:
    """Return whether a function writes to its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__set__", "__setitem__")
    return name.endswith("_")


def _cast(dtype: torch.dtype, values: Any) -> Any:
    """Cast floating-point tensors in nested values, except 0-d ones."""
    other = torch.float32 if dtype == torch.float16 else torch.float16

    def cast(tensor: Tensor) -> Tensor:
        is_number = dtype == torch.float16 and tensor.dim() == 0
        return tensor if is_number or tensor.dtype != other else tensor.to(dtype)

    return map_tensors(cast, values)
