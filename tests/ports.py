# SPDX-License-Identifier: Apache-2.0
"""Ports on which processes of a test meet.

The kernel's own choice, port 0, is let go before a process of the test takes it. It may
be given to a test of another pytest process meanwhile, and both would meet there.
"""

import itertools
import os
import socket

_FIRST, _PER_PROCESS = 20000, 500
_numbers = itertools.count(os.getpid() % _PER_PROCESS)


def free_port():
    """Return a port that tests of no other pytest process use."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    for number in itertools.islice(_numbers, _PER_PROCESS):
        port = _FIRST + worker * _PER_PROCESS + number % _PER_PROCESS
        with socket.socket() as attempt:
            try:
                attempt.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("all ports of this pytest process are taken")
