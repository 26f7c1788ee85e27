# SPDX-License-Identifier: Apache-2.0
"""The command `ipufit`: check, compile, launch and plan scripts; `doctor` has its own.

Most commands need torch, which takes a while to import: `--help` and `launch` do
without it.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Iterator,
    Mapping,
    NoReturn,
    Sequence,
    TypeVar,
)

from . import _env, doctor
from ._version import __version__
from .errors import ConfigError, IpufitError

if TYPE_CHECKING:
    from .model.arguments import FitArguments
    from .planning.plan import ModelPlan

ResultT = TypeVar("ResultT")
Look = Callable[[Any, Mapping[str, Any]], ResultT]
"""Gets a model, and the arguments of its `fit` by name."""

_CHECK = """\
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

_COMPILE = """\
examples:
  ipufit compile train.py --epochs 3
  ipufit compile --cache-dir compiled --ipu-version 21 -m package.train
  ipufit compile package.models:make

A script or module runs up to its first fit, and not further; the programs of that fit,
of evaluate and of predict are compiled. No IPU is needed. A function returns an
IPUModel and its data: `(model, x)` or `(model, x, y)`. Options of `compile` go before
the script; everything after it is the script's. See docs/how-to/compile-ahead.md.
"""

_PLAN = """\
examples:
  ipufit plan train.py --epochs 3
  ipufit plan --device bow --json -m package.train
  ipufit plan --batch-size 512 models:make

The script runs on this machine up to its first fit, of which nothing is done. A
function returns an IPUModel and its data: `(model, x)` or `(model, x, y)`. Options of
`plan` go before the script; everything after it is the script's. The exit status is 2
if there is no plan, else 0. See docs/how-to/plan.md.
"""

_LAUNCH = """\
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


def main() -> None:
    """Run the command that the command line names."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        run, _ = COMMANDS[name]
        run(arguments)
        return
    lines = [f"  {name:11}  {text}" for name, (_, text) in COMMANDS.items()]
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


def check(arguments: Sequence[str]) -> None:
    """Print all findings of a check of a script's model.

    Raises:
        SystemExit: Always: with 1 if the model is refused, 2 if there is none.
    """
    # A program is surveyed by the emulator, so it must be built with its functions,
    # also where PopTorch is installed. It is chosen at the first import of the seam.
    os.environ[_env.BACKEND] = "emulator"
    parser = _parser_of_model(
        "check",
        "Say everything at once that PopTorch would refuse in the first fit of a "
        "script, or compute otherwise than torch. Nothing is compiled, trained or "
        "written.",
        _CHECK,
    )
    parser.add_argument("--json", action="store_true", help="print data for programs")
    given = parser.parse_args(arguments)
    from ._poptorch import emulate_everywhere

    emulate_everywhere()
    with _errors_told("check"):
        from .model.checking import check_fit

        report = _of_first_fit(
            given,
            lambda model, of_fit: check_fit(model._planner, of_fit, is_spare=True),
        )
    if given.json:
        sys.stdout.write(f"{report.as_json()}\n")
    else:
        report.print()
    sys.exit(int(report.is_refused))


def plan(arguments: Sequence[str]) -> None:
    """Run a script to its first fit, and print the plan of that fit.

    Raises:
        SystemExit: Always: with 2 if there is no plan.
    """
    parser = _parser_of_model(
        "plan",
        "Say what the first fit of a script takes of each IPU, how its pipeline runs, "
        "and what other settings would change. Nothing is trained, and no IPU is "
        "needed.",
        _PLAN,
    )
    parser.add_argument(
        "--device", default="mk2", help="kind of IPU: mk1, mk2 (the default) or bow"
    )
    parser.add_argument("--save", help="also draw it into a file: .svg, .png or .pdf")
    prints = parser.add_mutually_exclusive_group()
    prints.add_argument("--json", action="store_true", help="print data for programs")
    prints.add_argument(
        "--pictures", action="store_true", help="print pictures with the tables"
    )
    given = parser.parse_args(arguments)

    with _errors_told("plan"):
        found: ModelPlan = _of_first_fit(
            given,
            lambda model, of_fit: model._planner.model_plan(
                of_fit, given.device, is_spare=True
            ),
        )
        if given.save is not None:
            found.save(given.save)
    if given.pictures:
        found.show()
    else:
        text = json.dumps(as_data(found), indent=2) if given.json else str(found)
        sys.stdout.write(text + "\n")
    sys.exit(0)


