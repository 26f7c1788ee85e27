# SPDX-License-Identifier: Apache-2.0
"""Whenever a writer is killed, there is a usable checkpoint, and no junk for long."""

from __future__ import annotations

import json
from pathlib import Path

from tests.files.killing import ENOUGH
from tests.interpreters import run_python

ROOT = Path(__file__).parent.parent.parent


def test_a_writer_killed_at_random_moments_always_leaves_a_usable_checkpoint(tmp_path):
    done = run_python("-m", "tests.files.killing", tmp_path, "8", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    numbers = seen["numbers"]
    assert numbers == sorted(numbers)  # nothing that was written is lost
    assert numbers[-1] > ENOUGH  # and it did write
    # two of the last, the best, one not yet deleted, and leftovers of one writer
    assert seen["most"] <= 6
    assert len(seen["left"]) <= 3
    assert not [name for name in seen["left"] if name.startswith(".")]
