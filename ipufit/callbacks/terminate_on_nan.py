# SPDX-License-Identifier: Apache-2.0
"""`TerminateOnNaN`: end `fit` when the loss is no longer finite."""

from __future__ import annotations

import math
from typing import Any

from .base import Callback
from .messages import say


class TerminateOnNaN(Callback):
    """Stop when the training loss of the epoch so far becomes NaN or infinite.

    As in Keras. The loss is checked after every call. ipufit warns of such a loss in
    any case (`NonFiniteLossWarning`).

    Args:
        raise_error: If True, raise an error instead of ending the run in order.
            `on_train_end` isn't called then, so no callback uses the lost weights.

    Raises:
        RuntimeError: With `raise_error`, when the loss becomes NaN or infinite.

    Example:
        >>> from ipufit.state import RunState
        >>> terminate = TerminateOnNaN()
        >>> terminate.set_run(RunState())
        >>> terminate.on_train_batch_end(7, {"loss": float("nan")})
        Batch 7: Invalid loss, terminating training
        >>> terminate.run.stop_reason
        'the loss is nan (TerminateOnNaN)'
    """

    def __init__(self, raise_error: bool = False) -> None:
        self.raise_error = raise_error

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Stop the run if the loss isn't finite."""
        loss = logs.get("loss")
        if loss is None or math.isfinite(loss):
            return
        if self.raise_error:
            raise RuntimeError(
                f"NaN or Inf loss: it is {loss} at batch {batch} of epoch "
                f"{self.run.epoch + 1}. The weights are probably lost."
            )
        say(f"Batch {batch}: Invalid loss, terminating training")
        self.run.stop(f"the loss is {loss} (TerminateOnNaN)")
