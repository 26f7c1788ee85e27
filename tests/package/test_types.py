# SPDX-License-Identifier: Apache-2.0
"""A script of a user, checked by `mypy --strict`: no cast, no ignored line."""

import os
from pathlib import Path

import pytest

from tests.interpreters import run_python

pytest.importorskip("mypy")
pytestmark = pytest.mark.slow  # it reads torch's types, too

ROOT = Path(__file__).parents[2]
SCRIPT = """
from __future__ import annotations

from typing import Any

import ipufit
import torch
from ipufit import EarlyStopping, IPUConfig, IPUModel
from ipufit.metrics import AUC


class Print(ipufit.Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        print(epoch, logs["loss"])


class Share(ipufit.Metric):
    def __init__(self, least: float = 0.5) -> None:
        super().__init__("share")
        self.least = least

    def sums(
        self, outputs: Any, targets: Any, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        values: torch.Tensor = outputs.gt(self.least).float()
        return torch.stack([values.sum(), torch.ones_like(values).sum()])


def train(x: torch.Tensor, y: torch.Tensor) -> float:
    model = IPUModel(torch.nn.Linear(4, 1), IPUConfig(micro_batch_size=4))
    optimizer = ipufit.optimizers.Optimizer("adam", 0.01)
    model.compile(optimizer, "bce", metrics=["accuracy", AUC(curve="PR"), Share()])
    callbacks = [EarlyStopping("loss"), ipufit.callbacks.StopAfter(5), Print()]
    history = model.fit(x, y, batch_size=8, epochs=2, callbacks=callbacks)
    best: float = min(history.history["loss"])
    first: float = model.train_on_batch(x[:8], y[:8])["loss"]
    loss: float = model.evaluate(x, y)["loss"]
    accuracy: float = model.test_on_batch(x, y, return_dict=True)["accuracy"]
    everything: list[float] = model.evaluate(x, y, return_dict=False)
    outputs: torch.Tensor = model.predict(x)
    for part in model.predict(x, stream=True):
        outputs += part
    return best + first + loss + accuracy + sum(everything) + float(outputs.sum())


def filtered() -> type[Warning]:
    return ipufit.errors.SharedRateWarning
"""
# What is written in place of the right line, and the code of mypy's error.
WRONG = [
    ('evaluate(x, y)["loss"]', "evaluate(x, y)[0]", "[index]"),
    ("ipufit.errors.Shared", "ipufit.Shared", "[attr-defined]"),
    ("StopAfter(5)", "StopAfter(mintues=5)", "[call-arg]"),
]


def check(folder, *scripts):
    for number, script in enumerate(scripts):
        (folder / f"script{number}.py").write_text(script, encoding="utf-8")
    paths = sorted(map(str, folder.glob("*.py")))
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    options = ["-m", "mypy", "--strict", f"--cache-dir={ROOT / '.mypy_cache'}"]
    return run_python(*options, *paths, cwd=folder, env=environment)


def test_a_script_of_a_user_passes_strictly_and_mistakes_in_it_do_not(tmp_path):
    scripts = [SCRIPT.replace(right, wrong) for right, wrong, _ in WRONG]
    assert SCRIPT not in scripts
    lines = check(tmp_path, SCRIPT, *scripts).stdout.splitlines()
    assert [line for line in lines if line.startswith("script0.py")] == []
    for number, (_, _, code) in enumerate(WRONG, start=1):
        [_] = [
            line
            for line in lines
            if line.startswith(f"script{number}.py") and code in line
        ]
