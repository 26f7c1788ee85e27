# SPDX-License-Identifier: Apache-2.0
"""Keras-like `compile`, `fit`, `evaluate` and `predict` for PyTorch on IPUs.

    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=0))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=32, epochs=5, validation_split=0.2)
    scores = model.predict(x)

`help(ipufit.IPUModel)` describes the methods, `help(ipufit.IPUConfig)` the layout on
IPUs, and `dir(ipufit)` lists all names. The error of an unknown loss, metric or
optimizer lists those that there are: `model.compile(metrics=["?"])`.
"""

# Names are imported when they are first used, so that `ipufit.emulator`, which stands
# alone, neither chooses a PopTorch nor waits for the rest. `__init__.pyi` lists them.

from __future__ import annotations

import warnings
from typing import Any

from ._lazy import imported_at_first_use

_find, __dir__, __all__ = imported_at_first_use(__name__)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use; warn of a warning by its old name."""
    if name.endswith("Warning") and name not in __all__:
        value = getattr(_find("errors"), name)
        text = f"ipufit.{name} is ipufit.errors.{name} now: write that."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return value
    return _find(name)
