# SPDX-License-Identifier: Apache-2.0
"""Translate functions of tensors to machine code of this processor, ahead of time.

A function is traced to a graph of ATen operators; torch's AOTInductor makes C++ of it,
and a C++ compiler a library. That is kept in a folder, under a name made of all that
it depends on: another process that traces the same graph loads it. Beside it lies a
note for each origin of functions with this graph, which saves even the tracing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import getpass
import hashlib
import importlib
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import warnings
import weakref
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.fx.graph_module import GraphModule

from ipufit.emulator._folding.check import difference
from ipufit.emulator._machine_code.kernel_ops import Table, kernel_table
from ipufit.emulator._machine_code.origins import constants_of, update_with
from ipufit.emulator._tracing.operands import tensors_in
from ipufit.emulator.errors import createPoptorchError

logger = logging.getLogger("poptorch::python")

_LEAST_TORCH = "2.7"
"""2.6 draws the numbers of dropout in another way than torch's own kernel."""

HALF = "it computes in float16"
_FORMAT = 1
"""Part of the names of libraries: raise it when they come out differently."""

_CONFIG = {
    # The numbers that torch's own kernels draw, from the generator that they draw from.
    "fallback_random": True,
}

Function = Callable[..., Sequence[Tensor]]


class MachineFunction:
    """A function as machine code.

    Args:
        path: The library's package.
        example: Arguments of the shapes and strides that it will get.
    """

    def __init__(self, path: str, example: Sequence[Tensor]) -> None:
        kernel_table()
        self._strides = [tensor.stride() for tensor in example]
        self._shapes = [tensor.shape for tensor in example]
        # It unpacks the package into a folder, which goes when the loader goes.
        self._loader = _package_loader(path)
        _LOADED.add(self)

    def takes(self, first: Sequence[Tensor]) -> bool:
        """Whether the first arguments have the shapes and strides of the example.

        The machine code itself checks neither.
        """
        known = zip(first, self._shapes, self._strides)
        return all(t.shape == shape and t.stride() == s for t, shape, s in known)

    def last_strides(self, count: int) -> list[tuple[int, ...]]:
        """The strides of the last arguments of the example."""
        return self._strides[len(self._strides) - count :]

    def run(self, arguments: list[Tensor]) -> list[Tensor]:
        """Run the function, which may change its arguments in place."""
        results: list[Tensor] = self._loader.run(arguments)
        return results

    def unload(self) -> None:
        """Remove the unpacked library; the function can't run any more."""
        self._loader = None


_LOADED: weakref.WeakSet[MachineFunction] = weakref.WeakSet()


@atexit.register
def _unload_all() -> None:
    # Python doesn't destroy what still lives at the end.
    for function in list(_LOADED):
        function.unload()


def require_compiler() -> None:
    """Refuse where nothing can be translated.

    Raises:
        Error: torch is too old, or there is no C++ compiler.
    """
    problem = _missing()
    if problem is not None:
        raise createPoptorchError(
            f"{problem} The emulator can't compile programs here: unset "
            "IPUFIT_EMULATOR_COMPILE, or set it to `eager`."
        )


@functools.lru_cache(maxsize=None)
def _missing() -> str | None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < tuple(map(int, _LEAST_TORCH.split("."))):
        return (
            f"Compiled programs need torch {_LEAST_TORCH} or newer; this is "
            f"{torch.__version__}."
        )
    default = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX", default)
    if shutil.which(compiler) is None:
        return (
            f"Compiled programs need a C++ compiler, and there is no `{compiler}` "
            "among the programs of this machine. Install one, or name one in CXX."
        )
    return None


def translate_function(
    name: str,
    function: Function,
    example: Sequence[Tensor],
    folder: str | None,
    origin: str | None = None,
    *,
    is_differentiated: bool,
    is_random: bool,
) -> MachineFunction:
    """Translate a function, or load the machine code that was kept.

    Args:
        name: A description for the log.
        function: It may change its arguments in place.
        example: Arguments of the shapes, types and strides that it will get.
        folder: The folder of machine code; None: one beside Inductor's own cache.
        origin: The result of `origin_of`: functions of one origin, with such arguments,
            have the same graph. None if that isn't known.
        is_differentiated: Whether there are gradients in it.
        is_random: Whether it draws random numbers. These may differ where a tensor is
            computed in another memory format, so results aren't compared.

    Raises:
        ArithmeticError: The machine code gives something else than the function.
        Exception: Whatever torch raises for what can't be traced or compiled.
    """
    start = time.perf_counter()
    folder = os.path.abspath(folder or os.path.join(_inductor_cache(), "ipufit"))
    note = _note(folder, origin, example)
    path = _noted_path(note)
    translated = None if path is None else _loaded(path, example)
    if translated is not None and not is_random:
        # If they differ, the note says more than it can.
        is_same = _difference(function, translated, example) is None
        translated = translated if is_same else None
    is_new = False
    if translated is None:
        graph = _traced(function, example, kernel_table() if is_differentiated else {})
        path = os.path.join(folder, f"{_key(graph, example)}.pt2")
        translated, is_new = _loaded_or_compiled(graph, example, path)
        if not is_random:
            reason = _difference(function, translated, example)
            if reason is not None:
                raise ArithmeticError(f"machine code gives something else: {reason}")
        _write_note(note, path)
    logger.info(
        "%s %s in %.1f s: %s",
        "Compiled" if is_new else "Loaded",
        name,
        time.perf_counter() - start,
        path,
    )
    return translated


