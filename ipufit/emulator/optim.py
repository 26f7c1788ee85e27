# SPDX-License-Identifier: Apache-2.0
"""`poptorch.optim`: PopTorch's optimisers."""

from __future__ import annotations

from ipufit.emulator._optimizers.base import Optimizer, VariableAttributes
from ipufit.emulator._optimizers.base import logger as logger
from ipufit.emulator._optimizers.lamb import LAMB
from ipufit.emulator._optimizers.optimizers import SGD, Adam, AdamW, RMSprop

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "RMSprop",
    "VariableAttributes",
]
