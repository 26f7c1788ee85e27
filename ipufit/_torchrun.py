# SPDX-License-Identifier: Apache-2.0
"""`python -m ipufit._torchrun`: torchrun, after which a script's error comes last.

torchrun ends with some thirty lines of its own below the error of a script, whatever
the error was.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run torchrun.

    Args:
        arguments: Its command line; that of this process by default.

    Raises:
        SystemExit: With 1 if a process has failed.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()  # of this process: what fails raises an error as well
    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # by a signal, so that it has said nothing
            name = signal.Signals(-failure.exitcode).name
            sys.stderr.write(f"ipufit: process {rank} was ended by {name}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
