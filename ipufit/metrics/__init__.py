# SPDX-License-Identifier: Apache-2.0
"""Metrics: values over all samples, computed from exact sums where possible.

`compile(metrics=["accuracy", "f1"])` takes names: the error of an unknown one lists
all of them. Objects have settings, as in `ipufit.metrics.AUC(curve="PR")`:
`dir(ipufit.metrics)` lists the classes, as `__init__.pyi` does.
"""

from __future__ import annotations

from ipufit._lazy import imported_at_first_use

__getattr__, __dir__, __all__ = imported_at_first_use(__name__)
