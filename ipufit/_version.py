# SPDX-License-Identifier: Apache-2.0
"""The version of ipufit, which checkpoints name too."""

from __future__ import annotations

__version__ = "0.4.0"
