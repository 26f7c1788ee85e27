# SPDX-License-Identifier: Apache-2.0
"""PopTorch's private module `_impl`, as far as other packages use it.

optimum-graphcore removes a wrapped model's wrapper classes to save it, and restores
them.
"""

from __future__ import annotations

from ipufit.emulator._executor.wrapping import rewrap_model as rewrapModelIfNecessary
from ipufit.emulator._executor.wrapping import unwrap_model as unwrapModelIfNecessary
from ipufit.emulator._tracing.recording import is_tracing as isDispatchTracing

__all__ = ["isDispatchTracing", "rewrapModelIfNecessary", "unwrapModelIfNecessary"]
