# SPDX-License-Identifier: Apache-2.0
"""The emulator under PopTorch's name: `import poptorch` finds `ipufit.emulator`.

In this process a finder on `sys.meta_path` makes `poptorch`, `popdist`, `popart` and
`libpvti` other names of the emulator's own modules, so that each class exists once.
Processes that this one starts have no such finder: they find the folder `_shim`, whose
modules of these names call `install` there. `multiprocessing` passes `sys.path` to
processes that it spawns, and `PYTHONPATH` reaches interpreters started in any other
way.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Sequence

from ._popart import WHAT_IT_IS as WHAT_POPART_IS
from ._switches import STRICT_VARIABLE
from .errors import createPoptorchError

if TYPE_CHECKING:
    from types import ModuleType

_EMULATOR = __name__.rpartition(".")[0]
_POPTORCH_MODULES = (
    "_impl",  # private in PopTorch, like the next two, and imported by
    "_poplar_executor",  # optimum-graphcore and PopTorch Geometric
    "_utils",
    "enums",
    "ops",
    "optim",
    "options",
    "poptorch_core",
    "profiling",
    "testing",
)
_TARGETS = {
    "poptorch": _EMULATOR,
    **{f"poptorch.{name}": f"{_EMULATOR}.{name}" for name in _POPTORCH_MODULES},
    "popdist": f"{_EMULATOR}._popdist",
    "popdist.popdist_core": f"{_EMULATOR}._popdist",
    "popdist.poptorch": f"{_EMULATOR}._popdist",
    "popart": f"{_EMULATOR}._popart",
    "libpvti": f"{_EMULATOR}.profiling",
}
"""Names that scripts import -> the emulator's modules."""

_REAL_PACKAGES = ("poptorch", "popdist", "popart")
_PACKAGES = (*_REAL_PACKAGES, "libpvti")
_POPART_PREFIXES = ("popart.", f"{_EMULATOR}._popart.")
_SHIM_FOLDER = str(Path(__file__).with_name("_shim"))
_ROOT = Path(__file__).parents[2]  # the folder that `ipufit` is in
_SITE_FOLDERS = ("site-packages", "dist-packages")
_PYTHON_PATH = "PYTHONPATH"


class _AliasLoader(Loader):
    """Import loader that gives one of the names of `_TARGETS` the emulator's module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new, empty module by the emulator's."""
        sys.modules[self._name] = self.load_module()

    def load_module(self, fullname: str | None = None) -> ModuleType:
        """Return the emulator's module; PopTorch Geometric calls it without a name."""
        return importlib.import_module(_TARGETS[fullname or self._name])


class _AliasFinder(MetaPathFinder):
    """Import finder that maps the names of `_TARGETS` to the emulator's modules.

    It refuses other names inside these packages. Otherwise Python would look into the
    emulator's folder and load a second copy of a module.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return a spec for modules of PopTorch, PopDist and PopART only."""
        for prefix in _POPART_PREFIXES:
            if fullname.startswith(prefix):
                name = f"popart.{fullname[len(prefix) :]}"
                # With `name=`, `from popart import Builder` drops the explanation.
                raise ModuleNotFoundError(f"No module named {name!r}: {WHAT_POPART_IS}")
        if fullname == "gcipuinfo" and PathFinder.find_spec(fullname) is None:
            raise ModuleNotFoundError(
                "No module named 'gcipuinfo': it comes with Graphcore's driver, in the "
                "Poplar SDK, and asks for the IPUs of this machine. The emulator has "
                "none: leave it out here.",
                name=fullname,
            )
        if fullname in _TARGETS:
            return ModuleSpec(fullname, _AliasLoader(fullname))
        if fullname.partition(".")[0] in _PACKAGES:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


