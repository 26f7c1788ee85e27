# SPDX-License-Identifier: Apache-2.0
"""Outputs that are probabilities, because a module ends in a sigmoid or a softmax."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .observing import Observer, Operation

_SQUASHING = {"sigmoid": "sigmoid", "expit": "sigmoid", "softmax": "softmax"}
_SAME_VALUES = frozenset(
    {"contiguous", "flatten", "float", "reshape", "squeeze", "to", "unsqueeze", "view"}
)


class ProbabilityObserver(Observer):
    """Notes the results of sigmoids and softmaxes.

    Example:
        >>> import torch
        >>> from ipufit.engine.observers.observing import Observing
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
