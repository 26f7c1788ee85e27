# SPDX-License-Identifier: Apache-2.0
"""Checks of a trace for things that PopTorch passes over without a word.

PopTorch records `forward` once, and PopART makes the backward pass from that. torch's
own autograd never runs, so its hooks are never called.

PopTorch compiles buffers of whole numbers in as constants, so a value that `forward`
writes to one is gone with the micro-batch (PopTorch's `JitDispatch::addParameter`): the
next one begins with the constant again. Counters that nothing computes with are counted
on the host. Of other writes there is a warning, and computing with a written value is
refused.

`docs/concepts/limits.md` has the whole list.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import types
import warnings
from pathlib import Path
from typing import (
    Any,
    Callable,
    ContextManager,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    TypeVar,
)

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as _torch_modules
from torch.overrides import TorchFunctionMode

from ipufit._poptorch import poptorch
from ipufit._tree import attribute_names
from ipufit.batching import BatchPlan
from ipufit.engine.weights import trained_modes, unfetched, user_name
from ipufit.errors import ConfigError, ConstantBuffersWarning, UnsupportedError


class Operation(NamedTuple):
    """One call of a function of torch's."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, nested ones too."""
        return list(tensors_of((self.args, self.kwargs)))


class Observer:
    """Base of what looks at operations: its hooks do nothing."""

    def before(self, operation: Operation) -> None:
        """Look at an operation that is about to run; an error refuses it."""

    def after(self, operation: Operation, result: Any) -> Any:
        """Return the result of an operation, or what the code gets instead."""
        return result

    def failed(self, operation: Operation, error: Exception) -> None:
        """Look at an operation that has raised an error."""


ObserverT = TypeVar("ObserverT", bound=Observer)


