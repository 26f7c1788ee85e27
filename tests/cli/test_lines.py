# SPDX-License-Identifier: Apache-2.0
"""The command `ipufit`; its `check` and `plan` of scripts, modules and functions.

What they print, their exit status, and the files that they leave.
"""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ipufit
from ipufit import cli
from ipufit.emulator import uninstall

ROOT = Path(__file__).parent.parent.parent
CHECKED = """\
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

if __name__ == "__main__":
    model, x, y = make()
    print("begins", sys.argv[1:])
    model.fit(x, y, batch_size=8)
    open("trained", "w").close()
"""
FINE = CHECKED.format(line="pass")
REFUSED = CHECKED.format(line="y = y * y.sum().item()")
PLANNED = """
import torch
from ipufit import IPUConfig, IPUModel
layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
model = IPUModel(layers, IPUConfig(micro_batch_size=4, pipeline=["0", "1"]))
model.compile("adamw", "cross_entropy")
x, y = torch.zeros(100, 4), torch.zeros(100, dtype=torch.int64)
"""
CALL = "model.fit(x, y, batch_size=20)\n"
FIT = f"{PLANNED}print('begins')\n{CALL}print('trained')\n"
_number = itertools.count()


@pytest.fixture
def written(tmp_path):
    """Write a module, and return its name; no two tests have the same."""

    def written(source):
        name = f"subject_{next(_number)}"
        (tmp_path / f"{name}.py").write_text(source, "utf-8")
        return name

    return written


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command line in a folder, and return its exit status and its words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("COLUMNS", "100")

    def run(*line):
        monkeypatch.setattr(sys, "argv", ["ipufit", *line])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code, *capsys.readouterr())

    yield run
    uninstall()


@pytest.fixture
def as_json(run):
    def as_json(*line):
        status, out, err = run("plan", "--json", *line)
        assert status == 0, err
        return json.loads(out)

    return as_json


# The command --------------------------------------------------------------------------


def test_it_names_its_commands_and_its_version(run):
    status, out, _ = run()
    assert status == 0
    assert "launch       run a script in several processes" in out
    status, _, err = run("lunch")
    assert status == 2
    assert "'lunch' (choose from" in err
    assert run("--version")[1] == f"{ipufit.__version__}\n"
    assert "models:make" in run("plan", "--help")[1]


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_has_eighty_columns(run, monkeypatch, columns, command):
    monkeypatch.setenv("COLUMNS", columns)
    _, out, err = run(*command.split(), "--help")
    lines = (out + err).splitlines()
    assert len(lines) >= 5
    assert max(map(len, lines)) <= 80


def test_a_plan_has_eighty_columns(run, written):
    status, out, err = run("plan", f"{written(PLANNED + CALL)}.py")
    assert status == 0, err
    lines = out.splitlines()
    assert "Memory:" in lines
    assert max(map(len, lines)) <= 80


def test_starting_it_waits_for_no_torch():
    code = "import sys, ipufit.__main__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Programs, up to their first fit ------------------------------------------------------


@pytest.mark.parametrize("form", ["{}.py", "-m {}", "{}:make", "{}:Home.make"])
def test_scripts_modules_and_functions_end_at_their_first_fit(
    tmp_path, run, written, form
):
    other = written("size = 20")
    source = FIT.replace("=20", "=size")
    if "make" in form:
        body = source.replace("print('begins')\n", "").replace("\n", "\n    ")
        source = f"def make():{body}\nclass Home:\n    make = staticmethod(make)\n"
    name = written(f"from {other} import size\n{source}")
    status, out, err = run("plan", *form.format(name).split())
    assert status == 0, err
    assert out.startswith("Plan of Sequential with AdamW, on 2 IPUs: Mk2 (GC200)")
    assert "An epoch of 100 samples is 1 call, 5 updates." in out
    assert err.startswith("begins") == ("make" not in form)
    assert "trained" not in err
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == sorted([f"{other}.py", f"{name}.py"])


