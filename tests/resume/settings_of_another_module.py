# SPDX-License-Identifier: Apache-2.0
"""A module of settings, as scripts have one."""

from __future__ import annotations

SCALE = 1.0