class _Installation:
    """The changes that `install` makes, for `uninstall` to undo."""

    def __init__(self) -> None:
        self._finder = _AliasFinder()
        self._hidden = _take_imported()
        self._new_folders = [_SHIM_FOLDER]
        before = os.environ.get(_PYTHON_PATH)
        self._variables = {
            _PYTHON_PATH: before,
            STRICT_VARIABLE: os.environ.get(STRICT_VARIABLE),
        }

        sys.meta_path.insert(0, self._finder)
        sys.path.insert(1, _SHIM_FOLDER)  # where PYTHONPATH goes: after the script's
        if PathFinder.find_spec(_EMULATOR.partition(".")[0]) is None:
            # It was found in a folder that has left the path since.
            self._new_folders.append(str(_ROOT))
            sys.path.append(str(_ROOT))
        folders = [_SHIM_FOLDER, *(before.split(os.pathsep) if before else [])]
        if _ROOT.name not in _SITE_FOLDERS:  # those are searched anyway
            folders.append(str(_ROOT))
        os.environ[_PYTHON_PATH] = os.pathsep.join(dict.fromkeys(folders))

    def undo(self) -> None:
        """Restore modules, `sys.path` and the environment."""
        sys.meta_path.remove(self._finder)
        _take_imported()
        sys.modules.update(self._hidden)
        for folder in self._new_folders:
            if folder in sys.path:
                sys.path.remove(folder)
        for variable, before in self._variables.items():
            os.environ.pop(variable, None)
            if before is not None:
                os.environ[variable] = before


_installation: _Installation | None = None


def install(*, force: bool = False, strict: bool = False) -> None:
    """Make `import poptorch`, `import popdist` and `import popart` find the emulator.

    Processes that this one starts find it too: the workers of data loaders, the process
    of an `AsynchronousDataAccessor`, and Python scripts. A second call changes nothing,
    but it can turn strict mode on.

    Args:
        force: If True, hide a real PopTorch. Modules that have imported it keep it.
        strict: If True, refuse operators that PopTorch doesn't compile, by setting
            `IPUFIT_EMULATOR_STRICT=1`.

    Raises:
        Error: If a real PopTorch, PopDist or PopART is installed, or imported.

    Example:
        >>> import ipufit.emulator
        >>> ipufit.emulator.install()
        >>> import poptorch.optim
        >>> poptorch.optim is ipufit.emulator.optim
        True
        >>> ipufit.emulator.uninstall()
    """
    global _installation
    if _installation is None:
        if not force:
            _refuse_to_hide_a_real_one()
        _installation = _Installation()
        for name in _PACKAGES:
            importlib.import_module(name)
    if strict:
        os.environ[STRICT_VARIABLE] = "1"


def uninstall() -> None:
    """Undo `install`, if it was called.

    Modules that have imported the emulator as `poptorch` keep it.

    Example:
        >>> import ipufit.emulator
        >>> ipufit.emulator.install()
        >>> ipufit.emulator.uninstall()
        >>> import poptorch
        Traceback (most recent call last):
        ModuleNotFoundError: No module named 'poptorch'
    """
    global _installation
    if _installation is not None:
        _installation.undo()
        _installation = None


def _refuse_to_hide_a_real_one() -> None:
    for name in _REAL_PACKAGES:
        if name in sys.modules:
            module = sys.modules[name]  # `None` forbids an import
            is_ours = module is None or module.__name__.startswith(_EMULATOR)
            state = "imported already"
        else:
            spec = find_spec(name)
            origin = spec and spec.origin  # a mere folder has no origin
            is_ours = not origin or origin.startswith(_SHIM_FOLDER)
            state = f"installed ({origin})"
        if not is_ours:
            raise createPoptorchError(
                f"A real {name} is {state}, and the emulator would hide it. Run the "
                "script without the emulator to use IPUs, or insist on the emulator: "
                "`install(force=True)`, or `--force` on the command line."
            )


def _take_imported() -> dict[str, ModuleType]:
    """Remove what `install` replaces from `sys.modules`, and return it."""
    names = [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]
    return {name: sys.modules.pop(name) for name in names}
