# SPDX-License-Identifier: Apache-2.0
"""`PoplarExecutor` at the path from which optimum-graphcore imports it."""

from __future__ import annotations

from ipufit.emulator._executor.executor import PoplarExecutor as PoplarExecutor
