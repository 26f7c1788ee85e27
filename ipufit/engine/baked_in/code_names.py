# SPDX-License-Identifier: Apache-2.0
"""The names that a function's code reads."""

from __future__ import annotations

import dis
import functools
from dataclasses import dataclass
from types import CodeType

_BY_NAME = ("getattr", "hasattr")
_COMPUTED = frozenset(
    {"vars", "eval", "exec", "globals", "locals", "__dict__"}
    | {"attrgetter", "__getattribute__"}
)
"""Names whose use lets code read attributes by names that aren't in it."""

_DUPLICATES = ("DUP_TOP", "COPY")
"""Instructions that begin `self.calls += 1`: the assignment needs the object again."""


@dataclass(frozen=True)
class CodeNames:
    """The names that code reads, in functions defined inside too.

    Attributes:
        variables: Globals, and built-ins, which can't be told apart here.
        attributes: Attributes of any object. One that is only counted up
            (`self.calls += 1`), put into (`self.seen["x"] = x`), or read after it was
            set anew (`self.hidden = ...`) isn't among them: no result depends on its
            old value.
        modules: Modules that the code imports.
        is_open: Whether the code may read attributes by names that it computes.
    """

    variables: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]
    is_open: bool


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_NO_STEPS = ("PRECALL", "CACHE", "PUSH_NULL", "EXTENDED_ARG")


@functools.lru_cache(maxsize=4096)
def names_read(code: CodeType) -> CodeNames:
    """Collect the names that the code of a function reads.

    Example:
        >>> def scaled(self, x):
        ...     self.calls += 1
        ...     return x * self.scale * FACTOR
        >>> names = names_read(scaled.__code__)
        >>> sorted(names.variables), sorted(names.attributes)
        (['FACTOR'], ['scale'])
    """
    variables: set[str] = set()
    modules: set[str] = set()
    attributes: set[str] = set()
    is_open = False
    before = ""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _NO_STEPS]
    own = _set_anew(code, instructions)
    for index, instruction in enumerate(instructions):
        kind, name = instruction.opname, instruction.argval
        if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
            variables.add(name)
            if name in _BY_NAME:
                given = _constant_name(instructions[index + 1 :])
                is_open |= given is None
                attributes.update(() if given is None else (given,))
        elif kind in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            is_own = own.get(name, index) < index and (
                _variable(instructions[index - 1]) == code.co_varnames[0]
            )
            is_filled = _is_filled(instructions[index + 1 : index + 3])
            if not (before in _DUPLICATES or is_own or is_filled):
                attributes.add(name)
        elif kind == "IMPORT_NAME":
            modules.add(name)
        before = kind
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = names_read(constant)
            variables |= inner.variables
            attributes |= inner.attributes
            modules |= inner.modules
            is_open |= inner.is_open
    is_open |= bool(_COMPUTED & (variables | attributes))
    return CodeNames(
        frozenset(variables), frozenset(attributes), frozenset(modules), is_open
    )


def _set_anew(code: CodeType, instructions: list[dis.Instruction]) -> dict[str, int]:
    """Find attributes of the first argument that code sets before it branches.

    Returns:
        Positions of the instructions, by the attributes' names.
    """
    first = code.co_varnames[0] if code.co_argcount else None
    if first is None or getattr(
        code, "co_exceptiontable", None
    ):  # an error may leave it
        return {}
    if any(
        one.opname.startswith(("STORE_FAST", "DELETE_FAST")) and first in _names(one)
        for one in instructions
    ):
        return {}
    found: dict[str, int] = {}
    for index, one in enumerate(instructions):
        if one.opcode in _JUMPS or one.opname == "YIELD_VALUE":
            break
        if one.opname == "STORE_ATTR" and _variable(instructions[index - 1]) == first:
            found.setdefault(one.argval, index)
    return found


def _is_filled(following: list[dis.Instruction]) -> bool:
    """Whether a loaded object is only put into, under a plain key."""
    names = [one.opname for one in following]
    return names[1:] == ["STORE_SUBSCR"] and names[0].startswith("LOAD_")


def _variable(instruction: dis.Instruction) -> str | None:
    """The variable that an instruction loads last; None if it loads none."""
    names = _names(instruction)
    return names[-1] if instruction.opname.startswith("LOAD_FAST") and names else None


def _names(instruction: dis.Instruction) -> tuple[str, ...]:
    """One variable, or the two that newer Pythons load at once."""
    value = instruction.argval
    return value if isinstance(value, tuple) else (value,)


def _constant_name(following: list[dis.Instruction]) -> str | None:
    """The name in `getattr(x, "name")`, with a plain default or none; else None."""
    call = next((i for i, one in enumerate(following) if _is_call(one)), None)
    num_given = following[call].arg if call is not None else None
    if call is None or num_given not in (2, 3):
        return None
    name, *default = following[call + 1 - num_given : call]
    is_plain = name.opname == "LOAD_CONST" and isinstance(name.argval, str)
    is_simple = all(one.opname.startswith("LOAD_") for one in default)
    return name.argval if is_plain and is_simple else None


def _is_call(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("CALL")
