# SPDX-License-Identifier: Apache-2.0
"""`IPUModel`: Keras's `compile`, `fit`, `evaluate` and `predict` for a torch module."""

from __future__ import annotations

from .model import IPUModel

__all__ = ["IPUModel"]
