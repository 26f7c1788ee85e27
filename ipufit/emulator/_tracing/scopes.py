# SPDX-License-Identifier: Apache-2.0
"""Name scopes: where in a model an operation is made, as operators' names show it.

Each sub-module adds its name while its `forward` runs, and `NameScope` any other:
`encoder/layer1/Relu:0`.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch

from ipufit.emulator.errors import createPoptorchError


class Scopes:
    """The scopes that are open, outermost first.

    Example:
        >>> scopes = Scopes()
        >>> scopes.push("encoder")
        >>> scopes.push("layer1")
        >>> scopes.prefix
        'encoder/layer1/'
        >>> scopes.pop()
        >>> scopes.prefix
        'encoder/'
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    @property
    def prefix(self) -> str:
        """The names of the open scopes, to put before an operator's name."""
        return "".join(f"{name}/" for name in self._names)

    def push(self, name: str) -> None:
        """Open a scope."""
        self._names.append(name)

    def pop(self) -> None:
        """Close the innermost scope.

        Raises:
            Error: No scope is open; PopART's behaviour is undefined then.
        """
        if not self._names:
            raise createPoptorchError(
                "A name scope is closed that was never opened: there are more calls "
                "of torch.ops.poptorch.pop_name_scope than of push_name_scope."
            )
        self._names.pop()

    @contextlib.contextmanager
    def of_modules(self, root: torch.nn.Module) -> Iterator[None]:
        """Open a scope whenever a sub-module of `root` runs.

        The scopes of a module that fails stay open, whoever catches the error
        (PopTorch, `NameScopeHook` in `_impl.py`).

        Args:
            root: A module; it opens no scope itself.
        """

        def opening(name: str) -> Callable[..., None]:
            return lambda module, args: self.push(name)

        def close(module: torch.nn.Module, args: Any, output: Any) -> None:
            self.pop()

        handles = []
        for path, module in root.named_modules():
            if path:
                enter = opening(path.rpartition(".")[2])
                handles.append(module.register_forward_pre_hook(enter))
                handles.append(module.register_forward_hook(close))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._names.clear()