def _loaded_or_compiled(
    graph: GraphModule, example: Sequence[Tensor], path: str
) -> tuple[MachineFunction, bool]:
    """Give the machine code of a graph, and whether it has been compiled for that."""
    translated = _loaded(path, example)
    if translated is not None:
        return translated, False
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with _alone(path):
        translated = _loaded(path, example)  # another process may have come first
        if translated is not None:
            return translated, False
        _compile(graph, example, path)
        return MachineFunction(path, example), True


def _note(folder: str, origin: str | None, example: Sequence[Tensor]) -> str | None:
    """The path of the note that names the machine code of an origin."""
    if origin is None:
        return None
    digest = hashlib.sha256(origin.encode())
    for part in (*_surroundings(), _shapes(example)):
        digest.update(repr(part).encode())
    return os.path.join(folder, f"{digest.hexdigest()}.origin")


def _noted_path(note: str | None) -> str | None:
    """The path of the machine code that a note names, if there is one."""
    if note is None:
        return None
    try:
        with open(note, encoding="utf-8") as file:
            key = file.read().strip()
    except OSError:
        return None
    is_key = len(key) == len(hashlib.sha256().hexdigest()) and key.isalnum()
    return os.path.join(os.path.dirname(note), f"{key}.pt2") if is_key else None


def _write_note(note: str | None, path: str) -> None:
    if note is None:
        return
    partial = f"{note}.{os.getpid()}"
    # Without a note, the next process traces.
    with contextlib.suppress(OSError):
        with open(partial, "w", encoding="utf-8") as file:
            file.write(os.path.splitext(os.path.basename(path))[0])
        os.replace(partial, note)


def _traced(function: Function, example: Sequence[Tensor], table: Table) -> GraphModule:
    trace = _module("torch.fx.experimental.proxy_tensor").make_fx(
        function,
        decomposition_table=table,
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )
    graph: GraphModule = trace(*example)
    for node in graph.graph.nodes:
        if any(t.dtype == torch.float16 for t in tensors_in(node.meta.get("val"))):
            raise NotImplementedError(HALF)
    return graph


def _difference(
    function: Function, translated: MachineFunction, example: Sequence[Tensor]
) -> str | None:
    """Describe how machine code differs from its function; None if it doesn't."""
    ones, others = ([torch.clone(t) for t in example] for _ in range(2))
    return difference([*function(*ones), *ones], [*translated.run(others), *others])


def _loaded(path: str, example: Sequence[Tensor]) -> MachineFunction | None:
    if not os.path.exists(path):
        return None
    try:
        return MachineFunction(path, example)
    except (RuntimeError, OSError) as error:
        logger.warning("Compiling anew, as %s can't be loaded: %s", path, error)
        return None


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Keep other processes from making the same file meanwhile, where that is possible.

    The lock ends with the process that has it, however that ends.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    lock = f"{path}.lock"
    with open(lock, "w", encoding="utf-8") as file:
        # Where a file system knows no locks, each process compiles for itself.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Who still waits for this file finds the machine code.
            with contextlib.suppress(OSError):
                os.remove(lock)


def _compile(graph: GraphModule, example: Sequence[Tensor], path: str) -> None:
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(
        dir=os.path.dirname(path), prefix=".compiling-"
    ) as partial:
        warnings.simplefilter("ignore")  # torch's, about its own parts
        exported = _module("torch.export").export(graph, tuple(example), strict=False)
        package = os.path.join(partial, "function.pt2")
        _inductor().aoti_compile_and_package(
            exported, package_path=package, inductor_configs=dict(_CONFIG)
        )
        os.replace(package, path)


def _inductor_cache() -> str:
    """Inductor's own folder, found as torch does, which would import its compiler."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is not None:
        return os.path.abspath(folder)
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    name = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), name)


def _package_loader(path: str) -> Any:
    """Load a package; by what torch's own function calls, which imports its compiler.

    Raises:
        RuntimeError: The package is broken.
    """
    parts = getattr(getattr(torch, "_C", None), "_aoti", None)
    make: Any = getattr(parts, "AOTIModelPackageLoader", None)
    if make is not None:
        # Not without its locks, for one caller at a time, on no device of many.
        with contextlib.suppress(TypeError):
            return make(path, "model", False, 1, -1)
    return _inductor().aoti_load_package(path).loader


def _inductor() -> Any:
    return _module("torch._inductor")


def _module(name: str) -> Any:
    """Import a part of torch that the oldest one hasn't got."""
    return importlib.import_module(name)


def _key(graph: GraphModule, example: Sequence[Tensor]) -> str:
    """Make a name for machine code from all that it depends on."""
    digest = hashlib.sha256()
    for part in (*_surroundings(), graph.code, _shapes(example)):
        digest.update(repr(part).encode())
    constants = constants_of(graph)
    for _, value in constants:
        if not isinstance(value, Tensor):
            raise NotImplementedError(f"a constant that is a {type(value).__name__}")
    update_with(digest, constants)
    return digest.hexdigest()


def _surroundings() -> list[object]:
    """List what machine code depends on besides its function."""
    return [
        _FORMAT,
        torch.__version__,
        sorted(_CONFIG.items()),
        # Loops are parted among threads, and made for one kind of processor.
        torch.get_num_threads(),
        platform.machine(),
        _module("torch.backends.cpu").get_cpu_capability(),
        _processor(),
        os.environ.get("CXX"),
    ]


def _shapes(example: Sequence[Tensor]) -> list[object]:
    return [(tuple(t.shape), t.stride(), t.dtype) for t in example]


@functools.lru_cache(maxsize=None)
def _processor() -> str:
    """Describe what the processor can do, where Linux tells; else give its name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return platform.processor()
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))
