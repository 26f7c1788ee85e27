# SPDX-License-Identifier: Apache-2.0
"""`ipufit launch`: a script in several processes, by PopRun or torchrun."""

from __future__ import annotations

from .command_line import main
from .launchers import Command, poprun_command, torchrun_command
from .request import LaunchRequest

__all__ = ["Command", "LaunchRequest", "main", "poprun_command", "torchrun_command"]
