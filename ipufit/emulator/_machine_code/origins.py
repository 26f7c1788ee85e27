# SPDX-License-Identifier: Apache-2.0
"""Origins of functions, by which their machine code is found without tracing them.

torch traces a function in seconds, and imports its compiler for that. What comes out
depends on the program, on the emulator's own code, on torch, and on a few switches. A
digest of all these is the function's origin: two functions of one origin have the same
graph.
"""

from __future__ import annotations

import functools
import hashlib
import types
from operator import attrgetter
from pathlib import Path
from typing import Any, Iterable

import torch
from torch import Tensor
from torch.fx.graph_module import GraphModule

from ipufit.emulator._ground.switches import uses_channels_last
from ipufit.emulator._program.program import Program

# Of these, torch exports nothing that its oldest version has too.
_C: Any = torch._C  # type: ignore[attr-defined]
_SWITCHES = (
    "_get_deterministic_algorithms",
    "_get_mkldnn_enabled",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
)
_OURS = "ipufit.emulator"
_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


def origin_of(program: Program, parts: Iterable[object]) -> str | None:
    """Make a name for the origin of a function that runs a program.

    Args:
        program: The program of one micro-batch.
        parts: Values that the function depends on besides its arguments, each with a
            `repr` that says all about it.

    Returns:
        A digest; None if the program calls functions that no name stands for, or has
        constants that are no tensors.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> executor = inferenceModel(torch.nn.Linear(2, 1))
        >>> executor.compile(torch.ones(1, 2))
        >>> program = executor._state.executable.program
        >>> origin_of(program, ["one"]) == origin_of(program, ["another"])
        False
    """
    graph = program.graph
    if not all(_has_a_name(n.target) for n in graph.graph.nodes if _is_called(n.op)):
        return None
    constants = constants_of(graph)
    if not all(isinstance(value, Tensor) for _, value in constants):
        return None
    digest = hashlib.sha256()
    for part in (
        _own_code(),
        torch.get_default_dtype(),
        [(name, getattr(_C, name)()) for name in _SWITCHES if hasattr(_C, name)],
        uses_channels_last(),
        graph.code,
        program.weight_names,
        program.weight_shapes,
        program.has_loss,
        program.is_random,
        *map(sorted, (program.updated_weights, program.volatile_weights)),
        program.written_inputs,
        *parts,
    ):
        digest.update(f"{part!r}\n".encode())
    update_with(digest, constants)
    return digest.hexdigest()


def constants_of(graph: GraphModule) -> list[tuple[str, Tensor]]:
    """List the constants of a graph by name; they needn't be tensors."""
    names = {str(n.target) for n in graph.graph.nodes if n.op == "get_attr"}
    return [(name, attrgetter(name)(graph)) for name in sorted(names)]


def update_with(digest: hashlib._Hash, constants: Iterable[tuple[str, Tensor]]) -> None:
    """Add constants to a digest: names, shapes, types and values."""
    for name, constant in constants:
        digest.update(f"{name} {tuple(constant.shape)} {constant.dtype}".encode())
        plain = constant.detach().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().tobytes())


def _is_called(op: str) -> bool:
    return op in ("call_function", "call_module")


def _has_a_name(target: object) -> bool:
    """Whether a graph's code says which function it calls: not by a closure's name."""
    if isinstance(target, _BUILTINS):
        return True
    if not isinstance(target, types.FunctionType):
        return type(target).__module__.startswith("torch._ops")
    module = target.__module__ or ""
    if module.startswith(_OURS):
        return target.__closure__ is None and "<" not in target.__qualname__
    return module == "torch" or module.startswith("torch.")


@functools.lru_cache(maxsize=None)
def _own_code() -> str:
    """A digest of the emulator's code: what it makes of a program depends on it."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent.parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
