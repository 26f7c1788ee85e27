# SPDX-License-Identifier: Apache-2.0
"""Ports of public programs train as scripts do that use PopTorch by hand."""

import contextlib
import importlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import ipufit
import ipufit.emulator
from ipufit.data.random_state import hash_seed
from tests.interpreters import run_python

ROOT = Path(__file__).parents[2]
PORTS = ROOT / "examples" / "ports"

# Port -> arguments that make ten updates quick, for it and for its original.
TEN_UPDATES = {
    "cnn_training": (
        "--epochs 5 --steps-per-epoch 2 --micro-batch-size 4 "
        "--gradient-accumulation 3 --fine-tune-epochs 2"
    ),
    "bert_finetuning": (
        "--network own --samples 60 --epochs 1 --test-samples 50 --hidden-size 16 "
        "--layers-per-ipu 1 1 --micro-batch-size 2 --gradient-accumulation 3"
    ),
    "gpt2_pretraining": (
        "--samples 140 --epochs 1 --layers-per-ipu 0 1 1 --hidden-size 16 "
        "--gradient-accumulation 7 --micro-batch-size 1"
    ),
}

# Port -> what its last line says, and the least value.
PROMISES = {
    "cnn_training": (r"test accuracy: (\d+\.\d\d)%", 90.0),
    "bert_finetuning": (r"exact match: (\d+\.\d\d)%", 90.0),
    "gpt2_pretraining": (r"foretold: (\d+\.\d\d)%", 85.0),
}


class UpdateLosses(ipufit.Callback):
    """The loss of each update, taken out of the running means."""

    def __init__(self):
        self.losses, self.total = [], 0.0

    def on_epoch_begin(self, epoch, logs):
        self.total = 0.0

    def on_train_batch_end(self, batch, logs):
        total = logs["loss"] * (batch + 1)
        self.losses.append(total - self.total)
        self.total = total


def run(*command):
    environment = {**os.environ, "IPUFIT_BACKEND": "emulator", "PYTHONPATH": str(ROOT)}
    done = run_python(*command, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_by_hand(name, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    ipufit.emulator.install()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(PORTS / f"{name}_by_hand.py"), run_name="__main__")
    finally:
        ipufit.emulator.uninstall()
    found = re.findall(r"^update \d+: loss (\S+)", printed.getvalue(), re.M)
    return [float(loss) for loss in found]


def losses_of_port(name, arguments):
    heard = UpdateLosses()
    importlib.import_module(name).main(arguments, [heard])
    return heard.losses


def few_digits(side):
    """Images and classes as `samples.digits` has them, without scikit-learn."""
    labels = torch.arange(210) % 10
    noise = torch.rand(210, 1, side, side, generator=torch.Generator().manual_seed(0))
    images = (noise * 100 + 15 * labels.reshape(-1, 1, 1, 1)).to(torch.uint8)
    rows = torch.utils.data.TensorDataset(images, labels)
    return tuple(
        torch.utils.data.TensorDataset(*rows[part])
        for part in (slice(200), slice(200, None))
    )


def shares_that_a_run_draws(seed, micro_batches, rows, alpha=0.2):
    """Coefficients of the micro-batches of a first pass over data."""
    seeds = [hash_seed(seed, 0, number, 1) for number in range(micro_batches)]
    return ipufit.Mixing(mixup=alpha).coefficients(seeds, rows, None)


@pytest.mark.filterwarnings("ignore::ipufit.DroppedRowsWarning")
@pytest.mark.parametrize(
    "name",
    [
        "cnn_training",
        "bert_finetuning",
        # By far the slowest; the one before has a pipeline, too.
        pytest.param("gpt2_pretraining", marks=[pytest.mark.slow]),
    ],
)
def test_a_port_trains_as_its_original(name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(PORTS))
    for module in ("networks", "samples"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(importlib.import_module("samples"), "digits", few_digits)
    arguments = [*TEN_UPDATES[name].split(), "--in-order"]
    extra = []
    if name == "cnn_training":
        path = tmp_path / "shares.pt"
        torch.save(shares_that_a_run_draws(42, 30, 4), path)
        extra = ["--mixup-shares", path]
    expected = losses_by_hand(name, [*arguments, *extra], monkeypatch)
    losses = losses_of_port(name, arguments)
    assert len(losses) >= 10
    assert losses[:10] == pytest.approx(expected[:10], abs=1e-4)
    # Fine-tuning goes on from float16 weights that were rounded another way here and
    # there: sums of the loss are added in another order.
    assert losses[10:] == pytest.approx(expected[10:], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISES)
def test_a_port_prints_what_it_promises(name):
    pattern, least = PROMISES[name]
    last = run(PORTS / f"{name}.py").splitlines()[-1]
    match = re.fullmatch(pattern, last)
    assert match is not None, last
    assert float(match.group(1)) >= least


def test_the_page_has_the_lines_of_each_port():
    page = (PORTS / "README.md").read_text(encoding="utf-8")
    printed = run(PORTS / "count_lines.py", *(PORTS / f"{n}.py" for n in TEN_UPDATES))
    counts = [line.split() for line in printed.splitlines()[:-1]]
    for count, path in counts:
        row = next(row for row in page.splitlines() if f"]({Path(path).name})" in row)
        assert f"| {count} |" in row, (path, count)
