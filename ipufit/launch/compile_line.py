# SPDX-License-Identifier: Apache-2.0
"""The command line of `ipufit compile`: a script whose programs are only compiled."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Sequence

from ipufit import _env

from .scripts import run_script

_EPILOG = """\
examples:
  ipufit compile train.py --epochs 3
  ipufit compile --output compiled --ipu-version 21 -m package.train

The script runs on this machine, which needs no IPUs. fit, evaluate and predict compile
their programs and run none. Options of `compile` go before the script; everything after
it is the script's. See docs/how-to/compile-ahead.md.
"""


def main(arguments: Sequence[str]) -> None:
    """Run a script so that its programs are compiled only, and say which.

    Args:
        arguments: The command line, without `ipufit compile`.

    Raises:
        SystemExit: With the script's own status; with 1 if it has compiled nothing.
    """
    given = _parser().parse_args(arguments)
    if not given.is_module and not os.path.exists(given.script):
        _parser().error(f"there is no script {given.script!r}")
    folder = Path(given.output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[_env.COMPILE_ONLY] = str(folder)
    os.environ[_env.COMPILE_FOR] = str(given.ipu_version)
    os.environ.setdefault("POPTORCH_CACHE_DIR", str(folder / "cache"))
    before = set(folder.glob("*.json"))
    status = run_script(given.script, given.arguments, is_module=given.is_module)
    done = sorted(set(folder.glob("*.json")) - before)
    programs = "1 program" if len(done) == 1 else f"{len(done)} programs"
    sys.stderr.write(f"ipufit: {programs} compiled, described in {folder}\n")
    for path in done:
        sys.stderr.write(f"  {path.name}\n")
    if status == 0 and not done:
        sys.stderr.write(
            "ipufit: the script calls no fit, evaluate or predict of an IPUModel, or "
            "another PopTorch's\n"
        )
        status = 1
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ipufit compile",
        usage="%(prog)s [-h] [--output DIR] [--ipu-version V] (script | -m module) ...",
        description="Run a script so that its programs are compiled and not run, on a "
        "machine with IPUs or without.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output",
        default="compiled",
        metavar="DIR",
        help="directory for a description of each program, and for the cache of "
        "executables unless POPTORCH_CACHE_DIR is set (default: compiled)",
    )
    parser.add_argument(
        "--ipu-version",
        type=int,
        default=2,
        choices=_env.IPU_VERSIONS,
        help="version of the IPUs: 2 for Mk2 (the default), 21 for Bow",
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="run a module, named as in an import, instead of a script",
    )
    parser.add_argument("script", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
