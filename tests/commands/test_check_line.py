# SPDX-License-Identifier: Apache-2.0
"""`ipufit check`: its output, its exit status, and the files that it leaves."""

from __future__ import annotations

import json
import sys

import pytest

from ipufit.cli import main
from ipufit.emulator import uninstall

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


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Run the command here, in `tmp_path`, and return its exit status and its words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("COLUMNS", "100")

    def run(*line):
        sys.modules.pop("train", None)
        monkeypatch.setattr(sys, "argv", ["ipufit", "check", *line])
        with pytest.raises(SystemExit) as stop:
            main()
        return (stop.value.code, *capsys.readouterr())

    yield run
    sys.modules.pop("train", None)
    uninstall()


@pytest.mark.parametrize("line", [["train.py"], ["-m", "train"], ["train:make"]])
def test_scripts_modules_and_functions(tmp_path, checked, line):
    (tmp_path / "train.py").write_text(REFUSED, "utf-8")
    status, out, err = checked(*line)
    assert status == 1, err
    assert "train.py:8" in out
    assert "Doesn't run: 1 refused." in out
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_fine_script_ends_with_0_and_its_words_are_apart(tmp_path, checked):
    (tmp_path / "train.py").write_text(FINE, "utf-8")
    status, out, err = checked("--json", "train.py", "--fast", "3")
    assert status == 0, err
    data = json.loads(out)
    assert data["is_refused"] is False
    assert data["title"] == "Net, 16 samples per call"
    assert err == "begins ['--fast', '3']\n"


def test_a_batch_size_stands_for_that_of_the_script(tmp_path, checked):
    (tmp_path / "train.py").write_text(FINE, "utf-8")
    for target in ["train.py", "train:make"]:
        status, out, err = checked("--json", "--batch-size", "12", target)
        assert status == 0, err
        assert json.loads(out)["title"] == "Net, 12 samples per call"


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
def test_what_is_no_model_ends_with_2(tmp_path, checked, line, message):
    source = MODEL.format(line="pass") + "def alone():\n    return make()[0]\n"
    source += "def bare():\n    return IPUModel(Net(4, 4)), torch.zeros(4, 4)\n"
    (tmp_path / "train.py").write_text(source, "utf-8")
    status, out, err = checked(*line)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert not out


def test_scripts_of_poptorch_get_the_emulator(tmp_path, checked):
    line = "poptorch.ipu_print_tensor(y) if poptorch.isRunningOnIpu() else None"
    source = "import poptorch\n" + MODEL.format(line=line) + SCRIPT
    (tmp_path / "train.py").write_text(source, "utf-8")
    status, _, err = checked("train.py")
    assert status == 0, err
