# SPDX-License-Identifier: Apache-2.0
"""From what users call a loss to one function of outputs and targets."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Union

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from .errors import ConfigError, DataError, UnknownNameError, UnsupportedError
from .types import LossFunction

LossLike = Union[str, torch.nn.Module, LossFunction]
"""A name, a loss module of torch, or a function of outputs and targets."""


def _cross_entropy(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction=reduction)


def _nll(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.nll_loss(outputs, targets, reduction=reduction)


def _binary_cross_entropy(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        outputs, _like(targets, outputs), reduction=reduction
    )


def _mse(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.mse_loss(outputs, _like(targets, outputs), reduction=reduction)


def _mae(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.l1_loss(outputs, _like(targets, outputs), reduction=reduction)


def _smooth_l1(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.smooth_l1_loss(outputs, _like(targets, outputs), reduction=reduction)


def _poisson(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.poisson_nll_loss(outputs, _like(targets, outputs), reduction=reduction)


def _like(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets in the outputs' shape; only axes of one element may differ."""
    wide = [size for size in outputs.shape if size != 1]
    if [size for size in targets.shape if size != 1] != wide:
        raise DataError(
            f"the shapes {tuple(outputs.shape)} and {tuple(targets.shape)} differ in "
            "more than axes of size 1"
        )
    like: Tensor = targets.to(outputs.dtype).reshape(outputs.shape)
    return like


