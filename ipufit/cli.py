# SPDX-License-Identifier: Apache-2.0
"""The command `ipufit`: check, compile, launch and plan scripts.

`doctor` is in `ipufit/doctor.py`. The docstring of a command is its `--help`. Most
commands need torch, which is slow to import; `--help` and `launch` don't import it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import operator
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import traceback
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Callable, Iterator, NoReturn, Sequence

from . import _env, doctor
from ._version import __version__
from .errors import ConfigError, IpufitError

if TYPE_CHECKING:
    from .model.arguments import FitArguments
    from .planning.plan import ModelPlan

Command = Callable[[Sequence[str]], None]
"""A function of the command line after `ipufit` and the command's name."""

_help_format = functools.partial(argparse.RawDescriptionHelpFormatter, width=80)
"""Also on wide terminals, because descriptions are printed as they are written."""


def main() -> None:
    """Run the command that the command line names."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        COMMANDS[name](arguments)
        return
    lines = ["commands:"]
    for known, command in COMMANDS.items():
        title = _help_text(command).partition("\n")[0].rstrip(".")
        lines.append(f"  {known:11}  {title[:1].lower()}{title[1:]}")
    parser = argparse.ArgumentParser(
        prog="ipufit",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        epilog="\n".join([*lines, "", "`ipufit COMMAND --help` says more."]),
        formatter_class=_help_format,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.parse_args([name])


def check(arguments: Sequence[str]) -> None:
    """Say what PopTorch would refuse in a script.

    All that PopTorch would refuse in the first fit of a script, or compute
    otherwise than torch, is said at once. Nothing is compiled, trained or written.

    Examples:
      ipufit check train.py --epochs 3
      ipufit check --json -m package.train
      ipufit check --batch-size 64 package.models:make_model

    The exit status is 1 where PopTorch would refuse the program, 2 if there is no
    model to look at, else 0. See docs/how-to/check.md.
    """
    # The emulator checks the program, so the program must be built with the emulator's
    # functions, even if PopTorch is installed. `ipufit._poptorch` chooses at import.
    os.environ[_env.BACKEND] = "emulator"
    parser = _parser_of_program("check", check)
    parser.add_argument("--json", action="store_true", help="print data for programs")
    options = parser.parse_args(arguments)
    from ._poptorch import emulate_everywhere

    emulate_everywhere()
    with _errors_told("check"):
        from .model.checking import check_fit

        report = look_at_first_fit(
            options,
            lambda model, of_fit: check_fit(model._planner, of_fit, is_spare=True),
        )
    if options.json:
        sys.stdout.write(f"{report.as_json()}\n")
    else:
        report.print()
    sys.exit(int(report.is_refused))


def plan(arguments: Sequence[str]) -> None:
    """Report what a script's fit takes of IPUs, without training.

    The plan says what the first fit of a script takes of each IPU, how its pipeline
    runs, and what other settings would change. Nothing is trained, and no IPU is
    needed.

    Examples:
      ipufit plan train.py --epochs 3
      ipufit plan --device bow --json -m package.train
      ipufit plan --batch-size 512 models:make

    The exit status is 2 if there is no plan, else 0. See docs/how-to/plan.md.
    """
    parser = _parser_of_program("plan", plan)
    parser.add_argument(
        "--device", default="mk2", help="kind of IPU: mk1, mk2 (the default) or bow"
    )
    parser.add_argument("--save", help="also draw it into a file: .svg, .png or .pdf")
    prints = parser.add_mutually_exclusive_group()
    prints.add_argument("--json", action="store_true", help="print data for programs")
    prints.add_argument(
        "--pictures", action="store_true", help="print pictures with the tables"
    )
    options = parser.parse_args(arguments)
    with _errors_told("plan"):
        model_plan: ModelPlan = look_at_first_fit(
            options,
            lambda model, of_fit: model._planner.model_plan(
                of_fit, options.device, is_spare=True
            ),
        )
        if options.save is not None:
            model_plan.save(options.save)
    if options.pictures:
        model_plan.show()
    else:
        data = as_data(model_plan) if options.json else None
        text = str(model_plan) if data is None else json.dumps(data, indent=2)
        sys.stdout.write(text + "\n")
    sys.exit(0)


def compile_(arguments: Sequence[str]) -> None:
    """Compile a script's programs without running them.

    The programs of the script's first fit, of evaluate and of predict are compiled,
    on a machine with IPUs or without. Nothing is trained.

    Examples:
      ipufit compile train.py --epochs 3
      ipufit compile --cache-dir compiled --ipu-version 21 -m package.train
      ipufit compile package.models:make

    The exit status is 1 if PopTorch refuses a program, 2 if there is none, else 0.
    See docs/how-to/compile-ahead.md.
    """
    parser = _parser_of_program("compile", compile_)
    parser.add_argument(
        "--cache-dir",
        default=os.environ.get("POPTORCH_CACHE_DIR") or "compiled",
        metavar="DIR",
        help="directory of the executables, if the script's config has none (default: "
        "POPTORCH_CACHE_DIR, else compiled)",
    )
    parser.add_argument(
        "--ipu-version",
        type=int,
        default=2,
        choices=_env.IPU_VERSIONS,
        help="version of the IPUs: 2 for Mk2 (the default), 21 for Bow",
    )
    options = parser.parse_args(arguments)
    os.environ[_env.COMPILE_FOR] = str(options.ipu_version)
    folder = os.path.abspath(options.cache_dir)
    with _errors_told("compile"):
        from .model.building import build_offline

        built = look_at_first_fit(
            options, lambda model, of_fit: build_offline(model, of_fit, folder)
        )
    sys.stdout.write(f"{built}\n")
    sys.exit(0)


def conformance(arguments: Sequence[str]) -> None:
    """Say how to record what IPUs do."""
    sys.stderr.write(
        "ipufit conformance: the probes are tests now. In a clone of ipufit, with its\n"
        "development packages (pip install -e '.[dev]'), run\n"
        "    pytest tests/conformance --record FILE\n"
        "to record what they do on this host, and --recording FILE to compare. See\n"
        "docs/how-to/conformance.md.\n"
    )
    sys.exit(2)


def as_data(plan: ModelPlan) -> dict[str, Any]:
    """Convert a plan to dicts, lists, numbers and texts, for programs."""
    names = "num_ipus bubble slowest_stage imbalance ideal_speedup"
    return {
        **_plain(vars(plan)),
        "memory": _plain(plan.memory),
        "choices": _plain(plan.choices),
        **{name: getattr(plan, name) for name in names.split()},
    }


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if hasattr(value, "__dataclass_fields__"):
        return _plain(vars(value))
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value


# Parsers ------------------------------------------------------------------------------


def _help_text(command: Command) -> str:
    return inspect.getdoc(command) or ""


def _parser(
    name: str, command: Command, usage: str, more: str = ""
) -> argparse.ArgumentParser:
    """Return a parser for a command that takes a script or, with `-m`, a module.

    The help is the docstring of the command: its text above the options, its examples
    below; then `more`.
    """
    about, _, examples = _help_text(command).partition("Examples:\n")
    parser = argparse.ArgumentParser(
        prog=f"ipufit {name}",
        usage=f"%(prog)s {usage}",
        description=about,
        epilog=f"examples:\n{examples}\n\n{more}".rstrip(),
        formatter_class=_help_format,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="run a module, named as in an import, instead of a script",
    )
    return parser


def _parser_of_program(name: str, command: Command) -> argparse.ArgumentParser:
    """Return a parser for a command line that ends with a program and its arguments."""
    parser = _parser(
        name,
        command,
        "[options] (script | -m module | module:function) ...",
        "A script or module runs up to its first fit, and not further. A function\n"
        "returns an IPUModel that was compiled, with its data: (model, x) or (model,\n"
        f"x, y). Options of `{name}` go before the script; everything after it is the\n"
        "script's.",
    )
    parser.add_argument("script", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument(
        "--batch-size", type=int, help="samples of an update, instead of the script's"
    )
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="time in which the script must call fit (default: %(default)g)",
    )
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number of seconds above 0")


@contextlib.contextmanager
def _errors_told(command: str) -> Iterator[None]:
    """Print an error of ipufit inside the context, and end with status 2."""
    try:
        yield
    except IpufitError as error:
        sys.stderr.write(f"ipufit {command}: {error}\n")
        sys.exit(2)


# Programs, up to their first fit ------------------------------------------------------


class EndOfProgram(BaseException):
    """Raised to end a program that runs for its model.

    This isn't an `Exception`, so a script that catches errors of `fit` doesn't catch
    it.
    """


def look_at_first_fit(
    options: argparse.Namespace, look: Callable[[Any, FitArguments], Any]
) -> Any:
    """Run a program up to its first `fit`, and return the result of `look`.

    `look` is called while a script waits, so the script's temporary files still exist.
    The program's standard output goes to standard error. No bytecode of the modules
    that it imports is written.

    Args:
        options: `script`, the path of a script, the name of a module, or
            `module:function`; its `arguments`; `is_module`, `batch_size` and
            `time_limit`.
        look: Function of the model and the arguments of its `fit`.

    Raises:
        ConfigError: The program doesn't exist, fails before it calls `fit`, ends
            without calling `fit`, or takes too long.
    """
    from .model import IPUModel
    from .model.arguments import FitArguments

    program, fit = options.script, IPUModel.fit
    outcome: Future[Any] = Future()
    signature = inspect.signature(fit)
    is_script = options.is_module or ":" not in program or os.path.exists(program)

    def seen(model: Any, **of_fit: Any) -> Any:
        if "x" not in of_fit:
            raise ConfigError(
                f"{program} returns a model and no data: shapes of a batch and the "
                "number of samples are needed. Return (model, x) or (model, x, y)."
            )
        if options.batch_size is not None:
            of_fit["batch_size"] = options.batch_size
        return look(model, FitArguments.of(of_fit))

    def stop(*args: Any, **kwargs: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # no time limit for `look`
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        model = bound.arguments.pop("self")
        if not outcome.done():
            try:
                outcome.set_result(seen(model, **bound.arguments))
            except Exception as error:  # noqa: BLE001 - raised when the script has ended
                outcome.set_exception(error)
        raise EndOfProgram

    def end_at_time_limit(*_: Any) -> NoReturn:
        outcome.set_exception(
            ConfigError(
                f"{program} has run for {options.time_limit:g} seconds and hasn't "
                "called fit of an IPUModel. --time-limit sets how long it may. A "
                "function that makes the model can be named instead: module:function."
            )
        )
        raise EndOfProgram

    before = sys.argv, sys.path[:], sys.dont_write_bytecode
    handler = signal.signal(signal.SIGALRM, end_at_time_limit)
    sys.argv, sys.dont_write_bytecode = [program, *options.arguments], True
    is_file = is_script and not options.is_module
    folder = os.path.dirname(os.path.abspath(program)) if is_file else os.getcwd()
    sys.path.insert(0, folder)
    IPUModel.fit = stop  # type: ignore[assignment,method-assign]
    signal.setitimer(signal.ITIMER_REAL, options.time_limit)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if is_script:
                status = _run(program, is_module=options.is_module)
            else:
                model, data = _call_function(program, options.arguments)
        if not is_script:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return seen(model, **data)
        if not outcome.done():
            ending = "ended" if status == 0 else f"ended with {status!r}"
            raise ConfigError(
                f"{program} {ending} before it called fit of an IPUModel, so there is "
                "nothing to look at. A function that makes the model can be named "
                "instead: module:function."
            )
    except EndOfProgram:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        IPUModel.fit = fit  # type: ignore[method-assign]
        sys.argv, sys.path[:], sys.dont_write_bytecode = before
    return outcome.result()


def _run(program: str, *, is_module: bool) -> str | int:
    """Run a script or module as Python would, and return its exit status."""
    (_require_module if is_module else _require_script)(program)
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ending:
        return 0 if ending.code is None else ending.code
    except Exception as error:  # noqa: BLE001 - shown; the compiled programs count
        _show(error)
        return 1
    return 0


def _show(error: Exception) -> None:
    """Print the traceback of an error, from the user's first frame on."""
    entry, own = error.__traceback__, (__name__, "runpy", "importlib")
    while entry and entry.tb_frame.f_globals["__name__"].startswith(own):
        entry = entry.tb_next
    traceback.print_exception(type(error), error, entry)


