# SPDX-License-Identifier: Apache-2.0
"""Optimizers, learning rates, loss scaling, averages of weights.

`compile("adamw")` takes a name: the error of an unknown one lists all of them.
`ipufit.Optimizer("adamw", learning_rate=0.001)` has settings, and takes schedules.
`dir(ipufit.optimizers)` lists the classes, as `__init__.pyi` does.
"""

from __future__ import annotations

from ipufit._lazy import imported_at_first_use

__getattr__, __dir__, __all__ = imported_at_first_use(__name__)
