# SPDX-License-Identifier: Apache-2.0
"""Keras on torch beside ipufit; nothing here is collected where Keras isn't."""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")

if importlib.util.find_spec("keras") is None:
    collect_ignore_glob = ["test_*.py"]

# Keras's variables, asked for their values by NumPy 2.
KERAS_WARNS = "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(KERAS_WARNS))
