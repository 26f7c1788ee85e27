# SPDX-License-Identifier: Apache-2.0
"""Run a PopTorch script on the emulator: `python -m ipufit.emulator script.py`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import uuid
from typing import Mapping, NoReturn

from . import __version__, _popdist
from ._install import install
from ._switches import REPLICAS_VARIABLE, STRICT_VARIABLE, is_strict, whole_number
from .core.pod import NUM_IPUS_VARIABLE, count_ipus
from .errors import Error, createPoptorchError

_FAILED = 1
_MISUSED = 2  # what Python itself exits with if it can't open the script


def main() -> None:
    """Run the script or module that the command line names, as `python` would."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.processes is None and arguments.replicas is not None:
        parser.error(
            f"--replicas {arguments.replicas} needs --processes: how many processes "
            "share them"
        )
    if arguments.ipus is not None:
        os.environ[NUM_IPUS_VARIABLE] = str(arguments.ipus)
    try:
        if arguments.processes is not None:
            _start_processes(arguments)
        os.environ.update(instance_variables(os.environ))
        script = arguments.script
        sys.argv = [script, *arguments.args]
        is_safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
        if not (is_safe or arguments.is_module):
            # As Python does.
            is_folder, path = os.path.isdir(script), os.path.realpath(script)
            sys.path[0] = (
                os.path.abspath(script) if is_folder else os.path.dirname(path)
            )
        install(force=arguments.force, strict=arguments.strict)
        mode = "; strict" if is_strict() else ""
        count = os.environ.get("WORLD_SIZE", "1")
        if count != "1":
            replicas = _popdist.getNumTotalReplicas()
            mode = f" each; processes: {count}; replicas: {replicas}{mode}"
        if os.environ.get("RANK", "0") == "0":  # once for all processes
            _say(
                f"PopTorch {__version__} on the host; emulated IPUs: "
                f"{count_ipus()}{mode}"
            )
    except Error as error:
        _say(error.message)
        sys.exit(_MISUSED)
    try:
        if arguments.is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(script), run_name="__main__")
    except Exception as error:  # noqa: BLE001 - shown as Python would, then it exits
        # Show it without the frames that ran the script.
        runners = main.__code__.co_filename, runpy.run_path.__code__.co_filename
        traceback = error.__traceback__
        while traceback and traceback.tb_frame.f_code.co_filename in runners:
            traceback = traceback.tb_next
        if traceback is None and isinstance(error, (ImportError, OSError)):
            # No frame of the script: there is no such module or file.
            _say(f"can't run {sys.argv[0]!r}: {error}")
            sys.exit(_FAILED if isinstance(error, ImportError) else _MISUSED)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(_FAILED)


