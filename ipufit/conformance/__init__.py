# SPDX-License-Identifier: Apache-2.0
"""`ipufit conformance`: what a device does, recorded there, and compared elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Sequence

from ipufit import _env
from ipufit.errors import IpufitError

RECORDED: tuple[str, ...] = ()
"""Versions of PopTorch of which tests/conformance/ has a recording."""

_EPILOG = """\
examples:
  srun --ipus=2 ipufit conformance record sdk33-pod64.json
  POPTORCH_IPU_MODEL=1 ipufit conformance record sdk33-ipu-model.json
  ipufit conformance compare sdk33-pod64.json

`record` runs about a hundred small programs where PopTorch runs, and writes down what
each returns or how it is refused. `compare` runs them on the emulator, or on the back
end that IPUFIT_BACKEND names. The exit status is 1 if something differs, 2 if there is
nothing to compare or PopTorch finds no IPU, else 0. Where no PopTorch is, `record`
records the emulator, which is of no use to send. See docs/how-to/conformance.md.
"""


def main(arguments: Sequence[str]) -> None:
    """Record what the probes return on this host, or compare a recording.

    Args:
        arguments: The command line, without `ipufit conformance`.

    Raises:
        SystemExit: Always: with 1 if something differs, 2 if the command can't run.
    """
    parser = argparse.ArgumentParser(
        prog="ipufit conformance",
        description="Record what small programs do on IPUs, and compare the emulator.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="a recording, such as sdk33-pod64.json")
    given = parser.parse_args(arguments)
    if given.action == "compare":
        os.environ.setdefault(_env.BACKEND, "emulator")
    os.environ["IPUFIT_EMULATOR_STRICT"] = "1"  # refuse what a device refuses
    try:
        from . import recording  # needs torch and PopTorch

        status = getattr(recording, given.action)(given.file)
    except IpufitError as error:
        sys.stderr.write(f"ipufit conformance: {error}\n")
        status = 2
    sys.exit(status)
