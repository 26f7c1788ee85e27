# SPDX-License-Identifier: Apache-2.0
"""A module in the types that a config asks for: as a copy, or changed in place."""

from __future__ import annotations

import copy
import fnmatch
import warnings
import weakref
from typing import Any, Container, Iterator, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from ipufit.config import IPUConfig
from ipufit.errors import (
    ConfigError,
    CopiedModuleWarning,
    UnknownNameError,
    UnsupportedError,
)
from ipufit.optimizers import is_norm

from .wrapping import plain_class, unfetched


def _is_loss(part: torch.nn.Module) -> bool:
    return isinstance(part, torch.nn.modules.loss._Loss)


_WORDS = {"norm": is_norm, "loss": _is_loss}
"""Kinds of submodules that `float32_modules` has words for."""


def float32_submodules(module: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Find the submodules that compute in float32.

    Args:
        patterns: `"norm"` for normalisation layers, `"loss"` for torch's losses, and
            names or patterns of submodules, as in `fnmatch`.

    Raises:
        UnknownNameError: A pattern matches none.
        ConfigError: A word stands for none.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> float32_submodules(module, ["norm"])
        ['1']
    """
    parts = {name: part for name, part in module.named_modules() if name}
    found: set[str] = set()
    for word in patterns:
        is_kind = _WORDS.get(word)
        matching = set(fnmatch.filter(parts, word))
        if is_kind is not None:
            matching.update(name for name, part in parts.items() if is_kind(part))
        if not matching and is_kind is not None:
            raise ConfigError(
                f"float32_modules has {word!r}, and the module has no such layers. "
                "Leave it out: losses and figures of compile() are float32 anyway."
            )
        if not matching:
            known = (*parts, *_WORDS)
            raise UnknownNameError("submodule in float32_modules", word, known)
        found |= matching
    return [name for name in parts if name in found]


class Counterparts:
    """The parameters of a module that was given, and those of the copy in its place.

    The module that was given may go: nothing here keeps it.

    Args:
        pairs: Each parameter that was given, and its counterpart.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self._own: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()  # type: ignore[no-untyped-call,unused-ignore]
        self._before: list[tuple[weakref.ReferenceType[Tensor], Any]] = []
        for given, own in pairs:
            self._own[given] = own
            self._before.append((weakref.ref(given), _state(given)))

    def own(self, parameter: Tensor) -> Tensor:
        """The counterpart of a parameter that was given; any other one itself.

        Example:
            >>> given, own = torch.zeros(1), torch.ones(1)
            >>> Counterparts([(given, own)]).own(given)
            tensor([1.])
        """
        return self._own.get(parameter, parameter)

    def among(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The pairs of those parameters that were given."""
        return [(one, self._own[one]) for one in parameters if one in self._own]

    def warn_of_changes(self) -> None:
        """Warn once of parameters that were changed, frozen or thawed since.

        Warns:
            CopiedModuleWarning: A parameter of the module that was given is another.
        """
        alive = [(one(), before) for one, before in self._before]
        if all(one is None or _state(one) == before for one, before in alive):
            return
        self._before = []
        warnings.warn(
            "The module that was given to IPUModel has been changed since, and what "
            "runs is model.module, a copy of it in the precision that was asked for: "
            "the change doesn't count. Change, load or freeze the weights of "
            "model.module, or give IPUModel(..., in_place=True).",
            CopiedModuleWarning,
            stacklevel=5,
        )


def _state(parameter: Tensor) -> tuple[Any, ...]:
    named = "requires_grad", "_version"
    return tuple(unfetched(parameter, name) for name in named)


def _refuse_bfloat16(module: torch.nn.Module, changed: Container[int]) -> None:
    """Refuse weights in a type that PopTorch would silently compute without.

    Args:
        module: The user's module.
        changed: Ids of the weights whose types will be others.

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
    """Give a module whose weights have the types that a config asks for.

    Args:
        module: It stays as it is unless `in_place`.
        config: Has the precision, and the submodules that are float32 all the same.
        in_place: Change the types of this module's own weights.

    Returns:
        The module itself if nothing has to change, or if it may be changed; else a
        copy. And the copy's counterparts of its parameters.

    Raises:
        UnknownNameError: `float32_modules` has a pattern that matches nothing.
        ConfigError: A copy is needed, and the module can't be copied.
        UnsupportedError: Weights would be left in bfloat16.

    Example:
        >>> given = torch.nn.Linear(2, 1)
        >>> own, _ = in_own_types(given, IPUConfig(precision="16.16"), in_place=False)
        >>> own.weight.dtype, given.weight.dtype
        (torch.float16, torch.float32)
    """
    names = float32_submodules(module, config.float32_patterns)
    wanted = {id(one): (one, dtype) for one, dtype in _changes(module, config, names)}
    _refuse_bfloat16(module, wanted)
    if not wanted:
        return module, Counterparts()
    if in_place:
        change_types(module, {key: dtype for key, (_, dtype) in wanted.items()})
        return module, Counterparts()
    for one in (*module.parameters(), *module.buffers()):
        if _is_lazy(one):  # torch can't copy lazy buffers
            wanted.setdefault(id(one), (one, one.dtype))
    memo: dict[int, Any] = {
        id(one): one.detach().clone() for one in computed_attributes(module)
    }
    memo.update({key: _converted(*change) for key, change in wanted.items()})
    try:
        own = copy.deepcopy(module, memo)
    except Exception as error:  # a user's attribute may raise anything
        raise ConfigError(
            f"precision={config.precision!r} makes a copy of the module in these "
            f"types, and {type(module).__name__} can't be copied: {error}. Give "
            "IPUModel(..., in_place=True) to have its own weights changed."
        ) from error
    return own, Counterparts([(one, memo[id(one)]) for one in module.parameters()])


def change_types(module: torch.nn.Module, dtypes: Mapping[int, torch.dtype]) -> None:
    """Change the types of weights of a module, as `Module.half` does it of all.

    Args:
        dtypes: Types of parameters and buffers, by their ids; others keep theirs.

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
    """Weights that don't have the types that they should have, and these types."""
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
    weights = [*module.parameters(), *module.buffers()]
    return [one for one in weights if unfetched(one, "dtype").is_floating_point]


def computed_attributes(module: torch.nn.Module) -> Iterator[Tensor]:
    """Attributes that were computed from weights, as `weight_norm` computes them.

    torch can't copy them; `forward` computes them anew.
    """
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield value


def _is_lazy(weight: Tensor) -> bool:
    return issubclass(type(weight), (UninitializedBuffer, UninitializedParameter))


def _converted(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a weight in another type; of its class, as `copy.deepcopy` makes it."""
    kind: Any = plain_class(weight)
    if _is_lazy(weight):
        lazy: Tensor = kind(weight.requires_grad, device=weight.device, dtype=dtype)
        return lazy
    value: Tensor = weight.detach().to(dtype)
    if issubclass(kind, torch.nn.Parameter):
        value = kind(value, weight.requires_grad)
    return value