def _start_processes(arguments: argparse.Namespace) -> NoReturn:
    """Replace this process by torchrun, which starts the command in each process."""
    if os.environ.get("RANK"):
        raise createPoptorchError(
            f"RANK={os.environ['RANK']}: this is a process of torchrun's already. Let "
            "either torchrun or --processes start them."
        )
    if _popdist.isPopdistEnvSet():
        raise createPoptorchError(
            f"{_popdist.TOTAL_REPLICAS} is set, as if PopRun had started this process "
            "already: unset it, or leave --processes out."
        )
    count = arguments.processes
    replicas = count if arguments.replicas is None else arguments.replicas
    _local_replicas(replicas, count)
    threads = max(1, (os.cpu_count() or 1) // count)
    environment = {
        "OMP_NUM_THREADS": str(threads),  # torchrun would warn, and take one
        **os.environ,
        REPLICAS_VARIABLE: str(replicas),
    }
    silent = ",".join(f"{index}:1" for index in range(1, count))
    flags = [f"--{name}" for name in ("force", "strict") if getattr(arguments, name)]
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        # Not --standalone: up to torch 2.0 that takes one port of all, so that two
        # runs on one machine would meet.
        *("--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *("--rdzv-id", uuid.uuid4().hex, "--nproc-per-node", str(count)),
        *("--monitor-interval", "0.1"),
        *(("--redirects", silent) if silent else ()),
        *("-m", "ipufit.emulator", *flags, *(("-m",) if arguments.is_module else ())),
        *(arguments.script, *arguments.args),
    ]
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def instance_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that PopRun would set in a process of torchrun's.

    PopRun starts instances by Open MPI's `mpirun`, so Open MPI's variables are
    included: `poptorch.Options` reads them.

    Args:
        environment: The environment of this process.

    Returns:
        Nothing if torchrun started one process alone and `IPUFIT_REPLICAS` isn't set,
        or if PopRun's variables are there already.

    Raises:
        Error: A variable is missing or no number, or the replicas can't be shared
            evenly.

    Example:
        >>> of_torchrun = {"RANK": "1", "WORLD_SIZE": "2", "IPUFIT_REPLICAS": "8"}
        >>> instance_variables(of_torchrun)["POPDIST_REPLICA_INDEX_OFFSET"]
        '4'
    """
    if _popdist.TOTAL_REPLICAS in environment:
        return {}
    for name, missing in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if environment.get(name) and not environment.get(missing):
            raise createPoptorchError(
                f"{name} is set but {missing} is not: torchrun sets both. Set "
                f"{missing} too, or unset {name}."
            )
    index = _number(environment, "RANK", 0)
    count = _number(environment, "WORLD_SIZE", 1)
    if count == 1 and not environment.get(REPLICAS_VARIABLE):
        return {}
    total = _number(environment, REPLICAS_VARIABLE, count)
    local = _local_replicas(total, count)
    variables = {
        _popdist.TOTAL_REPLICAS: total,
        _popdist.LOCAL_REPLICAS: local,
        _popdist.FIRST_REPLICA: index * local,
        _popdist.IS_UNIFORM: 1,
        _popdist.IPUS_PER_REPLICA: environment.get(_popdist.IPUS_PER_REPLICA, 1),
        "OMPI_COMM_WORLD_RANK": index,
        "OMPI_COMM_WORLD_SIZE": count,
    }
    if environment.get("LOCAL_RANK") and environment.get("LOCAL_WORLD_SIZE"):
        local_index = _number(environment, "LOCAL_RANK", 0)
        local_count = _number(environment, "LOCAL_WORLD_SIZE", 1)
        variables[_popdist.LOCAL_INSTANCE] = local_index
        variables["OMPI_COMM_WORLD_LOCAL_RANK"] = local_index
        variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = local_count
    return {name: str(value) for name, value in variables.items()}


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    number = whole_number(text.strip())
    if number is None:
        raise createPoptorchError(f"{name}={text!r} is no whole number of 0 or more.")
    return number


def _local_replicas(total: int, processes: int) -> int:
    if total < 1 or total % processes:
        raise createPoptorchError(
            f"{total} replicas (--replicas, or {REPLICAS_VARIABLE}: those of all "
            f"processes) can't be shared by {processes} processes evenly: choose a "
            f"multiple of {processes}."
        )
    return total // processes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ipufit.emulator",
        usage="%(prog)s [-h] [--ipus N] [--processes P [--replicas N]] [--force] "
        "[--strict] (script | -m module) ...",
        description="Run an unmodified PopTorch script without IPUs: its `import "
        "poptorch` and `import popdist` find the emulator.",
        epilog="Models run on this machine's processor, with torch's numbers. Options "
        "go before the script; what follows it is the script's.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ipus",
        type=_positive,
        metavar="N",
        help="how many IPUs there are; a model that needs more, or those that another "
        f"one holds, fails as on a pod (default: {NUM_IPUS_VARIABLE}, or 64)",
    )
    parser.add_argument(
        "--processes",
        type=_positive,
        metavar="P",
        help="start the script in P processes on this machine by torchrun, and tell "
        "popdist in each what PopRun would. What processes other than the first print "
        "is not shown: torchrun's --redirects keeps it in files, in a folder "
        "torchelastic_* among the temporary ones; their errors are shown. For several "
        "machines start torchrun yourself, with `-m ipufit.emulator script`",
    )
    parser.add_argument(
        "--replicas",
        type=_positive,
        metavar="N",
        help="the number of replicas in all processes together, as poprun's "
        "--num-replicas (default: one in each). Passed in "
        f"{REPLICAS_VARIABLE}, which torchrun's processes read too",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="emulate even though a real PopTorch is installed",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse operators that PopTorch doesn't compile, as a pod does; sets "
        f"{STRICT_VARIABLE}=1",
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="run a module, named as in an import, instead of a script",
    )
    parser.add_argument("script", help="what to run: a file, folder or zip file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="passed to it")
    return parser


def _positive(text: str) -> int:
    number = whole_number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return number


def _say(message: str) -> None:
    sys.stderr.write(f"ipufit.emulator: {message}\n")


if __name__ == "__main__":
    main()
