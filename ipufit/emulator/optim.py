# SPDX-License-Identifier: Apache-2.0
"""`poptorch.optim`: PopTorch's optimisers."""

from __future__ import annotations

from ipufit.emulator._optimizers import optimizers as _optimizers
from ipufit.emulator._optimizers.base import Optimizer, VariableAttributes
from ipufit.emulator._optimizers.base import logger as logger
from ipufit.emulator._optimizers.optimizers import *  # noqa: F403 - as `__all__` says

__all__ = ["Optimizer", "VariableAttributes"]
__all__ += _optimizers.__all__
