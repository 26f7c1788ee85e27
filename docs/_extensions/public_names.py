# SPDX-License-Identifier: Apache-2.0
"""Entries of public names: a directive, a role, and docstrings as Sphinx reads them.

The directive

    .. public:: ipufit.metrics
       :only: class

has an entry for each name of `__all__`, or of a module without it, so that a page is
complete whatever is added. A name that `ipufit` exports itself has its entry as
`ipufit.Name`, whichever page has it.

    .. methods:: ipufit.IPUModel

is a table of the class's public methods and properties, in the order of the source.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.domains.python import PyXRefRole
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

OPTIONS = {
    "class": (":members:",),
    "exception": (":members:", ":show-inheritance:"),
    "module": (":no-members:",),
    "function": (),
    "data": (),
}


def kind_of(value: Any) -> str:
    """The kind of autodoc's directive that documents a value."""
    if inspect.ismodule(value):
        return "module"
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "data"


def address(module: str, name: str) -> str:
    """The name under which the site has the entry of an object."""
    value = getattr(importlib.import_module(module), name)
    ipufit = importlib.import_module("ipufit")
    if name in ipufit.__all__ and getattr(ipufit, name) is value:
        return f"ipufit.{name}"
    return f"{module}.{name}"


class PublicNames(SphinxDirective):
    """Entries of the names in a module's `__all__`."""

    required_arguments = 1
    option_spec = {  # noqa: RUF012 - a class attribute in docutils, too
        "only": lambda text: directives.choice(text, tuple(OPTIONS)),
        "from": directives.unchanged_required,  # modules of which names are taken
        "except": directives.unchanged_required,  # names that the page has elsewhere
    }

    def run(self) -> list[nodes.Node]:
        """The entries of autodoc, one per name."""
        module = importlib.import_module(self.arguments[0])
        lines: list[str] = []
        excluded = self.options.get("except", "").split()
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            kind = kind_of(value)
            if name in excluded:
                continue
            if self.options.get("only", kind) != kind or not self._takes(value):
                continue
            lines.append(f".. auto{kind}:: {address(module.__name__, name)}")
            lines += [f"   {option}" for option in OPTIONS[kind]]
            lines.append("")
        parent = nodes.Element()
        source = StringList(lines, source=module.__name__)
        self.state.nested_parse(source, self.content_offset, parent)
        return parent.children

    def _takes(self, value: Any) -> bool:
        homes = self.options.get("from", "").split()
        home = getattr(value, "__module__", None) or ""
        return not homes or any(f"{home}.".startswith(f"{one}.") for one in homes)


class Methods(SphinxDirective):
    """A table of the public methods and properties of a class."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table of autosummary."""
        module, _, name = self.arguments[0].rpartition(".")
        members = vars(getattr(importlib.import_module(module), name))
        lines = [".. autosummary::", "   :nosignatures:", ""]
        lines += [
            f"   ~{module}.{name}.{member}"
            for member, value in members.items()
            if not member.startswith("_")
            and (inspect.isroutine(value) or isinstance(value, property))
        ]
        parent = nodes.Element()
        source = StringList(lines, source=module)
        self.state.nested_parse(source, self.content_offset, parent)
        return parent.children


class NameRole(PyXRefRole):
    """Code that becomes a link if it is the name of something with an entry."""

    def process_link(
        self,
        env: BuildEnvironment,
        refnode: nodes.Element,
        has_explicit_title: bool,
        title: str,
        target: str,
    ) -> tuple[str, str]:
        """Make a reference to any kind of Python object, which may lead nowhere."""
        refnode["refdomain"], refnode["reftype"] = "py", "obj"
        refnode["may_lead_nowhere"] = True
        return super().process_link(env, refnode, has_explicit_title, title, target)


def leave_as_code(
    app: Sphinx, env: BuildEnvironment, node: nodes.Element, content: nodes.Node
) -> nodes.Node | None:
    """Let a name without an entry be code, without a warning."""
    return content if node.get("may_lead_nowhere") else None


def adapt_docstring(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Change a docstring's lines, before napoleon, to what Sphinx reads as meant."""
    # A letter may follow code in Markdown: `Callback`s.
    lines[:] = [re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in lines]
    if what in ("property", "attribute", "data"):
        # Napoleon takes what a first line has before a colon for a type.
        lines.insert(0, "\\ ")  # which is nothing in reStructuredText


def skip_methods_of_others(
    app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out methods that another package put into our classes."""
    home = getattr(value, "__module__", None) or "ipufit"
    is_foreign = inspect.isroutine(value) and home.split(".")[0] != "ipufit"
    return True if is_foreign else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive, the role, and the changes of docstrings."""
    app.add_directive("public", PublicNames)
    app.add_directive("methods", Methods)
    app.add_role("name", NameRole())
    app.connect("missing-reference", leave_as_code)
    app.connect("autodoc-skip-member", skip_methods_of_others)
    app.connect("autodoc-process-docstring", adapt_docstring, priority=400)
    return {"parallel_read_safe": True}
