# SPDX-License-Identifier: Apache-2.0
"""A fork waits for gloo's threads where the interpreter needs it, and nowhere else."""

from __future__ import annotations

import os
import sys

import pytest

from tests.interpreters import run_python

FORKS = """
import os, sys
import torch.distributed as dist
import ipufit.emulator
from ipufit.emulator import _processes

pauses = []
_processes.time.sleep = pauses.append

def fork():
    child = os.fork()
    if not child:
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8

fork()
alone = len(pauses)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fork()
joined = len(pauses)
dist.destroy_process_group()
fork()
print(alone, joined, len(pauses))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system doesn't fork")
def test_forks_of_joined_processes_wait():
    run = run_python("-c", FORKS)
    waits = int(sys.version_info < (3, 12))
    *_, counts = run.stdout.splitlines()  # after what gloo says
    assert counts.split() == ["0", str(waits), str(waits)]
