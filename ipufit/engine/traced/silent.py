# SPDX-License-Identifier: Apache-2.0
"""What PopTorch leaves out without a word, so that a device would compute otherwise.

PopTorch records `forward` once, and PopART makes the backward pass from that. torch's
own autograd never runs, so its hooks are never called. `docs/limits.md` has the whole
list.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, Callable, Iterable

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as _torch_modules
from torch.overrides import TorchFunctionMode

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.engine.weights.modes import trained_modes
from ipufit.engine.weights.operands import short, tensors_of
from ipufit.errors import ConfigError, UnsupportedError

_HOOKS = frozenset(
    {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
)
"""Methods of tensors that ask autograd for something."""

_HOOKS_OF_WEIGHTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOKS_OF_MODULES = ("_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = tuple(
    Path(str(file)).parent
    for file in (torch.__file__, poptorch.__file__, Path(__file__).parents[1])
)

_ADVICE = (
    "a device makes its own backward pass and never calls it, so training would go "
    "on without it. Remove it: GradientMonitor and model.gradients() show gradients, "
    "global_clipnorm clips them, requires_grad_(False) freezes weights, and "
    "`x * a + (x * (1 - a)).detach()` scales what flows back through x."
)


def refuse_gradient_hooks(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse modules that look at, or change, gradients on their way back.

    A hook on a weight that isn't trained is never called in torch either.

    Args:
        modules: The user's, and losses.

    Raises:
        UnsupportedError: One has such a hook, or all modules have.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> handle = layer.weight.register_hook(lambda gradient: gradient * 0)
        >>> refuse_gradient_hooks([layer])
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: The weight 'weight' has a gradient hook: ...
    """
    for name in _HOOKS_OF_MODULES:
        if getattr(_torch_modules, f"_global{name}", None):
            raise UnsupportedError(f"All modules have a backward hook: {_ADVICE}")
    for module in modules:
        for path, part in module.named_modules():
            if any(getattr(part, name, None) for name in _HOOKS_OF_MODULES):
                what = f"The module {path!r}" if path else f"{type(part).__name__}"
                raise UnsupportedError(f"{what} has a backward hook: {_ADVICE}")
        for path, weight in module.named_parameters():
            if any(_plainly(weight, name) for name in _HOOKS_OF_WEIGHTS) and _plainly(
                weight, "requires_grad"
            ):
                raise UnsupportedError(
                    f"The weight {path!r} has a gradient hook: {_ADVICE}"
                )


def _plainly(weight: Tensor, name: str) -> Any:
    """An attribute of a weight, which isn't fetched from the device for this."""
    with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
        try:
            return object.__getattribute__(weight, name)
        except AttributeError:  # of a newer torch
            return None


def refuse_synchronised_norms(module: torch.nn.Module, plan: BatchPlan) -> None:
    """Refuse layers whose statistics are those of all replicas together.

    Without torch.distributed, which no replica of a device has, `SyncBatchNorm`
    computes what `BatchNorm` does.

    Args:
        module: The user's.
        plan: Has the replicas.

    Raises:
        UnsupportedError: It has such a layer, is trained, and there are several.

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
        module: The one that is traced.

    Raises:
        UnsupportedError: There are such buffers.

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
            shown = " and ".join(short(one) for one in (first, name))
            raise UnsupportedError(
                f"{shown} are one buffer, and PopTorch can't compile buffers under two "
                "names. Give each module a buffer of its own, or register it in one "
                "place and pass it on. A module with buffers, such as a batch norm, "
                "may be called often, but have one name only."
            )


def require_trained_weights(module: torch.nn.Module) -> None:
    """Refuse to train what has no weights that are trained.

    Args:
        module: The one that is traced.

    Raises:
        ConfigError: None of its parameters requires a gradient.
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
        loss: What is to be minimised.

    Raises:
        ConfigError: It depends on none.

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


class SilenceWatch(TorchFunctionMode):
    """Refuses, or mends, what a trace would pass over.

    Hooks on gradients, autograd functions with a backward pass of their own, autocast
    and inference mode are refused. What is computed without gradients is detached,
    because PopTorch works out from the weights what needs a gradient, and doesn't know
    of `torch.no_grad` (`fixRequiresGradFromDispatch`).

    Args:
        is_training: Whether there will be gradients.

    Attributes:
        problem: What was refused: an operator of Python's may have hidden the error.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> with SilenceWatch(is_training=True):
        ...     _ = (weight * 2).register_hook(print)
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: register_hook() in forward ...
    """

    def __init__(self, *, is_training: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._is_training = is_training
        self._is_inference_mode = torch.is_inference_mode_enabled()
        self.problem: UnsupportedError | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, unless a device would do something else."""
        name = getattr(func, "__name__", "")
        if self._is_training and name in _HOOKS:
            self._refuse(f"{name}() in forward ({_place()}): {_ADVICE}")
        if _is_autocast():
            self._refuse(
                f"torch.autocast('cpu') is on in forward ({_place()}): PopTorch has no "
                "autocast and would compute in the types that the tensors have. Turn "
                "it off (enabled=False), and choose half precision with "
                "IPUConfig(precision='float16') or layer.half()."
            )
        if torch.is_inference_mode_enabled() and not self._is_inference_mode:
            self._refuse(
                f"torch.inference_mode() is on in forward ({_place()}): its tensors "
                "can't be traced. Use torch.no_grad(), or nothing: evaluate() and "
                "predict() compute no gradients."
            )
        for tensor in tensors_of((args, kwargs)):
            if self._is_training and isinstance(tensor.grad_fn, BackwardCFunction):
                self._refuse(
                    f"forward uses a torch.autograd.Function ({_place()}): a device "
                    "never runs its backward. Compose it of ordinary functions, for "
                    "example `x + (f(x) - x).detach()`, or checkpoint with "
                    "use_reentrant=False."
                )
        result = func(*args, **(kwargs or {}))
        if not self._is_training or torch.is_grad_enabled():
            return result
        return _detached(result, {id(given) for given in tensors_of((args, kwargs))})

    def _refuse(self, why: str) -> None:
        self.problem = UnsupportedError(why)
        raise self.problem


def _detached(result: Any, given: set[int]) -> Any:
    """The tensors of a result, but for those that are arguments, without gradients."""
    if isinstance(result, Tensor):
        return result if id(result) in given else result.detach()
    if type(result) in (tuple, list):
        return type(result)(_detached(element, given) for element in result)
    return result


def _is_autocast() -> bool:
    """Whether torch on this host would compute in other types: a device never does."""
    try:
        return torch.is_autocast_enabled("cpu")  # type: ignore[call-arg,unused-ignore]
    except TypeError:  # torch before 2.4
        return torch.is_autocast_cpu_enabled()


def _place() -> str:
    """File and line of the user's code that is running."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if not any(library in path.parents for library in _LIBRARIES):
            return f"{path.name}:{frame.lineno}: {frame.line}"
    return "somewhere"
