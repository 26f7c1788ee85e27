# SPDX-License-Identifier: Apache-2.0
"""`IPUConfig`: how a model is laid out on IPUs, as one frozen value."""

from __future__ import annotations

from .ipu_config import IPUConfig

__all__ = ["IPUConfig"]
