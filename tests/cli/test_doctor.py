# SPDX-License-Identifier: Apache-2.0
"""`ipufit doctor` on machines of several kinds, which are made up of files."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from ipufit import doctor
from tests.interpreters import run_python

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")

SEES_IPUS = """
__version__ = "3.4.0"
def ipuHardwareIsAvailable(count=1): return count <= 16
def ipuHardwareVersion(): return 21
"""
SEES_NONE = """
__version__ = "3.4.0"
def ipuHardwareIsAvailable(count=1): return False
"""
BROKEN = "raise ImportError('libpopart.so: cannot open shared object file')\n"


def examined(tmp_path, poptorch=None, **variables):
    """What a machine's doctor says by names, and its exit status.

    Args:
        poptorch: Source of the PopTorch that is installed there; None for none.
        variables: Environment variables of ipufit's and PopTorch's.
    """
    if poptorch is not None:
        package = tmp_path / "poptorch"
        package.mkdir()
        (package / "__init__.py").write_text(poptorch, "utf-8")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(doctor._PREFIXES)}
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**kept, "PYTHONPATH": path, **variables}
    done = run_python("-m", "ipufit", "doctor", "--json", env=environment)
    assert not done.stderr, done.stderr
    return {one["name"]: one for one in json.loads(done.stdout)}, done.returncode


def test_without_poptorch_the_emulator_runs_and_nothing_is_wrong(tmp_path):
    found, status = examined(tmp_path)
    assert status == 0
    assert found["trial"]["value"] == "a small model runs"
    assert found["back end"]["value"] == "emulator: PopTorch isn't installed"
    assert "Poplar SDK" in found["back end"]["advice"]
    assert found["poptorch"]["value"] == "missing"


def test_a_folder_of_that_name_is_no_poptorch(tmp_path):
    (tmp_path / "poptorch").mkdir()
    found, status = examined(tmp_path)
    assert status == 0
    assert found["back end"]["value"] == "emulator: PopTorch isn't installed"
    assert found["poptorch"]["value"] == "missing"


def test_a_host_with_ipus_and_without_poptorch_is_wrong(tmp_path):
    wheel = "poptorch-3.3.0+113432_960e9c294b_ubuntu_20_04-cp38-cp38-linux_x86_64.whl"
    (tmp_path / "poplar").mkdir()
    (tmp_path / wheel).write_text("")
    variables = {"POPLAR_SDK_ENABLED": str(tmp_path / "poplar")}
    found, status = examined(tmp_path, **variables)
    assert status == 1
    assert found["back end"]["is_wrong"]
    assert "host has IPUs (POPLAR_SDK_ENABLED)" in found["back end"]["advice"]
    assert "Python 3.8" in found["back end"]["advice"]
    assert f"pip install {tmp_path / wheel}" in found["back end"]["advice"]
    _, status = examined(tmp_path, IPUFIT_BACKEND="emulator", **variables)
    assert status == 0


def test_poptorch_and_its_ipus_are_found(tmp_path):
    found, status = examined(tmp_path, SEES_IPUS)
    assert status == 0
    assert found["back end"]["value"] == f"PopTorch 3.4.0, in {tmp_path / 'poptorch'}"
    assert found["IPUs"]["value"] == "up to 16 for one program, of version 21"
    is_floor = sys.version_info[:2] == (3, 8)
    assert ("built for Python 3.8" in found["Python"]["advice"]) is not is_floor


@pytest.mark.parametrize(
    ("source", "variables", "name", "text"),
    [
        (SEES_NONE, {}, "IPUs", "none"),
        (BROKEN, {}, "back end", "PopTorch can't be imported: ImportError: libpopart"),
        (None, {"IPUFIT_BACKEND": "poptorch"}, "back end", "none"),
        (SEES_IPUS, {"IPUFIT_BACKEND": "ipu"}, "back end", "none"),
        (
            *(None, {"IPUFIT_EMULATOR_IPUS": "x"}, "trial"),
            "a small model fails: Error: 'poptorch_py_error': IPUFIT_EMULATOR_IPUS='x'",
        ),
    ],
    ids=[
        *("no IPU", "a broken PopTorch", "none, though asked for", "an unknown word"),
        "a word for a number of IPUs",
    ],
)
def test_what_is_wrong_ends_with_status_1(tmp_path, source, variables, name, text):
    found, status = examined(tmp_path, source, **variables)
    assert status == 1
    assert found[name]["is_wrong"]
    assert found[name]["value"].startswith(text)
    assert found[name]["advice"]
    assert ("trial" in found) == (name == "trial")


def test_the_emulator_can_be_chosen_beside_a_broken_poptorch(tmp_path):
    found, status = examined(tmp_path, BROKEN, IPUFIT_BACKEND="emulator")
    assert status == 0
    assert found["back end"]["value"] == "emulator: IPUFIT_BACKEND=emulator asks for it"
    assert found["poptorch"]["value"] == "installed"
    assert found["IPUFIT_BACKEND"]["value"] == "emulator"


def test_secrets_are_not_shown(tmp_path):
    found, _ = examined(tmp_path, IPUOF_VIPU_API_TOKEN="abc", IPUOF_LOG_LEVEL="INFO")
    assert found["IPUOF_VIPU_API_TOKEN"]["value"] == "set"
    assert found["IPUOF_LOG_LEVEL"]["value"] == "INFO"


def test_every_extra_for_users_is_looked_for():
    section = PYPROJECT.partition("[project.optional-dependencies]\n")[2]
    names = re.findall(r"^(\w+) = \[", section.partition("\n[")[0], re.M)
    assert set(doctor.EXTRAS) == set(names) - {"examples", "dev", "docs"}
    for extra, package in doctor.EXTRAS.items():
        (packages,) = re.findall(rf"^{extra} = \[(.*)\]$", section, re.M)
        assert f'"{package}>=' in packages


def test_people_read_lines_with_what_to_do(capsys):
    with pytest.raises(SystemExit):
        doctor.main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Back end"
    assert any(line.split()[:1] == ["torch"] for line in lines)
    words = ["one", "has", "eleven", "letters"] * 12
    long = doctor.Finding("IPUs", "IPUs", " ".join(words), " ".join(words))
    wrapped = doctor.in_words([long]).splitlines()
    assert max(map(len, wrapped)) <= 80
    assert " ".join(wrapped).split() == ["IPUs", "IPUs", *words, "->", *words]
    wrong = doctor.Finding("IPUs", "IPUs", "none", "look at gc-monitor", is_wrong=True)
    assert (
        doctor.in_words([wrong])
        == "IPUs\n! IPUs  none\n        -> look at gc-monitor\n"
    )
