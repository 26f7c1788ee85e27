# SPDX-License-Identifier: Apache-2.0
"""Leaves out what is held against scikit-learn where that isn't installed."""

from importlib.util import find_spec
from pathlib import Path

collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if "\nimport sklearn" in path.read_text("utf-8") and find_spec("sklearn") is None
]
