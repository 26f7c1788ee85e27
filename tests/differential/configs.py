# SPDX-License-Identifier: Apache-2.0
"""An object that programs compute with."""

from __future__ import annotations

import dataclasses
from typing import Any

from .kinds import mean_squares


@dataclasses.dataclass
class Config:
    factor: float = 1.0
    inner: Any = None

    def scaled(self, value):
        return value * self.factor

    def __call__(self, value):
        return value * self.factor

    def loss(self, outputs, wanted):
        return mean_squares(outputs, wanted) * self.factor
