# SPDX-License-Identifier: Apache-2.0
"""Each example prints the number that it promises, and the page of examples has it."""

import importlib.util
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ipufit

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
WRITER = runpy.run_path(str(ROOT / "tools" / "gallery.py"))
ADVICE = "the page is outdated: run `python tools/gallery.py`"
ACCURACY = "test accuracy: #%"

# Script -> arguments that make it quick, its last line, and the least value of #.
SCRIPTS = {
    "mnist_pipeline.py": ("--data digits --epochs 2", ACCURACY, 80),
    "scaling_curve.py": ("--layouts 1x1 2x2 --epochs 1", "equal curves: # of 2", 2),
    "resume.py": ("", "equal weights: #%", 100),
    "several_processes.py": (
        *("--epochs 1", "samples that one process has read: #%", 100),
    ),
    "first_steps.py": ("", ACCURACY, 96),
    "ctc.py": ("--images 1280 --epochs 5", "read without any error: #%", 25),
    "fine_tuning.py": ("--images 640 --fine-tune-epochs 3", ACCURACY, 50),
    "half_precision.py": (
        *("--epochs 6", "error of float16 that loss scaling removes: #%", 95),
    ),
    "output_modes.py": ("--epochs 3", "modes that count every sample: # of 4", 2),
    "own_options.py": ("--epochs 3", "ways with equal losses: # of 3", 3),
    "check.py": ("", "faults that would each have ended a compilation: #", 5),
    "plan.py": ("", "memory that the largest stage is known to take: #%", 37.5),
    "automatic_split.py": ("", "work of the slowest stage that is saved: #%", 35),
    "replicas.py": ("--epochs 3", "equal curves: # of 4", 4),
    "text_classification.py": ("--epochs 2", ACCURACY, 50),
    "time_series.py": (
        *("--weeks 8 --epochs 6", "less error than the better naive forecast: #%", 20),
    ),
    "annealed_value.py": ("--epochs 12", "explained by 32 bits: #%", 30),
    "bert.py": ("--epochs 4", ACCURACY, 75),
    "early_stopping.py": ("", "accuracy of the reloaded model: #%", 65),
    "segmentation.py": ("--epochs 4", "test IoU of the U-Net: #%", 60),
    "gpt.py": ("--epochs 2", "letters foretold: #%", 32),
    "tabular.py": (*("", "less error than by always predicting the mean: #%", 15),),
    "gan.py": ("--epochs 12", "generated points near the ring: #%", 80),
    "lightning_module.py": ("--epochs 5", "validation accuracy: #%", 80),
    "log_from_step.py": ("--epochs 5", "active hidden units: #%", 15),
    "observing.py": ("--epochs 1", "orders of magnitude lost: #", 3),
    "poptorch_script.py": ("--epochs 4", ACCURACY, 75),
    "optuna_sweep.py": ("--trials 5", "best accuracy: #%", 80),
    "hydra_settings.py": ("fit.epochs=3", ACCURACY, 75),
}
MODULES = {"handwriting.py"}  # which the scripts import
# Script -> a package that it can't do without.
NEEDS = {
    "bert.py": "transformers",
    "fine_tuning.py": "torchvision",
    "hydra_settings.py": "hydra",
    "optuna_sweep.py": "optuna",
    "tabular.py": "pandas",
}


def promised(script, line):
    """The number in a line, which has to be the script's last one."""
    _, form, least = SCRIPTS[script]
    before, _, after = map(re.escape, form.partition("#"))
    # On the page a run may have had more curves than a quick one has.
    after = after.replace(r"of\ 2", r"of\ \d+")
    match = re.fullmatch(rf"{before}(\d+(?:\.\d+)?){after}", line)
    assert match is not None, line
    assert float(match.group(1)) >= least
    return float(match.group(1))


@pytest.fixture
def load(monkeypatch):
    """A function that imports a script by its name; some import others beside them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the processes that a script starts
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
# Matplotlib asks tensors for their values by NumPy 2.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_prints_and_draws_what_it_promises(script, load, capsys, tmp_path):
    if script in NEEDS and find_spec(NEEDS[script]) is None:
        pytest.skip(f"needs {NEEDS[script]}")
    arguments = SCRIPTS[script][0].split()
    picture = tmp_path / "picture.png"
    draws = find_spec("matplotlib") is not None
    if draws:
        arguments += ["--plot", str(picture)]
    returned = load(script).main(arguments)
    number = promised(script, capsys.readouterr().out.splitlines()[-1])
    unit = 100 if "%" in SCRIPTS[script][1] else 1
    assert returned * unit == pytest.approx(number, abs=0.051)
    assert not draws or picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mnist", "says how to install torchvision"),
        ("digits", "pip install scikit-learn"),
    ],
)
def test_without_a_package_images_end_with_what_to_install(name, said, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match=said):
        importlib.import_module("handwriting").load_digits(name, "data")


@pytest.mark.parametrize(("script", "package"), NEEDS.items())
def test_a_script_says_which_package_to_install(script, package, load, monkeypatch):
    pytest.importorskip("sklearn", reason="the digits come with it")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=f"pip install {package}"):
        load(script).main([])


# The page -----------------------------------------------------------------------------


def test_the_page_has_each_script_with_its_last_line_and_a_picture():
    scripts = [script for named in WRITER["SECTIONS"].values() for script in named]
    assert sorted(scripts) == sorted(SCRIPTS)
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, *MODULES}
    rows = re.findall(r"^\| \[.*\]\(.*\) \| .* \| (.*) \| (\d+) \|$", PAGE, re.M)
    results = {
        script: WRITER["Result"](number, float(seconds))
        for script, (number, seconds) in zip(scripts, rows)
    }
    assert WRITER["page"](results) == PAGE, ADVICE
    for script, (number, _) in zip(scripts, rows):
        promised(script, number)
    pictures = list((EXAMPLES / "pictures").iterdir())
    assert {path.stem for path in pictures} == {Path(one).stem for one in scripts}
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size <= WRITER["LARGEST_PICTURE"], path
