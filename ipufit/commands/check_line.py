# SPDX-License-Identifier: Apache-2.0
"""The command line of `ipufit check`: what PopTorch would refuse in a script."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Sequence

from ipufit import _env

_MISUSED = 2  # argparse's own

_EPILOG = """\
examples:
  ipufit check train.py --epochs 3
  ipufit check --json -m package.train
  ipufit check --batch-size 64 package.models:make_model

A script or module runs up to its first fit, and not further. A function returns an
IPUModel that was compiled, with its data: (model, x) or (model, x, y). Options of
`check` go before the script; everything after it is the script's. The exit status is 1
where PopTorch would refuse the program, 2 if there is no model to look at, else 0. See
docs/how-to/check.md.
"""


def main(arguments: Sequence[str]) -> None:
    """Print everything that a check of a script's model finds.

    Args:
        arguments: The command line, without `ipufit check`.

    Raises:
        SystemExit: Always: with 1 if the model is refused, 2 if there is none.
    """
    # A program is surveyed by the emulator, so it must be built with its functions,
    # also where PopTorch is installed. It is chosen at the first import of the seam.
    os.environ[_env.BACKEND] = "emulator"
    from ipufit._poptorch import emulate_everywhere

    from .subject import add_target, arguments_of, looked_at, target_of

    parser = argparse.ArgumentParser(
        prog="ipufit check",
        usage="%(prog)s [options] (script | -m module | module:function) [arguments]",
        description="Say everything at once that PopTorch would refuse in the first "
        "fit of a script, or compute otherwise than torch. Nothing is compiled, "
        "trained or written.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print data for programs")
    add_target(parser)
    given = parser.parse_args(arguments)
    from ipufit.errors import IpufitError
    from ipufit.model.checking import checked

    emulate_everywhere()
    try:
        report = looked_at(
            target_of(given),
            lambda subject: checked(subject.model, arguments_of(subject, given)),
        )
    except IpufitError as error:
        sys.stderr.write(f"ipufit check: {error}\n")
        sys.exit(_MISUSED)
    if given.json:
        sys.stdout.write(f"{report.as_json()}\n")
    else:
        report.print()
    sys.exit(int(report.is_refused))
