# SPDX-License-Identifier: Apache-2.0
"""The gallery's scripts, run in this process: each prints the number that it promises.

`tests/test_examples.py` has the scripts that need a process of their own.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ipufit

EXAMPLES = Path(__file__).parent.parent / "examples"

# Script -> arguments that make it quick, what its last line says, and the least value.
SCRIPTS = {
    "first_steps.py": ([], r"test accuracy: (\d+\.\d\d)%", 96.0),
    "ctc.py": (
        ["--images", "1280", "--epochs", "5"],
        r"read without any error: (\d+\.\d)%",
        25.0,
    ),
    "fine_tuning.py": (
        ["--images", "640", "--fine-tune-epochs", "3"],
        r"test accuracy: (\d+\.\d\d)%",
        50.0,
    ),
    "half_precision.py": (
        ["--epochs", "6"],
        r"error of float16 that loss scaling removes: (\d+\.\d)%",
        95.0,
    ),
    "output_modes.py": (
        ["--epochs", "3"],
        r"modes that count every sample: (\d) of 4",
        2.0,
    ),
    "own_options.py": (["--epochs", "3"], r"ways with equal losses: (\d) of 3", 3.0),
    "check.py": (
        [],
        r"faults that would each have ended a compilation: (\d)",
        5.0,
    ),
    "plan.py": (
        [],
        r"memory that the largest stage is known to take: (\d+\.\d)%",
        37.5,
    ),
    "automatic_split.py": (
        [],
        r"work of the slowest stage that is saved: (\d+\.\d)%",
        35.0,
    ),
    "replicas.py": (["--epochs", "3"], r"equal curves: (\d) of 4", 4.0),
    "text_classification.py": (
        ["--epochs", "2"],
        r"test accuracy: (\d+\.\d\d)%",
        50.0,
    ),
    "time_series.py": (
        ["--weeks", "8", "--epochs", "6"],
        r"less error than the better naive forecast: (\d+\.\d)%",
        20.0,
    ),
    "annealed_value.py": (
        ["--epochs", "12"],
        r"explained by 32 bits: (\d+\.\d\d)%",
        30.0,
    ),
    "bert.py": (["--epochs", "4"], r"test accuracy: (\d+\.\d\d)%", 75.0),
    "early_stopping.py": (
        [],
        r"accuracy of the reloaded model: (\d+\.\d\d)%",
        65.0,
    ),
    "gan.py": (
        ["--epochs", "12"],
        r"generated points near the ring: (\d+\.\d\d)%",
        80.0,
    ),
    "lightning_module.py": (
        ["--epochs", "5"],
        r"validation accuracy: (\d+\.\d\d)%",
        80.0,
    ),
    "log_from_step.py": (
        ["--epochs", "5"],
        r"active hidden units: (\d+\.\d\d)%",
        15.0,
    ),
    "observing.py": (
        ["--epochs", "1"],
        r"orders of magnitude lost: (\d\.\d\d)",
        3.0,
    ),
    "poptorch_script.py": (
        ["--epochs", "4"],
        r"test accuracy: (\d+\.\d\d)%",
        75.0,
    ),
    "optuna_sweep.py": (["--trials", "5"], r"best accuracy: (\d+\.\d\d)%", 80.0),
}
# Script -> a package that it can't do without.
NEEDS = {"bert.py": "transformers", "fine_tuning.py": "torchvision"}


@pytest.fixture
def load(monkeypatch):
    """A function that imports a script by its name; some import others beside them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(sys.modules, "poptorch", ipufit.poptorch)
    if find_spec("torchvision") is not None:
        # Lightning imports it too, and doesn't know what to do beside another torch.
        importlib.import_module("handwriting").import_torchvision()

    def load(script):
        name = f"gallery_{Path(script).stem}"
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / script)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.not_in_mode(reason="a mode has tests of its own, which take less time")
# PopTorch itself calls `state_dict` so; torch 2.0 warns of it.
@pytest.mark.filterwarnings("ignore:Positional args are being deprecated:UserWarning")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_prints_and_draws_what_it_promises(script, load, capsys, tmp_path):
    if script in NEEDS and find_spec(NEEDS[script]) is None:
        pytest.skip(f"needs {NEEDS[script]}")
    arguments, pattern, least = SCRIPTS[script]
    picture = tmp_path / "picture.png"
    draws = find_spec("matplotlib") is not None
    if draws:
        arguments = [*arguments, "--plot", str(picture)]
    returned = load(script).main(arguments)
    last = capsys.readouterr().out.splitlines()[-1]
    match = re.fullmatch(pattern, last)
    assert match is not None, last
    assert float(match.group(1)) >= least
    unit = 100 if "%" in pattern else 1
    assert returned * unit == pytest.approx(float(match.group(1)), abs=0.051)
    assert not draws or picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_what_it_shows_and_how_to_run_it(script, load):
    text = load(script).__doc__
    assert "\nShows " in text
    assert re.search(rf"python (-m ipufit\.emulator )?examples/{script}", text)
    assert "The last line" in text
    assert len((EXAMPLES / script).read_text("utf-8").splitlines()) <= 130


@pytest.mark.parametrize(("script", "package"), NEEDS.items())
def test_a_script_says_which_package_to_install(script, package, load, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=f"pip install {package}"):
        load(script).main([])
