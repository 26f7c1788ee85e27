# SPDX-License-Identifier: Apache-2.0
"""The command `ipufit`, also `python -m ipufit`."""

from __future__ import annotations

import argparse
import sys
from typing import Callable, Sequence

from ipufit import doctor, launch
from ipufit._version import __version__
from ipufit.commands import check_line, plan_line

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "check": (check_line.main, "say what PopTorch would refuse in a script"),
    "compile": (launch.compile_line.main, "compile a script's programs, run none"),
    "doctor": (doctor.main, "say what is installed, and what is missing"),
    "launch": (launch.main, "run a script in several processes"),
    "plan": (plan_line.main, "say what a script's fit takes of IPUs, run none of it"),
}
"""Name of a command -> the function that takes its arguments, and what it does."""


def main() -> None:
    """Run the command that the command line names."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        run, _ = COMMANDS[name]
        run(arguments)
        return
    lines = [f"  {name:7}  {text}" for name, (_, text) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="ipufit",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        epilog="\n".join(
            ["commands:", *lines, "", "`ipufit COMMAND --help` says more."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.parse_args([name])


if __name__ == "__main__":
    main()