def _sparse(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Keras's: the class axis is the last, and targets may keep it with one element."""
    if targets.dim() == outputs.dim() and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    return F.cross_entropy(_classes_second(outputs), targets, reduction=reduction)


def _categorical(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Keras's: the class axis is the last, of one-hot targets too."""
    if targets.dim() < outputs.dim():
        return _sparse(outputs, targets, reduction)
    outputs, targets = _classes_second(outputs), _classes_second(targets)
    return F.cross_entropy(outputs, targets.to(outputs.dtype), reduction=reduction)


def _classes_second(values: Tensor) -> Tensor:
    return values if values.dim() < 3 else values.movedim(-1, 1)


_NAMED: dict[str, Callable[[Any, Any, str], Tensor]] = {
    "binarycrossentropy": _binary_cross_entropy,
    "categoricalcrossentropy": _categorical,
    "crossentropy": _cross_entropy,
    "huber": _smooth_l1,
    "l1": _mae,
    "mae": _mae,
    "meanabsoluteerror": _mae,
    "meansquarederror": _mse,
    "mse": _mse,
    "nll": _nll,
    "nllloss": _nll,
    "poisson": _poisson,
    "smoothl1": _smooth_l1,
    "sparsecategoricalcrossentropy": _sparse,
}
"""By their names without underscores and capitals."""

NAMES = (
    "binary_cross_entropy",
    "binary_crossentropy",
    "categorical_crossentropy",
    "cross_entropy",
    "huber",
    "l1",
    "mae",
    "mean_absolute_error",
    "mean_squared_error",
    "mse",
    "nll",
    "nll_loss",
    "poisson",
    "smooth_l1",
    "sparse_categorical_crossentropy",
)
"""The names as people write them."""

_IGNORED = -100
_IGNORING = (_cross_entropy, _nll, _sparse)


class LossTerms(NamedTuple):
    """What a micro-batch adds.

    Attributes:
        value: To be minimised, 0-d.
        total: The loss added up over the samples, 0-d.
        divisor: What figures divide it by: the real samples, or the targets that
            aren't ignored, 0-d.
    """

    value: Tensor
    total: Tensor
    divisor: Tensor


@dataclass(frozen=True)
class Loss:
    """A loss as the engine uses it.

    Attributes:
        name: For messages.
        function: Of outputs and targets; gives a scalar, or one value per sample or
            element, which are averaged.
        is_sum: Whether the function adds over samples instead of averaging, so that
            the gradients of micro-batches must be added too.
        each: The same with one value per sample or element; None if `function` must
            do.
        is_per_output: Whether it is about one output: with several it is taken for
            each. A function of the user's gets all outputs and targets as they nest.
        ignore_index: The class index of targets that don't count; None for none.
        summed: The same added up, for a loss that ignores some.
    """

    name: str
    function: LossFunction
    is_sum: bool = False
    each: LossFunction | None = None
    is_per_output: bool = False
    ignore_index: int | None = None
    summed: LossFunction | None = None

    def terms(
        self,
        outputs: Any,
        targets: Any,
        rows: int,
        weights: Tensor | None = None,
        share: Tensor | None = None,
    ) -> LossTerms:
        """The loss of a micro-batch.

        With weights it is Keras's: weighted values, divided by the number of samples
        and not by the weights' sum.

        Args:
            outputs: The model's.
            targets: Theirs.
            rows: Samples in it.
            weights: Of samples, `[rows]`, or of positions, `[rows, ...]`.
            share: What each row counts in the mean of its update, `[rows]`; 0 for
                padding.

        Returns:
            What to minimise, and the sum over real samples.

        Raises:
            UnsupportedError: There are weights or shares, but no values per sample.

        Example:
            >>> outputs, targets = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
            >>> resolve_loss("mse").terms(outputs, targets, 2)
            LossTerms(value=tensor(5.), total=tensor(10.), divisor=tensor(2.))
        """
        is_plain = weights is None and share is None
        if self._ignores(targets):
            if is_plain and self.summed is not None:
                return self._counted(outputs, targets)
        elif is_plain:
            loss = self._checked(self.function(outputs, targets))
            if loss.dim():
                loss = torch.sum(loss) if self.is_sum else torch.mean(loss)
            total = loss.detach()
            total = total if self.is_sum else total.mul(rows)
            return LossTerms(loss, total, torch.full_like(total, float(rows)))
        values = self._values(outputs, targets, rows, weights).reshape(rows, -1)
        counts = torch.ones_like(values[:, 0])
        if self._ignores(targets):
            valid = targets.ne(self.ignore_index).reshape(rows, -1).to(values.dtype)
            counts = valid.sum(dim=1)
            each, whole = values.sum(dim=1), counts.sum().clamp(min=1)
        elif self.is_sum:
            each, whole = values.sum(dim=1), torch.ones(())
        else:
            each, whole = values.mean(dim=1), torch.tensor(float(rows))
        if share is None:
            total = torch.sum(each)
            value = total if self.is_sum else total / whole
            return LossTerms(value, total.detach(), counts.sum())
        is_real = share.gt(0).to(values.dtype)
        total = torch.sum(each.mul(is_real))
        value = total if self.is_sum else torch.sum(each.mul(share)) / whole
        return LossTerms(value, total.detach(), torch.sum(counts.mul(is_real)))

    def _ignores(self, targets: Any) -> bool:
        """Whether some of these targets may be ones that don't count."""
        return (
            self.ignore_index is not None
            and not self.is_sum
            and isinstance(targets, Tensor)
            and not targets.is_floating_point()
        )

    def _counted(self, outputs: Any, targets: Any) -> LossTerms:
        """The mean over targets that aren't ignored; 0 if all are."""
        if self.summed is None:
            raise RuntimeError("a loss that ignores targets has no sum")
        total = self.summed(outputs, targets)
        count = torch.sum(targets.ne(self.ignore_index).to(total.dtype))
        return LossTerms(total / count.clamp(min=1), total.detach(), count)

    def _checked(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"The loss {self.name!r} gives {loss!r}, which is no tensor: compute "
                "it from outputs and targets with torch's operations."
            )
        return loss

    def _values(
        self, outputs: Any, targets: Any, rows: int, weights: Tensor | None
    ) -> Tensor:
        """Weighted values per sample or element, `[rows, ...]`."""
        values = self._checked((self.each or self.function)(outputs, targets))
        if values.dim() == 0 or len(values) != rows:
            raise UnsupportedError(
                f"The loss {self.name!r} gives a value of shape {tuple(values.shape)} "
                f"for {rows} samples, so they can't be weighted (sample_weight, "
                "class_weight, drop_last='pad'). Let it return one value per sample."
            )
        if weights is not None:
            if weights.dim() > values.dim() and weights.shape[-1] == 1:
                weights = torch.squeeze(weights, -1)  # [rows, 1], as Keras takes it
            missing = values.dim() - weights.dim()
            if missing < 0 or values.shape[: weights.dim()] != weights.shape:
                raise ConfigError(
                    f"Sample weights of shape {tuple(weights.shape)} don't fit the "
                    f"loss {self.name!r}, whose values have shape "
                    f"{tuple(values.shape)}: give one weight per sample."
                )
            shaped = weights.reshape(weights.shape + (1,) * missing)
            values = values.mul(shaped.to(values.dtype))
        return values


def resolve_loss(loss: LossLike) -> Loss:
    """Find the function behind a name, a module or a function.

    Binary losses and those of errors take targets of the outputs' shape but for axes
    of size 1: `[N]` labels fit `[N, 1]` outputs. Names that mean a probability loss
    take logits, as torch's do. The class axis is the second, as torch has it, and the
    last for Keras's `..._crossentropy`. Capitals and underscores don't matter.

    Args:
        loss: A name, a torch loss module, or `loss(outputs, targets)`.

    Returns:
        The loss.

    Raises:
        UnknownNameError: The name is unknown.
        ConfigError: It can't be called.

    Example:
        >>> resolve_loss(torch.nn.CrossEntropyLoss(reduction="sum")).is_sum
        True
    """
    if isinstance(loss, str):
        return _named(loss)
    if not callable(loss) or isinstance(loss, type):
        raise ConfigError(
            f"loss={loss!r} is neither a name, a torch loss module nor a function "
            "loss(outputs, targets)."
        )
    _refuse_unsupported(loss)
    is_torchs = _is_torchs(loss)
    ignore_index = getattr(loss, "ignore_index", None) if is_torchs else None
    return Loss(
        name=getattr(loss, "__name__", type(loss).__name__),
        function=loss,
        is_sum=getattr(loss, "reduction", None) == "sum",
        each=_unreduced(loss),
        is_per_output=is_torchs,
        ignore_index=ignore_index,
        summed=None if ignore_index is None else _with_reduction(loss, "sum"),
    )


def _named(name: str) -> Loss:
    function = _NAMED.get(name.lower().replace("_", ""))
    if function is None:
        raise UnknownNameError("loss", name, NAMES)

    def reduced(reduction: str) -> LossFunction:
        return lambda outputs, targets: function(outputs, targets, reduction)

    return Loss(
        name=name,
        function=reduced("mean"),
        each=reduced("none"),
        is_per_output=True,
        ignore_index=_IGNORED if function in _IGNORING else None,
        summed=reduced("sum"),
    )


def _refuse_unsupported(loss: Any) -> None:
    if isinstance(loss, torch.nn.CTCLoss):
        raise UnsupportedError(
            "torch.nn.CTCLoss takes four arguments, and with outputs [T, N, C]. Pass a "
            "function of the outputs [N, T, C] and a pair of targets and lengths: "
            "lambda x, y: F.ctc_loss(x.transpose(0, 1), y[0], lengths_of_x, y[1])."
        )
    if _is_torchs(loss) and getattr(loss, "weight", None) is not None:
        raise UnsupportedError(
            f"{type(loss).__name__}(weight=...) can't run on an IPU: PopTorch has no "
            "class weights in losses. Leave it out and use fit(class_weight=...)."
        )
    trained = [n for n, p in _parameters(loss) if p.requires_grad]
    if trained:
        raise ConfigError(
            f"The loss {type(loss).__name__} has parameters that would be trained "
            f"with the optimizer's defaults: {', '.join(trained)}. Freeze them with "
            "requires_grad_(False), or make the loss a part of the module, which then "
            "returns it."
        )


def _parameters(loss: Any) -> list[tuple[str, torch.nn.Parameter]]:
    is_module = isinstance(loss, torch.nn.Module)
    return list(loss.named_parameters()) if is_module else []


def _is_torchs(loss: Any) -> bool:
    return isinstance(loss, torch.nn.Module) and type(loss).__module__.startswith(
        "torch.nn."
    )


def _unreduced(loss: Any) -> LossFunction | None:
    """The same loss module with a value per sample; CTC has none on an IPU."""
    if not _is_torchs(loss) or isinstance(loss, torch.nn.CTCLoss):
        return None
    if not hasattr(loss, "reduction"):
        return None
    each = _with_reduction(loss, "none")
    if loss.reduction == "batchmean":  # a sum over all but the samples
        return lambda outputs, targets: each(outputs, targets).flatten(1).sum(dim=1)
    return each


def _with_reduction(loss: Any, reduction: str) -> LossFunction:
    twin: Any = copy.copy(loss)
    twin.reduction = reduction
    function: LossFunction = twin
    return function
