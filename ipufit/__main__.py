# SPDX-License-Identifier: Apache-2.0
"""The command `ipufit`, also `python -m ipufit`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from ipufit import _env, doctor, launch
from ipufit._version import __version__
from ipufit.errors import ConfigError, IpufitError

if TYPE_CHECKING:
    from ipufit.planning.plan import ModelPlan

# What these commands run needs torch, which takes a while to be imported: `--help` and
# `launch` do without it.

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
  ipufit compile --output compiled --ipu-version 21 -m package.train

The script runs on this machine, which needs no IPUs. fit, evaluate and predict compile
their programs and run none. Options of `compile` go before the script; everything after
it is the script's. See docs/how-to/compile-ahead.md.
"""

_PLAN = """\
examples:
  ipufit plan train.py --epochs 3
  ipufit plan --device bow --json -m package.train
  ipufit plan --batch-size 512 models:make

The script runs on this machine up to its first fit, of which nothing is done. A
function returns an IPUModel and its data: `(model, x)` or `(model, x, y)`. Options of
`plan` go before the script; everything after it is the script's. See
docs/how-to/plan.md.
"""


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


def check(arguments: Sequence[str]) -> None:
    """Print everything that a check of a script's model finds.

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
    from ipufit._poptorch import emulate_everywhere
    from ipufit.model.checking import checked
    from ipufit.scripts import look_at_model

    emulate_everywhere()
    try:
        report = look_at_model(
            given.script,
            given.arguments,
            lambda model, of_fit: checked(model, _arguments_of_fit(of_fit, given)),
            is_module=given.is_module,
        )
    except IpufitError as error:
        sys.stderr.write(f"ipufit check: {error}\n")
        sys.exit(2)
    if given.json:
        sys.stdout.write(f"{report.as_json()}\n")
    else:
        report.print()
    sys.exit(int(report.is_refused))


def plan(arguments: Sequence[str]) -> None:
    """Run a script to its first fit, and print the plan of that.

    Raises:
        SystemExit: Always: with 1 if there is no plan.
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
    parser.add_argument(
        "--save", help="also write it to a file: .html, or drawn as .svg, .png or .pdf"
    )
    prints = parser.add_mutually_exclusive_group()
    prints.add_argument("--json", action="store_true", help="print data for programs")
    prints.add_argument(
        "--pictures", action="store_true", help="print pictures with the tables"
    )
    given = parser.parse_args(arguments)
    from ipufit.model.planning import plan_of_fit
    from ipufit.scripts import look_at_model

    def planned(model: Any, of_fit: Mapping[str, Any]) -> ModelPlan:
        of_fit = _arguments_of_fit(of_fit, given)
        return plan_of_fit(model, of_fit, given.device, is_spare=True)

    try:
        found = look_at_model(
            given.script, given.arguments, planned, is_module=given.is_module
        )
        if given.save is not None:
            found.save(given.save)
    except IpufitError as error:
        sys.stderr.write(f"ipufit plan: {error}\n")
        sys.exit(1)
    if given.pictures:
        found.show()
    else:
        text = json.dumps(as_data(found), indent=2) if given.json else str(found)
        sys.stdout.write(text + "\n")
    sys.exit(0)


def compile_(arguments: Sequence[str]) -> None:
    """Run a script so that its programs are compiled only, and say which.

    Raises:
        SystemExit: With the script's own status; with 1 if it has compiled nothing.
    """
    parser = _parser(
        "compile",
        "[-h] [--output DIR] [--ipu-version V] (script | -m module) ...",
        "Run a script so that its programs are compiled and not run, on a machine with "
        "IPUs or without.",
        _COMPILE,
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
    given = parser.parse_args(arguments)
    if not given.is_module and not os.path.exists(given.script):
        parser.error(f"there is no script {given.script!r}")
    from ipufit.scripts import run_script

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


def as_data(plan: ModelPlan) -> dict[str, Any]:
    """A plan for programs: dicts, lists, numbers and texts."""
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
    """A parser of a command line that ends with a script and its arguments."""
    parser = argparse.ArgumentParser(
        prog=f"ipufit {command}",
        usage=f"%(prog)s {usage}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
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


def _parser_of_model(
    command: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    usage = "[options] (script | -m module | module:function) [arguments]"
    parser = _parser(command, usage, description, epilog)
    parser.add_argument(
        "--batch-size", type=int, help="samples of an update, instead of the script's"
    )
    return parser


def _arguments_of_fit(
    of_fit: Mapping[str, Any], given: argparse.Namespace
) -> dict[str, Any]:
    """The arguments of a `fit`, with the batch size of the command line."""
    if "x" not in of_fit:
        raise ConfigError(
            f"{given.script} gives a model and no data: shapes of a batch and the "
            "number of samples are needed. Return (model, x) or (model, x, y)."
        )
    if given.batch_size is None:
        return dict(of_fit)
    return {**of_fit, "batch_size": given.batch_size}


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "check": (check, "say what PopTorch would refuse in a script"),
    "compile": (compile_, "compile a script's programs, run none"),
    "doctor": (doctor.main, "say what is installed, and what is missing"),
    "launch": (launch.main, "run a script in several processes"),
    "plan": (plan, "say what a script's fit takes of IPUs, run none of it"),
}
"""Name of a command -> the function that takes its arguments, and what it does."""


if __name__ == "__main__":
    main()
