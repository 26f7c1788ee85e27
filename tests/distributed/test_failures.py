# SPDX-License-Identifier: Apache-2.0
"""A process that fails ends all of them, soon, and its own error comes first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipufit import load_checkpoint
from ipufit.checkpoint import CheckpointStore
from tests.checkpoint.samples import same_tensors
from tests.distributed import ending

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "IPUFIT_BACKEND": "emulator",
    "IPUFIT_PROCESS_TIMEOUT": "60",
    "OMP_NUM_THREADS": "1",
    "POPTORCH_LOG_LEVEL": "ERR",
    "PYTHONPATH": str(ROOT),
}


def run_all(folder, cases, count=2):
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.ending", folder, str(count), *cases],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=30 + 110 * len(cases),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, map(json.loads, done.stdout.splitlines())))


def check(case, result):
    """Whether all have ended as they should."""
    what, phase, index = case.split(",")
    index, said = int(index), result["output"]
    codes = {"raise": 1, "exit": 0, "die": 7, "kill": -9, "interrupt": 1}
    assert None not in result["codes"], (case, said)
    assert result["codes"][index] == codes[what], (case, said)
    others = [code for i, code in enumerate(result["codes"]) if i != index]
    if (what, phase) == ("exit", "after") and index:
        return  # process 0 has written and told, and nobody waits any more
    assert others == [1] * len(others), (case, said)
    # A dead process is noticed long before the time-out.
    assert result["seconds"] < 50, (case, said)
    if what in ("raise", "interrupt"):
        own = said.find("it failed here" if what == "raise" else "KeyboardInterrupt")
        later = said.find("another process")
        assert 0 < own < later, (case, said)
    assert "Something else failed" not in said, (case, said)


FEW = ["raise,training,1", "kill,checkpoint,0"]
MANY = [
    f"{what},{phase},{index}"
    for what, phases in {
        "raise": [
            "on_train_begin",
            "first batch",
            "checkpoint",
            "validation",
            "dataset",
            "forward",
            "on_train_end",
            "close",
            "after",
        ],
        "kill": ["forward", "first batch", "training", "validation", "after"],
        "die": ["training", "on_train_end"],
        "exit": ["validation", "close"],
        "interrupt": ["training", "checkpoint", "on_train_end"],
    }.items()
    for phase in phases
    for index in (0, 1)
]


def test_a_process_that_fails_ends_all(tmp_path):
    for case, result in run_all(tmp_path, FEW).items():
        check(case, result)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_a_process_that_fails_in_any_way_and_phase_ends_all(tmp_path, part):
    cases = MANY[part::4]
    for case, result in run_all(tmp_path, cases, count=2 + part % 2 * 2).items():
        check(case, result)


@pytest.mark.parametrize("index", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_sigterm_in_one_process_saves_and_ends_all(tmp_path, index):
    cases = [
        f"terminate,{phase},{index}"
        for phase in ("training", "validation", "last epoch")
    ]
    results = run_all(tmp_path, [ending.NOBODY, *cases])
    for number, (case, result) in enumerate(results.items()):
        assert result["codes"] == [0, 0], (case, result["output"])
        kept = CheckpointStore(tmp_path / str(number) / "backup").latest()
        assert (kept is None) == (case == ending.NOBODY), case
        if kept is not None:
            run = load_checkpoint(kept).state["run"]
            early = {"training": (5, 7), "validation": (4, 5)}
            low, high = early.get(case.split(",")[1], (12, 12))
            assert low <= run["updates"] <= high, case


SCRIPT = """
import os, signal, sys
import torch, ipufit

class Dying(ipufit.Callback):
    is_saved = False
    def on_train_batch_end(self, batch, logs):
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        rank = int(os.environ.get("RANK", 0))
        if (attempt, rank, self.run.updates) in DEATHS:
            os.kill(os.getpid(), signal.SIGKILL)

DEATHS = [(0, 1, 5), (1, 0, 9)] if sys.argv[2] == "dying" else []
torch.manual_seed(1)
layers = torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
network = torch.nn.Sequential(*layers)
model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=5))
model.compile(ipufit.Optimizer("adam", 0.1), "mse")
x = torch.randn(32, 3)
backup = ipufit.BackupAndRestore(sys.argv[1] + "/backup", save_freq=2)
history = model.fit(x, x[:, :1], 8, epochs=3, verbose=2, callbacks=[backup, Dying()])
assert len(history.history["loss"]) == 3
model.save(sys.argv[1] + "/learnt")
"""


@pytest.mark.thorough
def test_torchrun_begins_again_up_to_the_uninterrupted_end(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = []
    for how in ("living", "dying"):
        folder = tmp_path / how
        folder.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "--max-restarts", "2"]
        done = subprocess.run(
            [*command, str(script), str(folder), how],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("exitcode: -9" in done.stderr) == (how == "dying")
        assert not (folder / "backup").exists()
        found.append(load_checkpoint(folder / "learnt").tensors)
    living, dying = found
    assert same_tensors(dying["model"], living["model"])
    assert same_tensors(dying["optimizer"], living["optimizer"])
