# SPDX-License-Identifier: Apache-2.0
"""What the README says of pip and torchvision holds, on wheels made here."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")

# Looking for the module would have setuptools give up its own distutils, which torch
# needs: it takes that for pip at work.
HAS_PIP = any(one.metadata["Name"] == "pip" for one in metadata.distributions())

pytestmark = [
    pytest.mark.skipif(not HAS_PIP, reason="pip isn't installed"),
    pytest.mark.thorough,
]


def make_wheel(folder, name, version, requires=()):
    """Write a wheel without any module."""
    about = f"{name}-{version}.dist-info"
    about_it = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    about_it += "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {
        f"{about}/METADATA": about_it,
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = hashlib.sha256(text.encode()).digest()
        code = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        record += f"{path},sha256={code},{len(text)}\n"
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(str(wheel), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


@pytest.fixture
def pip(tmp_path):
    """A function that runs pip in an environment with a CPU build of an old torch."""
    index = tmp_path / "index"
    index.mkdir()
    installed = make_wheel(tmp_path, "torch", "2.1.0+cpu")
    make_wheel(index, "torch", "2.1.0")
    make_wheel(index, "torch", "2.2.0")
    make_wheel(index, "torchvision", "0.16.0", ["torch==2.1.0"])
    make_wheel(index, "torchvision", "0.17.0", ["torch>=2.2.0"])
    venv.create(str(tmp_path / "env"))
    command = [sys.executable, "-m", "pip", "--python", str(tmp_path / "env")]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PIP_")
    }
    environment.update(
        PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index)
    )

    def run(arguments):
        done = subprocess.run(
            [*command, *arguments],
            cwd=str(tmp_path),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(["install", str(installed)])
    return run


def versions(pip):
    lines = pip(["list", "--format=freeze"]).splitlines()
    return dict(line.split("==") for line in lines if line.startswith("torch"))


def test_pip_alone_replaces_the_installed_torch(pip):
    pip(["install", "torchvision"])
    assert versions(pip) == {"torch": "2.2.0", "torchvision": "0.17.0"}


def test_the_readme_s_commands_keep_it(pip, tmp_path):
    block = re.search(r"^pip (.+) \| grep \"(.+)\" > (\S+)\npip (.+)$", README, re.M)
    listing, pattern, file, install = block.groups()
    lines = pip(listing.split()).splitlines()
    kept = [line for line in lines if re.match(pattern, line)]
    assert kept == ["torch==2.1.0+cpu"]
    (tmp_path / file).write_text("\n".join(kept), encoding="utf-8")
    pip(install.split())
    assert versions(pip) == {"torch": "2.1.0+cpu", "torchvision": "0.16.0"}
