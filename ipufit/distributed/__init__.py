# SPDX-License-Identifier: Apache-2.0
"""Several processes that train together: which one this is, and what they exchange.

On IPUs, PopRun starts them, and their replicas exchange gradients inside of the
compiled program. On any other machine torchrun does, and the emulator sums gradients
over them. Figures, data and checkpoints go through torch.distributed in both cases.

    from ipufit import distributed

    info = distributed.get_process_info()
    print(f"process {info.index} of {info.count}")
"""

from __future__ import annotations

from .collectives import Processes, exchanges_off
from .current import configure, get_process_info, processes
from .environment import ALONE, ProcessInfo
from .group import has_group

__all__ = [
    "ALONE",
    "ProcessInfo",
    "Processes",
    "configure",
    "exchanges_off",
    "get_process_info",
    "has_group",
    "processes",
]
