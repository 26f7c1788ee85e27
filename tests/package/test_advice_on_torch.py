# SPDX-License-Identifier: Apache-2.0
"""What messages advise to write exists in the torch that runs, 2.0.1 included."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import ipufit

pytestmark = pytest.mark.floor

CALL = re.compile(r"\b((?:torch|nn|F)(?:\.\w+)+)(?:\(((?:[^()]|\([^()]*\))*)\))?")
ROOTS = {"nn": "torch.nn", "F": "torch.nn.functional"}
# Words of PopTorch, and names of modules.
NO_NAMES = ("torch.tensors", "torch.ops.poptorch")


def texts():
    """Yield the texts of several words in the package, without docstrings."""
    for path in sorted(Path(ipufit.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
        docstrings = {ast.get_docstring(node, clean=False) for node in nodes}
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            values = [getattr(part, "value", None) for part in parts]
            text = "".join(v if isinstance(v, str) else "..." for v in values)
            if " " in text and text not in docstrings:
                yield text


def found(name):
    """Return the object of a dotted name."""
    first, *rest = name.split(".")
    names = [*ROOTS.get(first, first).split("."), *rest]
    for count in range(len(names), 0, -1):
        try:
            value = importlib.import_module(".".join(names[:count]))
        except ImportError:
            continue
        for part in names[count:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


def test_messages_name_what_torch_has():
    advised, unknown = set(), []
    for text in texts():
        if re.search(r"torch 2\.[1-9]", text):  # says which torch has it
            continue
        for name, arguments in CALL.findall(text):
            if name.startswith(NO_NAMES):
                continue
            try:
                function = found(name)
            except AttributeError:
                unknown.append(name)
                continue
            for keyword in re.findall(r"(?<![\w.])(\w+)=(?!=)", arguments):
                advised.add((name, keyword))
                kind = inspect.Parameter.VAR_KEYWORD
                try:
                    parameters = inspect.signature(function).parameters.values()
                except ValueError:  # a builtin function, which names them in its text
                    is_known = keyword in function.__doc__
                else:
                    is_known = any(
                        p.name == keyword or p.kind is kind for p in parameters
                    )
                if not is_known:
                    unknown.append(f"{name}({keyword}=)")
    assert unknown == []
    assert len(advised) >= 8