def compile_(arguments: Sequence[str]) -> None:
    """Run a script to its first fit, and compile the programs of that fit.

    Raises:
        SystemExit: Always: with 1 if PopTorch refuses a program, 2 if there is none.
    """
    parser = _parser_of_model(
        "compile",
        "Compile the programs of the first fit of a script, on a machine with IPUs or "
        "without. Nothing is trained.",
        _COMPILE,
    )
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
    given = parser.parse_args(arguments)
    os.environ[_env.COMPILE_FOR] = str(given.ipu_version)
    folder = os.path.abspath(given.cache_dir)
    with _errors_told("compile"):
        from .model.building import build_offline

        built = _of_first_fit(
            given, lambda model, of_fit: build_offline(model, of_fit, folder)
        )
    sys.stdout.write(f"{built}\n")
    sys.exit(0)


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


def _parser(
    command: str, usage: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """Return a parser for a command line that ends with a script and its arguments."""
    parser = argparse.ArgumentParser(
        prog=f"ipufit {command}",
        usage=f"%(prog)s {usage}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_module(parser)
    parser.add_argument("script", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _parser_of_model(
    command: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    usage = "[options] (script | -m module | module:function) [arguments]"
    parser = _parser(command, usage, description, epilog)
    parser.add_argument(
        "--batch-size", type=int, help="samples of an update, instead of the script's"
    )
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=TIME_LIMIT,
        metavar="SECONDS",
        help="time in which the script must call fit (default: %(default)g)",
    )
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number of seconds above 0")


def _of_first_fit(
    given: argparse.Namespace, look: Callable[[Any, FitArguments], Any]
) -> Any:
    """Return what `look` makes of a model and its `fit`, with the given batch size."""
    from .model.arguments import FitArguments

    def looked(model: Any, of_fit: Mapping[str, Any]) -> Any:
        if "x" not in of_fit:
            raise ConfigError(
                f"{given.script} gives a model and no data: shapes of a batch and the "
                "number of samples are needed. Return (model, x) or (model, x, y)."
            )
        size = {} if given.batch_size is None else {"batch_size": given.batch_size}
        return look(model, FitArguments.of({**of_fit, **size}))

    return look_at_model(
        *(given.script, given.arguments, looked),
        is_module=given.is_module,
        time_limit=given.time_limit,
    )


@contextlib.contextmanager
def _errors_told(command: str) -> Iterator[None]:
    """Print an error of ipufit inside the context, and end with status 2."""
    try:
        yield
    except IpufitError as error:
        sys.stderr.write(f"ipufit {command}: {error}\n")
        sys.exit(2)


def _add_module(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="run a module, named as in an import, instead of a script",
    )


# Scripts ------------------------------------------------------------------------------


class FirstFit(BaseException):
    """Raised to end a script at its first `fit`.

    It is no `Exception`, so a script that catches errors of `fit` doesn't catch it.
    """


TIME_LIMIT = 600.0
"""Seconds in which a script calls `fit`, by default."""


class TimeIsUpError(BaseException):
    """Raised to end a script that doesn't call `fit`."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise a TimeIsUpError if the context takes longer, and nobody stops the timer."""

    def end(*_: Any) -> NoReturn:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_script(script: str, arguments: Sequence[str], *, is_module: bool) -> str | int:
    """Run a script as Python would, and return its exit status."""
    before = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        return 0 if ending.code is None else ending.code
    except Exception as error:  # noqa: BLE001 - shown, and what was compiled after it
        _show(error)
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _show(error: Exception) -> None:
    """Print the traceback of an error, from the user's first frame on."""
    entry, own = error.__traceback__, (__name__, "runpy", "importlib")
    while entry and entry.tb_frame.f_globals["__name__"].startswith(own):
        entry = entry.tb_next
    traceback.print_exception(type(error), error, entry)


def look_at_model(
    program: str,
    arguments: Sequence[str],
    look: Look[ResultT],
    *,
    is_module: bool = False,
    time_limit: float = TIME_LIMIT,
) -> ResultT:
    """Run a program up to its first `fit`, and pass the model to `look`.

    `look` is called while the program waits, so its temporary files still exist. The
    program's standard output goes to standard error. No bytecode of the modules that it
    imports is written.

    Args:
        program: A script's path, a module's name, or `module:function`. The function
            returns a model, `(model, x)` or `(model, x, y)`.
        arguments: The arguments of the script.
        look: Called with the model, and the arguments of its `fit`: all of them for a
            script, `x` and `y` for a function that returns them.
        is_module: Whether `program` is the name of a module that is run as a script.
        time_limit: Seconds in which it must call `fit`, or return the model.

    Returns:
        The result of `look`; its errors are raised.

    Raises:
        ConfigError: There is no such program, it fails before it calls `fit`, ends
            without doing so, or takes too long.
    """
    outcome: Future[ResultT] = Future()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with contextlib.redirect_stdout(sys.stderr), _stopping_at_fit(
            look, outcome
        ), _limited(time_limit):
            if is_module or ":" not in program or os.path.exists(program):
                _run_to_fit(program, arguments, is_module=is_module)
            made = _made_by(program, arguments)
        return look(*made)
    except TimeIsUpError:
        raise ConfigError(
            f"{program} has run for {time_limit:g} seconds and hasn't called fit of an "
            "IPUModel. --time-limit sets how long it may. A function that makes the "
            "model can be named instead: module:function."
        ) from None
    except (FirstFit, ConfigError):
        if not outcome.done():
            raise
    finally:
        sys.dont_write_bytecode = before
    return outcome.result()


@contextlib.contextmanager
def _stopping_at_fit(look: Look[ResultT], outcome: Future[ResultT]) -> Iterator[None]:
    """Let `IPUModel.fit` end the script, and store the result of `look`."""
    from .model import IPUModel

    fit = IPUModel.fit
    signature = inspect.signature(fit)

    def stop(*args: Any, **kwargs: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the look may take its time
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        model = given.arguments.pop("self")
        if not outcome.done():
            try:
                outcome.set_result(look(model, given.arguments))
            except Exception as error:  # noqa: BLE001 - raised when the script has ended
                outcome.set_exception(error)
        raise FirstFit

    IPUModel.fit = stop  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        IPUModel.fit = fit  # type: ignore[method-assign]


def _run_to_fit(program: str, arguments: Sequence[str], *, is_module: bool) -> NoReturn:
    if is_module:
        _require_module(program)
    else:
        _require_script(program)
    status = run_script(program, arguments, is_module=is_module)
    ending = "ended" if status == 0 else f"ended with {status!r}"
    raise ConfigError(
        f"{program} {ending} before it called fit of an IPUModel, so there is nothing "
        "to look at. A function that makes the model can be named instead: "
        "module:function."
    )


def _made_by(name: str, arguments: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Return the model that a function makes, and its data."""
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
            f"import: go to the file's folder and give {stem}:{path}."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
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
        kind = "is a directory, and no script" if os.path.isdir(path) else "isn't there"
        raise ConfigError(f"There is no script {path!r}: it {kind}.")


def _require_module(name: str) -> None:
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        is_there = not f"{name}.".startswith(f"{error.name}.")
    except Exception:  # noqa: BLE001 - of its package; the import itself will show it
        is_there = True
    finally:
        sys.path.remove(folder)
    if not is_there:
        raise ConfigError(
            f"There is no module {name!r}, neither in this folder nor installed."
        )


# Launch -------------------------------------------------------------------------------

_LAUNCHERS = ("poprun", "torchrun")
_THREADS = "OMP_NUM_THREADS"

_MEETING_PLACE = re.compile("--(rdzv.endpoint|master.addr)|PET_(RDZV_END|MASTER_ADD)")
"""Options and variables of torchrun that say where hosts find each other."""


def launch(arguments: Sequence[str]) -> None:
    """Run a script in several processes; the launcher replaces this process."""
    parser, valued = _parser_of_launch()
    own, program = _split(arguments, valued)
    given = parser.parse_args(own)
    try:
        given.options = shlex.split(given.options)
        if not program:
            raise ConfigError("No script: name it after the options of `launch`.")
        if given.replicas is not None:
            _require_shares("--replicas", given.replicas, given.processes, "processes")
        launcher, remark = given.launcher, ""
        if launcher is None:
            launcher, remark = _chosen_launcher()
        make = _poprun_line if launcher == "poprun" else _torchrun_line
        command, variables = make(given, program)
    except ValueError as error:  # ConfigError, or a quote that isn't closed
        parser.error(str(error))
    settings = [f"{name}={shlex.quote(text)}" for name, text in variables.items()]
    line = " ".join([*settings, *map(shlex.quote, command)])
    if given.is_dry_run:
        sys.stdout.write(f"{line}\n")
        return
    if not given.is_module:
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
    # The launcher takes this process's place, so that nothing stands in between:
    # signals of a terminal, a scheduler or `kill` reach it, and whoever waits for this
    # process gets its exit code. A parent that only forwarded both would be one more
    # thing that can die and leave the others behind.
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
    parser = argparse.ArgumentParser(
        prog="ipufit launch",
        usage="%(prog)s [-h] --processes P [--replicas N] [--ipus-per-replica I]\n"
        f"         [--launcher {{{','.join(_LAUNCHERS)}}}] [--options OPTIONS]\n"
        "         [--dry-run] (script | -m module) ...",
        description="Run a script in several processes: by PopRun on a host with IPUs "
        "(PopTorch is installed, and poprun on PATH), by torchrun elsewhere.",
        epilog=_LAUNCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
            choices=_LAUNCHERS,
            help="insist on one, whatever is installed",
        ),
        parser.add_argument(
            "--options",
            default="",
            help='options of torchrun or PopRun, in quotes: "--max-restarts 3", '
            '"--host=host1,host2"; they come after those that ipufit sets',
        ),
    ]
    parser.add_argument(
        "--dry-run",
        dest="is_dry_run",
        action="store_true",
        help="only print the command, on standard output",
    )
    _add_module(parser)
    return parser, [name for action in valued for name in action.option_strings]


_MOST_IPUS = 1024  # of a Bow Pod1024


def _count(text: str) -> int:
    number = _env.whole_number(text)
    if not number or number > _MOST_IPUS:
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not a number from 1 to {_MOST_IPUS}, the IPUs of the "
            "largest pod"
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
    """Choose PopRun if PopTorch runs the models, else torchrun; with a remark.

    PopTorch is looked for and not imported, because an import may take IPUs.
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
    given: argparse.Namespace, program: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of PopRun, and the variables to set."""
    command = [
        "poprun",
        f"--num-instances={given.processes}",
        f"--num-replicas={given.replicas or given.processes}",
    ]
    if given.ipus_per_replica is not None:
        command.append(f"--ipus-per-replica={given.ipus_per_replica}")
    if not any(option.startswith("--vipu-") for option in given.options):
        # That of the shell, or the one that Graphcore's Slurm makes for a job.
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID")
        of_job = f"slurm_{job}" if job else ""
        partition = os.environ.get("IPUOF_VIPU_API_PARTITION_ID") or of_job
        command += [f"--vipu-partition={partition}"] if partition else []
    # -u as torchrun does: output goes through a pipe, and would be lost with a process
    # that is killed.
    python = [sys.executable, "-u", *(["-m"] if given.is_module else [])]
    return [*command, *given.options, *python, *program], {}


def _torchrun_line(
    given: argparse.Namespace, program: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of torchrun on this host, and the variables to set.

    Of an option that comes twice torchrun takes the last, which is the user's.
    """
    hosts = _num_hosts(given.options)
    _require_shares("--processes", given.processes, hosts, "hosts")
    here = given.processes // hosts
    command = [sys.executable, "-m", "ipufit._torchrun", f"--nproc-per-node={here}"]
    if hosts == 1:
        # As --standalone, which has one fixed port for all runs on a host in torch 2.0.
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    elif not any(map(_MEETING_PLACE.match, [*given.options, *os.environ])):
        raise ConfigError(
            f"{hosts} hosts need a place to meet: add --rdzv-backend c10d "
            "--rdzv-endpoint HOST:29500 to the options, with one of the hosts."
        )
    if here > 1:
        # 1: their standard output, to files. Errors still come to the terminal.
        redirects = ",".join(f"{index}:1" for index in range(1, here))
        command.append(f"--redirects={redirects}")
    command += [*given.options, *(["--module"] if given.is_module else [])]
    if "--" in program:
        command.append("--")  # torchrun drops the first one
    variables = {}
    if given.replicas is not None:
        variables[_env.REPLICAS] = str(given.replicas)
    if here > 1 and not os.environ.get(_THREADS):
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        variables[_THREADS] = str(max(1, cores // here))
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


def conformance(arguments: Sequence[str]) -> None:
    """Say that pytest records what IPUs do.

    Args:
        arguments: The command line, without `ipufit conformance`.

    Raises:
        SystemExit: Always, with 2.
    """
    sys.stderr.write(
        "ipufit conformance: the probes are tests now. In a clone of ipufit, with its "
        "development packages (pip install -e '.[dev]'), run\n"
        "    pytest tests/conformance --record FILE\n"
        "to record what they do on this host, and --recording FILE to compare. See "
        "docs/how-to/conformance.md.\n"
    )
    sys.exit(2)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "check": (check, "say what PopTorch would refuse in a script"),
    "compile": (compile_, "compile a script's programs, run none"),
    "conformance": (conformance, "say how to record what IPUs do"),
    "doctor": (doctor.main, "say what is installed, and what is missing"),
    "launch": (launch, "run a script in several processes"),
    "plan": (plan, "say what a script's fit takes of IPUs, run none of it"),
}
"""Name of a command -> the function that takes its arguments, and what it does."""
