# SPDX-License-Identifier: Apache-2.0
"""The model that a command looks at: of a script, a module, or a function of one.

A script is run up to its first `fit`, of which nothing is done. What it prints goes to
the standard error output, so that the command alone writes to the standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import operator
import os
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Mapping, Sequence, TypeVar

from ipufit.errors import ConfigError, IpufitError
from ipufit.first_fit import FirstFit, awaited
from ipufit.launch import run_script
from ipufit.model import IPUModel

ResultT = TypeVar("ResultT")

_FORMS = "a compiled IPUModel with its data: (model, x) or (model, x, y)"


@dataclass(frozen=True)
class Target:
    """The program that a command line names.

    Attributes:
        name: A script's path, a module's name, or `module:function`.
        arguments: The arguments that a script gets.
        is_module: Whether `name` is that of a module which is run as a script.

    Example:
        >>> Target("models:make").is_factory, Target("train.py", ("--fast",)).is_factory
        (True, False)
    """

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    @property
    def is_factory(self) -> bool:
        """Whether it is a function that makes the model."""
        return not self.is_module and ":" in self.name and not os.path.exists(self.name)


@dataclass(frozen=True)
class Subject:
    """A model, and the arguments that its `fit` was called with.

    Attributes:
        model: The model; a factory may have left it without `compile`.
        arguments: Arguments of `fit` by name: all of them if a script has called it,
            `x` and `y` if a factory gives these, else none.
    """

    model: IPUModel
    arguments: Mapping[str, Any] = field(default_factory=dict)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Have a command line end with the program: `(script | -m module | module:f) ...`.

    A batch size may stand before it.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_target(parser)
        >>> target_of(parser.parse_args(["-m", "train", "--epochs", "3"]))
        Target(name='train', arguments=('--epochs', '3'), is_module=True)
    """
    parser.add_argument(
        "--batch-size", type=int, help="samples of an update, instead of the script's"
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="run a module, named as in an import, instead of a script",
    )
    parser.add_argument("target", metavar="script", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def target_of(given: argparse.Namespace) -> Target:
    """The program that was given to a parser of `add_target`."""
    return Target(given.target, tuple(given.arguments), given.is_module)


def arguments_of(subject: Subject, given: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `fit` to look at, with the batch size of the command line.

    Args:
        subject: The model, with the arguments that the program gives.
        given: The command line, read by a parser of `add_target`.

    Raises:
        ConfigError: There is no data.
    """
    if "x" not in subject.arguments:
        raise ConfigError(
            f"{given.target} gives a model and no data: shapes of a batch and the "
            "number of samples are needed. Return (model, x) or (model, x, y)."
        )
    arguments = dict(subject.arguments)
    if given.batch_size is not None:
        arguments["batch_size"] = given.batch_size
    return arguments


def looked_at(target: Target, look: Callable[[Subject], ResultT]) -> ResultT:
    """Run a program up to its first `fit`, and give the model to `look` there.

    `look` is called while the program waits, so its temporary files are still there.
    Modules that the program imports are read, and no bytecode of them is written.

    Args:
        target: The program.
        look: Gets the model, and the arguments of its `fit`.

    Returns:
        What `look` returns; its errors come through.

    Raises:
        ConfigError: There is no such program, it fails before it calls `fit`, or it
            ends without doing so.
    """
    results: list[ResultT] = []
    errors: list[Exception] = []

    def at_fit(model: Any, arguments: Mapping[str, Any]) -> None:
        try:
            results.append(look(Subject(model, arguments)))
        except Exception as error:
            errors.append(error)
            raise

    with _leaving_no_traces(), contextlib.redirect_stdout(sys.stderr), awaited(at_fit):
        try:
            if target.is_factory:
                made = _made(target)
            else:
                _run(target)
        except (FirstFit, ConfigError):
            if errors:  # the first of those, also if the program has gone on
                raise errors[0] from None
            if results:
                return results[0]
            raise
    with _leaving_no_traces():
        return look(made)


@contextlib.contextmanager
def _leaving_no_traces() -> Iterator[None]:
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _run(target: Target) -> None:
    """Run a script or module to its first fit.

    Raises:
        ConfigError: It never comes there.
        FirstFit: It has.
    """
    if target.is_module:
        _look_for(target.name)
    elif not os.path.isfile(target.name):
        raise ConfigError(f"There is no script {target.name!r}.")
    status = run_script(target.name, target.arguments, is_module=target.is_module)
    ending = "ended" if status == 0 else f"ended with {status!r}"
    raise ConfigError(
        f"{target.name} {ending} before it called fit of an IPUModel, so there is "
        "nothing to look at. A function that makes the model can be named instead: "
        "module:function."
    )


def _made(target: Target) -> Subject:
    """The model that a function makes.

    Raises:
        ConfigError: There is no such function, it fails, or returns something else.
    """
    if target.arguments:
        raise ConfigError(
            f"{target.name} is a function that is called without arguments. Got "
            f"{' '.join(target.arguments)}."
        )
    function = _function(target.name)
    try:
        made = function()
    except IpufitError:
        raise
    except Exception as error:
        traceback.print_exc()  # as of a script: it has the line
        raise ConfigError(
            f"{target.name} can't be called: {type(error).__name__}: {error}"
        ) from error
    model, *data = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(model, IPUModel) or len(data) > 2:
        raise ConfigError(
            f"{target.name} must return {_FORMS}. It has returned {_kinds(made)}."
        )
    return Subject(model, dict(zip(("x", "y"), data)))


def _function(name: str) -> Callable[[], Any]:
    """Import a function that is named as `module:function`.

    Raises:
        ConfigError: There is no such module or function, or the module fails.
    """
    module_name, _, path = name.partition(":")
    if module_name.endswith(".py"):
        stem = os.path.basename(module_name)[: -len(".py")]
        raise ConfigError(
            f"{module_name!r} is a file. A function is named with its module, as in an "
            f"import: go to the file's folder and give {stem}:{path}."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _look_for(module_name)
    try:
        module = importlib.import_module(module_name)
    except IpufitError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise ConfigError(
            f"{module_name} can't be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        found: Callable[[], Any] = operator.attrgetter(path)(module)
    except AttributeError as error:
        raise ConfigError(f"{module_name} has no function {path!r}.") from error
    return found


def _look_for(module_name: str) -> None:
    """Refuse the name of a module that isn't there.

    Raises:
        ConfigError: There is no such module, or no package that it would be in.
    """
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        is_there = importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError as error:
        is_there = not f"{module_name}.".startswith(f"{error.name}.")
    except Exception:  # noqa: BLE001 - of its package; the import itself will show it
        is_there = True
    finally:
        sys.path.remove(folder)
    if not is_there:
        raise ConfigError(
            f"There is no module {module_name!r}, neither in this folder nor installed."
        )


def _kinds(made: Any) -> str:
    """The types of a returned value, in words."""
    if isinstance(made, tuple) and made:
        return f"({', '.join(type(one).__name__ for one in made)})"
    return type(made).__name__
