# SPDX-License-Identifier: Apache-2.0
"""`python -m ipufit.emulator`: scripts run as under `python`, on the emulator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipufit.emulator import __main__ as command
from ipufit.emulator import uninstall
from ipufit.emulator._switches import STRICT_VARIABLE
from tests.interpreters import run_python

ROOT = Path(__file__).parents[3]
WHO_AM_I = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "folder": sys.path[0],
    "main": sys.modules["__main__"].__dict__ is globals(),
    "spec": __spec__ and __spec__.name,
}))
"""


@pytest.fixture
def emulate(monkeypatch, capsys):
    """Run a command line in this process: exit code, output, errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["emulator", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        try:
            command.main()
            code = 0
        except SystemExit as end:
            code = end.code
        return (code, *capsys.readouterr())

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # scripts may replace it
    yield run
    uninstall()


@pytest.fixture
def write(tmp_path):
    def make(source, name="script.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return path

    return make


def emulated(*arguments, folder):
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    return run_python("-m", "ipufit.emulator", *arguments, cwd=folder, env=path)


def plainly(*arguments, folder):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=str(folder),
        check=False,
    )


def test_a_script_sees_what_it_would_under_python(write, tmp_path):
    script = write(WHO_AM_I)
    arguments = (script, "--ipus", "9", "-m", "--", "--force")
    plain = plainly(*arguments, folder=tmp_path)
    done = emulated(*arguments, folder=tmp_path)
    assert json.loads(done.stdout) == json.loads(plain.stdout)
    assert json.loads(plain.stdout)["argv"][1:] == [
        "--ipus",
        "9",
        "-m",
        "--",
        "--force",
    ]
    (notice,) = done.stderr.splitlines()
    assert "emulated" in notice


def test_a_module_sees_what_it_would_under_python(write, tmp_path):
    write("", "package/__init__.py")
    write(WHO_AM_I, "package/part.py")
    arguments = ("-m", "package.part", "--epochs", "3")
    plain = plainly(*arguments, folder=tmp_path)
    done = emulated(*arguments, folder=tmp_path)
    assert json.loads(done.stdout) == json.loads(plain.stdout)
    assert json.loads(plain.stdout)["spec"] == "package.part"


def test_a_script_uses_poptorch_without_knowing(emulate, write):
    script = write(
        "import poptorch, torch\n"
        "model = poptorch.inferenceModel(torch.nn.ReLU())\n"
        "print(model(torch.tensor([-1.0, 2.0])).tolist(), poptorch.__version__)\n"
    )
    code, output, _ = emulate(script)
    assert (code, output) == (0, "[0.0, 2.0] 3.4.0+emulator\n")


FAILING = {
    "an exit code": "raise SystemExit(3)",
    "an error": "def fail():\n    raise KeyError('x')\nfail()",
    "a chained error": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['x']",
    "a syntax error": "x = = 1",
    "a hook": "import sys\nsys.excepthook = lambda *a: print(a[2].tb_lineno)\n1 / 0",
}


@pytest.mark.parametrize("source", FAILING.values(), ids=FAILING)
def test_it_ends_as_under_python(emulate, write, tmp_path, source):
    script = write(source)
    plain = plainly(script, folder=tmp_path)
    code, output, errors = emulate(script)
    if isinstance(code, str):  # Python prints it on its way out
        code, errors = 1, f"{errors}{code}\n"
    assert plain.returncode
    assert code == plain.returncode
    assert output == plain.stdout
    assert errors.partition("\n")[2] == plain.stderr  # the first line is the notice


@pytest.mark.parametrize(
    ("arguments", "code"), [(["no_such.py"], 2), (["-m", "no_such_module"], 1)]
)
def test_what_is_not_there_is_named(emulate, arguments, code):
    actual, output, errors = emulate(*arguments)
    assert (actual, output) == (code, "")
    assert "no_such" in errors.splitlines()[-1]
    assert "Traceback" not in errors


TWO_MODELS = """
import poptorch, torch
models = [poptorch.inferenceModel(torch.nn.ReLU()) for _ in range(2)]
models[0](torch.ones(1))
print("one runs")
models[1](torch.ones(1))
"""


def test_ipus_are_as_scarce_as_asked(write, tmp_path):
    script = write(TWO_MODELS)
    done = emulated("--ipus", 1, script, folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout == "one runs\n"
    assert "Error: 'poptorch_py_error': Failed to acquire 1 IPU(s)" in done.stderr
    assert "emulated IPUs: 1" in done.stderr.splitlines()[0]


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_a_number_of_ipus_is_1_or_more(emulate, text):
    code, _, errors = emulate("--ipus", text, "script.py")
    assert code == 2
    assert "is not 1 or more" in errors or "expected one argument" in errors


def test_a_real_poptorch_is_emulated_only_by_force(emulate, write):
    write("__version__ = 'real'", "poptorch/__init__.py")
    script = write("import poptorch; print(poptorch.__version__)")
    code, output, errors = emulate(script)
    assert (code, output) == (2, "")
    assert "A real poptorch is installed" in errors
    assert "--force" in errors
    assert emulate("--force", script)[:2] == (0, "3.4.0+emulator\n")


@pytest.mark.parametrize("name", ["IPUFIT_EMULATOR_IPUS", STRICT_VARIABLE])
def test_a_bad_setting_in_the_environment_is_named(emulate, write, monkeypatch, name):
    monkeypatch.setenv(name, "many")
    code, _, errors = emulate(write("print('never')"))
    assert code == 2
    assert f"{name}='many'" in errors


STRICT = """
import poptorch, torch

class Gamma(torch.nn.Module):
    def forward(self, x):
        return x.lgamma()

print(poptorch.inferenceModel(Gamma())(torch.ones(1)).shape)
"""


def test_strict_mode_refuses_what_no_ipu_computes(emulate, write, monkeypatch):
    monkeypatch.delenv(STRICT_VARIABLE, raising=False)
    script = write(STRICT)
    code, output, errors = emulate(script)
    assert (code, output) == (0, "torch.Size([1])\n")
    assert "strict" not in errors
    uninstall()
    code, output, errors = emulate("--strict", script)
    assert (code, output) == (1, "")
    assert "; strict" in errors.splitlines()[0]
    assert "[aten::lgamma]" in errors
