# SPDX-License-Identifier: Apache-2.0
"""The sdist and the wheel: the same bytes twice, with all that their users need."""

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

ROOT = Path(__file__).parents[2]
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
def test_the_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(str(wheel)) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    metadata = f"ipufit-{ipufit.__version__}.dist-info"
    assert tops == {"ipufit", metadata}
    own = {name for name in names if not name.startswith(metadata)}
    sources = {
        path.relative_to(ROOT).as_posix()
        for kind in ("py", "pyi", "tsv")
        for path in (ROOT / "ipufit").rglob(f"*.{kind}")
    }
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


# The changelog ------------------------------------------------------------------------

CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")


def agrees(changelog, version):
    """Whether the newest heading is right for a version, `X.Y.Z` or `X.Y.Z.devN`."""
    heading = r"^## \[([^]]+)\](?: - \d{4}-\d{2}-\d{2})?$"
    newest, *older = re.findall(heading, changelog, re.M)
    released, development, _ = version.partition(".dev")
    if development:
        return newest == "Unreleased" and released not in older
    return newest == released or (newest == "Unreleased" and older[:1] == [released])


def test_the_changelog_is_about_this_version():
    assert agrees(CHANGELOG, ipufit.__version__)
    assert not agrees("## [0.2.0] - 2024-02-29\n\n## [Unreleased]", "0.1.0")
    assert not agrees("## [Unreleased]\n\n## [0.1.0] - 2024-01-31", "0.1.0.dev0")
