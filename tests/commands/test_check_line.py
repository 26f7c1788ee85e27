# SPDX-License-Identifier: Apache-2.0
"""`ipufit check`: its output, its exit status, and the files that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MODEL = """\
import sys
import torch
from ipufit import IPUConfig, IPUModel

class Net(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        {line}
        return y

def make():
    model = IPUModel(Net(4, 4), IPUConfig(micro_batch_size=4))
    model.compile("sgd", "mse")
    return model, torch.zeros(16, 4), torch.zeros(16, 4)
"""
SCRIPT = """
if __name__ == "__main__":
    model, x, y = make()
    print("begins", sys.argv[1:])
    model.fit(x, y, batch_size=8)
    open("trained", "w").close()
"""
FINE = MODEL.format(line="pass") + SCRIPT
REFUSED = MODEL.format(line="y = y * y.sum().item()") + SCRIPT


def checked(folder, *line):
    path = os.pathsep.join([str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "ipufit", "check", *line],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
    )


@pytest.mark.parametrize("line", [["train.py"], ["-m", "train"], ["train:make"]])
def test_scripts_modules_and_functions(tmp_path, line):
    (tmp_path / "train.py").write_text(REFUSED, "utf-8")
    done = checked(tmp_path, *line)
    assert done.returncode == 1, done.stderr
    assert "train.py:8" in done.stdout
    assert "Doesn't run: 1 refused." in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_fine_script_ends_with_0_and_its_words_are_apart(tmp_path):
    (tmp_path / "train.py").write_text(FINE, "utf-8")
    done = checked(tmp_path, "--json", "train.py", "--fast", "3")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["is_refused"] is False
    assert data["title"] == "Net, 16 samples per call"
    assert done.stderr == "begins ['--fast', '3']\n"


def test_a_batch_size_stands_for_that_of_the_script(tmp_path):
    (tmp_path / "train.py").write_text(FINE, "utf-8")
    for target in ["train.py", "train:make"]:
        done = checked(tmp_path, "--json", "--batch-size", "12", target)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["title"] == "Net, 12 samples per call"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["absent.py"], "There is no script 'absent.py'"),
        (["train.py"], "ended before it called fit"),
        (["train:alone"], "gives a model and no data"),
        (["train:bare"], "You must call compile()"),
        ([], "arguments are required"),
    ],
)
def test_what_is_no_model_ends_with_2(tmp_path, line, message):
    source = MODEL.format(line="pass") + "def alone():\n    return make()[0]\n"
    source += "def bare():\n    return IPUModel(Net(4, 4)), torch.zeros(4, 4)\n"
    (tmp_path / "train.py").write_text(source, "utf-8")
    done = checked(tmp_path, *line)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_scripts_of_poptorch_get_the_emulator(tmp_path):
    line = "poptorch.ipu_print_tensor(y) if poptorch.isRunningOnIpu() else None"
    source = "import poptorch\n" + MODEL.format(line=line) + SCRIPT
    (tmp_path / "train.py").write_text(source, "utf-8")
    done = checked(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
