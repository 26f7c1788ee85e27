# SPDX-License-Identifier: Apache-2.0
"""Whether a module ends in a sigmoid or a softmax, so that outputs are probabilities.

Losses by Keras's names take logits here. Of probabilities they would be other numbers.
"""

from __future__ import annotations

from typing import Any, Callable

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ipufit.errors import ConfigError
from ipufit.losses import Loss

from .outputs import named_outputs, only

_SQUASHING = {"sigmoid": "sigmoid", "expit": "sigmoid", "softmax": "softmax"}
_SAME_VALUES = frozenset(
    {"contiguous", "flatten", "float", "reshape", "squeeze", "to", "unsqueeze", "view"}
)


class SquashWatch(TorchFunctionMode):
    """Notes the results of sigmoids and softmaxes while a module is traced.

    Example:
        >>> import torch
        >>> with SquashWatch() as watch:
        ...     outputs = torch.sigmoid(torch.zeros(2, 1)).squeeze(1)
        >>> watch.squashed(outputs)
        {'': 'sigmoid'}
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._results: list[tuple[Tensor, str]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and note its result if that is probabilities."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        kind = _SQUASHING.get(name)
        if name in _SAME_VALUES and args:
            kind = self._of(args[0])
        if kind is not None and isinstance(result, Tensor):
            self._results.append((result, kind))
        return result

    def _of(self, tensor: Any) -> str | None:
        return next((kind for one, kind in self._results if one is tensor), None)

    def squashed(self, outputs: Any) -> dict[str, str]:
        """The outputs that are probabilities, and what has made them such.

        Args:
            outputs: The module's.

        Returns:
            "sigmoid" or "softmax" by the output's name, which is empty for a single
            output.
        """
        parts = named_outputs(outputs) or {"": only(outputs)}
        kinds = {name: self._of(part) for name, part in parts.items()}
        return {name: kind for name, kind in kinds.items() if kind is not None}


def check_logits(loss: Loss, name: str, squashed: dict[str, str]) -> None:
    """Refuse probabilities as outputs for a loss that takes logits.

    Args:
        loss: Of that output.
        name: Of the output; empty for a single one.
        squashed: What `SquashWatch.squashed` gave.

    Raises:
        ConfigError: The output is probabilities.

    Example:
        >>> from ipufit.losses import resolve_loss
        >>> check_logits(resolve_loss("bce"), "", {"": "sigmoid"})
        Traceback (most recent call last):
        ipufit.errors.ConfigError: The loss 'bce' takes logits, and the module's outp...
    """
    kind = squashed.get(name)
    if kind is None or not loss.takes_logits:
        return
    output = f"output {name!r}" if name else "output"
    own = (
        "torch.nn.BCELoss()"
        if kind == "sigmoid"
        else "lambda x, y: torch.nn.functional.nll_loss(x.log(), y)"
    )
    raise ConfigError(
        f"The loss {loss.name!r} takes logits, and the module's {output} comes from a "
        f"{kind}: they are probabilities, which would be squashed once more. Leave the "
        f"{kind} out of the module and apply it to what predict() gives, or compile "
        f"with a loss of probabilities: loss={own}."
    )
