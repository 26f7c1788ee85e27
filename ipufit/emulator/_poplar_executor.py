# SPDX-License-Identifier: Apache-2.0
"""PopTorch's private module `_poplar_executor`, as far as other packages use it.

optimum-graphcore imports the executor, PopTorch Geometric registers substitutions.
"""

from __future__ import annotations

from ipufit.emulator._executor.executor import PoplarExecutor as PoplarExecutor
from ipufit.emulator._tracing.recording import Substitutions as _OverwriteContextManager

__all__ = ["PoplarExecutor", "_OverwriteContextManager"]
