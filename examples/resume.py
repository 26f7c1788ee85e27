# SPDX-License-Identifier: Apache-2.0
"""A run that fails in the middle of an epoch goes on as if nothing had happened.

`BackupAndRestore` saves every five updates, a callback fails at update 68, and the same
call, made again, goes on at 65. With dropout, shuffling and a schedule all weights end
up equal to those of a run without failure, bit by bit: `python examples/resume.py`.
"""

from __future__ import annotations

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

import ipufit


class FailAt(ipufit.Callback):
    """A power cut, for once."""

    def __init__(self, update: int | None) -> None:
        self.update = update

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        """Fail once it is time."""
        if self.run.updates == self.update:
            raise RuntimeError(f"failed at update {self.update}")


def fit(backup_dir: str, fails_at: int | None = None) -> torch.Tensor:
    """Train from the beginning or the backup; returns all weights in one tensor."""
    torch.manual_seed(0)
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    layers = [nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)]
    model = ipufit.IPUModel(nn.Sequential(*layers), ipufit.IPUConfig(seed=1))
    model.compile("adamw", "cross_entropy", lr_schedule="cosine")
    backup = ipufit.BackupAndRestore(backup_dir, save_freq=5)
    callbacks = [FailAt(fails_at), backup]
    data = (x[:1760] / 16).float(), y[:1760]
    model.fit(*data, batch_size=32, epochs=3, callbacks=callbacks, verbose=2)
    return torch.cat([torch.from_numpy(w).flatten() for w in model.get_weights()])


def main() -> float:
    """Compare; returns the share of weights that are equal."""
    with tempfile.TemporaryDirectory() as folder:
        expected = fit(f"{folder}/never-needed")
        try:
            fit(f"{folder}/backup", fails_at=68)
        except RuntimeError as error:
            print(f"The run {error}, and begins again.")
        share = (fit(f"{folder}/backup") == expected).float().mean().item()
    print(f"equal weights: {share:.2%}")
    return share


if __name__ == "__main__":
    main()
