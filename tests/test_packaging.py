# SPDX-License-Identifier: Apache-2.0
"""The wheel holds all of the package, its types and its licence."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed():
    try:
        distribution = importlib.metadata.distribution("ipufit")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("ipufit isn't installed")
    files = {file.as_posix() for file in distribution.files or ()}
    if "ipufit/__init__.py" not in files:
        pytest.skip("ipufit is installed as a link to the checkout")
    return files


def test_every_module_and_the_type_marker_are_installed(installed):
    expected = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "ipufit").rglob("*.py")
    }
    assert len(expected) > 1
    assert expected | {"ipufit/py.typed"} <= installed


def test_the_licence_is_installed(installed):
    assert any(file.endswith("licenses/LICENSE") for file in installed)


def test_nothing_beside_the_package_and_its_command_is_installed(installed):
    outside = [file for file in installed if file.startswith("..")]
    assert [PurePath(file).stem for file in outside] == ["ipufit"]  # the command
    tops = {file.split("/")[0] for file in installed} - {".."}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ipufit"}
