# SPDX-License-Identifier: Apache-2.0
"""What `import popart` finds in a process started by one that emulates it."""

from __future__ import annotations

if __name__ == "popart":  # not under its own name: tools import every module
    from ipufit.emulator._install import install

    install(force=True)  # who started this process decided; it replaces this module
