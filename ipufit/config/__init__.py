# SPDX-License-Identifier: Apache-2.0
"""`IPUConfig`: the layout of a model on IPUs, as one frozen value."""

from __future__ import annotations

from .automatic import with_stages
from .ipu_config import IPUConfig
from .precision import precision_of

__all__ = ["IPUConfig", "precision_of", "with_stages"]
