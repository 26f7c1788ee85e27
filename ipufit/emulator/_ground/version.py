# SPDX-License-Identifier: Apache-2.0
"""The version of PopTorch that is emulated."""

from __future__ import annotations

__version__ = "3.4.0+emulator"
