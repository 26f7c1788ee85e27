# SPDX-License-Identifier: Apache-2.0
"""Keras 3 on its torch backend, with the module as its only layer."""

from __future__ import annotations

from typing import Any

import keras
from torch import Tensor

from .base import Contestant, Figures, Task


class Wrapped(keras.Model):
    """Keras wraps a torch module that is an attribute into a layer by itself."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def call(self, x: Any, training: bool | None = None) -> Any:
        """The module's scores; it trains unless it is told not to."""
        return self.network(x, training=training)


class Keras(Contestant):
    """`compile` and `fit` with tensors, `verbose=0`."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        accumulation = task.workload.accumulation
        self.model = Wrapped(task.network)
        self.model.compile(
            optimizer=keras.optimizers.AdamW(
                learning_rate=task.workload.learning_rate,
                weight_decay=0.01,  # torch's defaults
                epsilon=1e-8,
                gradient_accumulation_steps=accumulation if accumulation > 1 else None,
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
        self.epochs = 0

    def train(self, epochs: int) -> list[Figures]:
        """`fit`."""
        history = self.model.fit(
            *self.task.train,
            batch_size=self.task.workload.micro_batch,
            shuffle=self.task.shuffle,
            initial_epoch=self.epochs,
            epochs=self.epochs + epochs,
            verbose=0,
        ).history
        self.epochs += epochs
        return [Figures(*pair) for pair in zip(history["loss"], history["accuracy"])]

    def evaluate(self) -> Figures:
        """`evaluate`."""
        size = self.task.workload.micro_batch
        return Figures(
            *self.model.evaluate(*self.task.test, batch_size=size, verbose=0)
        )

    def predict(self) -> Tensor:
        """`predict`, which gives an array of NumPy's."""
        size = self.task.workload.micro_batch
        return self.model.predict(self.task.test.x, batch_size=size, verbose=0)
