# SPDX-License-Identifier: Apache-2.0
"""LightningModules, trained by ipufit; Lightning itself needn't be installed."""

from __future__ import annotations

from .model import LightningModel, from_lightning

__all__ = ["LightningModel", "from_lightning"]
