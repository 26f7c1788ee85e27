# SPDX-License-Identifier: Apache-2.0
"""The places of a user's program: source lines, and the modules that run there."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Iterator, NamedTuple

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

_OURS = tuple(
    f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)
_STANDARD = tuple(
    f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib")
)
_PACKAGES = ("/site-packages/", "/dist-packages/")

_SKIPPED, _LIBRARY, _USER = range(3)


class Place(NamedTuple):
    """A place of a program.

    Attributes:
        file: Path of the source file; "" if no line of the user's is known.
        line: Number of the line.
        module: Path of the module that ran there; "" for the whole.
    """

    file: str = ""
    line: int = 0
    module: str = ""


class Places:
    """Tells where the user's program is at this moment.

    The innermost line counts that isn't torch's, this package's or Python's own; of
    those a line that isn't in an installed package, if there is one. Lines of whoever
    has made this object don't count.
    """

    def __init__(self) -> None:
        self._root = sys._getframe(1)
        self._modules: list[str] = []
        self._kinds: dict[str, int] = {}

    @contextlib.contextmanager
    def following(self, root: torch.nn.Module) -> Iterator[None]:
        """Note which module runs, while those inside `root` are called."""
        paths = {id(module): path for path, module in root.named_modules() if path}

        def enter(module: torch.nn.Module, args: Any) -> None:
            if id(module) in paths:
                self._modules.append(paths[id(module)])

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            path = paths.get(id(module))
            if path in self._modules:  # what an error has left in between goes too
                while self._modules.pop() != path:
                    pass

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def here(self) -> Place:
        """The place where the program is."""
        frame: FrameType | None = sys._getframe(1)
        frames = []
        while frame is not None and frame is not self._root:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return self._place(frames)

    def of_error(self, error: BaseException) -> Place:
        """The place where an error was raised, or the one that it explains."""
        found = Place(module=self._module)
        seen: BaseException | None = error
        while seen is not None:
            place = self._place(list(reversed(_lines(seen.__traceback__, self._root))))
            found = place if place.file else found
            seen = seen.__cause__
        return found

    def is_in_library(self) -> bool:
        """Whether code of torch's, and no line of the user's, has made a call.

        Frames of this package count for nothing.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._root:
            path = frame.f_code.co_filename
            if not path.startswith(_OURS[1]) and "/torch/overrides" not in path:
                return path.startswith(_OURS[0])
            frame = frame.f_back
        return True

    @property
    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _place(self, frames: list[tuple[str, int]]) -> Place:
        library: Place | None = None
        for path, line in frames:
            kind = self._kind(path)
            if kind == _USER:
                return Place(path, line, self._module)
            if kind == _LIBRARY and library is None:
                library = Place(path, line, self._module)
        return library or Place(module=self._module)

    def _kind(self, path: str) -> int:
        kind = self._kinds.get(path)
        if kind is None:
            kind = _USER
            if path.startswith(_OURS) or path.startswith("<frozen"):
                kind = _SKIPPED
            elif any(part in path for part in _PACKAGES):
                kind = _LIBRARY
            elif path.startswith(_STANDARD):
                kind = _SKIPPED
            self._kinds[path] = kind
        return kind


def _lines(trace: TracebackType | None, root: FrameType) -> list[tuple[str, int]]:
    """Files and lines of a traceback, from the call that `root` has made."""
    found: list[tuple[str, int]] = []
    while trace is not None:
        found.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        if trace.tb_frame is root:
            found.clear()
        trace = trace.tb_next
    return found