def _call_function(name: str, arguments: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Return the model that the named function returns, and its data."""
    from .model import IPUModel

    if arguments:
        raise ConfigError(
            f"{name} is a function that is called without arguments. Got "
            f"{' '.join(arguments)}."
        )
    function = _function(name)
    with _failures_shown(f"{name} can't be called"):
        made = function()
    values = made if isinstance(made, tuple) and made else (made,)
    model, *data = values
    if not isinstance(model, IPUModel) or len(data) > 2:
        kinds = ", ".join(type(one).__name__ for one in values)
        returned = f"({kinds})" if values is made else kinds
        raise ConfigError(
            f"{name} must return a compiled IPUModel with its data: (model, x) or "
            f"(model, x, y). It has returned {returned}."
        )
    return model, dict(zip(("x", "y"), data))


@contextlib.contextmanager
def _failures_shown(what: str) -> Iterator[None]:
    """Print the traceback of a user's error, and raise it as a ConfigError."""
    try:
        yield
    except IpufitError:
        raise
    except Exception as error:
        _show(error)
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error


def _function(name: str) -> Callable[[], Any]:
    """Import a function that is named as `module:function`."""
    module_name, _, path = name.partition(":")
    if module_name.endswith(".py"):
        stem = os.path.basename(module_name)[: -len(".py")]
        raise ConfigError(
            f"{module_name!r} is a file. A function is named with its module, as in an "
            f"import: go to the file's folder and pass {stem}:{path}."
        )
    _require_module(module_name)
    with _failures_shown(f"{module_name} can't be imported"):
        module = importlib.import_module(module_name)
    try:
        found: Callable[[], Any] = operator.attrgetter(path)(module)
    except AttributeError as error:
        raise ConfigError(f"{module_name} has no function {path!r}.") from error
    return found


def _require_script(path: str) -> None:
    if not os.path.isfile(path):
        kind = "is a directory, not a script" if os.path.isdir(path) else "isn't there"
        raise ConfigError(f"There is no script {path!r}: it {kind}.")


def _require_module(name: str) -> None:
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        is_there = not f"{name}.".startswith(f"{error.name}.")
    except Exception:  # noqa: BLE001 - an error of its package; importing will show it
        is_there = True
    if not is_there:
        raise ConfigError(
            f"There is no module {name!r}, neither in this folder nor installed."
        )


# Launch -------------------------------------------------------------------------------

_MEETING_PLACE = re.compile("--(rdzv.endpoint|master.addr)|PET_(RDZV_END|MASTER_ADD)")
"""Options and variables of torchrun that say where hosts find each other."""


def launch(arguments: Sequence[str]) -> None:
    """Run a script in several processes.

    PopRun starts them on a host with IPUs (PopTorch is installed, and poprun on
    PATH), torchrun elsewhere.

    Examples:
      ipufit launch --processes 4 train.py --epochs 3
      ipufit launch --processes 4 --replicas 8 -m package.train
      ipufit launch --processes 8 --options "--nnodes 2 --rdzv-backend c10d
          --rdzv-endpoint host1:29500" train.py              (on both of two hosts)
      ipufit launch --processes 8 --replicas 16 --options "--host=host1,host2
          --vipu-partition=p16" train.py                     (on one host of a pod)

    Options of `launch` go before the script; everything after it is the script's.
    Signals reach the launcher, and its exit code is this command's. See
    docs/how-to/pods.md.
    """
    parser, valued = _parser_of_launch()
    own, program = _split(arguments, valued)
    options = parser.parse_args(own)
    try:
        options.options = shlex.split(options.options)
        if not program:
            raise ConfigError("No script: name it after the options of `launch`.")
        if options.replicas is not None:
            count = options.processes
            _require_shares("--replicas", options.replicas, count, "processes")
        launcher, remark = options.launcher, ""
        if launcher is None:
            launcher, remark = _chosen_launcher()
        make = _poprun_line if launcher == "poprun" else _torchrun_line
        command, variables = make(options, program)
    except ValueError as error:  # ConfigError, or a quote that isn't closed
        parser.error(str(error))
    settings = [f"{name}={shlex.quote(text)}" for name, text in variables.items()]
    line = " ".join([*settings, *map(shlex.quote, command)])
    if options.is_dry_run:
        sys.stdout.write(f"{line}\n")
        return
    if not options.is_module:
        with _errors_told("launch"):
            _require_script(program[0])
    for text in filter(None, (remark, line)):
        sys.stderr.write(f"ipufit: {text}\n")
    if shutil.which(command[0]) is None:
        sys.stderr.write(
            f"ipufit: {command[0]} isn't on PATH: the enable.sh of the Poplar SDK puts "
            "it there. --launcher torchrun starts emulated processes.\n"
        )
        sys.exit(2)
    sys.stdout.flush()
    sys.stderr.flush()
    # The launcher replaces this process: signals of a terminal, a scheduler or `kill`
    # reach it directly, and a waiting process gets its exit code. A parent that only
    # forwards both could die and leave the launcher behind.
    os.execvpe(command[0], command, {**os.environ, **variables})


def _split(
    arguments: Sequence[str], valued: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Split the options of `launch` from the program and its arguments.

    argparse would read a value that begins with a dash, such as `--host=a,b` for
    `--options`, as another option, and drop a `--` of the program's.

    Example:
        >>> _split(["--options", "--host=a,b", "train.py", "-x"], ["--options"])
        (['--options=--host=a,b'], ['train.py', '-x'])
    """
    rest = list(arguments)
    own = []
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        if option in valued and rest:
            option += f"={rest.pop(0)}"
        own.append(option)
    return own, rest


def _parser_of_launch() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser, and the names of its options that take a value."""
    usage = (
        "[-h] --processes P [--replicas N] [--ipus-per-replica I]\n"
        "         [--launcher {poprun,torchrun}] [--options OPTIONS]\n"
        "         [--dry-run] (script | -m module) ..."
    )
    parser = _parser("launch", launch, usage)
    valued = [
        parser.add_argument(
            "--processes",
            type=_count,
            required=True,
            metavar="P",
            help="number of processes, of all hosts together, as poprun's "
            "--num-instances; with torchrun on H hosts each of them starts P / H",
        ),
        parser.add_argument(
            "--replicas",
            type=_count,
            metavar="N",
            help="number of replicas, of all processes together, as poprun's "
            "--num-replicas (default: one for each process with poprun, as the "
            "script's IPUConfig says with torchrun)",
        ),
        parser.add_argument(
            "--ipus-per-replica",
            type=_count,
            metavar="I",
            help="for poprun; with torchrun replicas are emulated, and take as many "
            "IPUs as the model names",
        ),
        parser.add_argument(
            "--launcher",
            choices=("poprun", "torchrun"),
            help="insist on one, whatever is installed",
        ),
        parser.add_argument(
            "--options",
            default="",
            help='options of torchrun or PopRun, in quotes: "--host=host1,host2", '
            '"--max-restarts 3"; they come after those that ipufit sets',
        ),
    ]
    parser.add_argument(
        "--dry-run",
        dest="is_dry_run",
        action="store_true",
        help="only print the command, on standard output",
    )
    return parser, [name for action in valued for name in action.option_strings]


def _count(text: str) -> int:
    number = _env.whole_number(text)
    most = doctor.MOST_IPUS_OF_POD
    if not number or number > most:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not a number from 1 to {most}, the IPUs of the largest "
            "pod"
        )
    return number


def _require_shares(option: str, number: int, sharers: int, word: str) -> None:
    if number % sharers:
        below = number // sharers * sharers
        legal = f"{below} or {below + sharers}" if below else f"{sharers}"
        raise ConfigError(
            f"{option} {number} can't be shared equally by {sharers} {word}: use "
            f"{legal}."
        )


def _chosen_launcher() -> tuple[str, str]:
    """Choose PopRun if PopTorch runs the models, else torchrun; return a remark, too.

    PopTorch is searched for and not imported, because an import may take IPUs.
    """
    if _env.backend() == "emulator" or importlib.util.find_spec("poptorch") is None:
        return "torchrun", ""
    if shutil.which("poprun"):
        return "poprun", ""
    return "torchrun", (
        "PopTorch is installed, and poprun isn't on PATH (the SDK's enable.sh puts it "
        "there), so torchrun starts the processes"
    )


def _poprun_line(
    options: argparse.Namespace, program: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of PopRun, and the variables to set."""
    command = [
        "poprun",
        f"--num-instances={options.processes}",
        f"--num-replicas={options.replicas or options.processes}",
    ]
    if options.ipus_per_replica is not None:
        command.append(f"--ipus-per-replica={options.ipus_per_replica}")
    if not any(option.startswith("--vipu-") for option in options.options):
        # The partition of the shell, or the one that Graphcore's Slurm makes for a job.
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID")
        of_job = f"slurm_{job}" if job else ""
        partition = os.environ.get("IPUOF_VIPU_API_PARTITION_ID") or of_job
        command += [f"--vipu-partition={partition}"] if partition else []
    # -u as torchrun does: a killed process would lose output that is buffered for the
    # pipe.
    python = [sys.executable, "-u", *(["-m"] if options.is_module else [])]
    return [*command, *options.options, *python, *program], {}


def _torchrun_line(
    options: argparse.Namespace, program: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of torchrun on this host, and the variables to set.

    If an option occurs twice, torchrun takes the last: the user's.
    """
    hosts = _num_hosts(options.options)
    _require_shares("--processes", options.processes, hosts, "hosts")
    here = options.processes // hosts
    command = [sys.executable, "-m", "ipufit._torchrun", f"--nproc-per-node={here}"]
    if hosts == 1:
        # Like --standalone, which in torch 2.0 uses one port for all runs on a host.
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    elif not any(map(_MEETING_PLACE.match, [*options.options, *os.environ])):
        raise ConfigError(
            f"{hosts} hosts need a place to meet: add --rdzv-backend c10d "
            "--rdzv-endpoint HOST:29500 to the options, with one of the hosts."
        )
    if here > 1:
        # 1: standard output of these processes goes to files, errors to the terminal.
        redirects = ",".join(f"{index}:1" for index in range(1, here))
        command.append(f"--redirects={redirects}")
    command += [*options.options, *(["--module"] if options.is_module else [])]
    if "--" in program:
        command.append("--")  # torchrun drops the first "--"
    variables = {}
    if options.replicas is not None:
        variables[_env.REPLICAS] = str(options.replicas)
    if here > 1 and not os.environ.get("OMP_NUM_THREADS"):
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        variables["OMP_NUM_THREADS"] = str(max(1, cores // here))
    return [*command, *program], variables


def _num_hosts(options: Sequence[str]) -> int:
    """Read the number of hosts from torchrun's `--nnodes`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default=os.environ.get("PET_NNODES") or "1")
    text = parser.parse_known_args(options)[0].nnodes
    hosts = _env.whole_number(text)
    if not hosts:
        raise ConfigError(
            f"--nnodes {text}: `ipufit launch` needs one number of hosts, which share "
            "the processes and replicas. Use --nnodes 2, for example."
        )
    return hosts


COMMANDS: dict[str, Command] = {
    "check": check,
    "compile": compile_,
    "conformance": conformance,
    "doctor": doctor.main,
    "launch": launch,
    "plan": plan,
}
"""The functions of the commands, by their names."""
