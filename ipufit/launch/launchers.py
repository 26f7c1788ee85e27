# SPDX-License-Identifier: Apache-2.0
"""The command lines of PopRun and torchrun."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from typing import Mapping

from ipufit import _env
from ipufit.errors import ConfigError

from .request import LaunchRequest, require_shares

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
    request.require_own("--num-instances", by="--processes")
    request.require_own("--num-replicas", by="--replicas")
    request.require_own("--ipus-per-replica", by="`ipufit launch --ipus-per-replica`")
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
    request.require_own("--nproc-per-node", by="--processes")
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
