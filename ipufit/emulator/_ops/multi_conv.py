# SPDX-License-Identifier: Apache-2.0
"""`MultiConv`: convolutions that may run side by side."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ipufit.emulator._ground.checks import require
from ipufit.emulator._tracing.half import original
from ipufit.emulator._tracing.trace_state import Trace, current_trace
from ipufit.emulator.enums import MultiConvPlanType
from ipufit.emulator.errors import createPoptorchError

_MultiConvT = TypeVar("_MultiConvT", bound="MultiConv")
_PARTIALS = (torch.float, torch.half)


class MultiConv:
    """Let the device compute the convolutions inside together.

    Other operations may be inside, another `MultiConv` may not. It changes no
    result, and nothing on the host: the settings below are checked and not used.

    Example:
        >>> convolution = torch.nn.Conv2d(1, 1, 3)
        >>> with MultiConv().availableMemoryProportions(0.8):
        ...     convolution(torch.zeros(1, 1, 3, 3)).shape
        torch.Size([1, 1, 1, 1])
    """

    def __init__(self) -> None:
        self._trace: Trace | None = None
        self._first_node = 0

    def availableMemoryProportions(self: _MultiConvT, value: Any) -> _MultiConvT:
        """Limit the memory for temporary data.

        Args:
            value: A float, one for each convolution, or None.

        Raises:
            AssertionError: `value` is something else.

        Example:
            >>> _ = MultiConv().availableMemoryProportions([0.8, 0.4])
        """
        require(
            value is None or (bool(_as_list(value)) and _all_are(value, float)),
            "Invalid available memory proportion! Use a float, or a list or tuple of "
            f"them. Got {value!r}.",
        )
        return self

    def partialsTypes(self: _MultiConvT, value: Any) -> _MultiConvT:
        """Choose the type of intermediate sums.

        Args:
            value: `torch.float` or `torch.half`, or one for each convolution.

        Raises:
            ValueError: `value` is something else.

        Example:
            >>> _ = MultiConv().partialsTypes(torch.half)
        """
        if any(partials not in _PARTIALS for partials in _as_list(value)):
            raise ValueError(
                "Invalid partials types. Expecting torch.float or torch.half. "
                f"Got {value!r}."
            )
        return self

    def enableConvDithering(self: _MultiConvT, value: Any) -> _MultiConvT:
        """Spread convolutions over tiles from different starting points.

        Args:
            value: A bool, one for each convolution, or None.

        Raises:
            ValueError: `value` is something else.

        Example:
            >>> _ = MultiConv().enableConvDithering(True)
        """
        if value is not None and not _all_are(value, bool):
            raise ValueError(f"value must be bool or list of bools. Got {value!r}.")
        return self

    def planType(self: _MultiConvT, value: MultiConvPlanType | None) -> _MultiConvT:
        """Choose whether convolutions run side by side or one after the other.

        Args:
            value: The plan; None for the default.

        Raises:
            AssertionError: `value` is something else.

        Example:
            >>> _ = MultiConv().planType(MultiConvPlanType.Serial)
        """
        require(
            value is None or isinstance(value, MultiConvPlanType),
            f"Invalid plan type! Use poptorch.MultiConvPlanType. Got {value!r}.",
        )
        return self

    def perConvReservedTiles(self: _MultiConvT, value: int) -> _MultiConvT:
        """Reserve tiles for each convolution.

        Args:
            value: Number of tiles.

        Raises:
            AssertionError: `value` isn't an int.

        Example:
            >>> _ = MultiConv().perConvReservedTiles(120)
        """
        require(isinstance(value, int), f"perConvReservedTiles: {value!r} is no int.")
        return self

    def cycleBackOff(self: _MultiConvT, value: float) -> _MultiConvT:
        """Trade speed of the largest convolution for tiles of the others.

        Args:
            value: A proportion.

        Raises:
            AssertionError: `value` isn't a float.

        Example:
            >>> _ = MultiConv().cycleBackOff(0.3)
        """
        require(isinstance(value, float), f"cycleBackOff: {value!r} is no float.")
        return self

    def __enter__(self) -> None:
        trace = current_trace()
        if trace is None:
            return
        if "MultiConv" in trace.open:
            raise createPoptorchError("Nested poptorch.MultiConv is not supported.")
        trace.open.append("MultiConv")
        self._trace = trace
        self._first_node = len(trace.recording.graph.nodes)

    def __exit__(
        self, exc_type: type[BaseException] | None, *exception: object
    ) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        trace.open.remove("MultiConv")
        inside = list(trace.recording.graph.nodes)[self._first_node :]
        if exc_type is None and not any(_is_convolution(n.target) for n in inside):
            raise createPoptorchError(
                "Unexpected end_multi_conv: there is no convolution inside this "
                "poptorch.MultiConv."
            )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _all_are(value: Any, kind: type) -> bool:
    return all(isinstance(element, kind) for element in _as_list(value))


def _is_convolution(target: Any) -> bool:
    return str(getattr(original(target), "__name__", "")).startswith("conv")