@pytest.mark.parametrize("data", ["x", "x, y"])
def test_a_function_gives_model_and_data(as_json, written, data):
    name = written(f"{PLANNED}def make():\n    return model, {data}\n")
    plan = as_json("--batch-size", "40", f"{name}:make")
    assert plan["epoch"]["batch"]["gradient_accumulation"] == 10
    assert plan["epoch"]["num_samples"] == 100


@pytest.mark.parametrize("size", [20, 21])
def test_a_script_that_catches_everything_has_called_fit(run, written, size):
    caught = f"try:\n    {CALL.replace('20', str(size))}except:\n    pass\n"
    status, out, err = run("plan", f"{written(PLANNED + caught)}.py")
    assert (status, out == "") == ((0, False) if size == 20 else (2, True))
    assert ("batch_size=21" in err) == (size == 21)


MADE = """
def broken():
    1 / 0
def other():
    return 3
def many():
    return 1, 'x', 3, 4
"""
MAKE = PLANNED + "def make():\n    return model\n"
BARE = PLANNED.replace("model.compile", "#") + "def make():\n    return model, x, y\n"
WITHOUT = "ended with {} before it called fit"
ENDLESS = "import time\nwhile True: time.sleep(0.01)"


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("", "absent.py", r"There is no script 'absent\.py'"),
        ("", "absent:make --fast", r"without arguments\. Got --fast"),
        ("", "absent:make", "There is no module 'absent', neither"),
        ("", "-m json.absent", "There is no module 'json.absent'"),
        ("", "code/absent.py:make", "'code/absent.py' is a file.*pass absent:make."),
        (PLANNED, "{}.py", "ended before it called fit"),
        ("raise SystemExit(3)", "{}.py", WITHOUT.format(3)),
        ("1 / 0", "{}.py", WITHOUT.format(1)),
        ("x = (1", "{}.py", "SyntaxError: .*" + WITHOUT.format(1)),
        (ENDLESS, "--time-limit 0.2 {}.py", "0.2 seconds and hasn't called fit"),
        (ENDLESS, "--time-limit 0 {}.py", "'0' is not a number of seconds above 0"),
        (MADE, "{}:nothing", "has no function 'nothing'"),
        (MADE, "{}:broken", "line 3, in broken.*ZeroDivisionError"),
        (MADE, "{}:other", "a compiled IPUModel with its data: .* It has returned int"),
        (MADE, "{}:many", r"It has returned \(int, str, int, int\)\."),
        (MAKE, "{}:make", "returns a model and no data"),
        (BARE, "{}:make", r"You must call compile\(\)"),
        (FIT.replace("(8, 3)", "(7, 3)"), "{}.py", r"inputs of float32 \[4, 4\]"),
        (FIT, "--device mk9 {}.py", "Unknown kind of IPU 'mk9'"),
        (FIT, "--save plan.gif {}.py", r"or \.pdf"),
    ],
)
def test_what_cannot_be_planned_ends_with_2(run, written, source, line, message):
    status, out, err = run("plan", *line.format(written(source)).split())
    assert (status, out) == (2, "")
    assert "ipufit plan: " in err
    assert re.search(message, err, re.DOTALL), err
    assert ("Traceback" in err) == (source == "1 / 0" or "broken" in line)
    assert not re.search(r"cli\.py|runpy", err)  # the user's lines only


@pytest.mark.parametrize(
    ("form", "source"),
    [("{}.train:make", "import absent_one"), ("-m {}.train", "1 / 0")],
)
def test_a_module_that_fails_is_told_from_none(tmp_path, run, source, form):
    """Where its import ends with an error, the traceback leads to the line."""
    folder = tmp_path / f"package_{next(_number)}"
    folder.mkdir()
    (folder / "__init__.py").write_text(source, "utf-8")
    (folder / "train.py").write_text(FIT, "utf-8")
    status, _, err = run("plan", *form.format(folder.name).split())
    assert status == 2
    assert re.search(r"ended with 1|can't be imported", err)
    assert source in err


