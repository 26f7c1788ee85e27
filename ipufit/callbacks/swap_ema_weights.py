# SPDX-License-Identifier: Apache-2.0
"""`SwapEMAWeights`: look at the running average of the weights."""

from __future__ import annotations

from typing import Any

from .base import Callback


class SwapEMAWeights(Callback):
    """Have the running average of the weights in the model while it is looked at.

    As Keras's, but the weights are always back afterwards: after `evaluate`,
    `predict`, a validation, and when an error or Ctrl-C ended one of them. After `fit`
    the averages are the weights, as without this callback.

    It needs an optimizer that keeps an average: `Optimizer(..., ema_momentum=0.999)`.

    Args:
        swap_on_epoch: Have the averages in the model from the end of an epoch to the
            beginning of the next too, so that callbacks after this one, such as
            `ModelCheckpoint`, see them.

    Raises:
        ConfigError: When a run begins: the optimizer keeps no average.

    Example:
        >>> import torch
        >>> from ipufit import IPUModel, Optimizer
        >>> model = IPUModel(torch.nn.Linear(2, 1))
        >>> model.compile(Optimizer("sgd", 0.1, ema_momentum=0.9), "mse")
        >>> x, y = torch.zeros(8, 2), torch.ones(8, 1)
        >>> history = model.fit(x, y, batch_size=2, verbose=0, validation_data=(x, y),
        ...                     callbacks=SwapEMAWeights())
        >>> last = model.evaluate(x, y, verbose=0)["loss"]
        >>> abs(history.history["val_loss"][0] - last) < 1e-6
        True
    """

    def __init__(self, swap_on_epoch: bool = False) -> None:
        self.swap_on_epoch = swap_on_epoch

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """See that there is an average."""
        self.model.swap_weights(is_average=False)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Have the weights back to train them."""
        self.model.swap_weights(is_average=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Have the averages, if asked to."""
        if self.swap_on_epoch:
            self.model.swap_weights(is_average=True)

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Have the averages."""
        self.model.swap_weights(is_average=True)

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Have the weights back."""
        self.model.swap_weights(is_average=False)

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """Have the averages."""
        self.model.swap_weights(is_average=True)

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """Have the weights back."""
        self.model.swap_weights(is_average=False)

    def close(self) -> None:
        """Have the weights back, whatever happened."""
        if self.model is not None and self.model.weight_average is not None:
            self.model.swap_weights(is_average=False)