class Observing(TorchFunctionMode):
    """Shows each operation to observers, in their order.

    Args:
        *observers: Observers that look at all operations.

    Example:
        >>> import torch
        >>> class Names(Observer):
        ...     def before(self, operation):
        ...         print(operation.name)
        >>> with Observing(Names()):
        ...     _ = torch.ones(2).add(1)
        ones
        add
    """

    def __init__(self, *observers: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._observers = list(observers)
        self._refusal: UnsupportedError | None = None

    @contextlib.contextmanager
    def also(self, observer: ObserverT) -> Iterator[ObserverT]:
        """Show operations to one more observer for a while."""
        self._observers.append(observer)
        try:
            yield observer
        finally:
            self._observers.remove(observer)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and show the operation to the observers."""
        operation = Operation(getattr(func, "__name__", ""), args, kwargs or {})
        try:
            for observer in self._observers:
                observer.before(operation)
            result = self._result(func, operation)
            for observer in self._observers:
                result = observer.after(operation, result)
        except UnsupportedError as refusal:
            self._refusal = refusal
            raise
        return result

    def _result(self, func: Callable[..., Any], operation: Operation) -> Any:
        try:
            return func(*operation.args, **operation.kwargs)
        except Exception as error:
            for observer in self._observers:
                observer.failed(operation, error)
            raise

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Raise what was refused, which Python's operators hide behind a TypeError."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call,unused-ignore]
        is_hidden = isinstance(error, TypeError) and error is not self._refusal
        if is_hidden and self._refusal is not None:
            raise self._refusal from None


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts.

    Example:
        >>> import torch
        >>> list(tensors_of((torch.ones(1), {"other": [torch.zeros(1)]}, 3)))
        [tensor([1.]), tensor([0.])]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from tensors_of(element)


_HOOKS = frozenset(
    {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
)
"""Methods of tensors that ask autograd for something."""

_LIBRARIES = tuple(
    Path(str(file)).parent
    for file in (torch.__file__, poptorch.__file__, Path(__file__).parent)
)

INSTEAD_OF_HOOKS = (
    "a device makes its own backward pass and never calls it, so training would go "
    "on without it. Remove it: GradientMonitor and model.gradients() show gradients, "
    "global_clipnorm clips them, requires_grad_(False) freezes weights, and "
    "`x * a + (x * (1 - a)).detach()` scales what flows back through x."
)
"""End of the messages that refuse a hook."""


class AutogradObserver(Observer):
    """Refuses, or mends, what a trace would pass over.

    Gradients in `forward`, hooks on gradients, autograd functions with a backward pass
    of their own, autocast and inference mode are refused. What is computed without
    gradients is detached, because PopTorch works out from the weights what needs a
    gradient, and doesn't know of `torch.no_grad` (`fixRequiresGradFromDispatch`).

    Args:
        is_training: Whether there will be gradients.

    Example:
        >>> from ipufit.engine.trace_checks import Observing
        >>> weight = torch.ones(1, requires_grad=True)
        >>> with Observing(AutogradObserver(is_training=True)):
        ...     _ = (weight * 2).register_hook(print)
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: register_hook() in forward ...
    """

    def __init__(self, *, is_training: bool) -> None:
        self._is_training = is_training
        self._was_inference_mode = torch.is_inference_mode_enabled()

    def before(self, operation: Operation) -> None:
        """Refuse an operation that a device would do otherwise."""
        if self._is_training and operation.name in _HOOKS:
            raise UnsupportedError(
                f"{operation.name}() in forward ({user_line()}): {INSTEAD_OF_HOOKS}"
            )
        if operation.name == torch.autograd.grad.__name__:
            raise UnsupportedError(
                f"torch.autograd.grad() was called ({user_line()}): a device makes "
                "its own backward pass, once, from the loss, so gradients can't be "
                "part of what is computed, as in a gradient penalty. Compute with "
                "outputs and weights alone."
            )
        if _is_autocast():
            raise UnsupportedError(
                f"torch.autocast('cpu') is on in forward ({user_line()}): PopTorch "
                "has no autocast and would compute in the types that the tensors have. "
                "Turn it off (enabled=False), and choose half precision with "
                "IPUConfig(precision='float16') or layer.half()."
            )
        if torch.is_inference_mode_enabled() and not self._was_inference_mode:
            raise UnsupportedError(
                f"torch.inference_mode() is on in forward ({user_line()}): its "
                "tensors can't be traced. Use torch.no_grad(), or nothing: evaluate() "
                "and predict() compute no gradients."
            )
        if self._is_training and any(
            isinstance(tensor.grad_fn, BackwardCFunction) and tensor.numel()
            for tensor in operation.tensors
        ):
            raise UnsupportedError(
                f"forward uses a torch.autograd.Function ({user_line()}): a device "
                "never runs its backward. Compose it of ordinary functions, for "
                "example `x + (f(x) - x).detach()`, or checkpoint with "
                "use_reentrant=False."
            )

    def after(self, operation: Operation, result: Any) -> Any:
        """Detach what was computed without gradients."""
        if not self._is_training or torch.is_grad_enabled():
            return result
        return _detached(result, {id(given) for given in operation.tensors})


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


def user_line(error: BaseException | None = None) -> str:
    """File, number and text of the line of the user's code that is running.

    Args:
        error: Its origin, if it isn't what is running.
    """
    stack = traceback.extract_stack()
    if error is not None:
        stack = traceback.extract_tb(error.__traceback__)
    for frame in reversed(stack):
        path = Path(frame.filename)
        if not any(library in path.parents for library in _LIBRARIES):
            return f"{path.name}:{frame.lineno}: {frame.line}"
    return "somewhere"


_DIVISIONS = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("div", "divide", "true_divide", "floor_divide")
    for prefix, suffix in (("", ""), ("", "_"))
) | {
    f"__{letter}{name}__"
    for letter in ("", "i", "r")
    for name in ("div", "truediv", "floordiv")
}


class DivisionObserver(Observer):
    """Refuses to divide whole numbers (PopTorch's `AtenHandlers` truncate).

    Args:
        divider: Subject of the message: the code that divides.

    Example:
        >>> import torch
        >>> with Observing(DivisionObserver("The metric 'share'")):
        ...     torch.tensor([True, False]).sum() / 2
        Traceback (most recent call last):
        ipufit.errors.ConfigError: The metric 'share' divides whole numbers ...
    """

    def __init__(self, divider: str) -> None:
        self._divider = divider

    def before(self, operation: Operation) -> None:
        """Refuse the division of whole numbers by whole numbers."""
        given = (*operation.args, *operation.kwargs.values())
        if operation.name in _DIVISIONS and all(map(_is_whole_number, given)):
            # No TypeError: Python would take it for a type that can't be divided.
            kinds = " / ".join(_kind_of(value) for value in operation.args[:2])
            raise ConfigError(
                f"{self._divider} divides whole numbers ({kinds}), and an IPU cuts the "
                "result off: 3 / 4 is 0 there. Divide numbers with a fraction, such as "
                "(outputs.argmax(-1) == targets).float().mean()."
            )


def divisions_refused(divider: str) -> ContextManager[Any]:
    """Refuse to divide whole numbers in a program; on the host torch divides exactly.

    Args:
        divider: Subject of the message: the code that divides.
    """
    if poptorch.isRunningOnIpu():
        return Observing(DivisionObserver(divider))
    return contextlib.nullcontext()


def _is_whole_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return not isinstance(value, float)


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.dtype).replace("torch.", "")
    return type(value).__name__


_NAMES = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
cross_entropy cross_entropy_loss ctc_loss hinge_embedding_loss identity_loss kl_div
l1_loss margin_ranking_loss mse_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss
smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_LOSSES = frozenset(_NAMES.split())
"""Functions whose results PopTorch marks as losses."""


class LossObserver(Observer):
    """Notes whether a built-in loss function is called, and what is marked as a loss.

    PopTorch marks the results of these as losses, whatever they are for. A marker that
    isn't a part of the final loss is an error ("Multiple independent losses").

    Attributes:
        has_losses: Whether a built-in loss function was called.
        marked: Results of `identity_loss`, in order.
        sums: Results of loss functions that were asked for a sum.

    Example:
        >>> import torch
        >>> from ipufit.engine.trace_checks import Observing
        >>> losses = LossObserver()
        >>> with Observing(losses):
        ...     _ = torch.nn.functional.mse_loss(torch.ones(2), torch.ones(2))
        >>> losses.has_losses
        True
    """

    def __init__(self) -> None:
        self.has_losses = False
        self.marked: list[Tensor] = []
        self.sums: list[Tensor] = []

    def after(self, operation: Operation, result: Any) -> Any:
        """Note the result of a loss function."""
        name, args, kwargs = operation
        if name in _LOSSES:
            self.has_losses = True
            is_marker = name == "identity_loss"
            if is_marker:
                self.marked.append(result)
            settings = (*args[1:], *kwargs.values())
            if any(_is_sum(value, is_marker=is_marker) for value in settings):
                self.sums.append(result)
        return result


def _is_sum(setting: Any, *, is_marker: bool) -> bool:
    """Whether a setting asks for a sum; PopTorch's own marker has numbers for them."""
    if isinstance(setting, str):
        return setting == "sum"
    return is_marker and isinstance(setting, int) and setting == 0


_SQUASHING = {"sigmoid": "sigmoid", "expit": "sigmoid", "softmax": "softmax"}
_SAME_VALUES = frozenset(
    {"contiguous", "flatten", "float", "reshape", "squeeze", "to", "unsqueeze", "view"}
)


class ProbabilityObserver(Observer):
    """Notes the results of sigmoids and softmaxes.

    Example:
        >>> import torch
        >>> from ipufit.engine.trace_checks import Observing
        >>> probabilities = ProbabilityObserver()
        >>> with Observing(probabilities):
        ...     output = torch.sigmoid(torch.zeros(2, 1)).squeeze(1)
        >>> probabilities.function_of(output)
        'sigmoid'
    """

    def __init__(self) -> None:
        self._results: list[tuple[Tensor, str]] = []

    def after(self, operation: Operation, result: Any) -> Any:
        """Note the result of an operation that gives probabilities."""
        function = _SQUASHING.get(operation.name)
        if operation.name in _SAME_VALUES and operation.args:
            function = self.function_of(operation.args[0])
        if function is not None and isinstance(result, Tensor):
            self._results.append((result, function))
        return result

    def function_of(self, tensor: Any) -> str | None:
        """The function that a tensor's probabilities come from; None for others."""
        return next((name for one, name in self._results if one is tensor), None)


_ADDITIONS = ("add_", "__iadd__")
_NO_VALUES = ("__get__", "dim", "size", "numel", "stride", "__len__", "__repr__")
"""Functions that need no values of their tensors."""


class BufferObserver(Observer):
    """Notes what a trace does to buffers of whole numbers.

    Args:
        buffers: All buffers by name, as they are in the trace.

    Example:
        >>> import torch
        >>> from ipufit.engine.trace_checks import Observing
        >>> count = torch.tensor(0)
        >>> buffers = BufferObserver({"count": count})
        >>> with Observing(buffers):
        ...     _ = count.add_(1)
        >>> buffers.increments()
        {'count': 1}
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = {name: b for name, b in buffers.items() if _is_whole(b)}
        self._name_of = {id(buffer): name for name, buffer in self._buffers.items()}
        self._views: list[Tensor] = []  # kept alive: their ids are in _name_of
        self._operands: list[tuple[Tensor, int]] = []
        self._added: dict[str, int] = {}
        self._written: dict[str, None] = {}
        self._used: set[str] = set()

    def before(self, operation: Operation) -> None:
        """Note the versions of the buffers that an operation gets."""
        self._operands = (
            []
            if operation.name in _NO_VALUES
            else [
                (tensor, tensor._version)
                for tensor in operation.tensors
                if id(tensor) in self._name_of
            ]
        )

    def after(self, operation: Operation, result: Any) -> Any:
        """Note whether an operation has written to buffers, viewed or used them."""
        for tensor, version in self._operands:
            buffer = self._name_of[id(tensor)]
            if tensor._version != version:
                self._note_write(buffer, operation)
            elif isinstance(result, Tensor) and result._base is not None:
                self._views.append(result)
                self._name_of[id(result)] = buffer
            else:
                self._used.add(buffer)
        if self._operands:
            self._refuse(self._used & self._written.keys())
        return result

    def failed(self, operation: Operation, error: Exception) -> None:
        """Note that an operation that PopTorch refuses, as `float(buffer)`, uses it."""
        if isinstance(error, poptorch.Error) and self._operands:
            self._used.update(self._name_of[id(tensor)] for tensor, _ in self._operands)
            self._refuse(self._used & self._written.keys())

    def _note_write(self, buffer: str, operation: Operation) -> None:
        self._written[buffer] = None
        args = operation.args
        is_counted = (
            operation.name in _ADDITIONS
            and args[0] is self._buffers[buffer]
            and type(args[1]) is int
        )
        if is_counted and self._added.get(buffer) != 0:
            self._added[buffer] = self._added.get(buffer, 0) + args[1]
        else:
            self._added[buffer] = 0  # no counter

    def refuse_returned(self, tensors: Iterable[Tensor]) -> None:
        """Refuse to return buffers that were changed.

        Args:
            tensors: Everything that the module returns.

        Raises:
            UnsupportedError: One of them is such a buffer.
        """
        returned = {self._name_of.get(id(tensor), "") for tensor in tensors}
        self._refuse(returned & self._written.keys())

    @staticmethod
    def _refuse(buffers: set[str]) -> None:
        if buffers:
            name = user_name(min(buffers))
            raise UnsupportedError(
                f"forward changes the buffer {name!r} and computes with it, but "
                "PopTorch compiles buffers of whole numbers in as constants: every "
                "micro-batch would begin with the same value. Keep the number in a "
                "float32 buffer, which lives on the device (for batch norm, set a "
                "momentum instead of momentum=None)."
            )

    def increments(self) -> dict[str, int]:
        """The number that a micro-batch adds to each buffer that is only counted up."""
        return {name: number for name, number in self._added.items() if number}

    def warn(self, *, is_counted: bool) -> None:
        """Warn of buffers that are written to in vain.

        Args:
            is_counted: Whether the host counts those up that are only counted up.

        Warns:
            ConstantBuffersWarning: There are such buffers.
        """
        counted = self.increments() if is_counted else {}
        lost = [user_name(name) for name in self._written if name not in counted]
        if lost:
            warnings.warn(
                f"forward changes {', '.join(lost)}: PopTorch compiles buffers of "
                "whole numbers in as constants, so they stay as they are on the host, "
                "and evaluate() and predict() see no change. Use float32 buffers for "
                "what is to change.",
                ConstantBuffersWarning,
                stacklevel=2,
            )


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


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


_DEPTH = 6
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def refuse_hidden(leaf: Any, path: str) -> None:
    """Refuse an output in which a tensor is hidden.

    A program returns tensors. Whatever else `forward` returns stays as it was when the
    program was traced, so a tensor in it would have the values of tracing in all calls.

    Args:
        leaf: An output that is no tensor.
        path: Name of the output in messages, such as `outputs[0]`.

    Raises:
        UnsupportedError: There is a tensor in it, or it is an iterator, which may
            give one.

    Example:
        >>> refuse_hidden(torch.distributions.Normal(torch.zeros(2), 1.0), "outputs")
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: forward returns a Normal, with a tensor at ...
    """
    if isinstance(leaf, Iterator):
        hidden: str | None = path
    else:
        hidden = _path_to_tensor(leaf, path, _DEPTH, set())
    if hidden is not None:
        kind = type(leaf).__name__
        where = "" if hidden == path else f", with a tensor at {hidden}"
        raise UnsupportedError(
            f"forward returns a {kind}{where}. A program returns tensors, so those in "
            "it would keep the values of tracing. Return the tensors themselves, in "
            "tuples, lists, dicts, named tuples, data classes, classes of attrs or "
            "SimpleNamespace, and build the object from what predict() gives."
        )


def _path_to_tensor(value: Any, path: str, depth: int, seen: set[int]) -> str | None:
    if isinstance(value, Tensor):
        return path
    if isinstance(value, (*_PLAIN, type, types.ModuleType)) or id(value) in seen:
        return None
    if isinstance(value, torch.nn.Module) or depth == 0:
        return None  # a module's tensors are weights, which it doesn't compute
    seen.add(id(value))
    for step, part in _parts(value):
        found = _path_to_tensor(part, path + step, depth - 1, seen)
        if found is not None:
            return found
    return None


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """The parts of an object, and the text that leads to each."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, Iterable) and hasattr(value, "__len__"):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    if isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or ()):
            if cell != types.CellType():
                yield f" (closure variable {name})", cell.cell_contents
    if isinstance(value, functools.partial):
        yield from ((".args", value.args), (".keywords", value.keywords))
    if isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    for name in attribute_names(value):
        yield f".{name}", getattr(value, name)
