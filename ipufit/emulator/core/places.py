# SPDX-License-Identifier: Apache-2.0
"""Places: the source lines of a user's program that its operations come from."""

from __future__ import annotations

import functools
import sysconfig
import traceback
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Iterable, Iterator, NamedTuple

import torch
from torch.fx.node import Node

from ..errors import Error
from .graph import blamed_nodes

TORCH = f"{Path(torch.__file__).parent}/"
PACKAGE = f"{Path(__file__).parents[2]}/"
_STANDARD = tuple(f"{sysconfig.get_paths()[n]}/" for n in ("stdlib", "platstdlib"))
_USERS, _INSTALLED, _SKIPPED = range(3)


class Place(NamedTuple):
    """A source line of a program, and the module that it runs in.

    Attributes:
        file: Path of the source file; "" if no line of the user's is known.
        line: Number of the line.
        module: Path of the module that ran there; "" for the whole.

    Example:
        >>> str(Place("models/net.py", 12, "encoder"))
        'net.py:12, in encoder'
    """

    file: str = ""
    line: int = 0
    module: str = ""

    def __str__(self) -> str:
        line = f"{Path(self.file).name}:{self.line}" if self.file else ""
        inside = f"in {self.module}" if self.module else ""
        return ", ".join(filter(None, (line, inside)))


NOWHERE = Place()


def place_of(node: Node) -> Place:
    """Return the place of a node's operation."""
    return node.meta.get("place", NOWHERE)


def find_place(
    frames: Iterable[tuple[FrameType, int]], stop: CodeType, module: str
) -> Place:
    """Return the user's innermost line, or else that of an installed package.

    Args:
        frames: Frames and their lines, the innermost first.
        stop: The function that traces; its callers aren't part of the program.
        module: Path of the module that runs.
    """
    nothing = "", 0
    found = min(inside(frames, stop), key=lambda one: _kind(one[0]), default=nothing)
    path, line = nothing if _kind(found[0]) == _SKIPPED else found
    return Place(path, line, module)


def inside(
    frames: Iterable[tuple[FrameType, int]], stop: CodeType
) -> Iterator[tuple[str, int]]:
    """Yield path and line of the frames inside a trace, innermost first."""
    for frame, line in frames:
        if frame.f_code is stop:
            return
        yield frame.f_code.co_filename, line


def add_place(error: Error, stop: CodeType, module: str) -> None:
    """Add the place of the nodes that an error is about, or else of its traceback.

    The traceback then ends at the user's line.

    Args:
        error: An error of a trace.
        stop: The function that traces.
        module: Path of the module that runs.
    """
    places = [place_of(node) for node in blamed_nodes(error)]
    if not places:
        places = [place_of_error(error, stop, module)]
        _cut_after_user(error)
    shown = "; ".join(dict.fromkeys(str(place) for place in places if place.file))
    if shown:
        error.message = f"{error.message} ({shown})"
        error.args = (error.message,)


def _cut_after_user(error: BaseException) -> None:
    """Leave out the end of an error's traceback that is torch's or this package's."""
    last: TracebackType | None = None
    step = error.__traceback__
    while step is not None:
        if _kind(step.tb_frame.f_code.co_filename) != _SKIPPED:
            last = step
        step = step.tb_next
    if last is not None:
        last.tb_next = None


def place_of_error(error: BaseException, stop: CodeType, module: str) -> Place:
    """Return the place where an error was raised, or where its cause was."""
    found = Place(module=module)
    cause: BaseException | None = error
    while cause is not None:
        frames = list(traceback.walk_tb(cause.__traceback__))
        place = find_place(reversed(frames), stop, module)
        found = place if place.file else found
        cause = cause.__cause__
    return found


@functools.lru_cache(maxsize=None)
def _kind(path: str) -> int:
    """Rank a source file: the user's, an installed package's, torch's or Python's."""
    if path.startswith((TORCH, PACKAGE, "<frozen")):
        return _SKIPPED
    if "/site-packages/" in path or "/dist-packages/" in path:
        return _INSTALLED
    return _SKIPPED if path.startswith(_STANDARD) else _USERS