# `ipufit check` -----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}.py", "-m {}", "{}:make"])
def test_what_is_refused_ends_with_1(tmp_path, run, written, form):
    name = written(REFUSED)
    status, out, err = run("check", *form.format(name).split())
    assert status == 1, err
    assert f"{name}.py:8" in out
    assert "Doesn't run: 1 refused." in out
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.py"]
    status, out, err = run("check", "absent.py")
    assert (status, out) == (2, "")
    assert "ipufit check: There is no script 'absent.py'" in err


def test_a_fine_script_ends_with_0_and_its_words_are_apart(run, written):
    name = written(FINE)
    status, out, err = run("check", "--json", f"{name}.py", "--fast", "3")
    assert status == 0, err
    data = json.loads(out)
    assert data["is_refused"] is False
    assert data["title"] == "Net, 16 samples per call"
    assert err == "begins ['--fast', '3']\n"
    for target in (f"{name}.py", f"{name}:make"):
        status, out, err = run("check", "--json", "--batch-size", "12", target)
        assert status == 0, err
        assert json.loads(out)["title"] == "Net, 12 samples per call"


def test_scripts_of_poptorch_get_the_emulator(run, written):
    line = "poptorch.ipu_print_tensor(y) if poptorch.isRunningOnIpu() else None"
    name = written("import poptorch\n" + CHECKED.format(line=line))
    status, _, err = run("check", f"{name}.py")
    assert status == 0, err


# `ipufit plan` ------------------------------------------------------------------------


def test_numbers_come_as_json(as_json, written):
    name = f"{written(FIT)}.py"
    plan = as_json(name)
    assert plan["epoch"]["batch"]["gradient_accumulation"] == 5
    assert [memory["parameters"] for memory in plan["memory"]] == [160, 108]
    assert plan["memory"][0]["gradients"] == {"value": 128, "least": 128, "most": 160}
    assert [stage["names"] for stage in plan["stages"]] == [["0"], ["1"]]
    assert plan["num_ipus"] == 2
    assert plan["choices"][0]["change"] == ""
    assert plan["device"]["num_tiles"] == 1472
    assert as_json("--device", "mk1", name)["device"]["num_tiles"] == 1216


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("batch_size=20, validation_split=0.2", "An epoch of 80 samples is"),
        ("batch_size=20, steps_per_epoch=12", "240 samples is .* 12 updates.\n"),
        ("batch_size=200, steps_per_epoch=3", "fit will refuse this data"),
    ],
)
def test_an_epoch_has_the_samples_that_fit_is_given(run, written, arguments, told):
    name = written(FIT.replace("batch_size=20", arguments))
    status, out, err = run("plan", f"{name}.py")
    assert status == 0, err
    assert re.search(told, out), out


def test_a_generator_gives_its_first_batch(as_json, written):
    def plan_with(data):
        name = written(FIT.replace("x, y, batch", f"{data}, steps_per_epoch=3, batch"))
        return as_json(f"{name}.py")

    of_batches = plan_with("((x[:20], y[:20]) for _ in range(3))")
    of_tensors = plan_with("x, y")
    for one in ("memory", "bubble"):
        assert of_batches[one] == of_tensors[one]
    for one in ("num_samples", "stages", "is_padding"):
        assert of_batches["epoch"][one] == of_tensors["epoch"][one]


def test_pictures_are_printed_and_saved(tmp_path, run, written, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    name = f"{written(FIT)}.py"
    _, out, _ = run("plan", "--pictures", name)
    lines = out.splitlines()
    assert lines[0] == "Plan of Sequential with AdamW, on 2 IPUs: Mk2 (GC200)"
    assert "Pipeline of 2 stages, 5 micro-batches in training" in lines
    assert "1 FB    . 0 1 2 3 4 ." in lines
    assert max(map(len, lines)) <= 60
    pytest.importorskip("matplotlib")
    _, out, _ = run("plan", "--save", "plan.svg", "--json", name)
    assert json.loads(out)["num_ipus"] == 2
    assert "Plan of Sequential" in (tmp_path / "plan.svg").read_text("utf-8")
