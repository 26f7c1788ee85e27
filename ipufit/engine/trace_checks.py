# SPDX-License-Identifier: Apache-2.0
"""Checks of a trace for code that PopTorch would silently ignore.

PopTorch records `forward` once, and PopART makes the backward pass from that. torch's
own autograd never runs, so its hooks are never called.

PopTorch compiles integer buffers in as constants, so a value that `forward` writes to
one is lost after the micro-batch (PopTorch's `JitDispatch::addParameter`): the next one
begins with the constant again. Counters that are only counted up are counted on the
host. Other writes cause a warning, and computing with a written value is refused.

`docs/concepts/limits.md` has the whole list.
"""

from __future__ import annotations

import functools
import math
import random
import re
import sys
import traceback
import types
from pathlib import Path
from types import FrameType
from typing import Any, Iterable, Iterator, Mapping, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.distributions import Distribution
from torch.nn.modules import module as _torch_modules
from torch.nn.modules.adaptive import AdaptiveLogSoftmaxWithLoss, _ASMoutput
from torch.overrides import TorchFunctionMode

from ipufit._modules import modules_of, parameters_of, path_of
from ipufit._poptorch import operator_rules, poptorch
from ipufit._tree import attribute_names
from ipufit.batching import BatchPlan
from ipufit.distributed import warn_in_first_process
from ipufit.engine.weights import trained_modes, unfetched, user_name
from ipufit.errors import (
    BakedInWarning,
    ConfigError,
    ConstantBuffersWarning,
    IpufitWarning,
    OtherNumbersWarning,
    UnsupportedError,
)

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

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
"""Methods of tensors that ask autograd for something."""

_ADDITIONS = ("add_", "__iadd__")
_SAMPLING = ("sample", "rsample", "sample_n")
_NO_VALUES = ("__get__", "dim", "size", "numel", "stride", "__len__", "__repr__")
"""Functions that don't read the values of their tensors."""


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute torch's function without its check of the values of `var`."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss if reduction == "none" else getattr(torch, reduction)(loss)


def _adaptive_log_softmax(module: Any, input_: Tensor, target_: Tensor) -> Any:
    """Compute torch's layer for all classes, since a program can't select rows."""
    log_prob = module.log_prob(input_.reshape(-1, module.in_features))
    output = log_prob.gather(1, target_.reshape(-1, 1)).reshape(target_.shape)
    return _ASMoutput(output, -output.mean())


_WITHOUT_VALUES = {torch.nn.functional.gaussian_nll_loss: _gaussian_nll_loss}
"""Functions of torch that read values, and replacements that don't."""


