# SPDX-License-Identifier: Apache-2.0
"""Everything that ipufit raises or warns of.

    IpufitError
    ├── FileError        (OSError)       a file that can't be written or read
    │   └── CheckpointError              a checkpoint that can't be written or read
    │       ├── DamagedCheckpointError   a file of it is missing, cut or changed
    │       └── MissingCheckpointError   (FileNotFoundError) there is none at the path
    ├── ConfigError      (ValueError)    options that contradict each other
    ├── DataError        (ValueError)    data that can't be used as it is
    ├── UnknownNameError (ValueError)    a name nobody knows, with a suggestion
    ├── NotCompiledError (ValueError)    `fit` before `compile`
    ├── ProcessError     (RuntimeError)  another process ended, or is at another step
    └── UnsupportedError (TypeError)     something PopTorch or ipufit can't do

    IpufitWarning (UserWarning)
    ├── BakedInWarning        a number that forward changes is constant in a program
    ├── CheckpointWarning     a damaged checkpoint was passed over
    ├── DroppedRowsWarning    rows that don't fill a call were left out
    ├── CopiedModuleWarning   a module was changed, and a copy of it is trained
    ├── CoverageWarning       metrics cover only a part of the samples
    ├── ConstantBuffersWarning  writes to integer buffers, which are lost
    ├── OtherNumbersWarning   a device computes an operator differently
    ├── OtherLayoutWarning    a run goes on with other replicas or processes
    ├── NonFiniteLossWarning  the loss became NaN or infinite
    ├── NonFiniteGradientWarning  a gradient did
    ├── SharedRateWarning     updates of one call share one learning rate
    ├── EmptyUpdatesWarning   padding left updates without samples
    ├── DataRanOutWarning     an epoch had fewer steps than were asked for
    └── WholeStreamWarning    each of several processes reads all of a stream

Errors of PopTorch itself pass through unchanged.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import sys
import warnings
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, Callable, Iterable, Iterator, TypeVar, cast

from ._hints import hint

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
KindT = TypeVar("KindT", bound=type)


_VALUES = re.compile(r"\b(tensor|array)\((?:[^()]|\([^()]*\)){60,}?\)")
_MORE_VALUES = re.compile(r"(, (\(?'[^']*'[,:] )?(tensor|array)\(\.\.\.\)\)?)+")
_LONGEST = 4000
"""Length of the longest message that is shown whole, in characters."""


def printable(text: str) -> str:
    r"""Escape characters that move a terminal's cursor, or turn text around.

    Files and other processes may have written a part of the text.

    Example:
        >>> printable("was \x1b[31mred\x1b[0m,\nis blue")
        'was \\x1b[31mred\\x1b[0m,\nis blue'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _short(text: Any) -> Any:
    """Remove the numbers of tensors from a message, and the middle of a long text."""
    if not isinstance(text, str):
        return text
    text = printable(text)
    text = _MORE_VALUES.sub(", ...", _VALUES.sub(r"\1(...)", text))
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


class IpufitError(Exception):
    """Base of ipufit's errors.

    Example:
        >>> import torch
        >>> print(IpufitError(f"loss={torch.ones(9, 9)} is neither a name, ..."))
        loss=tensor(...) is neither a name, ...
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*map(_short, args))


class FileError(IpufitError, OSError):
    """Raised if a file can't be written or read; `errno` is the system's."""


class CheckpointError(FileError):
    """Raised if a checkpoint can't be written or read; `errno` is the system's."""


class DamagedCheckpointError(CheckpointError):
    """Raised if a file of a checkpoint is missing, cut, changed or foreign."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """Raised if there is no checkpoint, or no file of weights, at a path."""


class ConfigError(IpufitError, ValueError):
    """Raised for options that contradict each other or PopTorch's rules."""


class DataError(IpufitError, ValueError):
    """Raised for data that can't be used as it is."""


