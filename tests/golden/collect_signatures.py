# SPDX-License-Identifier: Apache-2.0
"""Collect PopTorch's public names and signatures from its source.

It writes `poptorch_signatures.json` beside itself, which `tests/emulator` holds the
emulator against. Only names, parameters and defaults are taken. Tests don't run it; run
it again to follow another version, with Python 3.9 or newer::

    git clone https://github.com/graphcore/poptorch
    python tests/golden/collect_signatures.py poptorch
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, Union

REPOSITORY = "https://github.com/graphcore/poptorch"
OUTPUT = Path(__file__).with_name("poptorch_signatures.json")
SECTIONS = {
    "Distributed": "_DistributedOptions",
    "Jit": "_JitOptions",
    "Precision": "_PrecisionOptions",
    "TensorLocations": "_TensorLocationOptions",
    "Training": "_TrainingOptions",
    "_Popart": "_PopartOptions",
}
"""The properties of `Options` that are objects with methods of their own."""

SUBMODULES = ("optim", "profiling", "testing")
SPECIAL_METHODS = ("__init__", "__call__")

Definition = Union[ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign]


class Source:
    """PopTorch's Python files.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module] = {}

    def body(self, module: str) -> list[ast.stmt]:
        """The statements of a module; none of the one that is compiled."""
        path = self._folder / f"{module}.py"
        if module not in self._trees:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            self._trees[module] = ast.parse(text)
        return self._trees[module].body

    def public(self, module: str) -> Iterator[tuple[str, str, str]]:
        """What a module offers: name, module that defines it, and its name there."""
        for statement in self.body(module):
            if isinstance(statement, ast.ImportFrom):
                yield from self._imported(statement)
            for name in _defined(statement):
                yield name, module, name

    def _imported(self, statement: ast.ImportFrom) -> Iterator[tuple[str, str, str]]:
        package, _, inside = (statement.module or "").partition(".")
        is_ours = statement.level == 1 or package == "poptorch"
        if not is_ours:
            return
        module = inside if statement.level == 0 else package
        for alias in statement.names:
            name = alias.asname or alias.name
            if alias.name == "*":
                yield from self.public(module)
            else:
                yield name, module, alias.name

    def find(self, module: str, name: str) -> tuple[str, Definition] | None:
        """The definition of a name, wherever it is imported from."""
        for statement in self.body(module):
            if name in _defined(statement):
                return module, statement  # type: ignore[return-value]
        for offered, origin, original in self.public(module):
            if offered == name and origin != module:
                return self.find(origin, original)
        return None

    def members(
        self, module: str, definition: ast.ClassDef
    ) -> dict[str, ast.FunctionDef]:
        """The methods of a class, those of PopTorch's base classes included."""
        methods: dict[str, ast.FunctionDef] = {}
        for base in reversed(definition.bases):
            package, _, name = ast.unparse(base).rpartition(".")
            found = self.find(package or module, name)
            if found is not None and isinstance(found[1], ast.ClassDef):
                methods.update(self.members(found[0], found[1]))
        for statement in definition.body:
            if isinstance(statement, ast.FunctionDef):
                methods[statement.name] = statement
        return methods


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [t.id for t in statement.targets if isinstance(t, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def signature(function: ast.FunctionDef) -> str:
    """Parameters and defaults, as in `(self, count, *rest, size=1)`."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    defaults = [*[None] * missing, *arguments.defaults]
    parts = [_parameter(a, d) for a, d in zip(positional, defaults)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        parts.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        parts.append("*")
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults)
    parts.extend(_parameter(a, d) for a, d in keywords)
    if arguments.kwarg:
        parts.append(f"**{arguments.kwarg.arg}")
    return f"({', '.join(parts)})"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={_default(default)}"


def _default(expression: ast.expr) -> str:
    """A default's `repr`; members of enumerations without their module."""
    try:
        return repr(ast.literal_eval(expression))
    except ValueError:
        text = ast.unparse(expression)
        return text.replace("poptorch.", "").replace("enums.", "")


def _kind(function: ast.FunctionDef) -> str:
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    if f"{function.name}.setter" in decorators:
        return "property"
    for kind in ("property", "staticmethod", "classmethod"):
        if kind in decorators:
            return kind
    return ""


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in SPECIAL_METHODS


class Collection:
    """What was found, by dotted name.

    Args:
        source: Where to look.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.signatures: dict[str, str] = {}
        self.enums: dict[str, dict[str, Any]] = {}
        self.others: dict[str, str] = {}

    def add_module(self, module: str, prefix: str) -> None:
        """Collect what a module offers."""
        for name, origin, original in self._source.public(module):
            if not name.startswith("_"):
                self._add(prefix + name, origin, original)
            if not prefix and not (origin or name).startswith("_"):
                self.others[origin or name] = "module"  # a package shows its modules

    def add_class(self, name: str, module: str, definition: ast.ClassDef) -> None:
        """Collect a class with its public members."""
        if any(ast.unparse(base).startswith("enum.") for base in definition.bases):
            self.enums[name] = {
                target: ast.literal_eval(statement.value)
                for statement in definition.body
                if isinstance(statement, ast.Assign)
                for target in _defined(statement)
            }
            return
        members = self._source.members(module, definition)
        self.others[name] = "class"
        for member, function in sorted(members.items()):
            if not _is_public(member):
                continue
            kind = _kind(function)
            if kind == "property":
                self.others[f"{name}.{member}"] = kind
            else:
                self.signatures[f"{name}.{member}"] = f"{kind}{signature(function)}"

    def _add(self, name: str, module: str, original: str) -> None:
        if not module:  # `from . import optim`
            self.others[name] = "module"
            return
        found = self._source.find(module, original)
        if found is None:
            self.others[name] = "compiled"
        elif isinstance(found[1], ast.ClassDef):
            self.add_class(name, found[0], found[1])
        elif isinstance(found[1], ast.FunctionDef):
            self.signatures[name] = signature(found[1])
        else:
            self.others[name] = "value"


def collect(folder: Path) -> dict[str, Any]:
    """Read a checkout of PopTorch."""
    source = Source(folder / "python")
    collection = Collection(source)
    collection.add_module("__init__", prefix="")
    for module in SUBMODULES:
        collection.add_module(module, prefix=f"{module}.")
    for section, class_name in SECTIONS.items():
        found = source.find("options", class_name)
        if found is not None and isinstance(found[1], ast.ClassDef):
            collection.add_class(f"Options.{section}", found[0], found[1])
    return {
        "source": {
            "repository": REPOSITORY,
            "commit": _git(folder, "%H"),
            "committed": _git(folder, "%cs"),
            "version": "3.4.0",
            "script": "tests/golden/collect_signatures.py",
        },
        "signatures": dict(sorted(collection.signatures.items())),
        "enums": dict(sorted(collection.enums.items())),
        "others": dict(sorted(collection.others.items())),
    }


def _git(folder: Path, form: str) -> str:
    command = ["git", "log", "-1", f"--format={form}"]
    done = subprocess.run(
        command, cwd=str(folder), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    golden = collect(Path(sys.argv[1]))
    OUTPUT.write_text(json.dumps(golden, indent=2) + "\n", encoding="utf-8")
