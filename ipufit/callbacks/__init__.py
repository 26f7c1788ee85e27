# SPDX-License-Identifier: Apache-2.0
"""Callbacks: Keras's hooks and callbacks, History, progress, loggers.

A callback is imported when it is first used. `__init__.pyi` lists them.
"""

from __future__ import annotations

from ipufit._lazy import imported_at_first_use

__getattr__, __dir__, __all__ = imported_at_first_use(__name__)
