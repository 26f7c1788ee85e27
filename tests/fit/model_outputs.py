# SPDX-License-Identifier: Apache-2.0
"""An output such as transformers have."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """As transformers have it: items and attributes at once, items that aren't None."""

    logits: Any = None
    hidden: Any = None
    loss: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return type(self), tuple(values)
