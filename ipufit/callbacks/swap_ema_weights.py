# SPDX-License-Identifier: Apache-2.0
"""`SwapEMAWeights`: evaluate the running average of the weights."""

from __future__ import annotations

from typing import Any

from ipufit._arguments import check_flags

from .base import Callback


class SwapEMAWeights(Callback):
    """Evaluate and predict with the running average of the weights.

    As in Keras, but the trained weights always come back: after `evaluate`, `predict`
    and a validation, and if an error or Ctrl-C ends one of them. After `fit` the
    averages are the weights, as without this callback. Unlike Keras's, the average has
    the buffers of floats too, such as the statistics of batch norm.

    The optimizer must keep an average: `Optimizer(..., ema_momentum=0.999)`.

    Args:
        swap_on_epoch: If True, the averages are in the model from the end of an epoch
            to the beginning of the next too, so that later callbacks, such as
            `ModelCheckpoint`, see them.

    Raises:
        ConfigError: When a run begins, if the optimizer keeps no average.

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
        check_flags("SwapEMAWeights", swap_on_epoch=swap_on_epoch)
        self.swap_on_epoch = swap_on_epoch

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Refuse an optimizer without an average; start with the trained weights."""
        self.model.swap_weights(is_average=False)

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Copy the averages into the model."""
        self.model.swap_weights(is_average=True, is_joint=True)

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Restore the trained weights."""
        self.model.swap_weights(is_average=False)

    on_predict_begin = on_test_begin
    on_predict_end = on_test_end

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Restore the trained weights."""
        self.model.swap_weights(is_average=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Copy the averages into the model if `swap_on_epoch` is set."""
        if self.swap_on_epoch:
            self.model.swap_weights(is_average=True, is_joint=True)

    def close(self) -> None:
        """Restore the trained weights, also after an error."""
        if self.model is not None and self.model.weight_average is not None:
            self.model.swap_weights(is_average=False)
