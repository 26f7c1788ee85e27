# SPDX-License-Identifier: Apache-2.0
"""The changelog is about the version that the package says it has."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

import ipufit

CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"
HEADING = re.compile(r"^## \[(?P<name>[^]]+)\](?: - \d{4}-\d{2}-\d{2})?$", re.MULTILINE)


def agrees(changelog, version):
    """Whether the newest heading is right for a version, `X.Y.Z` or `X.Y.Z.devN`."""
    newest, *older = HEADING.findall(changelog)
    released, development, _ = version.partition(".dev")
    if development:
        return newest == "Unreleased" and released not in older
    return newest == released or (newest == "Unreleased" and older[:1] == [released])


def test_the_changelog_agrees_with_the_version():
    assert agrees(CHANGELOG.read_text(encoding="utf-8"), ipufit.__version__)


@pytest.mark.parametrize(
    ("headings", "version", "expected"),
    [
        (["[Unreleased]"], "0.1.0.dev0", True),
        (["[0.1.0] - 2024-01-31"], "0.1.0.dev0", False),
        (["[Unreleased]", "[0.1.0] - 2024-01-31"], "0.1.0.dev0", False),
        (["[Unreleased]", "[0.1.0] - 2024-01-31"], "0.2.0.dev0", True),
        (["[Unreleased]"], "0.1.0", False),
        (["[Unreleased]", "[0.1.0] - 2024-01-31"], "0.1.0", True),
        (["[0.2.0] - 2024-02-29", "[0.1.0] - 2024-01-31"], "0.1.0", False),
    ],
)
def test_headings_that_agree_and_that_do_not(headings, version, expected):
    changelog = "\n\n".join(f"## {heading}" for heading in headings)
    assert agrees(changelog, version) is expected


def test_the_installed_metadata_has_the_same_version():
    try:
        installed = importlib.metadata.version("ipufit")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("ipufit is imported from the checkout, it isn't installed")
    assert installed == ipufit.__version__
