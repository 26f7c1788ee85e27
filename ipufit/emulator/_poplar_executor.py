# SPDX-License-Identifier: Apache-2.0
"""`PoplarExecutor` where PopTorch has it; optimum-graphcore imports it from there."""

from __future__ import annotations

from ipufit.emulator._executor.executor import PoplarExecutor as PoplarExecutor
