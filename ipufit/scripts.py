# SPDX-License-Identifier: Apache-2.0
"""Runs the scripts of command lines, and finds the model that a script trains."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import operator
import os
import runpy
import sys
import traceback
from concurrent.futures import Future
from typing import Any, Callable, Iterator, Mapping, NoReturn, Sequence, TypeVar

from ipufit.errors import ConfigError, IpufitError

ResultT = TypeVar("ResultT")
Look = Callable[[Any, Mapping[str, Any]], ResultT]
"""Gets a model, and the arguments of its `fit` by name."""


class FirstFit(BaseException):
    """Ends a script at its first `fit`.

    It is no `Exception`, so a script that catches errors of `fit` lets it through.
    """


def run_script(script: str, arguments: Sequence[str], *, is_module: bool) -> str | int:
    """Run a script as Python would, and give its exit status."""
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
    except Exception:  # noqa: BLE001 - shown, and what was compiled after it
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path[:] = before
    return 0


def look_at_model(
    program: str,
    arguments: Sequence[str],
    look: Look[ResultT],
    *,
    is_module: bool = False,
) -> ResultT:
    """Run a program up to its first `fit`, and give the model to `look` there.

    `look` is called while the program waits, so its temporary files are still there.
    What the program prints goes to the standard error output. No bytecode of the
    modules that it imports is written.

    Args:
        program: A script's path, a module's name, or `module:function`. The function
            returns a model, `(model, x)` or `(model, x, y)`.
        arguments: The arguments that a script gets.
        look: Gets the model, and the arguments of its `fit`: all of them if a script
            has called it, `x` and `y` if a function returns them.
        is_module: Whether `program` is the name of a module that is run as a script.

    Returns:
        The result of `look`; its errors come through.

    Raises:
        ConfigError: There is no such program, it fails before it calls `fit`, or it
            ends without doing so.
    """
    outcome: Future[ResultT] = Future()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        with contextlib.redirect_stdout(sys.stderr), _stopping_at_fit(look, outcome):
            if is_module or ":" not in program or os.path.exists(program):
                _run_to_fit(program, arguments, is_module=is_module)
            made = _made_by(program, arguments)
        return look(*made)
    except (FirstFit, ConfigError):
        if not outcome.done():
            raise
    finally:
        sys.dont_write_bytecode = before
    return outcome.result()


@contextlib.contextmanager
def _stopping_at_fit(look: Look[ResultT], outcome: Future[ResultT]) -> Iterator[None]:
    """Have `IPUModel.fit` end its caller, and keep what the first one looks like."""
    from ipufit.model import IPUModel

    fit = IPUModel.fit
    signature = inspect.signature(fit)

    def stop(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        model = given.arguments.pop("self")
        if not outcome.done():
            try:
                outcome.set_result(look(model, given.arguments))
            except Exception as error:  # noqa: BLE001 - raised when the script has ended
                outcome.set_exception(error)
        raise FirstFit

    IPUModel.fit = stop  # type: ignore[assignment]
    try:
        yield
    finally:
        IPUModel.fit = fit


def _run_to_fit(program: str, arguments: Sequence[str], *, is_module: bool) -> NoReturn:
    if is_module:
        _require_module(program)
    elif not os.path.isfile(program):
        raise ConfigError(f"There is no script {program!r}.")
    status = run_script(program, arguments, is_module=is_module)
    ending = "ended" if status == 0 else f"ended with {status!r}"
    raise ConfigError(
        f"{program} {ending} before it called fit of an IPUModel, so there is nothing "
        "to look at. A function that makes the model can be named instead: "
        "module:function."
    )


def _made_by(name: str, arguments: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The model that a function makes, and its data."""
    from ipufit.model import IPUModel

    if arguments:
        raise ConfigError(
            f"{name} is a function that is called without arguments. Got "
            f"{' '.join(arguments)}."
        )
    function = _function(name)
    try:
        made = function()
    except IpufitError:
        raise
    except Exception as error:
        traceback.print_exc()  # as of a script: it has the line
        raise ConfigError(
            f"{name} can't be called: {type(error).__name__}: {error}"
        ) from error
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
