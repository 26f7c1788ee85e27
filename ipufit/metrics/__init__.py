# SPDX-License-Identifier: Apache-2.0
"""Metrics: values over all samples, computed from exact sums where possible.

`__init__.pyi` lists the names.
"""

from __future__ import annotations

from ipufit._lazy import imported_at_first_use

__getattr__, __dir__, __all__ = imported_at_first_use(__name__)
