# SPDX-License-Identifier: Apache-2.0
"""Measurements, run by hand: `python -m benchmarks.<name>`."""

from __future__ import annotations
