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
from tests.files.samples import same_tensors
from tests.interpreters import run_python
from tests.processes import ending

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
    program = "-m", "tests.processes.ending"
    done = run_python(*program, folder, count, *cases, cwd=ROOT, env=ENVIRONMENT)
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


def check_saved(case, result, folder):
    """Whether all have ended in order, and with a checkpoint if it was too early."""
    assert result["codes"] == [0] * len(result["codes"]), (case, result["output"])
    kept = CheckpointStore(folder / "backup").latest()
    assert (kept is None) == (case == ending.NOBODY), case
    if kept is not None:
        run = load_checkpoint(kept).state["run"]
        early = {"training": (5, 7), "validation": (4, 5)}
        low, high = early.get(case.split(",")[1], (12, 12))
        assert low <= run["updates"] <= high, case


def terminated(index):
    phases = "training", "validation", "last epoch"
    return [f"terminate,{phase},{index}" for phase in phases]


FEW = ["raise,training,1", "kill,checkpoint,0", ending.NOBODY, *terminated(1)]
MANY = [
    f"{what},{phase},{index}"
    for what, phases in {
        "raise": [
            *("on_train_begin", "first batch", "checkpoint", "validation", "dataset"),
            *("forward", "on_train_end", "close", "after"),
        ],
        "kill": ["forward", "first batch", "training", "validation", "after"],
        "die": ["training", "on_train_end"],
        "exit": ["validation", "close"],
        "interrupt": ["training", "checkpoint", "on_train_end"],
    }.items()
    for phase in phases
    for index in (0, 1)
]


@pytest.mark.parametrize(
    ("cases", "count"),
    [
        (FEW, 2),
        *(
            pytest.param(cases, count, marks=pytest.mark.slow)
            for cases, count in [
                (terminated(0), 2),
                *((MANY[part::4], 2 + part % 2 * 2) for part in range(4)),
            ]
        ),
    ],
)
def test_a_process_that_fails_ends_all_and_sigterm_saves_first(tmp_path, cases, count):
    for number, (case, result) in enumerate(run_all(tmp_path, cases, count).items()):
        if case == ending.NOBODY or case.startswith("terminate"):
            check_saved(case, result, tmp_path / str(number))
        else:
            check(case, result)


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


@pytest.mark.slow
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
