# SPDX-License-Identifier: Apache-2.0
"""The page for those who come from Keras: both sides say the same."""

import json

import pytest

from tests.docs.test_migrate import Page
from tests.interpreters import run_python

# The page sets no seed, and other starting weights end up to 0.13 apart.
SEED = """
import random
import numpy as np
import torch
random.seed(1), np.random.seed(1), torch.manual_seed(1)
"""
REPORT = """
import json
keys = sorted(history.history), sorted(result), list(rows.shape)
print(json.dumps([*keys, float(result["accuracy"])]))
"""


def said(code, folder):
    """The keys and numbers that a script ends with, in a process of its own."""
    done = run_python("-c", SEED + code + REPORT, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_both_sides_of_the_page_say_the_same(tmp_path):
    page = Page("keras")
    *before, accuracy = said(page.shared + page.before(), tmp_path)
    *after, own_accuracy = said(page.shared + page.after, tmp_path)
    assert before == after
    assert own_accuracy == pytest.approx(accuracy, abs=0.05)
    assert accuracy > 0.8
