# SPDX-License-Identifier: Apache-2.0
"""`GradientMonitor`: norms of the gradients in the logs."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Iterable, Mapping, Sequence

import torch

from ipufit._kinds import Kind, count, dict_of, number
from ipufit.errors import (
    ConfigError,
    NonFiniteGradientWarning,
    UnknownNameError,
    warn,
)

from .base import Callback


class GradientMonitor(Callback):
    """Log the norms of the gradients in the updates.

    Gradients leave the device through PopTorch's anchors (`Options.anchorTensor`). The
    training program is built again with them, and every call sends them to the host.
    If that is too much, name the parameters that matter.

    A gradient is the mean over the updates of one call, without loss scaling and before
    clipping. With `device_iterations=1` a call is one update. With more updates,
    gradients of different signs cancel out. If your own options return only some
    micro-batches, it is the mean over these. An update that has only padding counts
    with gradients of zero.

    It adds to the logs, for later callbacks and History:

    - after every call `grad_norm`, the L2 norm of all gradients together;
    - after every epoch `grad_norm`, the mean over its calls, and `grad_norm_max`;
    - with `is_detailed`, `grad_norm/<parameter>` for each parameter too.

    It warns of the first gradient that isn't finite, with its parameter's name.

    Args:
        parameters: Names of trainable parameters, or patterns such as
            `"encoder.*.weight"`; all of them by default.
        is_detailed: If True, log a norm for each parameter too.

    Attributes:
        norms: Norms of the last call by name of the parameter.

    Raises:
        ConfigError: `parameters` are no names.
        UnknownNameError: When `fit` begins, if a name or pattern fits no trainable
            parameter.
        UnsupportedError: If the loss scaling is automatic: only the device knows the
            factor of the gradients.

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

    saved_attributes: ClassVar[Mapping[str, Kind]] = {
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
        is_one = isinstance(parameters, str) or not isinstance(parameters, Iterable)
        names: Any = (parameters,) if is_one else parameters
        self.parameters = None if parameters is None else tuple(names)
        if not all(isinstance(name, str) for name in self.parameters or ()):
            raise ConfigError(
                f"GradientMonitor has parameters={parameters!r}: give names of "
                "parameters, or patterns such as 'encoder.*.weight'."
            )
        self.is_detailed = is_detailed
        self.norms: dict[str, float] = {}
        self.sums: dict[str, float] = {}
        self.largest = 0.0
        self.calls = 0
        self._names: tuple[str, ...] = ()
        self._has_warned = False

    def watched_gradients(self, module: torch.nn.Module) -> Sequence[str]:
        """Return the parameters that match the patterns, in the module's order."""
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        patterns = ["*"] if self.parameters is None else self.parameters
        wanted: set[str] = set()
        for pattern in patterns:
            found = {name for name in names if fnmatchcase(name, pattern)}
            if not found and self.parameters is not None:
                raise UnknownNameError("trainable parameter", pattern, names)
            wanted |= found
        self._names = tuple(name for name in names if name in wanted)
        return self._names

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Reset the values of an earlier run."""
        self._has_warned = False
        self._reset()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Reset the means of the epoch."""
        self._reset()

    def _reset(self) -> None:
        self.sums, self.largest, self.calls = {}, 0.0, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Add the norms of the call to its logs."""
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
        """Add the means of the epoch to its logs."""
        if self.calls:
            logs.update({name: total / self.calls for name, total in self.sums.items()})
            logs["grad_norm_max"] = self.largest

    def _warn_of_non_finite(self, batch: int) -> None:
        odd = [name for name, norm in self.norms.items() if not math.isfinite(norm)]
        if not odd or self._has_warned:
            return
        self._has_warned = True
        warn(
            f"The gradient of {odd[0]}{f' and {len(odd) - 1} more' if odd[1:] else ''} "
            f"is {self.norms[odd[0]]} in epoch {self.run.epoch + 1}, at update {batch} "
            "or one of its call. Lower the learning rate, clip (Optimizer(..., "
            "global_clipnorm=1.0)), or look at the loss scaling in half precision.",
            NonFiniteGradientWarning,
        )
