# SPDX-License-Identifier: Apache-2.0
"""`ipufit launch`: a script in several processes, by PopRun or by torchrun."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from typing import Mapping, Sequence

from . import _env
from .errors import ConfigError

LAUNCHERS = ("poprun", "torchrun")
THREADS = "OMP_NUM_THREADS"

# How hosts find each other. torchrun also reads `--nnodes` from PET_NNODES, and so on.
_MEETING = (
    "--standalone",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--node-rank",
    "--master-addr",
    "--master-port",
)
_OUTPUT = {"--redirects", "-r", "--tee", "-t", "--local-ranks-filter"}

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


@dataclass(frozen=True)
class LaunchRequest:
    """A program to be run in several processes.

    Attributes:
        program: Script or module, and the arguments that it gets.
        processes: Number of processes, of all hosts together.
        replicas: Number of replicas, of all processes together; None leaves them to
            the script's config, and is one for each process under PopRun.
        ipus_per_replica: For PopRun; None is PopRun's own default, 1.
        options: More options for the launcher.
        is_module: Whether the program is a module, named as in an import.
        shows_all: Whether processes other than the first write to the terminal, too.

    Raises:
        ConfigError: The program is missing, or the processes can't share the replicas
            equally.

    Example:
        >>> LaunchRequest(("train.py", "--lr", "0.1"), processes=4, replicas=10)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: --replicas 10 can't be shared equally by 4 processes:
        use 8 or 12.
    """

    program: tuple[str, ...]
    processes: int
    replicas: int | None = None
    ipus_per_replica: int | None = None
    options: tuple[str, ...] = ()
    is_module: bool = False
    shows_all: bool = False

    def __post_init__(self) -> None:
        if not self.program:
            raise ConfigError("No script: name it after the options of `launch`.")
        if self.replicas is not None:
            require_shares("--replicas", self.replicas, self.processes, "processes")

    def option_names(self) -> frozenset[str]:
        """The names of options for the launcher, as `--name`, without their values."""
        return frozenset(map(_name, self.options))

    def option(self, name: str) -> str | None:
        """The last value of an option for the launcher; None if there is none."""
        value = None
        for token, following in zip(self.options, (*self.options[1:], None)):
            if _name(token) == name:
                value = token.partition("=")[2] if "=" in token else following
        return value

    def refuse(self, name: str, by: str) -> None:
        """Refuse an option for the launcher that `ipufit launch` sets by itself."""
        if name in self.option_names():
            raise ConfigError(f"{name} can't be among the options: {by} sets it.")


def require_shares(option: str, number: int, sharers: int, word: str) -> None:
    """Refuse a number that can't be shared equally, and name the nearest that can.

    Example:
        >>> require_shares("--processes", 3, 2, "hosts")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: --processes 3 can't be shared equally by 2 hosts:
        use 2 or 4.
    """
    if number % sharers == 0:
        return
    below = number // sharers * sharers
    legal = f"{below} or {below + sharers}" if below else f"{sharers}"
    raise ConfigError(
        f"{option} {number} can't be shared equally by {sharers} {word}: use {legal}."
    )


def _name(token: str) -> str:
    """An option's name in one spelling: torchrun takes `_` for `-`."""
    return token.partition("=")[0].replace("_", "-")


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and the variables that are set for it.

    Attributes:
        arguments: The program first.
        variables: They join the environment.

    Example:
        >>> print(Command(("train", "a b"), {"IPUFIT_REPLICAS": "8"}))
        IPUFIT_REPLICAS=8 train 'a b'
    """

    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The command as a line for a shell."""
        words = [f"{name}={shlex.quote(text)}" for name, text in self.variables.items()]
        return " ".join([*words, *map(shlex.quote, self.arguments)])


def chosen_launcher() -> tuple[str, str]:
    """The launcher for this host: PopRun where PopTorch runs the models.

    PopTorch is looked for and not imported, because that may take IPUs.

    Returns:
        One of `LAUNCHERS`, and a remark for the user, "" if there is nothing to say.

    Raises:
        ConfigError: `IPUFIT_BACKEND` is no backend.
    """
    if _env.backend() == "emulator" or importlib.util.find_spec("poptorch") is None:
        return "torchrun", ""
    if shutil.which("poprun"):
        return "poprun", ""
    return "torchrun", (
        "PopTorch is installed, and poprun isn't on PATH (the SDK's enable.sh puts it "
        "there), so torchrun starts the processes"
    )


