# SPDX-License-Identifier: Apache-2.0
"""Leaves out the tests of an integration with scikit-learn where it isn't installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("sklearn") else ["test_sklearn.py"]
