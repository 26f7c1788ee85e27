# SPDX-License-Identifier: Apache-2.0
"""Origins of code: the user's, a library's, or machinery that holds no data."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from typing import Any

_MACHINERY = ("torch", "ipufit", "poptorch", "numpy")
HOLDERS = ("types", "argparse", "collections")
"""Modules of Python whose classes hold values, and never read them themselves."""
_DATA = ("torch.distributions", *HOLDERS)


@functools.lru_cache(maxsize=None)
def is_library(module_name: str) -> bool:
    """Whether a Python module is installed, and so not the user's to change.

    Args:
        module_name: Full name, as in `function.__module__`.

    Example:
        >>> is_library("torch.nn"), is_library("__main__")
        (True, False)
    """
    root = module_name.partition(".")[0]
    if root == "__main__":
        return False
    if root in _MACHINERY:
        return True
    file = _file_of(root)
    if file is None:
        return root in sys.builtin_module_names
    return any(folder in file.parents for folder in _folders())


@functools.lru_cache(maxsize=None)
def is_machinery(module_name: str) -> bool:
    """Whether a Python module's objects are no values that code computes with.

    Those of Python's own library, torch, numpy, PopTorch and ipufit are: loggers,
    locks, optimisers, generators. Containers, namespaces and distributions aren't.

    Args:
        module_name: Full name, as in `type(value).__module__`.

    Example:
        >>> is_machinery("logging"), is_machinery("types"), is_machinery("transformers")
        (True, False, False)
    """
    if any((module_name + ".").startswith(name + ".") for name in _DATA):
        return False
    root = module_name.partition(".")[0]
    if root in _MACHINERY:
        return True
    file = _file_of(root)
    if file is None:
        return root in sys.builtin_module_names
    standard = Path(sysconfig.get_paths()["stdlib"]).resolve()
    return standard in file.parents and "site-packages" not in file.parts


def _file_of(root: str) -> Path | None:
    """The file or folder of a package; None if it is built in, or made by hand."""
    module: Any = sys.modules.get(root)
    name = getattr(module, "__file__", None)
    folders = list(getattr(module, "__path__", ()))
    if name is None and not folders:
        return None
    return Path(name or folders[0]).resolve()


@functools.lru_cache(maxsize=None)
def _folders() -> list[Path]:
    """Folders of Python's own library and of installed packages."""
    paths = sysconfig.get_paths()
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return sorted({Path(paths[kind]).resolve() for kind in kinds})
