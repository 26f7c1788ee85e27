# SPDX-License-Identifier: Apache-2.0
"""The command line of `ipufit plan`: what the first `fit` of a script would take."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any, Sequence

from ipufit.errors import IpufitError

if TYPE_CHECKING:
    from ipufit.planning.plan import ModelPlan

    from .subject import Subject

_EPILOG = """\
examples:
  ipufit plan train.py --epochs 3
  ipufit plan --device bow --json -m package.train
  ipufit plan --batch-size 512 models:make

The script runs on this machine up to its first fit, of which nothing is done. A
function returns an IPUModel and its data: `(model, x)` or `(model, x, y)`. Options of
`plan` go before the script; everything after it is the script's. See
docs/how-to/plan.md.
"""


def main(arguments: Sequence[str]) -> None:
    """Run a script to its first fit, and print the plan of that.

    Args:
        arguments: The command line, without `ipufit plan`.

    Raises:
        SystemExit: Always: with 1 if there is no plan.
    """
    from .subject import add_target, looked_at, target_of  # waits for torch

    parser = _parser()
    add_target(parser)
    given = parser.parse_args(arguments)
    try:
        plan = looked_at(target_of(given), lambda subject: _planned(subject, given))
        if given.save is not None:
            plan.save(given.save)
    except IpufitError as error:
        sys.stderr.write(f"ipufit plan: {error}\n")
        sys.exit(1)
    if given.pictures:
        plan.show()
    else:
        text = json.dumps(as_data(plan), indent=2) if given.json else str(plan)
        sys.stdout.write(text + "\n")
    sys.exit(0)


def as_data(plan: ModelPlan) -> dict[str, Any]:
    """A plan for programs: dicts, lists, numbers and texts.

    Args:
        plan: The plan.
    """
    names = "num_ipus bubble slowest_stage imbalance ideal_speedup"
    return {
        **_plain(vars(plan)),
        "memory": _plain(plan.memory),
        "choices": _plain(plan.choices),
        **{name: getattr(plan, name) for name in names.split()},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if hasattr(value, "__dataclass_fields__"):
        return _plain(vars(value))
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value


def _planned(subject: Subject, given: argparse.Namespace) -> ModelPlan:
    from ipufit.model.planning import plan_of_fit

    from .subject import arguments_of

    arguments = arguments_of(subject, given)
    return plan_of_fit(subject.model, arguments, given.device, is_spare=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ipufit plan",
        usage="%(prog)s [options] (script | -m module | module:function) [arguments]",
        description="Say what the first fit of a script takes of each IPU, how its "
        "pipeline runs, and what other settings would change. Nothing is trained, and "
        "no IPU is needed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default="mk2", help="kind of IPU: mk1, mk2 (the default) or bow"
    )
    parser.add_argument(
        "--save",
        help="also write it to this file: .html, or a picture as .svg, .png, .pdf",
    )
    prints = parser.add_mutually_exclusive_group()
    prints.add_argument("--json", action="store_true", help="print data for programs")
    prints.add_argument(
        "--pictures", action="store_true", help="print pictures with the tables"
    )
    return parser
