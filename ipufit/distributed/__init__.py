# SPDX-License-Identifier: Apache-2.0
"""Several processes that train together: their indices, and their exchanges.

On IPUs, PopRun starts the processes, and replicas exchange gradients inside the
compiled program. On other machines torchrun starts them, and the emulator sums
gradients over processes. Metrics, data and checkpoints are exchanged by
torch.distributed in both cases.

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
