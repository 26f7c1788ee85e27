# SPDX-License-Identifier: Apache-2.0
"""Callbacks: Keras's hooks and callbacks, History, progress, loggers.

`fit(callbacks=[ipufit.EarlyStopping(patience=3)])` takes them. One of your own is a
class that derives from `ipufit.Callback`. `dir(ipufit.callbacks)` lists all of them, as
`__init__.pyi` does.
"""

from __future__ import annotations

from ipufit._lazy import imported_at_first_use

__getattr__, __dir__, __all__ = imported_at_first_use(__name__)
