# SPDX-License-Identifier: Apache-2.0
"""Each example runs as a user would run it, and its last line holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.test_gallery import SCRIPTS as GALLERY

EXAMPLES = Path(__file__).parent.parent / "examples"

# Script -> arguments that make it quick, what its last line says, and the least value.
SCRIPTS = {
    "mnist_pipeline.py": (
        ["--data", "digits"],
        r"test accuracy: (\d+\.\d\d)%",
        90.0,
    ),
    "scaling_curve.py": (
        ["--layouts", "1x1", "2x2", "--epochs", "1"],
        r"equal curves: (\d) of \d",
        2.0,
    ),
    "resume.py": ([], r"equal weights: (\d+\.\d\d)%", 100.0),
    "several_processes.py": (
        ["--epochs", "1"],
        r"samples that one process has read: (\d+\.\d\d)%",
        100.0,
    ),
}
MODULES = {"handwriting.py"}  # which the scripts import


def run(script, *arguments, runner=()):
    environment = {
        **os.environ,
        "IPUFIT_BACKEND": os.environ.get("IPUFIT_BACKEND", "emulator"),
        "PYTHONPATH": str(EXAMPLES.parent),  # the checkout, installed or not
    }
    return subprocess.run(
        [sys.executable, *runner, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=EXAMPLES.parent,
        check=False,
    )


def test_every_example_is_tested():
    tested = {*SCRIPTS, *GALLERY, *MODULES}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_prints_what_it_promises(script):
    arguments, pattern, least = SCRIPTS[script]
    done = run(script, *arguments)
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(pattern, done.stdout.splitlines()[-1])
    assert match is not None, done.stdout
    assert float(match.group(1)) >= least


def test_a_script_of_poptorch_fails_as_on_a_pod_where_ipus_are_missing():
    runner = ["-m", "ipufit.emulator", "--ipus", "1"]
    done = run("poptorch_script.py", runner=runner)
    assert done.returncode != 0
    assert "Failed to acquire 2 IPU(s)" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    "switches",
    [
        ["--strategy", "sharded", "--gradient-accumulation", "2"],
        ["--offload-optimiser", "--debug", "--test-batch-size", "32"],
        ["--profile", "--batch-size", "20", "--learning-rate", "0.002"],
    ],
)
def test_the_tutorials_switches_work(switches, tmp_path):
    common = ["--data", "digits", "--epochs", "1", "--profile-dir", str(tmp_path)]
    done = run("mnist_pipeline.py", *common, *switches)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^test accuracy: \d+\.\d\d%$", done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_too_little_accumulation_for_four_stages_is_explained():
    done = run("mnist_pipeline.py", "--data", "digits", "--gradient-accumulation", "5")
    assert done.returncode != 0
    assert "gradient_accumulation=5 is too small for a pipeline of 4" in done.stderr


def test_auto_says_that_it_fell_back(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'examples')\n"
        "import handwriting\n"
        "def refuse(folder): raise OSError('no such host\\nreally')\n"
        "handwriting._mnist = refuse\n"
        "print(handwriting.load_digits('auto', '.').origin)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "MNIST can't be had (no such host) Using scikit-learn's digits instead.",
        "scikit-learn's digits",
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mnist", "README.md says how to install torchvision"),
        ("digits", "pip install scikit-learn"),
    ],
)
def test_a_missing_package_ends_an_example_with_what_to_install(name, said):
    code = (
        "import sys; sys.path.insert(0, 'examples')\n"
        "sys.modules.update({'torchvision': None, 'sklearn.datasets': None})\n"
        f"import handwriting; handwriting.load_digits({name!r}, 'data')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        check=False,
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
def test_torchvision_reads_mnist_in_its_layout(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 7), ("t10k", 3)):
        header = bytes([0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 28, 0, 0, 0, 28])
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + bytes(count * 784))
        labels = bytes([0, 0, 8, 1, 0, 0, 0, count]) + bytes(range(count))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    code = (
        "import sys; sys.path.insert(0, 'examples')\n"
        "from handwriting import load_digits\n"
        f"digits = load_digits('mnist', {str(tmp_path)!r})\n"
        "print(len(digits.train), len(digits.test), digits.test[2][1].item())\n"
        "print(digits.train.tensors[0].shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["7 3 2", "torch.Size([7, 1, 28, 28])"]
