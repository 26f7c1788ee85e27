# SPDX-License-Identifier: Apache-2.0
"""`python -m ipufit._torchrun`: run torchrun, and show a script's error last.

torchrun itself prints some thirty lines below the error of a script.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run torchrun.

    Args:
        arguments: Command line of torchrun; by default that of this process.

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