class TraceChecks(TorchFunctionMode):
    """Refuses, or corrects, code that a trace would ignore.

    Autocast and inference mode are refused, and in training gradients in `forward`,
    hooks on gradients, and autograd functions with a backward pass of their own.
    Results computed without gradients are detached in training, because PopTorch
    derives from the weights which tensors need a gradient, and ignores `torch.no_grad`
    (`fixRequiresGradFromDispatch`).

    Writes, views and uses of integer buffers are recorded. So are random numbers that
    are drawn on the host. A distribution that the module stores is sampled on the host:
    PopTorch traces one sample, which is a constant. A distribution that `forward`
    creates is sampled by the device. Operators that have no gradient on a device, or
    make NaN there, are recorded too.

    Args:
        traced: The module that is traced, with its buffers as they are in the trace.
        is_training: Whether there will be gradients.

    Example:
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> with TraceChecks(norm, is_training=True) as checks:
        ...     _ = norm.num_batches_tracked.add_(1)
        >>> checks.increments()
        {'num_batches_tracked': 1}
        >>> with TraceChecks(norm, is_training=True):
        ...     _ = (norm.weight * 2).register_hook(print)
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: register_hook() in forward ...
    """

    def __init__(self, traced: torch.nn.Module, *, is_training: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._is_training = is_training
        self._was_inference_mode = torch.is_inference_mode_enabled()
        self._refusal: UnsupportedError | None = None
        buffers = traced.named_buffers()
        self._buffers = {name: b for name, b in buffers if _is_whole_number(b)}
        self._name_of = {id(buffer): name for name, buffer in self._buffers.items()}
        self._views: list[Tensor] = []  # kept alive: their ids are in _name_of
        self._added: dict[str, int] = {}
        self._written: dict[str, None] = {}
        self._used: set[str] = set()
        self._stored = {
            id(value): f"{path}.{name}"
            for path, part in traced.named_modules()
            for name, value in vars(part).items()
            if isinstance(value, Distribution)
        }
        self._sampled: dict[str, str] = {}
        self._generators = _generators()
        self._grave_messages = operator_rules().grave_messages
        self._grave: dict[str, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function, with checks before and after it."""
        func = _WITHOUT_VALUES.get(func, func)
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        tensors = list(tensors_of((args, kwargs)))
        try:
            if self._stored:
                self._note_sample(sys._getframe(1))
            self._refuse_autograd(name, tensors)
            versions = [
                (tensor, tensor._version)
                for tensor in tensors
                if id(tensor) in self._name_of and name not in _NO_VALUES
            ]
            try:
                result = func(*args, **kwargs)
            except poptorch.Error:  # it refuses to give values, as for `float(buffer)`
                self._used.update(self._name_of[id(tensor)] for tensor, _ in versions)
                self._refuse(self._used)
                raise
            if self._is_training and not torch.is_grad_enabled():
                result = _detached(result, set(map(id, tensors)))
            for message in self._grave_messages(
                func, args, kwargs, result, is_training=self._is_training
            ):
                self._grave[message] = None
            for tensor, version in versions:
                buffer = self._name_of[id(tensor)]
                if tensor._version != version:
                    self._note_write(buffer, name, args)
                elif isinstance(result, Tensor) and result._base is not None:
                    self._views.append(result)
                    self._name_of[id(result)] = buffer
                else:
                    self._used.add(buffer)
            if versions:
                self._refuse(self._used)
        except UnsupportedError as refusal:
            self._refusal = refusal
            raise
        return result

    def __enter__(self) -> TraceChecks:
        """Replace torch's adaptive softmax by a traceable one, and start checking."""
        self._adaptive = AdaptiveLogSoftmaxWithLoss.forward
        AdaptiveLogSoftmaxWithLoss.forward = _adaptive_log_softmax  # type: ignore[method-assign,assignment,unused-ignore]
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call,unused-ignore]

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Raise the refusal that Python's operators hide behind a TypeError."""
        AdaptiveLogSoftmaxWithLoss.forward = self._adaptive  # type: ignore[method-assign,unused-ignore]
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call,unused-ignore]
        is_hidden = isinstance(error, TypeError) and error is not self._refusal
        if is_hidden and self._refusal is not None:
            raise self._refusal from None

    def _refuse_autograd(self, name: str, tensors: list[Tensor]) -> None:
        """Refuse uses of autograd that a device would ignore."""
        if self._is_training and name in _HOOKS:
            raise UnsupportedError(
                f"{name}() in forward ({user_line()}): {INSTEAD_OF_HOOKS}"
            )
        if self._is_training and name == torch.autograd.grad.__name__:
            raise UnsupportedError(
                f"torch.autograd.grad() was called in training ({user_line()}), as for "
                "a gradient penalty: a device makes its own backward pass, once, from "
                "the loss, and nobody has seen it differentiate a gradient. evaluate() "
                "and predict() may call it. For a derivative by an input take finite "
                "differences, `(f(x + h) - f(x - h)) / (2 * h)`, or carry it along in "
                "forward by hand: y = tanh(W x) has dy = (1 - y ** 2) * W dx."
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
            for tensor in tensors
        ):
            raise UnsupportedError(
                f"forward uses a torch.autograd.Function ({user_line()}): a device "
                "never runs its backward. Compose it of ordinary functions, for "
                "example `x + (f(x) - x).detach()`, or checkpoint with "
                "use_reentrant=False."
            )

    def _note_sample(self, frame: FrameType | None) -> None:
        """Record the distribution of the module that calls a torch function."""
        for _ in range(10):  # functions between a method and torch's
            if frame is not None and frame.f_code.co_name in _SAMPLING:
                caller = frame.f_locals.get("self")
                if id(caller) in self._stored:
                    self._sampled[self._stored[id(caller)]] = type(caller).__name__
            frame = None if frame is None else frame.f_back

    def _note_write(self, buffer: str, name: str, args: Any) -> None:
        self._written[buffer] = None
        is_counted = (
            name in _ADDITIONS
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
            UnsupportedError: A returned tensor is a buffer that was changed.
        """
        self._refuse({self._name_of.get(id(tensor), "") for tensor in tensors})

    def _refuse(self, used: set[str]) -> None:
        """Refuse to use a buffer that was changed."""
        changed = used & self._written.keys()
        if changed:
            raise UnsupportedError(
                f"forward changes the buffer {user_name(min(changed))!r} and computes "
                "with it, but PopTorch compiles buffers of whole numbers in as "
                "constants: every micro-batch would begin with the same value. Keep "
                "the number in a float32 buffer, which lives on the device (for batch "
                "norm, set a momentum instead of momentum=None)."
            )

    def increments(self) -> dict[str, int]:
        """Return how much each micro-batch adds to buffers that are only counted up."""
        return {name: number for name, number in self._added.items() if number}

    def warn(self) -> None:
        """Warn of values that are compiled in as constants, and of lost writes.

        In training the host counts buffers that are only counted up.

        Warns:
            BakedInWarning: Code draws from Python's or NumPy's global generator, or
                samples a distribution of the module.
            ConstantBuffersWarning: The new values of some buffers are lost.
            OtherNumbersWarning: A device computes an operator differently: no gradient,
                NaN, or no randomness.
        """
        for message in self._grave:
            warn_in_first_process(message, OtherNumbersWarning)
        before = self._generators
        drawn = [name for name, state in _generators().items() if state != before[name]]
        if drawn:
            warn_of_baked_in(
                f"forward draws random numbers from {' and '.join(drawn)}",
                "the numbers of that time are baked in, and every batch is computed "
                "with them. Draw with torch, as in torch.rand(1, device=x.device), "
                "which a device does for each micro-batch, or pass the numbers as an "
                "input.",
            )
        for path, kind in self._sampled.items():
            warn_of_baked_in(
                f"forward samples {path}, a {kind} that was made before on the host",
                "that one sample is baked in, and every batch is computed with it. "
                f"Make the {kind} in forward, as in torch.distributions.Uniform(0.0, "
                "1.0).sample(), and the device draws for each micro-batch; or pass the "
                "numbers as an input.",
            )
        counted = self.increments() if self._is_training else {}
        lost = [user_name(name) for name in self._written if name not in counted]
        if lost:
            warn_in_first_process(
                f"forward changes {', '.join(lost)}: PopTorch compiles buffers of "
                "whole numbers in as constants, so they stay as they are on the host, "
                "and evaluate() and predict() see no change. Use float32 buffers for "
                "what is to change.",
                ConstantBuffersWarning,
            )


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts.

    Example:
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


def _detached(result: Any, arguments: set[int]) -> Any:
    """Detach the tensors of a result, except arguments."""
    if isinstance(result, Tensor):
        return result if id(result) in arguments else result.detach()
    if type(result) in (tuple, list):
        return type(result)(_detached(element, arguments) for element in result)
    return result


def _is_autocast() -> bool:
    """Return whether torch on this host would autocast: a device never does."""
    try:
        return torch.is_autocast_enabled("cpu")  # type: ignore[call-arg,unused-ignore]
    except TypeError:  # torch before 2.4
        return torch.is_autocast_cpu_enabled()


def user_line(error: BaseException | None = None) -> str:
    """Return file, number and text of the user's line that is running.

    Args:
        error: An error; return the user's line that raised it instead.
    """
    stack = traceback.extract_stack()
    if error is not None:
        stack = traceback.extract_tb(error.__traceback__)
    for frame in reversed(stack):
        path = Path(frame.filename)
        if not any(library in path.parents for library in _LIBRARIES):
            return f"{path.name}:{frame.lineno}: {frame.line}"
    return "somewhere"


_DIVISION = re.compile(r"(true_|floor_)?div(ide)?_?|__[ir]?(true|floor)?div__")


class Divisions(TorchFunctionMode):
    """Refuses to divide integers, which PopTorch's `AtenHandlers` truncate.

    Args:
        divider: Subject of the message: the code that divides.

    Example:
        >>> with Divisions("The metric 'share'"):
        ...     torch.tensor([True, False]).sum() / 2
        Traceback (most recent call last):
        ipufit.errors.ConfigError: The metric 'share' divides whole numbers ...
    """

    def __init__(self, divider: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._divider = divider

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse the division of integers by integers."""
        values = (*args, *(kwargs or {}).values())
        is_division = _DIVISION.fullmatch(getattr(func, "__name__", ""))
        if is_division and all(map(_is_whole_number, values)):
            # No TypeError: Python would take it for a type that can't be divided.
            kinds = " / ".join(
                str(getattr(value, "dtype", type(value).__name__)).split(".")[-1]
                for value in args[:2]
            )
            raise ConfigError(
                f"{self._divider} divides whole numbers ({kinds}), and an IPU cuts the "
                "result off: 3 / 4 is 0 there. Divide numbers with a fraction, such as "
                "(outputs.argmax(-1) == targets).float().mean()."
            )
        return func(*args, **(kwargs or {}))


def _is_whole_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return not isinstance(value, float)


_LOSSES = frozenset(
    """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
    cross_entropy cross_entropy_loss ctc_loss hinge_embedding_loss identity_loss kl_div
    l1_loss margin_ranking_loss mse_loss nll_loss nll_loss2d nll_loss_nd
    poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
    """.split()  # noqa: SIM905 - one per line would be a page
)
"""Functions whose results PopTorch marks as losses."""
_BROADCASTING = frozenset({"huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss"})
"""Losses whose arguments torch broadcasts, with a warning."""
_WARNED: set[str] = set()
"""Lines of users' code that a warning of sizes or probabilities has named."""
_SQUASHING = {"sigmoid": "sigmoid", "expit": "sigmoid", "softmax": "softmax"}
_SAME_VALUES = frozenset(
    """
    __getitem__ clamp clip clone contiguous flatten float movedim permute reshape
    squeeze to transpose unsqueeze view
    """.split()  # noqa: SIM905
)
_TAKEN = {
    **dict.fromkeys(
        ("binary_cross_entropy_with_logits", "multilabel_soft_margin_loss"), "logits"
    ),
    **dict.fromkeys(("cross_entropy", "log_softmax", *_SQUASHING), "logits"),
    **dict.fromkeys(("ctc_loss", "kl_div", "nll_loss"), "log-probabilities"),
}
"""Functions of losses that take no probabilities, and what they take."""
_IN_NETWORKS = frozenset({"log_softmax", *_SQUASHING})
"""Of these functions those that a network may call with probabilities, as gates do."""


class Misuse(NamedTuple):
    """A call that passes probabilities to a loss function of something else.

    Attributes:
        function: Name of the loss function.
        squashing: "sigmoid" or "softmax", which gave the probabilities.
        line: The user's line of the call.
    """

    function: str
    squashing: str
    line: str

    @property
    def taken(self) -> str:
        """The kind of numbers that the function takes."""
        return _TAKEN[self.function]


class LossRecorder(TorchFunctionMode):
    """Records the results of loss functions, sigmoids and softmaxes.

    PopTorch marks the results of built-in loss functions as losses, also where a metric
    calls the function. A marked result that the final loss doesn't depend on is an
    error ("Multiple independent losses").

    Args:
        warns: Whether to warn once of sizes that differ. torch would warn in each trace
            and call.

    Attributes:
        has_losses: Whether a built-in loss function was called.
        marked: Results of `identity_loss`, in order.
        sums: Results of loss functions with a sum as reduction.
        misuses: Calls of loss functions with probabilities that they don't take.

    Example:
        >>> with LossRecorder() as noted:
        ...     output = torch.sigmoid(torch.zeros(2, 1)).squeeze(1)
        ...     _ = torch.nn.functional.mse_loss(output, torch.ones(2))
        >>> noted.has_losses, noted.function_of(output)
        (True, 'sigmoid')
    """

    def __init__(self, *, warns: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._warns = warns
        self.has_losses = False
        self.marked: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.misuses: list[Misuse] = []
        self._probabilities: list[tuple[Tensor, str]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record the result of a loss function, sigmoid or softmax."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in _BROADCASTING:
            names = ("input", "target")[len(args) :]
            pair = (*args, *(kwargs.pop(name) for name in names))
            args = (*self._broadcast(*pair[:2]), *pair[2:])
        if name in _TAKEN:
            squashing = self.function_of(args[0] if args else kwargs.get("input"))
            if squashing is not None:
                self.misuses.append(Misuse(name, squashing, user_line()))
        result = func(*args, **kwargs)
        if name in _LOSSES:
            self.has_losses = True
            is_marker = name == "identity_loss"
            if is_marker:
                self.marked.append(result)
            # PopTorch's own marker has numbers for the kinds of reduction.
            settings = (*args[1:], *kwargs.values())
            if any(
                value == "sum"
                if isinstance(value, str)
                else is_marker and type(value) is int and value == 0
                for value in settings
            ):
                self.sums.append(result)
        function = _SQUASHING.get(name)
        if name in _SAME_VALUES and args:
            function = self.function_of(args[0])
        elif name == "where" and len(args) > 1:
            function = self.function_of(args[1])
        if function is not None and isinstance(result, Tensor):
            self.note(result, function)
        return result

    def note(self, tensor: Tensor, function: str) -> None:
        """Record that a tensor has probabilities, and which function made them."""
        self._probabilities.append((tensor, function))

    def _broadcast(self, outputs: Tensor, targets: Tensor) -> Any:
        if outputs.shape == targets.shape:
            return outputs, targets
        line = user_line()
        if self._warns and line not in _WARNED:
            _WARNED.add(line)
            warn_in_first_process(
                f"Using a target size ({tuple(targets.shape)}) that is different to "
                f"the input size ({tuple(outputs.shape)}), in {line}. This will likely "
                "lead to incorrect results due to broadcasting. Please ensure they "
                "have the same size.",
                IpufitWarning,
            )
        return torch.broadcast_tensors(outputs, targets)  # type: ignore[no-untyped-call,unused-ignore]

    def function_of(self, tensor: Any) -> str | None:
        """Return the function that computed a tensor's probabilities, or None."""
        names = (name for known, name in self._probabilities if known is tensor)
        return next(names, None)


def warn_of_misuses(misuses: Iterable[Misuse]) -> None:
    """Warn once per line of loss functions that got probabilities by mistake.

    Warns:
        IpufitWarning: A loss function takes other numbers, and got probabilities.
    """
    for misuse in misuses:
        if misuse.line not in _WARNED and misuse.function not in _IN_NETWORKS:
            _WARNED.add(misuse.line)
            warn_in_first_process(
                f"{misuse.function}() takes {misuse.taken}, and gets what a "
                f"{misuse.squashing} gives, probabilities, in {misuse.line}: leave the "
                f"{misuse.squashing} out before it, or take a loss of probabilities.",
                IpufitWarning,
            )


_HOOKS_OF_WEIGHTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOKS_OF_MODULES = ("_backward_hooks", "_backward_pre_hooks")


def refuse_gradient_hooks(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse hooks on gradients of modules and weights.

    A hook on a weight that isn't trained is never called in torch either.

    Args:
        modules: The user's module, and losses.

    Raises:
        UnsupportedError: A module or weight has such a hook, or there is a global one.

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
        for part in modules_of(module):
            if part._backward_hooks or part._backward_pre_hooks:
                path = path_of(module, part)
                what = f"The module {path!r}" if path else f"{type(part).__name__}"
                raise _hooked(f"{what} has a backward hook")
        for weight in parameters_of(module):
            has_hook = any(unfetched(weight, n, None) for n in _HOOKS_OF_WEIGHTS)
            if has_hook and unfetched(weight, "requires_grad"):
                path = path_of(module, weight)
                raise _hooked(f"The weight {path!r} has a gradient hook")


def _hooked(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what}: {INSTEAD_OF_HOOKS}")


def refuse_synchronized_norms(module: torch.nn.Module, plan: BatchPlan) -> None:
    """Refuse layers that normalize over all replicas, such as `SyncBatchNorm`.

    Replicas of a device don't use torch.distributed, without which `SyncBatchNorm`
    computes as `BatchNorm` does.

    Args:
        plan: Factors of a call; a single replica may have such layers.

    Raises:
        UnsupportedError: Such a layer would be trained on several replicas.

    Example:
        >>> norm = torch.nn.SyncBatchNorm(2)
        >>> refuse_synchronized_norms(norm, BatchPlan(1))
        >>> refuse_synchronized_norms(norm, BatchPlan(1, replicas=2))
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
    """Refuse a buffer with two names, for which PopTorch raises a KeyError.

    PopTorch restores tied weights by the names of parameters only
    (`_compileWithDispatch`). A module with two names has each buffer twice.

    Args:
        module: The module that is traced.

    Raises:
        UnsupportedError: A buffer has two names.

    Example:
        >>> module = torch.nn.ModuleList([torch.nn.BatchNorm1d(2) for _ in range(2)])
        >>> module[1].running_mean = module[0].running_mean
        >>> refuse_tied_buffers(module)
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: 0.running_mean and 1.running_mean are the ...
    """
    names: dict[int, str] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        first = names.setdefault(id(buffer), name)
        if first != name:
            shown = " and ".join(map(user_name, (first, name)))
            raise UnsupportedError(
                f"{shown} are the same buffer, and PopTorch can't compile a buffer "
                "that has two names. Give each module a buffer of its own, or register "
                "it in one place and pass it on. A module with buffers, such as a "
                "batch norm, may be called often, but have one name only."
            )


def require_trained_weights(module: torch.nn.Module) -> None:
    """Refuse to train a module without trainable parameters, or one frozen as in Keras.

    Args:
        module: The module that is traced.

    Raises:
        ConfigError: No parameter requires a gradient; or a layer with trainable
            parameters has `trainable = False`, Keras's attribute, which torch ignores.
    """
    for path, part in module.named_modules():
        if vars(part).get("trainable") is not False:
            continue
        trained = [parameter.requires_grad for parameter in part.parameters()]
        if trained and all(trained):
            raise ConfigError(
                f"{user_name(path)} has trainable = False, which torch ignores: it "
                "would be trained. Freeze it with requires_grad_(False), or the layers "
                "before another with ipufit.freeze(module, before=...), and delete or "
                "rename the attribute."
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(
            "Nothing would be trained: no parameter of the module requires a gradient, "
            "and torch's backward() would fail. Unfreeze some with "
            "requires_grad_(True), or use evaluate() and predict()."
        )


def require_gradient(loss: Tensor) -> None:
    """Refuse a loss that depends on no trained weight; called in a trace.

    Autograd records dependencies while PopTorch traces, though it never runs backwards.
    If a backend turns that off, nothing is refused.

    Args:
        loss: The loss to minimize.

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
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def refuse_hidden(leaf: Any, path: str) -> None:
    """Refuse an output object that contains a tensor.

    A program returns tensors. Other results of `forward` are constants of the program,
    so a tensor inside such an object would keep the values of the trace in all calls.

    Args:
        leaf: An output that isn't a tensor.
        path: Name of the output in messages, such as `outputs[0]`.

    Raises:
        UnsupportedError: The output contains a tensor, or is an iterator, which may
            yield a tensor.

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
    if isinstance(value, (*PLAIN, type, types.ModuleType)) or id(value) in seen:
        return None
    if isinstance(value, torch.nn.Module) or depth == 0:
        return None  # a module's tensors are weights, which it doesn't compute
    seen.add(id(value))
    for step, part in _parts(value):
        inner_path = _path_to_tensor(part, path + step, depth - 1, seen)
        if inner_path is not None:
            return inner_path
    return None


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the parts of an object, and the code that accesses each part."""
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


def _generators() -> dict[str, Any]:
    _, keys, *rest = np.random.get_state()
    numpys = keys.tobytes(), *rest  # type: ignore[attr-defined,unused-ignore]
    return {"Python's random": random.getstate(), "numpy.random": numpys}


def warn_of_baked_in(what: str, why: str) -> None:
    """Warn of code whose result is compiled in as a constant, and say why."""
    warn_in_first_process(
        f"{what}. forward runs once, when the program is compiled: {why}",
        BakedInWarning,
    )
