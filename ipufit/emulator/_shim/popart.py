# SPDX-License-Identifier: Apache-2.0
"""Emulated `popart` for processes that a script starts: `_install` replaces it."""

from __future__ import annotations

if __name__ == "popart":  # not under its own name: tools import every module
    from ipufit.emulator._install import install

    install(force=True)  # the parent process chose to emulate; replaces this module
