# SPDX-License-Identifier: Apache-2.0
"""`ipufit launch`, a script in several processes, and `ipufit compile`."""

from __future__ import annotations

from . import compile_line
from .command_line import main
from .launchers import Command, poprun_command, torchrun_command
from .request import LaunchRequest
from .scripts import run_script

__all__ = [
    "Command",
    "LaunchRequest",
    "compile_line",
    "main",
    "poprun_command",
    "run_script",
    "torchrun_command",
]