class UnknownNameError(IpufitError, ValueError):
    """Raised for an unknown name; the message suggests the nearest name.

    Args:
        kind: Kind of thing that the name is for, such as "optimizer".
        name: The unknown name.
        known: Names of all things of that kind.

    Example:
        >>> print(UnknownNameError("loss", "msee", ["mae", "mse"]))
        Unknown loss 'msee'. Did you mean 'mse'? Known: mae, mse.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        advice = advise(kind, name, names)
        advice = f" {advice}" if advice else ""
        shown = ", ".join(names) or "none"
        super().__init__(f"Unknown {kind} {name!r}.{advice} Known: {shown}.")


def advise(
    place: str, name: str, known: Iterable[str], way: str = "", cutoff: float = 0.6
) -> str:
    """Return advice for an unknown name: its hint, `way`, or the nearest known name."""
    by_key = {known_name.lower(): known_name for known_name in known}
    close = difflib.get_close_matches(name.lower(), by_key, n=1, cutoff=cutoff)
    nearest = f"Did you mean {by_key[close[0]]!r}?" if close else ""
    return hint(place, name) or way or nearest


def unknown_attribute(
    what: str, place: str, name: str, known: Iterable[str], way: str = ""
) -> AttributeError:
    """Return the error for an unknown attribute, with what to write in its place.

    Args:
        what: Subject of the message: the module or object.
        place: Name of the place for `hint`.
        name: The unknown name.
        known: Names of attributes.
        way: Code to name if there is no hint.

    Example:
        >>> unknown_attribute("module 'ipufit'", "ipufit", "IpuConfig", ["IPUConfig"])
        AttributeError("module 'ipufit' has no attribute 'IpuConfig'. Did you mean ...
    """
    is_private = name.startswith("_")
    public = [n for n in known if not (is_private or n.startswith("_"))]
    advice = advise(place, name, public, f"Write {way}." if way else "", cutoff=0.8)
    end = f". {advice}" if advice else ""
    return AttributeError(f"{what} has no attribute {name!r}{end}")


class NotCompiledError(IpufitError, ValueError):
    """Raised if the model is used before `compile`."""


class ProcessError(IpufitError, RuntimeError):
    """Raised if another process has ended, is late, or is at another step."""


class UnsupportedError(IpufitError, TypeError):
    """Raised for something that PopTorch, or ipufit on top of it, can't do."""


class IpufitWarning(UserWarning):
    """Base of ipufit's warnings."""


class BakedInWarning(IpufitWarning):
    """Warns that a number is constant in a program, though `forward` changes it."""


class CheckpointWarning(IpufitWarning):
    """Warns of a damaged checkpoint that was skipped, or an old one not deleted."""


class DroppedRowsWarning(IpufitWarning):
    """Warns of rows that don't fill a call and were left out of an epoch."""


class CopiedModuleWarning(IpufitWarning):
    """Warns that the user's module was changed, though a copy of it is trained."""


class CoverageWarning(IpufitWarning):
    """Warns that reported metrics cover only a part of the samples."""


class ConstantBuffersWarning(IpufitWarning):
    """Warns that writes to integer buffers are lost: they are compiled in."""


class OtherNumbersWarning(IpufitWarning):
    """Warns that a device computes an operator differently than torch.

    On a device the operator has no gradient, makes NaN, or isn't random.
    """


class OtherLayoutWarning(IpufitWarning):
    """Warns that a resumed run has other replicas, processes or micro-batches."""


class NonFiniteLossWarning(IpufitWarning):
    """Warns that the loss became NaN or infinite."""


class NonFiniteGradientWarning(IpufitWarning):
    """Warns that a gradient became NaN or infinite."""


class SharedRateWarning(IpufitWarning):
    """Warns that a schedule changes the learning rate more often than calls send it."""


class EmptyUpdatesWarning(IpufitWarning):
    """Warns that padding left updates without any samples."""


class DataRanOutWarning(IpufitWarning):
    """Warns of an epoch with fewer steps than `steps_per_epoch` asks for."""


class WholeStreamWarning(IpufitWarning):
    """Warns that each of several processes reads a whole stream, but uses a part."""


_KERAS = ("keras", "tf_keras")


def refuse_foreign(
    what: str, value: Any, instead: str, names: Iterable[str] = ()
) -> None:
    """Refuse an object, a class or a function of Keras or scikit-learn.

    Args:
        what: Argument that has the value.
        value: Any value.
        instead: Words for what to use, such as "a loss of torch".
        names: Names that the argument accepts; the name like the class's is suggested.

    Raises:
        ConfigError: `value` is from Keras or scikit-learn.

    Example:
        >>> refuse_foreign("loss", print, "a loss of torch")
    """
    kind = value if hasattr(value, "__name__") else type(value)
    bases = getattr(kind, "__mro__", [kind])
    homes = {str(getattr(base, "__module__", "")) for base in bases}
    is_of_sklearn = str(getattr(kind, "__module__", "")).startswith("sklearn.")
    is_of_keras = not {home.partition(".")[0] for home in homes}.isdisjoint(_KERAS)
    is_torchs = any(base.__name__ == "TorchModuleWrapper" for base in bases)
    if is_torchs or not (is_of_keras or is_of_sklearn):
        return
    origin = "scikit-learn, which computes in NumPy, and programs compute in torch"
    if is_of_keras:
        origin = "Keras, which works with Keras's tensors"
    key = kind.__name__.replace("_", "").lower()
    by_key = {name.replace("_", ""): name for name in names}
    name = f"the name {by_key[key]!r}, or " if key in by_key else ""
    raise ConfigError(f"{what} has {kind.__name__} of {origin}. Use {name}{instead}.")


_NO_PLACE = ("ipufit", "contextlib", "functools", "torch")
"""Packages whose code is never shown as the line of a warning."""

_LIBRARIES = ("ipufit", "poptorch", "torch")
_STANDARD = (os.path.dirname(os.__file__), "<frozen ")
"""Packages, and paths of Python's library, whose frames tracebacks leave out."""

_PRINTED_FRAME = re.compile(r'  File "([^"]+)", line .*\n(?:    .*\n)*')


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the user's line that led to the warning."""
    _, level = users_frame()
    warnings.warn(printable(text), category, stacklevel=level)


def users_frame() -> tuple[FrameType, int]:
    """Return the frame of the user's line, and its `stacklevel` for the caller."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and _package(frame) in _NO_PLACE:
        level, frame = level + 1, frame.f_back
    return frame, level


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_library(path: str, package: str = "") -> bool:
    """Return whether a source file is of torch, PopTorch, ipufit or Python itself."""
    modules = filter(None, map(sys.modules.get, _LIBRARIES))
    folders = tuple(f"{root}{os.sep}" for m in modules for root in m.__path__)
    if package in _LIBRARIES or path.startswith(folders):
        return True
    return path.startswith(_STANDARD) and "-packages" not in path


def shorten_traceback(error: BaseException) -> None:
    """Keep only the user's frames in an error's traceback; without any, ipufit's last.

    An error of ipufit that repeats the text of its cause gets the user's frames of the
    cause. The cause isn't shown then; it remains as `__context__`.
    `IPUFIT_TRACEBACK=full` keeps all frames.
    """
    if os.environ.get("IPUFIT_TRACEBACK") != "full":
        head = error.__traceback__  # of the caller
        _shorten(error, set())
        if head is not None and head is not error.__traceback__:
            head.tb_next = error.__traceback__  # before Python 3.11 it stays


def _shortening(parts: Iterator[Any]) -> Iterator[Any]:
    """Shorten the tracebacks of errors that a generator raises."""
    try:
        yield from parts
    except Exception as error:
        refuse_ended_worker(error)
        shorten_traceback(error)
        raise


def refuse_ended_worker(error: BaseException) -> None:
    """Explain an error that torch raises because a loading process has ended.

    torch raises this error wherever the process is when the signal arrives. So the
    error may be the cause of any other error.

    Raises:
        DataError: In place of the error.
    """
    for cause in _causes(error):
        if _is_of_ended_worker(cause):
            raise DataError(
                f"A process that loads samples has ended: {str(cause).rstrip('. ')}. "
                "If it was killed, memory may be short, or shared memory; else it "
                "ended itself. With num_workers=0 this process loads the samples, and "
                "shows any error."
            ) from cause


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause and so on, each once even if they form a circle."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and all(cause is not other for other in seen):
        seen.append(cause)
        yield cause
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context


def _is_of_ended_worker(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):
        return str(error).startswith("DataLoader worker (pid")
    if not isinstance(error, (ConnectionError, EOFError)):
        return False
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    loader = os.path.join("torch", "utils", "data", "dataloader.py")
    return "multiprocessing" in files[-1] and any(loader in file for file in files)


def _shorten(error: BaseException, seen: set[int]) -> list[TracebackType]:
    """Shorten the tracebacks of an error and its causes.

    Args:
        error: The error.
        seen: Errors that were shortened before, by identity: causes may be circular.

    Returns:
        The entries of the error's traceback that are in the user's code.
    """
    seen.add(id(error))
    users: list[TracebackType] = []
    ours: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        package = _package(entry.tb_frame)
        if not _is_library(entry.tb_frame.f_code.co_filename, package):
            users.append(entry)
        elif package == "ipufit" or not ours:
            ours.append(entry)
        entry = entry.tb_next
    text = error.args[0] if error.args else None
    if isinstance(text, str) and "Original Traceback" in text:  # of a data worker
        short = _PRINTED_FRAME.sub(lambda m: "" if _is_library(m[1]) else m[0], text)
        error.args = (type(text)(short), *error.args[1:])
    cause = error.__cause__
    for other in (cause, error.__context__):
        if other is None or id(other) in seen:
            continue
        users_of_other = _shorten(other, seen)
        is_first = other.__cause__ is None and other.__context__ is None
        is_explained = other is cause and isinstance(error, IpufitError)
        words = str(other).rstrip(".")
        if is_first and is_explained and words and words in str(error):
            users += [entry for entry in users_of_other if entry not in users]
            error.__cause__, error.__context__ = None, other
        elif not users_of_other:
            other.__traceback__ = None  # its text is enough
    shown = users or ours[-1:]
    for entry in shown:
        entry.tb_next = None
    for entry, following in zip(shown, shown[1:]):
        entry.tb_next = following
    error.__traceback__ = shown[0] if shown else None
    return users


_TAKERS = {
    "IPUConfig": "IPUModel(module, ipufit.IPUConfig({}=...))",
    "compile": "compile({}=...)",
    "fit": "fit({}=...)",
}
_TAKER_OF: dict[str, str] = {}
"""The call that takes an argument, by the argument's name."""


def suggesting(function: FunctionT, called: str = "") -> FunctionT:
    """Decorate a function so that errors of misspelt arguments suggest a name.

    Example:
        >>> @suggesting
        ... def fit(epochs=1):
        ...     pass
        >>> fit(epoch=3)
        Traceback (most recent call last):
        TypeError: fit() got an unexpected keyword argument 'epoch'. Did you mean ...
    """
    parameters = inspect.signature(function).parameters.values()
    names = {one.name for one in parameters}
    is_open = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)

    whose = called or function.__name__
    for name in names if whose in _TAKERS else ():
        _TAKER_OF.setdefault(name, _TAKERS[whose].format(name))

    def refuse_misspelt(keywords: Iterable[str], owner: Any) -> None:
        # A constructor that classes inherit is called by the name of the class.
        is_inherited = whose == "__init__"
        name_shown = type(owner).__name__ if is_inherited else whose
        for name in keywords:
            if name in names:
                continue
            way = f"Write {_TAKER_OF[name]}." if name in _TAKER_OF else ""
            advice = advise(name_shown, name, names, way)
            if not advice and is_inherited:
                advice = f"It takes {', '.join(sorted(names - {'self'}))}."
            if advice:
                raise TypeError(
                    f"{name_shown}() got an unexpected keyword argument {name!r}. "
                    f"{advice}"
                )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # in notebooks and pytest
        try:
            if not (is_open or names.issuperset(kwargs)):
                refuse_misspelt(kwargs, next(iter(args), None))
            result = function(*args, **kwargs)
        except Exception as error:
            refuse_ended_worker(error)
            shorten_traceback(error)
            raise
        return _shortening(result) if inspect.isgenerator(result) else result

    return cast("FunctionT", call)


