# SPDX-License-Identifier: Apache-2.0
"""Whenever a writer is killed, there is a usable checkpoint, and no junk for long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.files.killing import ENOUGH
from tests.interpreters import run_python

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    done = run_python("-m", "tests.files.killing", folder, "8", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_writer_killed_at_random_moments_always_leaves_a_usable_checkpoint(seen):
    seen = seen["random"]
    numbers = seen["numbers"]
    assert numbers == sorted(numbers)  # nothing that was written is lost
    assert numbers[-1] > ENOUGH  # and it did write
    # two of the last, the best, one not yet deleted, and leftovers of one writer
    assert seen["most"] <= 6
    assert len(seen["left"]) <= 3
    assert not [name for name in seen["left"] if name.startswith(".")]


def test_a_save_killed_before_any_of_its_steps_leaves_the_old_or_the_new(seen):
    gains = seen["store"]["gains"]
    assert gains == sorted(gains)  # up to some step the old one, then the new one
    assert set(gains) == {0, 1}
    assert len(gains) > 20


def test_an_overwrite_killed_before_any_of_its_steps_leaves_the_old_or_new(seen):
    seen = seen["path"]
    assert seen["gains"] == sorted(seen["gains"])
    assert set(seen["gains"]) == {0, 1}
    assert len(seen["gains"]) > 20
    assert seen["left"] == ["saved"]
