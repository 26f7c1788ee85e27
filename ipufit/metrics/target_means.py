# SPDX-License-Identifier: Apache-2.0
"""Correct means over targets that `cross_entropy` and `nll_loss` compute.

torch divides by the number of targets of a micro-batch that aren't ignored. A loss or
metric must divide by the number of the whole update.
"""

from __future__ import annotations

import inspect
from typing import Any, Mapping, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's name for it
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ipufit._tree import leaves_of
from ipufit.errors import DataError

_DEFAULTS = {
    function: {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
    }
    for function in (F.cross_entropy, F.nll_loss)
}
"""The functions of torch that ignore targets, with the defaults of their arguments."""

_REARRANGEMENTS = frozenset(
    """
    __get__ clone contiguous detach flatten float int long movedim permute ravel reshape
    reshape_as squeeze swapaxes t to transpose type unflatten unsqueeze view view_as
    """.split()  # noqa: SIM905 - one per line would be a page
)
"""Functions whose results have all elements of their tensor, in any order or type."""


class TargetMean(NamedTuple):
    """A mean over the targets that `cross_entropy` or `nll_loss` doesn't ignore.

    Attributes:
        value: The mean, 0-d; 0 if all targets are ignored.
        total: The sum over the targets, 0-d.
        num_targets: Number of targets that aren't ignored, 0-d.
        num_unknown: Number of ignored targets; None if the host has counted the targets
            of the whole update.
    """

    value: Tensor
    total: Tensor
    num_targets: Tensor
    num_unknown: Tensor | None


class TargetMeans(TorchFunctionMode):
    """Replaces means over a micro-batch's targets by means over those of its update.

    torch's cross-entropies divide by the number of targets that aren't ignored, so the
    mean over micro-batches isn't the mean over targets. Inside this context they divide
    by the number that the host has counted for the update, as long as the function
    passes on all targets: a slice or mask of targets has another number.

    Args:
        targets: Nested targets of the function.
        divisors: By ignored class index, nested as the targets: `[rows]`, as in
            `Labels.counted`; None to divide by the number in the micro-batch.
        is_derived: Whether `slopes` will be called.

    Attributes:
        means: The means that were computed, in order.
        ignored: Class indices that were ignored, also in sums and values per sample.

    Example:
        >>> outputs, targets = torch.eye(2), torch.tensor([0, -100])
        >>> with TargetMeans() as taken:
        ...     loss = F.cross_entropy(outputs, targets)
        >>> taken.means[0].num_targets, taken.origin_of(loss) is taken.means[0]
        (tensor(1.), True)
    """

    def __init__(
        self,
        targets: Any = (),
        divisors: Mapping[int, Any] | None = None,
        *,
        is_derived: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.means: list[TargetMean] = []
        self.ignored: set[int] = set()
        self._is_derived = is_derived
        self._origins: list[tuple[Tensor, int, Any]] = []
        columns = [(i, leaves_of(nested)) for i, nested in (divisors or {}).items()]
        for place, leaf in enumerate(leaves_of(targets) if columns else ()):
            self._note(leaf, {index: column[place] for index, column in columns})

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function; replace the divisors of cross-entropies."""
        kwargs = kwargs or {}
        if func in _DEFAULTS:
            defaults = _DEFAULTS[func]
            values = {**defaults, **dict(zip(defaults, args)), **kwargs}
            if not values["target"].is_floating_point():
                self.ignored.add(values["ignore_index"])
                # PopTorch has no class weights, with which the divisor is their sum.
                others = {values[n] for n in ("weight", "size_average", "reduce")}
                if values["reduction"] == "mean" and others == {None}:
                    return self._mean(func, values)
        result = func(*args, **kwargs)
        origin = self.origin_of(args[0]) if args else None
        if origin is not None and _is_rearranged(func, args, result):
            self._note(result, origin)
        return result

    def _mean(self, func: Any, values: Mapping[str, Any]) -> Tensor:
        target, index = values["target"], values["ignore_index"]
        total = func(**{**values, "reduction": "sum"}).reshape(())
        counts = target.ne(index)
        num_targets = counts.to(total.dtype).sum()
        divisor = (self.origin_of(target) or {}).get(index)
        num_unknown = None
        if divisor is None:
            num_unknown = counts.logical_not().to(total.dtype).sum()
        value = total / (num_targets.clamp(min=1) if divisor is None else divisor[0])
        if self._is_derived:
            value = value.detach().requires_grad_()
        mean = TargetMean(value, total.detach(), num_targets, num_unknown)
        self.means.append(mean)
        if self._is_derived:  # the function may change its mean in place
            value = value.clone()
        self._note(value, mean)
        return value

    def _note(self, tensor: Any, origin: Any) -> None:
        if isinstance(tensor, Tensor):
            self._origins.append((tensor, _version(tensor), origin))

    def origin_of(self, tensor: Any) -> Any:
        """Return the origin of a tensor that has all elements of a mean or target.

        Returns:
            The `TargetMean`; the divisors of the target, by index; or None.
        """
        for known, version, origin in self._origins:
            if known is tensor and _version(tensor) == version:
                return origin
        return None

    def slopes(self, result: Tensor) -> list[Tensor]:
        """Return the derivative of a result with respect to each mean.

        The result must be computed with `is_derived`.
        """
        values, zero = [mean.value for mean in self.means], torch.zeros(())
        if not result.requires_grad:
            return [zero] * len(values)
        slopes = torch.autograd.grad(result, values, allow_unused=True)
        return [zero if slope is None else slope for slope in slopes]

    def checked(self, sums: Tensor) -> Tensor:
        """Replace the sums by NaN if it isn't known how many targets count.

        A compiled program can't raise an error: the host, which reads the sums, raises
        `unknown_number`.
        """
        for mean in self.means:
            if mean.num_unknown is not None:
                sums = sums.masked_fill(mean.num_unknown.gt(0), float("nan"))
        return sums


def unknown_number(what: str) -> DataError:
    """Build the error for sums that `TargetMeans.checked` has replaced by NaN."""
    return DataError(
        f"{what} ignores targets, as cross_entropy does with those of its "
        "ignore_index, and how many are left of several micro-batches isn't known: "
        "it slices or masks its targets, or they are floats, or a metric computes "
        "with the mean. Give it whole numbers with all marks in them, pass "
        "torch.nn.CrossEntropyLoss(ignore_index=...) itself, or return one value "
        "per sample (reduction='none')."
    )


def _version(tensor: Tensor) -> int:
    """Return the number of changes in place; inference mode doesn't count them."""
    return 0 if tensor.is_inference() else tensor._version


def _is_rearranged(func: Any, args: Any, result: Any) -> bool:
    """Return whether a result has all elements of the first argument."""
    if not isinstance(result, Tensor) or result.numel() != args[0].numel():
        return False
    name = getattr(func, "__name__", "")
    if name != "__getitem__":
        return name in _REARRANGEMENTS
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(key is None or key is ... or type(key) in (int, slice) for key in keys)