def poprun_command(request: LaunchRequest) -> Command:
    """The command line of PopRun.

    Raises:
        ConfigError: `options` has one that `ipufit launch` sets.

    Example:
        >>> request = LaunchRequest(("train.py",), processes=4, options=("-vv",))
        >>> poprun_command(request).arguments[:4]
        ('poprun', '--num-instances=4', '--num-replicas=4', '-vv')
    """
    request.refuse("--num-instances", by="--processes")
    request.refuse("--num-replicas", by="--replicas")
    request.refuse("--ipus-per-replica", by="`ipufit launch --ipus-per-replica`")
    arguments = [
        "poprun",
        f"--num-instances={request.processes}",
        f"--num-replicas={request.replicas or request.processes}",
    ]
    if request.ipus_per_replica is not None:
        arguments.append(f"--ipus-per-replica={request.ipus_per_replica}")
    # -u as torchrun does: output goes through a pipe, and would be lost with a process
    # that is killed.
    python = [sys.executable, "-u", *(["-m"] if request.is_module else [])]
    return Command((*arguments, *request.options, *python, *request.program))


def torchrun_command(
    request: LaunchRequest,
    environment: Mapping[str, str] = os.environ,
    cores: int | None = None,
) -> Command:
    """The command line of torchrun, on this host.

    Args:
        request: Its processes and replicas are those of all hosts.
        environment: Variables by name; torchrun reads its options from some.
        cores: Number of cores for the processes of this host; None counts them.

    Raises:
        ConfigError: `options` has one that `ipufit launch` sets, the hosts can't share
            the processes equally, or have no place to meet.

    Example:
        >>> request = LaunchRequest(("train.py",), processes=4, replicas=8)
        >>> command = torchrun_command(request, {}, cores=16)
        >>> command.variables
        {'IPUFIT_REPLICAS': '8', 'OMP_NUM_THREADS': '4'}
        >>> command.arguments[3:]  # doctest: +NORMALIZE_WHITESPACE
        ('--nproc-per-node=4', '--rdzv-backend=c10d', '--rdzv-endpoint=localhost:0',
        '--redirects=1:1,2:1,3:1', 'train.py')
    """
    request.refuse("--nproc-per-node", by="--processes")
    here = request.processes // _num_hosts(request, environment)
    arguments = [sys.executable, "-m", "torch.distributed.run"]
    arguments.append(f"--nproc-per-node={here}")
    names = request.option_names()
    if not any(_is_given(name, request, environment) for name in _MEETING):
        # As --standalone, which has one fixed port for all runs on a host in torch 2.0.
        arguments += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    if here > 1 and not request.shows_all and not names & _OUTPUT:
        # 1: their standard output, to files. Errors still come to the terminal.
        redirects = ",".join(f"{index}:1" for index in range(1, here))
        arguments.append(f"--redirects={redirects}")
    arguments += request.options
    if request.is_module:
        arguments.append("--module")
    if "--" in request.program:
        arguments.append("--")  # torchrun drops the first one
    variables = {}
    if request.replicas is not None:
        variables[_env.REPLICAS] = str(request.replicas)
    if here > 1 and not environment.get(THREADS):
        variables[THREADS] = str(max(1, (cores or _num_cores()) // here))
    return Command((*arguments, *request.program), variables)


def _num_hosts(request: LaunchRequest, environment: Mapping[str, str]) -> int:
    """Read the number of hosts from torchrun's `--nnodes`."""
    text = request.option("--nnodes") or environment.get(_variable("--nnodes")) or "1"
    least, _, most = text.partition(":")
    if not least.isdigit() or int(least) < 1 or (most or least) != least:
        raise ConfigError(
            f"--nnodes {text}: `ipufit launch` needs one number of hosts, which share "
            "the processes and replicas. Use --nnodes 2, for example."
        )
    hosts = int(least)
    require_shares("--processes", request.processes, hosts, "hosts")
    places = "--rdzv-endpoint", "--master-addr"
    if hosts > 1 and not any(_is_given(name, request, environment) for name in places):
        raise ConfigError(
            f"{hosts} hosts need a place to meet: add --rdzv-backend c10d "
            "--rdzv-endpoint HOST:29500 to the options, with one of the hosts."
        )
    return hosts


def _is_given(
    name: str, request: LaunchRequest, environment: Mapping[str, str]
) -> bool:
    return name in request.option_names() or bool(environment.get(_variable(name)))


def _variable(name: str) -> str:
    """The variable that torchrun reads where an option isn't given."""
    return "PET_" + name[2:].replace("-", "_").upper()


def _num_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# The command line --------------------------------------------------------------------


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
    for line in filter(None, (remark, str(command))):
        sys.stderr.write(f"ipufit: {line}\n")
    if shutil.which(command.arguments[0]) is None:
        sys.stderr.write(
            f"ipufit: {command.arguments[0]} isn't on PATH: the enable.sh of the "
            "Poplar SDK puts it there. --launcher torchrun starts emulated processes.\n"
        )
        sys.exit(2)
    sys.stdout.flush()
    sys.stderr.flush()
    # The launcher takes this process's place, so that nothing stands in between:
    # signals of a terminal, a scheduler or `kill` reach it, and whoever waits for this
    # process gets its exit code. A parent that only forwarded both would be one more
    # thing that can die and leave the others behind.
    variables = {**os.environ, **command.variables}
    os.execvpe(command.arguments[0], command.arguments, variables)


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


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)
