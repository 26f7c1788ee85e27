# SPDX-License-Identifier: Apache-2.0
"""Stochastic weight averaging: which weights of a training are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from ipufit.errors import ConfigError

from .checks import check_whole


@dataclass(frozen=True)
class SWA:
    """Stochastic weight averaging: the equal average of weights late in a training.

    After the first `start` epochs or updates, the weights after every so many of them
    are averaged, and each of them counts the same (Izmailov et al. 2018, "Averaging
    Weights Leads to Wider Optima and Better Generalization"). `Optimizer(..., swa=)`
    takes it. Epochs and updates are counted over all fits since `compile`.

    Args:
        start_epoch: Number of epochs before the first that counts.
        every_epochs: Number of epochs from one average to the next; 1 by default.
        start_update: Number of updates before the first that counts.
        every_updates: Number of updates from one average to the next; 1 by default.
            The weights are taken at the end of the call that makes the update.

    Raises:
        ConfigError: A number is out of range, or both epochs and updates are given.

    Example:
        >>> swa = SWA(start_epoch=3, every_epochs=2)
        >>> [epoch for epoch in range(1, 10) if swa.is_due("epochs", epoch - 1, epoch)]
        [5, 7, 9]
    """

    start_epoch: int | None = None
    every_epochs: int | None = None
    start_update: int | None = None
    every_updates: int | None = None

    def __post_init__(self) -> None:
        epochs = {"start_epoch": self.start_epoch, "every_epochs": self.every_epochs}
        updates = {
            "start_update": self.start_update,
            "every_updates": self.every_updates,
        }
        given = {
            name: value
            for name, value in {**epochs, **updates}.items()
            if value is not None
        }
        for name, value in given.items():
            check_whole("SWA", name, value, least=int(name.startswith("every")))
        if epochs.keys() & given and updates.keys() & given:
            words = ", ".join(f"{name}={value}" for name, value in given.items())
            raise ConfigError(f"SWA has {words}: give epochs or updates, not both.")
        if not given:
            raise ConfigError(
                "SWA needs to know when averaging begins: SWA(start_epoch=75), or "
                "SWA(start_update=30000, every_updates=400)."
            )

    @property
    def unit(self) -> str:
        """`"epochs"` or `"updates"`, whichever is counted."""
        in_epochs = self.start_epoch is not None or self.every_epochs is not None
        return "epochs" if in_epochs else "updates"

    def is_due(self, unit: str, before: int, after: int) -> bool:
        """Whether weights are to be taken between two counts.

        Args:
            unit: Unit of the counts, `"epochs"` or `"updates"`.
            before: The count when weights could be taken last.
            after: The count now.

        Example:
            >>> SWA(start_update=100, every_updates=10).is_due("updates", 108, 112)
            True
        """
        if unit != self.unit:
            return False
        start = self.start_epoch or self.start_update or 0
        every = self.every_epochs or self.every_updates or 1
        return max(0, after - start) // every > max(0, before - start) // every
