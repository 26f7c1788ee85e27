# SPDX-License-Identifier: Apache-2.0
"""Refusals of modules that PopTorch would compile to something else, without a word.

`docs/concepts/limits.md` has the whole list.
"""

from __future__ import annotations

from typing import Iterable

import torch
from torch import Tensor
from torch.nn.modules import module as _torch_modules

from ipufit.batching import BatchPlan
from ipufit.engine.observers.autograd import INSTEAD_OF_HOOKS
from ipufit.engine.weights.modes import trained_modes
from ipufit.engine.weights.names import user_name
from ipufit.engine.weights.wrapping import unfetched
from ipufit.errors import ConfigError, UnsupportedError

_HOOKS_OF_WEIGHTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOKS_OF_MODULES = ("_backward_hooks", "_backward_pre_hooks")


def refuse_gradient_hooks(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse modules that look at, or change, gradients on their way back.

    A hook on a weight that isn't trained is never called in torch either.

    Args:
        modules: The user's module, and losses.

    Raises:
        UnsupportedError: A module or weight has such a hook, or all modules have one.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> handle = layer.weight.register_hook(lambda gradient: gradient * 0)
        >>> refuse_gradient_hooks([layer])
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: The weight 'weight' has a gradient hook: ...
    """
    for name in _HOOKS_OF_MODULES:
        if getattr(_torch_modules, f"_global{name}", None):
            raise _hooked("All modules have a backward hook")
    for module in modules:
        for path, part in module.named_modules():
            if any(getattr(part, name, None) for name in _HOOKS_OF_MODULES):
                what = f"The module {path!r}" if path else f"{type(part).__name__}"
                raise _hooked(f"{what} has a backward hook")
        for path, weight in module.named_parameters():
            has_hook = any(unfetched(weight, name, None) for name in _HOOKS_OF_WEIGHTS)
            if has_hook and unfetched(weight, "requires_grad"):
                raise _hooked(f"The weight {path!r} has a gradient hook")


def _hooked(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what}: {INSTEAD_OF_HOOKS}")


def refuse_synchronised_norms(module: torch.nn.Module, plan: BatchPlan) -> None:
    """Refuse layers whose statistics are those of all replicas together.

    Without torch.distributed, which no replica of a device has, `SyncBatchNorm`
    computes what `BatchNorm` does.

    Args:
        plan: Factors of a call; one replica alone may have such layers.

    Raises:
        UnsupportedError: Such a layer would be trained on several replicas.

    Example:
        >>> norm = torch.nn.SyncBatchNorm(2)
        >>> refuse_synchronised_norms(norm, BatchPlan(1))
        >>> refuse_synchronised_norms(norm, BatchPlan(1, replicas=2))
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: SyncBatchNorm over 2 replicas isn't ...
    """
    count = plan.replicas * plan.processes
    if count == 1:
        return
    for (path, part), is_trained in zip(module.named_modules(), trained_modes(module)):
        if isinstance(part, torch.nn.SyncBatchNorm) and is_trained:
            what = f"{path} (SyncBatchNorm)" if path else "SyncBatchNorm"
            raise UnsupportedError(
                f"{what} over {count} replicas isn't possible: PopTorch has no batch "
                "norm over replicas, each takes the statistics of its own "
                "micro-batches. Use GroupNorm or LayerNorm, which depend on no batch, "
                "or BatchNorm with a larger micro_batch_size, or a single replica."
            )


def refuse_tied_buffers(module: torch.nn.Module) -> None:
    """Refuse one buffer under two names, for which PopTorch has a KeyError.

    It puts tied weights back in their places by the names of parameters alone
    (`_compileWithDispatch`). A module under two names has each buffer under two names.

    Args:
        module: The module that is traced.

    Raises:
        UnsupportedError: A buffer has two names.

    Example:
        >>> module = torch.nn.ModuleList([torch.nn.BatchNorm1d(2) for _ in range(2)])
        >>> module[1].running_mean = module[0].running_mean
        >>> refuse_tied_buffers(module)
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: 0.running_mean and 1.running_mean are one ...
    """
    names: dict[int, str] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        first = names.setdefault(id(buffer), name)
        if first != name:
            shown = " and ".join(user_name(one) for one in (first, name))
            raise UnsupportedError(
                f"{shown} are one buffer, and PopTorch can't compile buffers under two "
                "names. Give each module a buffer of its own, or register it in one "
                "place and pass it on. A module with buffers, such as a batch norm, "
                "may be called often, but have one name only."
            )


def require_trained_weights(module: torch.nn.Module) -> None:
    """Refuse to train a module without weights that are trained.

    Args:
        module: The module that is traced.

    Raises:
        ConfigError: No parameter requires a gradient.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(
            "Nothing would be trained: no parameter of the module requires a gradient, "
            "and torch's backward() would fail. Unfreeze some with "
            "requires_grad_(True), or use evaluate() and predict()."
        )


def require_gradient(loss: Tensor) -> None:
    """Refuse a loss that no trained weight is a part of; in a trace.

    Autograd notes dependencies while PopTorch traces, though it never runs backwards.
    Where a backend doesn't have it noted, nothing is known, and nothing refused.

    Args:
        loss: The loss to minimise.

    Raises:
        ConfigError: The loss depends on no trained weight.

    Example:
        >>> require_gradient(torch.ones((), requires_grad=True) * 2)
        >>> require_gradient(torch.ones(()))
        Traceback (most recent call last):
        ipufit.errors.ConfigError: Nothing would be trained: the loss depends on no ...
    """
    if loss.requires_grad:
        return
    with torch.enable_grad():
        probe = loss.detach().requires_grad_().mul(1.0)
    if probe.requires_grad:
        raise ConfigError(
            "Nothing would be trained: the loss depends on no weight that requires a "
            "gradient (torch says 'element 0 of tensors does not require grad'). Look "
            "for detach(), .data, argmax() or torch.no_grad() between the weights and "
            "the loss, and for frozen weights."
        )
