# SPDX-License-Identifier: Apache-2.0
"""The command line of `ipufit launch`: read it, and become the launcher."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from typing import Sequence

from .launchers import (
    LAUNCHERS,
    Command,
    chosen_launcher,
    poprun_command,
    torchrun_command,
)
from .request import LaunchRequest

_MISUSED = 2  # argparse's own

_EPILOG = """\
examples:
  ipufit launch --processes 4 train.py --epochs 3
  ipufit launch --processes 4 --replicas 8 -m package.train
  ipufit launch --processes 8 --options "--nnodes 2 --rdzv-backend c10d
      --rdzv-endpoint host1:29500" train.py              (on both of two hosts)
  ipufit launch --processes 8 --replicas 16 --options "--host=host1,host2
      --vipu-partition=p16" train.py                     (on one host of a pod)

Options of `launch` go before the script; everything after it is the script's. Signals
reach the launcher, and its exit code is this command's. See docs/how-to/pods.md.
"""


def main(arguments: Sequence[str]) -> None:
    """Run a script in several processes; the launcher takes this process's place.

    Args:
        arguments: The command line, without `ipufit launch`.
    """
    parser = _parser()
    own, program = _split(arguments)
    given = parser.parse_args(own)
    try:
        request = LaunchRequest(
            tuple(program),
            given.processes,
            given.replicas,
            given.ipus_per_replica,
            tuple(shlex.split(given.options)),
            given.is_module,
            given.shows_all,
        )
        launcher, remark = given.launcher, ""
        if launcher is None:
            launcher, remark = chosen_launcher()
        make = poprun_command if launcher == "poprun" else torchrun_command
        command = make(request)
    except ValueError as error:  # ConfigError, or a quote that isn't closed
        parser.error(str(error))
    if given.is_dry_run:
        sys.stdout.write(f"{command}\n")
        return
    if not (request.is_module or os.path.exists(program[0])):
        parser.error(f"there is no script {program[0]!r}")
    for line in (remark, str(command)):
        _say(line)
    _become(command)


def _become(command: Command) -> None:
    """Replace this process by the launcher, so that nothing stands in between.

    Signals of the terminal, of a scheduler and of `kill` then reach the launcher
    itself, which passes them on to the processes that it started, and whoever waits for
    this process gets its exit code. A parent that only forwarded both would be one more
    thing that can die and leave the others behind.
    """
    program, *_ = command.arguments
    if shutil.which(program) is None:
        _say(
            f"{program} isn't on PATH: the enable.sh of the Poplar SDK puts it there. "
            "--launcher torchrun starts emulated processes."
        )
        sys.exit(_MISUSED)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(program, command.arguments, {**os.environ, **command.variables})


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the options of `launch` from the program and its arguments.

    argparse would read a value that begins with a dash, such as `--host=a,b` for
    `--options`, as another option, and drop a `--` of the program's.

    Example:
        >>> _split(["--options", "--host=a,b", "train.py", "--processes", "3"])
        (['--options=--host=a,b'], ['train.py', '--processes', '3'])
    """
    rest = list(arguments)
    own = []
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        if option in _VALUED and rest:
            option += f"={rest.pop(0)}"
        own.append(option)
    return own, rest


_VALUED = (
    "--processes",
    "--replicas",
    "--ipus-per-replica",
    "--launcher",
    "--options",
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ipufit launch",
        usage="%(prog)s [-h] --processes P [--replicas N] [--ipus-per-replica I]\n"
        f"         [--launcher {{{','.join(LAUNCHERS)}}}] [--options OPTIONS]\n"
        "         [--all-output] [--dry-run] (script | -m module) ...",
        description="Run a script in several processes: by PopRun on a host with IPUs "
        "(PopTorch is installed, and poprun on PATH), by torchrun elsewhere.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_sizes(parser)
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, help="insist on one, whatever is installed"
    )
    parser.add_argument(
        "--options",
        default="",
        help='more options of the launcher, in quotes: "--max-restarts 3", '
        '"--host=host1,host2"',
    )
    parser.add_argument(
        "--all-output",
        dest="shows_all",
        action="store_true",
        help="show what all processes write; otherwise torchrun shows the standard "
        "output of one process on each host, and the errors of all (poprun shows both "
        "of all, because its option for less hides errors)",
    )
    parser.add_argument(
        "--dry-run",
        dest="is_dry_run",
        action="store_true",
        help="only print the command, on standard output",
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="run a module, named as in an import, instead of a script",
    )
    return parser


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        type=_count,
        required=True,
        metavar="P",
        help="number of processes, of all hosts together, as poprun's --num-instances; "
        "with torchrun on H hosts each of them starts P / H",
    )
    parser.add_argument(
        "--replicas",
        type=_count,
        metavar="N",
        help="number of replicas, of all processes together, as poprun's "
        "--num-replicas (default: one for each process with poprun, as the script's "
        "IPUConfig says with torchrun)",
    )
    parser.add_argument(
        "--ipus-per-replica",
        type=_count,
        metavar="I",
        help="for poprun; with torchrun replicas are emulated, and take as many IPUs "
        "as the model names",
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def _say(line: str) -> None:
    if line:
        sys.stderr.write(f"ipufit: {line}\n")
