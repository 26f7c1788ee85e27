# SPDX-License-Identifier: Apache-2.0
"""`GradientMonitor`: the norms of the gradients."""

from __future__ import annotations

import math
import warnings
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Mapping, Sequence

import torch

from ipufit._kinds import Kind, count, dict_of, number
from ipufit.errors import NonFiniteGradientWarning, UnknownNameError

from .base import Callback


class GradientMonitor(Callback):
    """Log the norms of the gradients that the updates are made with.

    The device keeps gradients to itself: they are seen through PopTorch's anchors
    (`Options.anchorTensor`), which have to be in the program. So it is compiled anew
    for them, and every call sends them to the host: name the parameters that matter
    where that is much.

    The gradient is that of the loss, without loss scaling and before clipping: the
    mean over the updates of one call. (With `device_iterations=1` that
    is one update's; with more, gradients of a call that disagree cancel out. Where own
    options return a part of the micro-batches, it is the mean over these; updates that
    padding leaves without samples count with their gradients, which are zero.)

    It puts into the logs, for callbacks that come after it and for History:

    - after every call `grad_norm`, the L2 norm of all gradients together;
    - after every epoch `grad_norm`, the mean over its calls, and `grad_norm_max`;
    - with `is_detailed`, `grad_norm/<parameter>` for each, likewise.

    The first gradient that isn't finite is warned of, with its parameter's name.

    Args:
        parameters: Names of trainable parameters, or patterns such as
            `"encoder.*.weight"`; all of them by default.
        is_detailed: Log each parameter's too.

    Attributes:
        norms: Of the last call, by parameter.

    Raises:
        UnknownNameError: A name or pattern fits no trainable parameter (when `fit`
            begins).
        UnsupportedError: The loss scaling is automatic: what the gradients are
            multiplied by is known to the device alone.

    Example:
        >>> from ipufit import IPUModel
        >>> model = IPUModel(torch.nn.Linear(1, 1, bias=False))
        >>> model.compile("sgd", "mse")
        >>> model.set_weights([[[2.0]]])
        >>> x = torch.ones(4, 1)
        >>> history = model.fit(x, x, 4, verbose=0, callbacks=GradientMonitor())
        >>> history.history["grad_norm"]  # 2 * (w * x - y) * x
        [2.0]
    """

    saved_attributes = ("sums", "largest", "calls")
    saved_kinds: ClassVar[Mapping[str, Kind]] = {
        "sums": dict_of(number),
        "largest": number,
        "calls": count,
    }

    def __init__(
        self,
        parameters: str | Sequence[str] | None = None,
        *,
        is_detailed: bool = False,
    ) -> None:
        if isinstance(parameters, str):
            parameters = [parameters]
        self.parameters = None if parameters is None else tuple(parameters)
        self.is_detailed = is_detailed
        self.norms: dict[str, float] = {}
        self.sums: dict[str, float] = {}
        self.largest = 0.0
        self.calls = 0
        self._names: tuple[str, ...] = ()
        self._has_warned = False

    def watched_gradients(self, module: torch.nn.Module) -> Sequence[str]:
        """The parameters that the names and patterns fit, in the module's order."""
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        if self.parameters is None:
            self._names = tuple(names)
        else:
            for pattern in self.parameters:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise UnknownNameError("trainable parameter", pattern, names)
            self._names = tuple(
                name
                for name in names
                if any(fnmatchcase(name, pattern) for pattern in self.parameters)
            )
        return self._names

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """A new run."""
        self._has_warned = False
        self._reset()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """A new mean."""
        self._reset()

    def _reset(self) -> None:
        self.sums, self.largest, self.calls = {}, 0.0, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Measure."""
        gradients = self.model.gradients()
        self.norms = {
            name: float(torch.linalg.vector_norm(gradients[name]))
            for name in self._names
        }
        self._warn_of_non_finite(batch)
        figures = {"grad_norm": math.sqrt(sum(n * n for n in self.norms.values()))}
        if self.is_detailed:
            figures.update({f"grad_norm/{n}": v for n, v in self.norms.items()})
        logs.update(figures)
        self.calls += 1
        self.sums = {n: self.sums.get(n, 0.0) + v for n, v in figures.items()}
        norm = figures["grad_norm"]
        if math.isnan(norm) or norm > self.largest:  # NaN stays
            self.largest = norm

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Put the epoch's figures into its logs."""
        if self.calls:
            logs.update({name: total / self.calls for name, total in self.sums.items()})
            logs["grad_norm_max"] = self.largest

    def _warn_of_non_finite(self, batch: int) -> None:
        odd = [name for name, norm in self.norms.items() if not math.isfinite(norm)]
        if not odd or self._has_warned:
            return
        self._has_warned = True  # once is enough
        warnings.warn(
            f"The gradient of {odd[0]}{f' and {len(odd) - 1} more' if odd[1:] else ''} "
            f"is {self.norms[odd[0]]} in epoch {self.run.epoch + 1}, at update {batch} "
            "or one of its call. Lower the learning rate, clip (Optimizer(..., "
            "global_clipnorm=1.0)), or look at the loss scaling in half precision.",
            NonFiniteGradientWarning,
            stacklevel=2,
        )
