# SPDX-License-Identifier: Apache-2.0
"""ipufit on its emulator, as a user would write it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import Contestant, Figures, Task

MOST_PASSES = 500


class Ipufit(Contestant):
    """`IPUModel` with `History`; `device_iterations` of the workload, no bar.

    Calls that only look take all test samples, up to `MOST_PASSES` batches.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        from ipufit import IPUConfig, IPUModel

        self.model = IPUModel(task.network, IPUConfig(**self.settings()))
        self.model.compile(
            optimizer=task.adamw(),
            loss="cross_entropy",
            metrics=["accuracy"],
        )
        self.epochs = 0

    def settings(self) -> dict[str, Any]:
        """Fields of `IPUConfig`."""
        workload = self.task.workload
        passes = -(-len(self.task.test.x) // workload.micro_batch)
        return {
            "micro_batch_size": workload.micro_batch,
            "gradient_accumulation": workload.accumulation,
            "device_iterations": workload.device_iterations,
            "inference_iterations": min(MOST_PASSES, passes),
            "seed": 0,
        }

    def train(self, epochs: int) -> list[Figures]:
        """`fit`."""
        history = self.model.fit(
            self.task.train.x,
            self.task.train.y,
            batch_size=self.task.workload.batch_size,
            shuffle=self.task.shuffle,
            initial_epoch=self.epochs,
            epochs=self.epochs + epochs,
            verbose=0,
        ).history
        self.epochs += epochs
        return [Figures(*pair) for pair in zip(history["loss"], history["accuracy"])]

    def evaluate(self) -> Figures:
        """`evaluate`, with the batch size of training."""
        size = self.task.workload.micro_batch
        logs = self.model.evaluate(*self.task.test, batch_size=size, verbose=0)
        return Figures(logs["loss"], logs["accuracy"])

    def predict(self) -> Tensor:
        """`predict`, with the batch size of training."""
        size = self.task.workload.micro_batch
        return self.model.predict(self.task.test.x, batch_size=size, verbose=0)


class IpufitNothingSet(Ipufit):
    """What a newcomer writes: `batch_size`, and whatever is left open is ipufit's."""

    def settings(self) -> dict[str, Any]:
        """None, but for the micro-batches that a workload has several of."""
        accumulation = self.task.workload.accumulation
        return {} if accumulation == 1 else {"gradient_accumulation": accumulation}


class IpufitHalf(Ipufit):
    """float16 for activations and weights, with stochastic rounding in training."""

    def settings(self) -> dict[str, Any]:
        """The same, and the types."""
        return {**super().settings(), "precision": "float16"}


class IpufitHalfNearest(IpufitHalf):
    """float16 that is rounded to the nearest."""

    def settings(self) -> dict[str, Any]:
        """The same, and how to round."""
        return {**super().settings(), "stochastic_rounding": False}
