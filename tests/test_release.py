# SPDX-License-Identifier: Apache-2.0
"""The sdist and the wheel: the same bytes twice, with all that their users need."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import ipufit

ROOT = Path(__file__).parent.parent
EPOCH = "1700000000"
# Newer Pythons ask for it, older ones don't know it.
CAREFULLY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
NEEDED = [name for name in ("hatchling", "hatch_fancy_pypi_readme") if find_spec(name)]

pytestmark = pytest.mark.not_in_mode(reason="it runs no program")
needs_hatchling = pytest.mark.skipif(
    len(NEEDED) < 2, reason="hatchling and its plugin aren't installed"
)


def build(source, output, kind, epoch=EPOCH):
    """Build a `wheel` or an `sdist` of a folder, and return its path."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(output)],
        cwd=str(source),
        env={**os.environ, "SOURCE_DATE_EPOCH": epoch},
        check=True,
        capture_output=True,
    )
    (made,) = output.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    """The sdist's folder, with times and permissions that aren't the checkout's."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(str(sdist)) as archive:
        archive.extractall(str(folder), **CAREFULLY)
    (top,) = folder.iterdir()
    for path in top.rglob("*"):
        os.utime(str(path), (2e9, 2e9))
        if path.is_file():
            path.chmod(path.stat().st_mode & 0o700)
    return top


@needs_hatchling
def test_the_sdist_builds_itself_and_the_wheel_again(sdist, wheel, unpacked, tmp_path):
    again = build(unpacked, tmp_path / "sdist", "sdist")
    assert again.name == sdist.name
    assert again.read_bytes() == sdist.read_bytes()
    other = build(unpacked, tmp_path / "wheel", "wheel")
    assert other.name == wheel.name
    assert other.read_bytes() == wheel.read_bytes()


@needs_hatchling
def test_the_date_of_the_source_is_that_of_the_files(wheel, tmp_path):
    with zipfile.ZipFile(str(wheel)) as archive:
        assert {one.date_time[0] for one in archive.infolist()} == {2023}
    later = build(ROOT, tmp_path, "wheel", epoch="1800000000")
    with zipfile.ZipFile(str(later)) as archive:
        assert {one.date_time[0] for one in archive.infolist()} == {2027}


@needs_hatchling
def test_the_sdist_has_every_file_of_the_repository(unpacked):
    if not (ROOT / ".git").exists():
        pytest.skip("there is no repository to compare with")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=str(ROOT), capture_output=True, text=True, check=True
    )
    expected = {one for one in listed.stdout.splitlines() if (ROOT / one).is_file()}
    found = {
        path.relative_to(unpacked).as_posix()
        for path in unpacked.rglob("*")
        if path.is_file()
    }
    assert len(expected) > 300
    assert found - expected == {"PKG-INFO"}
    assert expected - found == set()


@needs_hatchling
def test_make_knows_its_targets_in_the_sdist(unpacked):
    done = subprocess.run(
        ["make", "-n", "demo", "test"],
        cwd=str(unpacked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "-e demo" in done.stdout
    assert "-e lint,tests,keras" in done.stdout
    for script in ("find-python", "find-poptorch", "matrix", "run"):
        assert os.access(str(unpacked / ".ci" / script), os.X_OK)


@needs_hatchling
def test_the_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(str(wheel)) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    metadata = f"ipufit-{ipufit.__version__}.dist-info"
    assert tops == {"ipufit", metadata}
    sources = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "ipufit").rglob("*.py")
    }
    own = {name for name in names if not name.startswith(metadata)}
    assert own == {*sources, "ipufit/py.typed"}
    assert f"{metadata}/licenses/LICENSE" in names


# The index page -----------------------------------------------------------------------


def description(wheel):
    with zipfile.ZipFile(str(wheel)) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("/METADATA"))
        text = archive.read(name).decode("utf-8")
    message = email.message_from_string(text)
    assert message["Version"] == ipufit.__version__
    assert message["Description-Content-Type"] == "text/markdown"
    return message.get_payload()


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


@needs_hatchling
def test_the_index_page_has_no_link_that_leads_nowhere(wheel):
    page = without_code(description(wheel))
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert [one for one in targets if not one.startswith(("https://", "#"))] == []
    readme = without_code((ROOT / "README.md").read_text("utf-8"))
    files = re.findall(r"\]\((?!https?:|#)([^)#]+)", readme)
    assert len(files) > 10
    assert [one for one in files if not one.endswith(IMAGES) and one not in page] == []


IMAGES = (".png", ".svg", ".jpg", ".gif")


@needs_hatchling
def test_the_index_page_has_the_code_as_it_is(wheel):
    def blocks(text):
        return re.findall(r"^```.*?^```", text, re.M | re.S)

    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(blocks(readme)) >= 3
    assert blocks(description(wheel)) == blocks(readme)


# What stands beside the package -------------------------------------------------------


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    (version,) = re.findall(r"^version: (.+)$", citation, re.M)
    assert version == ipufit.__version__.partition(".dev")[0]
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    (licence,) = re.findall(r'^license = "(.+)"$', pyproject, re.M)
    assert f"\nlicense: {licence}\n" in citation
    (keywords,) = re.findall(r"^keywords = \[(.+)\]$", pyproject, re.M)
    assert re.findall(r"^  - (\w+)$", citation, re.M) == re.findall(r"\w+", keywords)


def test_the_workflow_runs_what_there_is():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"run: make ([\w-]+)", workflow)
    assert len(targets) >= 3
    assert set(targets) <= set(re.findall(r"^([\w-]+):", makefile, re.M))


@needs_hatchling
@pytest.mark.skipif(find_spec("twine") is None, reason="twine isn't installed")
def test_the_checkers_have_nothing_to_say(sdist, wheel):
    for command in (["twine", "check", "--strict"], ["check_wheel_contents"]):
        files = [wheel] if "wheel" in command[0] else [sdist, wheel]
        done = subprocess.run(
            [sys.executable, "-m", *command, *map(str, files)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