def all_suggesting(kind: KindT) -> KindT:
    """Decorate the constructor and all public methods of a class with `suggesting`."""
    for name, value in list(vars(kind).items()):
        if inspect.isfunction(value) and (name == "__init__" or name[0] != "_"):
            called = kind.__name__ if name == "__init__" else name
            setattr(kind, name, suggesting(value, called))
    return kind


def suggesting_constructor(kind: KindT) -> KindT:
    """Decorate the constructor of a class with `suggesting`, also a dataclass's."""
    kind.__init__ = suggesting(kind.__init__)  # type: ignore[misc]
    return kind


def do_all(actions: Iterable[Callable[[], Any]], *, is_failing: bool = False) -> None:
    """Call all actions, even if some fail; then raise the first error.

    Args:
        actions: Functions to call, one after the other.
        is_failing: If True, an earlier error will be raised, so errors of actions
            become warnings.

    Raises:
        BaseException: The error of the first action that failed, unless `is_failing`. A
            KeyboardInterrupt or a SystemExit takes precedence, and is raised in any
            case.

    Warns:
        IpufitWarning: An error that is not raised; a CheckpointWarning if it is about a
            checkpoint.

    Example:
        >>> done = []
        >>> do_all([lambda: done.append(1), lambda: 1 / 0, lambda: done.append(3)])
        Traceback (most recent call last):
        ZeroDivisionError: division by zero
        >>> done
        [1, 3]
    """
    failures: list[BaseException] = []
    for action in actions:
        try:
            action()
        except BaseException as failure:  # noqa: BLE001 - reported below
            failures.append(failure)
    first = next((one for one in failures if not isinstance(one, Exception)), None)
    if first is None and failures and not is_failing:
        first = failures[0]
    try:
        if first is not None:
            raise first
    finally:  # a filter that makes errors of warnings hides none of the failures
        for other in failures:
            if other is not first:
                is_checkpoint = isinstance(other, CheckpointError)
                warn(
                    f"Something else failed besides the error that is raised: "
                    f"{type(other).__name__}: {other}",
                    CheckpointWarning if is_checkpoint else IpufitWarning,
                )
