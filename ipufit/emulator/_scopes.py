# SPDX-License-Identifier: Apache-2.0
"""Where in a model a call is made: the names that PopTorch puts before an operator's.

Each sub-module adds its name while its `forward` runs, and `NameScope` any other:
`encoder/layer1/Relu:0`.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class Scopes:
    """The scopes that are open, outermost first.

    Example:
        >>> scopes = Scopes()
        >>> with scopes.inside("encoder"), scopes.inside("layer1"):
        ...     scopes.prefix
        'encoder/layer1/'
        >>> scopes.prefix
        ''
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    @property
    def prefix(self) -> str:
        """What goes before the name of an operator here."""
        return "".join(f"{name}/" for name in self._names)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Open a scope for a while."""
        depth = len(self._names)
        self._names.append(name)
        try:
            yield
        finally:
            del self._names[depth:]

    @contextlib.contextmanager
    def of_modules(self, root: torch.nn.Module) -> Iterator[None]:
        """Open a scope whenever a sub-module of `root` runs.

        Args:
            root: A module; it has no name itself.
        """
        names = {
            id(module): path.rpartition(".")[2]
            for path, module in root.named_modules()
            if path
        }
        open_modules: list[tuple[torch.nn.Module, int]] = []

        def enter(module: torch.nn.Module, args: Any) -> None:
            if id(module) in names:
                open_modules.append((module, len(self._names)))
                self._names.append(names[id(module)])

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            if id(module) not in names:
                return
            # More than one is open if an inner module raised what an outer one caught.
            innermost, depth = open_modules.pop()
            while innermost is not module:
                innermost, depth = open_modules.pop()
            del self._names[depth:]

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._names.clear()
