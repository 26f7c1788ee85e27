# SPDX-License-Identifier: Apache-2.0
"""Write the page of what the emulator makes of each public name of PopTorch.

From the root of the repository::

    python -m tests.golden.namespace_table
"""

from __future__ import annotations

import json
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Iterator, NamedTuple

from tests.golden import differences
from tests.golden.namespace_remarks import EXACT, LEGEND, MISSING, REMARKS

GOLDEN = Path(__file__).with_name("poptorch_signatures.json")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "emulator-namespace.md"
REST = "Errors, hardware, logs and the rest"
SECTIONS = {
    "Models and their executor": (
        "PoplarExecutor*",
        "inferenceModel",
        "load",
        "importPoptorchMetadataFromFile",
        "registerP*CompileHook",
        "trainingModel",
    ),
    "Options": ("ConfigFileError", "Options", "Options.*", "TensorLocationSettings*"),
    "Blocks, stages and strategies": (
        "B*Block*",
        "Block*",
        "*Execution",
        "*Execution.*",
        "Phase*",
        "Stage*",
        "removeBlocks",
    ),
    "Data and arguments": (
        "AsynchronousDataAccessor*",
        "DataLoader",
        "DataLoader.*",
        "ICustomArgParser*",
        "*Structure",
        "register*ArgParser*",
    ),
    "Operations": (
        "ATTR_PREFIX",
        "Attribute*",
        "CPU*",
        "LegacyBeginBlockFn*",
        "MultiConv",
        "MultiConv.*",
        "NameScope*",
        "accessAttributes",
        "attributes_lists",
        "[cdfinrs]*_*",
        "cond",
        "fps",
        "nearest",
        "nop",
        "recomputationCheckpoint",
        "serializedMatMul",
    ),
    "Optimisers": ("optim.*",),
    "Modules": ("enums", "ops", "optim", "options", "poptorch_core", "profiling"),
}
"""Title -> patterns of the names; the first section that one matches has the name."""


class Name(NamedTuple):
    """A public name of PopTorch.

    Attributes:
        name: With dots.
        text: What the table shows: with the signature, or the members.
        status: What the emulator makes of it.
        remark: How, or why.
    """

    name: str
    text: str
    status: str
    remark: str


def names(golden: dict[str, Any]) -> list[Name]:
    """All public names, in alphabetical order."""
    texts = {name: name for name in golden["others"]}
    for name, members in golden["enums"].items():
        values = ", ".join(f"{member}={value!r}" for member, value in members.items())
        texts[name] = f"{name}: {values}"
    for name, signature in golden["signatures"].items():
        owner, _, member = name.rpartition(".")
        shown = signature.replace("staticmethod", "").replace("classmethod", "")
        shown = shown.replace("(self, ", "(").replace("(self)", "()")
        if member == "__init__":
            texts[owner] = owner + shown  # a class is shown as it is called
        else:
            texts[name] = name + shown
    return [
        Name(name, texts[name], *assessment(name)) for name in sorted(texts, key=_order)
    ]


def assessment(name: str) -> tuple[str, str]:
    """What the emulator makes of a name, and how or why."""
    if name in differences.MISSING:
        return MISSING, differences.MISSING[name]
    found = (EXACT, "")
    for pattern, remark in REMARKS.items():
        if fnmatchcase(name, pattern):
            found = remark
    for different in (name, f"{name}.__init__"):
        if different in differences.DIFFERENT and found[1] == "":
            _, why = differences.DIFFERENT[different]
            return found[0], f"with another signature: {why}"
    return found


def sections(rows: list[Name]) -> Iterator[tuple[str, list[Name]]]:
    """The names of each section, in its order."""
    left = list(rows)
    for title, patterns in SECTIONS.items():
        inside = [r for r in left if any(fnmatchcase(r.name, p) for p in patterns)]
        left = [row for row in left if row not in inside]
        yield title, inside
    enums = [row for row in left if row.text.startswith(f"{row.name}: ")]
    yield "Enumerations", enums
    yield REST, [row for row in left if row not in enums]


def page(golden: dict[str, Any]) -> str:
    """The whole page."""
    source, rows = golden["source"], names(golden)
    counts = Counter(row.status for row in rows)
    tally = ", ".join(f"{counts[status]} {status}" for status in LEGEND)
    lines = [
        "# The emulator's namespace",
        "",
        f"The {len(rows)} public names of PopTorch {source['version']} "
        f"([source]({source['repository']}/tree/{source['commit']}) of "
        f"{source['committed']}) and what `ipufit.emulator` makes of them: {tally}. "
        "[The emulator](../concepts/emulator.md) says more.",
        "",
        "This page is written by `python -m tests.golden.namespace_table`, and a test "
        "holds it to `tests/golden/poptorch_signatures.json` and "
        "`tests/golden/namespace_remarks.py`.",
        "",
        "| | |",
        "|---|---|",
        *(f"| **{status}** | {meaning} |" for status, meaning in LEGEND.items()),
    ]
    for title, inside in sections(rows):
        lines += ["", f"## {title}", "", "| Name | | |", "|---|---|---|"]
        lines += [f"| `{r.text}` | {r.status} | {r.remark} |" for r in inside]
    return "\n".join(lines) + "\n"


def _order(name: str) -> tuple[str, ...]:
    return tuple(name.lower().split("."))


if __name__ == "__main__":
    content = page(json.loads(GOLDEN.read_text(encoding="utf-8")))
    PAGE.write_text(content, encoding="utf-8")
