# SPDX-License-Identifier: Apache-2.0
"""Optimizers, learning rates, loss scaling, averages of weights.

`__init__.pyi` lists the names.
"""

from __future__ import annotations

from ipufit._lazy import imported_at_first_use

__getattr__, __dir__, __all__ = imported_at_first_use(__name__)
